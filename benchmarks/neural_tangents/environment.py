"""Separate environments for `neural_tangents`, which needs an old JAX.

`python -m benchmarks.neural_tangents.environment` creates both in `build/`.
"""

import pathlib
import subprocess
import sys


HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent / "build"
# The first has the newest JAX with which all of `neural_tangents` works. The second one
# suffices for everything that is timed here, and its XLA is a year newer.
VERSIONS = {
    "truth": ("jax==0.4.25", "jaxlib==0.4.25", "numpy<2", "scipy<1.13"),
    "timing": ("jax==0.5.3", "jaxlib==0.5.3"),
}


def python(name: str) -> pathlib.Path:
    """The interpreter of an environment, which is created if necessary."""
    folder = ROOT / f"neural-tangents-{name}"
    interpreter = folder / "bin" / "python"
    done = folder / "done"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        packages = ("neural-tangents==0.6.5", *VERSIONS[name])
        install = [str(interpreter), "-m", "pip", "install", "--quiet", *packages]
        subprocess.run(install, check=True)
        done.touch()
    return interpreter


if __name__ == "__main__":
    for name in VERSIONS:
        print(python(name))
