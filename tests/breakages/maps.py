"""Maps and grids."""

from .breakage import Breakage


BREAKAGES = [
    Breakage(
        "the axis of a grid that is named first is accumulated last",
        "GridVmap._levels",
        "reversed(reduced.items())",
        "reduced.items()",
        "tests/maps/test_grid.py -k TestAccumulators",
    ),
]
