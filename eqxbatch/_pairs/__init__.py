"""Kernels of pairs of examples, in blocks: on devices, on the host, on disk, reduced.

It imports from `_base`, `_batch` and `_sites`.
"""
