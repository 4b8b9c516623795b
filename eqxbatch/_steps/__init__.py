"""Gauss-Newton steps, in sample space by kernels, or in parameter space.

May import from `_base`, `_batch`, `_sites`, `_maps`, `_gradients`, `_curvature`,
`_kernels` and `_ntk`.
"""
