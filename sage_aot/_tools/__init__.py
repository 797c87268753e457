"""Explain, info and verify, which users run beside the call; and what tests, benches and the demo compare with."""
