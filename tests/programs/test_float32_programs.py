"""Random programs in float32; `float32_programs` runs for longer."""

import pytest

from .float32_programs import draw, findings


# Two and three uses that nearly cancel, and a confident classifier.
@pytest.mark.matrix
@pytest.mark.parametrize("seed", (144, 6))
def test_several_uses_keep_what_plain_float32_keeps(seed):
    program = draw(seed)
    assert findings(program) == [], str(program)


@pytest.mark.matrix
def test_positions_that_cancel_keep_their_norms():
    # Kernels and Gauss-Newton matrices lose digits here, as the docs say.
    lost = {text.split(":")[0] for text in findings(draw(5))}
    assert lost <= {"ntk", "ntk_diagonal", "ggn", "ggn_diagonal"}
