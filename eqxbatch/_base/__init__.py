"""Foundations that do not depend on batches.

Programs and how they are traced, meshes, dtypes, PyTrees, and workarounds for XLA on
CPUs. Imports nothing else from the package.
"""
