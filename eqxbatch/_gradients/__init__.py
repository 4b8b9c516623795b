"""Gradients in microbatches, of sums and of each example, clipped by their norms.

It imports from `_base`, `_batch` and `_sites`.
"""
