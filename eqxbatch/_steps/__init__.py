"""Gauss-Newton steps, in the space of samples by kernels, or in that of parameters.

It imports from `_base`, `_batch`, `_sites`, `_maps`, `_gradients`, `_curvature`,
`_pairs` and `_ntk`.
"""
