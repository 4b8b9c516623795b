"""Writes kernels that `neural_tangents` computes, for the tests to compare with.

`python -m benchmarks.neural_tangents.truth` runs `write.py` in its environment. The
files have weights, inputs and kernels; only their names tell which model they are of.
"""

import pathlib
import subprocess

from .environment import HERE, python


FOLDER = pathlib.Path(__file__).parent.parent.parent / "tests" / "neural_tangents"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    script = HERE / "write.py"
    subprocess.run([str(python("truth")), str(script), str(FOLDER)], check=True)


if __name__ == "__main__":
    main()
