"""Explain, info and verify, which users run in addition to calls; and what tests, benches and the demo compare with."""
