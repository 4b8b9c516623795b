"""Results that are judged to more digits keep them where products are rounded."""

import pytest

from .rounded_products import errors


EXACT = ("KernelProduct", "Kronecker factors, inverse", "step in sample space")


@pytest.mark.matrix
def test_results_keep_digits():
    for name, (exact, *rounded) in errors(EXACT):
        assert max(rounded[:2]) <= 2 * exact, name
        # They would not, if all products were rounded.
        assert min(rounded[2:]) > 10 * exact, name
