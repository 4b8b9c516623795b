"""Jacobians, Hessians, Gauss-Newton matrices, their products, and expansions.

It imports from `_base`, `_batch` and `_sites`.
"""
