"""Kernels of models: empirical ones, their estimates, and averages over models.

May import from `_base`, `_batch`, `_sites`, `_kernels` and `_maps`.
"""
