"""Compiles all transforms for a GPU that need not be there, and reads the programs.

The environment is made anew in `.venv-extras/accelerators`, with the plug-in for the
version of JAX that it has. This needs `uv`, as `.ci/extras.py` does.
"""

import os
import subprocess
import sys

import extras


VERSION = "import importlib.metadata; print(importlib.metadata.version('jax'))"


def main(options: list[str]) -> int:
    python = str(extras.make("accelerators", extra="test"))
    found = subprocess.run([python, "-c", VERSION], check=True, capture_output=True)
    version = found.stdout.decode().strip()
    plugin = [f"jax-cuda12-{part}=={version}" for part in ("plugin", "pjrt")]
    # It has `ptxas`, which assembles the kernels.
    packages = [f"jax=={version}", *plugin, "nvidia-cuda-nvcc-cu12"]
    extras.install(python, *packages)
    # Without these, JAX looks for the GPU, and refuses to compile checks by the host.
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", "EQX_ON_ERROR": "nan"}
    command = [python, "-m", "pytest", "-m", "accelerators", *options]
    command.append("tests/test_accelerators.py")
    return subprocess.run(command, cwd=extras.ROOT, env=variables).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["-n", "auto"]))
