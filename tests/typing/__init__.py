"""Small user programs, and what type checkers say of them.

`.ci/run` has pyright check them. Where one is to be refused, a comment says by which
rule; a comment that is not needed is an error, too. `test_typing.py` runs the programs
that are right, and sees that the types are those at run time.
"""
