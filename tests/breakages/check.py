"""The check of rules."""

from .breakage import Breakage


BREAKAGES = [
    Breakage(
        "the check compares both sides without sites",
        "_clipped",
        '"sites" if by_sites else "materialise"',
        '"materialise"',
        "tests/check/test_check.py -k broken",
    ),
    Breakage(
        "the check takes NaN for no error",
        "_errors",
        "differ[np.isnan(differ)] = np.inf",
        "differ[np.isnan(differ)] = 0.0",
        "tests/check/test_check.py",
    ),
]
