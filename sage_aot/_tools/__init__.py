"""What users run beside the call: explain, info, verify, the demo; and what tests and benches compare with."""
