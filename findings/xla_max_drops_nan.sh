#!/usr/bin/env bash
# `jnp.max` and `jnp.min` of some thousand numbers drop NaN on CPUs; of fewer, they do not.
#
# Expected: NaN where any number is NaN, as documented for NumPy, and as these functions return for
# a smaller array. `jnp.sum` is NaN.
# Seen: the largest of the other numbers, in float32 and float64, along either axis, from about 4,096
# entries on; in bfloat16, `jnp.min` does so. JAX 0.12.0.1 does, 0.7.2 does not. With
# XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type= (no fusions for YNNPACK) it does not either.
# Guessed before: a reduction does not depend on how many numbers it has.
# Source: the libraries themselves; https://github.com/openxla/xla/issues/21461 is an older report
# of NaN that a reduction drops on CPUs.
#
# Exits with 0 as long as this is so. It needs Python 3.12 or newer, and an x86 CPU.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.4.6
cat >"$folder/program.py" <<'PROGRAM'
import sys

import jax
import jax.numpy as jnp
import numpy as np


def num_wrong(dtype, shape, axis, reduce):
    x = np.random.default_rng(0).normal(size=shape)
    x.ravel()[::7] = np.nan
    found = jax.jit(lambda x: reduce(x, axis=axis))(jnp.asarray(x, dtype))
    return int(np.sum(np.isnan(np.asarray(found)) != np.isnan(x).any(axis)))


jax.config.update("jax_enable_x64", True)
drops = len(sys.argv) == 1
for dtype in ("float32", "float64"):
    for reduce in (jnp.max, jnp.min):
        small = [num_wrong(dtype, (16, 16), axis, reduce) for axis in (0, 1)]
        large = [num_wrong(dtype, (256, 256), axis, reduce) for axis in (0, 1)]
        print(jax.__version__, dtype, reduce.__name__, small, "of 16", large, "of 256")
        assert small == [0, 0]
        assert large == ([256, 256] if drops else [0, 0])
PROGRAM
export JAX_PLATFORMS=cpu
"$folder/env/bin/python" "$folder/program.py"
XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type= \
    "$folder/env/bin/python" "$folder/program.py" without
