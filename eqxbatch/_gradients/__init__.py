"""Gradient accumulation and per-example gradients, in microbatches.

May import from `_base`, `_batch` and `_sites`.
"""
