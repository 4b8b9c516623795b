"""Sites: where parameters enter a program.

Also which contractions are exact there, and what they cost. May import from `_base` and
`_batch`.
"""
