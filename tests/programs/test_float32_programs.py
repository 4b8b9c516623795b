"""Random programs in float32; `float32_programs` runs for longer."""

import pytest

from .float32_programs import draw, examine, findings


# Positions that nearly cancel with inputs of different sizes, and a step by eigh with
# little damping.
@pytest.mark.matrix
@pytest.mark.parametrize("seed", (28, 100044))
def test_programs_keep_what_plain_float32_keeps(seed):
    program = draw(seed)
    assert findings(examine(program)) == [], str(program)
