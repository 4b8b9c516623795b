"""All wrong calls end in messages of our own."""

import collections
import inspect

import pytest

import eqxbatch
from .first_mistakes import FIRST
from .of_curvature import CURVATURE, SITES
from .of_kernels import FUNCTIONS, MODELS
from .of_maps import ACCUMULATORS, GRADIENTS, MAPS, STREAMS
from .remedies import REMEDIES


CASES = [*MAPS, *GRADIENTS, *ACCUMULATORS, *CURVATURE, *SITES, *FUNCTIONS, *MODELS]
CASES += [*STREAMS, *FIRST, *REMEDIES]


def is_more_than_two():
    """Whether a public name has two wrong calls before."""
    counts = collections.Counter()
    for case in CASES:
        counts[case.name] += 1
        yield counts[case.name] > 2


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.matrix] if is_more else [])
        for case, is_more in zip(CASES, is_more_than_two(), strict=True)
    ],
    ids=lambda case: case.name,
)
def test_wrong_calls(case, pytestconfig):
    if pytestconfig.getoption("--jaxtyping-packages", default=None):
        pytest.skip("what checks the package's own functions speaks first")
    with pytest.raises(case.error, match=case.match):
        case.call()


def test_every_public_name_has_two():
    found = collections.Counter(case.name for case in CASES)
    results = {n for n, x in vars(eqxbatch.results).items() if inspect.isclass(x)}
    assert {*found} == {*eqxbatch.__all__} | results
    assert min(found.values()) >= 2
    assert found.total() >= 120
