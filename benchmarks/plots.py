"""The style of the pictures in the docs: readable on white and on black."""

import contextlib
import pathlib
from collections.abc import Iterator

import matplotlib
import matplotlib.pyplot as plt


# The contrast to white is the same as to the dark background of the docs.
GREY = "#7f7f7f"
OURS, THEIRS, THIRD = "#e08a00", "#6f8fbf", "#4fa37a"
SETTINGS = {
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "axes.titlecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "font.size": 10,
}


@contextlib.contextmanager
def picture(path: pathlib.Path, width: float, height: float) -> Iterator[plt.Figure]:
    """A figure that is written to `path`; equal figures give an identical file."""
    matplotlib.use("agg")
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": path.stem}):
        figure = plt.figure(figsize=(width, height), layout="constrained")
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None}, transparent=True)
        plt.close(figure)
