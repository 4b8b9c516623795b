"""Kernels of models: empirical ones, their estimates, and averages over models.

It imports from `_base`, `_batch`, `_sites`, `_pairs` and `_maps`.
"""
