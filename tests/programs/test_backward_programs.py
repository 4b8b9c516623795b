"""Random custom backward passes and padding; `backward_programs` runs for longer."""

import pytest

from .backward_programs import draw, examine


# Of each kind: on data and on parameters, with weights and without.
@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(1000, 1008))
def test_gradients_are_those_of_single_examples(seed):
    program = draw(seed)
    assert examine(program) == [], str(program)
