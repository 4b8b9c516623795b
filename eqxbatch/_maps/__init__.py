"""Maps over examples: `filter_micro_vmap`, `filter_microbatch`, `filter_grid_vmap`.

It imports from `_base`, `_batch` and `_sites`.
"""
