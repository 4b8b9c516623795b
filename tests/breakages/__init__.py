"""Breaks the package on purpose, and sees whether the tests notice.

`python -m tests.breakages` applies each breakage to a copy of the checkout, one at a
time, and runs the tests there that ought to notice it. It is run by hand: pytest only
checks that the code of each breakage is still there.

- `python -m tests.breakages --list`: the names and numbers of all.
- `python -m tests.breakages 3 17 "a reversed scan runs forwards"`: some of them.
- `python -m tests.breakages 3 --tests tests`: with the whole suite. What pytest is to
  select goes in quotes: `--tests "tests/batch/test_memory.py -k cache"`.

A breakage that survives is one of two things: something that no user can see, which is
replaced by another, or a test that is missing.
"""

from . import (
    base,
    batch,
    check,
    curvature,
    gradients,
    kernels,
    maps,
    ntk,
    sites,
    steps,
)
from .breakage import Breakage as Breakage, broken as broken, place as place


# One module for each folder of the package, in the order of these.
_MODULES = (
    *(base, batch, sites, maps, gradients),
    *(curvature, kernels, ntk, steps, check),
)
BREAKAGES = [breakage for module in _MODULES for breakage in module.BREAKAGES]
