"""Running a batch in microbatches.

How a batch is cut, looped over, accumulated and sized, and what all transforms share.
May import from `_base`.
"""
