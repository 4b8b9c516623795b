"""Kernels of models: empirical ones, their estimates, and averages over models.

May import from `_base`, `_batch`, `_sites`, `_maps`, `_curvature` and `_kernels`.
"""
