"""Random programs in float32; `float32_programs` runs for longer."""

import pytest

from .float32_programs import draw, findings


# Positions that alternate, two and three uses that nearly cancel, and confident losses.
@pytest.mark.parametrize("seed", (5, 6, 121, 139, 144))
def test_what_plain_float32_keeps_is_kept(seed):
    program = draw(seed)
    assert findings(program) == [], str(program)
