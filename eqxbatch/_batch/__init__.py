"""Rows of a batch in microbatches.

How they are cut, looped over, accumulated and sized, and what all transforms share.
It imports from `_base`.
"""
