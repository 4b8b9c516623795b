"""Jacobians, Hessians, Gauss-Newton matrices, their products, and expansions.

May import from `_base`, `_batch` and `_sites`.
"""
