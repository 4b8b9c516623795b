"""A fixed set of the random programs of `map_programs.py`, which runs any others."""

import pytest

from .map_programs import FAMILIES, Finding, run_seed


# Half of them are on a mesh.
pytestmark = pytest.mark.devices

# One of each family; those from the second line on found a defect each, or notice what
# others do not.
SEEDS = (
    *range(len(FAMILIES)),
    *(81, 85, 88, 98, 154, 161, 211, 227, 337, 391, 486, 520, 692, 926, 1294, 1312),
    *(97, 237, 348, 279, 295, 517, 592, 730, 762, 839, 979, 1283, 1840, 1959),
    *(200256, 200286, 203799, 210440, 211912),
)


# Two also run with the newest and the lowest versions.
MARKED = [
    pytest.param(seed, marks=pytest.mark.versions if i < 2 else pytest.mark.matrix)
    for i, seed in enumerate(SEEDS)
]


@pytest.mark.parametrize("seed", MARKED)
def test_equals_numpy_and_vmap(seed):
    found, text, choices = run_seed(seed)
    assert not isinstance(found, Finding), f"{text}\n{choices}\n{found}"


@pytest.mark.matrix
def test_a_seed_is_one_case():
    """The same choices make the same case, without the seed."""
    _, text, choices = run_seed(7)
    assert run_seed(7)[1] == text
    assert run_seed(7 + len(FAMILIES), choices=choices)[1] == text
    assert run_seed(8)[1] != text
