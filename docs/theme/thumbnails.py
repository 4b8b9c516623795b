"""Writes the small pictures of `examples/README.md`.

`python docs/theme/thumbnails.py` runs the examples, unless `build/examples` has their
pages already, and makes each one's last plot small.
"""

import pathlib
import sys

import PIL.Image


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from examples import EXAMPLES, PAGES, write_all


WIDTH, HEIGHT = 480, 180


def make_small(source: pathlib.Path, target: pathlib.Path) -> None:
    """A plot within a width and a height, in few colours."""
    with PIL.Image.open(source) as opened:
        plot = opened.convert("RGB")
    plot.thumbnail((WIDTH, HEIGHT), PIL.Image.Resampling.LANCZOS)
    plot.quantize(64).save(target, optimize=True)


def main() -> None:
    write_all()
    folder = EXAMPLES / "pictures"
    folder.mkdir(exist_ok=True)
    for example in sorted(EXAMPLES.glob("*.py")):
        plots = sorted(PAGES.glob(f"{example.stem}_[0-9]*.png"))
        make_small(plots[-1], folder / f"{example.stem}.png")


if __name__ == "__main__":
    main()
