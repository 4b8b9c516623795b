"""Random programs against dense derivatives: see `tests.programs` for longer runs."""

from unittest import mock

import jax
import pytest

from eqxbatch._sites import contract
from .program_checks import some_checks
from .program_draw import draw
from .programs import examine, settings


# Between them, these have nearly all blocks, and each finds an error of its own if some
# rule or view is broken on purpose.
SEEDS = tuple(range(16))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_program(seed):
    with settings():
        program = draw(seed)
    result = examine(program, some_checks(seed))
    report = "\n".join(map(str, [program, *result.findings]))
    assert not result.findings, report
    assert result.skipped is None
    assert result.num_compared


def test_a_program_follows_from_its_seed():
    with settings():
        texts = {str(draw(7)) for _ in range(2)}
        assert len(texts) == 1
        assert texts != {str(draw(8))}


def test_the_search_finds_what_is_broken():
    with settings():
        program = draw(7, ("linear",))
    jax.clear_caches()
    with mock.patch.object(contract, "_scale", return_value=1.5):
        result = examine(program, ["norms_and_sums"])
    assert {finding.check for finding in result.findings} == {"norms_and_sums"}
