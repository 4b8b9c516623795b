"""What knows nothing of batches.

Programs and how they are traced, meshes, dtypes, PyTrees, and what XLA for CPUs needs.
It imports nothing of the package.
"""
