"""Benchmarks of eqxbatch and its alternatives: `python -m benchmarks`."""
