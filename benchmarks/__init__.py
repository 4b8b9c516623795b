"""Measurements of eqxbatch beside its peers: `python -m benchmarks`."""
