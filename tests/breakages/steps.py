"""Steps and their states."""

from .breakage import Breakage


BREAKAGES = [
    Breakage(
        "the average of factors is biased towards zeros",
        "scale_by_kfac",
        "(1 - rate) / (1 - rate**num)",
        "(1 - rate) * num**0",
        "tests/steps/test_scale_by_kfac.py",
    ),
    Breakage(
        "inverses are computed anew in each update",
        "scale_by_kfac",
        "state.count % inverse_update_period == 0",
        "state.count >= 0",
        "tests/steps/test_scale_by_kfac.py",
    ),
]
