"""Maps over examples: `filter_micro_vmap`, `filter_microbatch`, `filter_grid_vmap`.

May import from `_base`, `_batch` and `_sites`.
"""
