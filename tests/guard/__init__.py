"""Prints the programs of many calls, so that a change of structure leaves them equal.

Nothing is compiled, but for calls that run loops in Python.

- `python -m tests.guard`: a table with a line for each call. `table.txt` is this table
  for one version of JAX, and a test compares both. Write it again after a change of
  programs: `python -m tests.guard > tests/guard/table.txt`.
- `python -m tests.guard --against HEAD~1`: which equations differ from those of another
  commit. It traces both.
- `python -m tests.guard --save FILE` and `--compare FILE`: the same in two steps.
- `python -m tests.guard --show "filter_hvp"`: the equations of some calls.

The columns of the table: how often Python runs the user's function, the number of
programs and of their equations, the floating-point operations of products, the largest
result of an equation in bytes, and a digest of all equations. The digest depends on
primitives, their parameters, shapes, dtypes and inputs, but not on names of functions.
"""
