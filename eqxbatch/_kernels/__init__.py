"""Kernels of pairs of examples, in blocks: on devices, on the host, on disk, reduced.

May import from `_base`, `_batch` and `_sites`.
"""
