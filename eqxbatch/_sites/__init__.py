"""Where parameters enter a program.

Which contractions are exact there, and what they cost.
It imports from `_base` and `_batch`.
"""
