#!/usr/bin/env bash
# `jnp.array` of a masked array of NumPy returns the numbers under the mask.
#
# Expected: a ValueError, as `jnp.asarray`, `jax.device_put`, `jnp.sum` and functions in `jax.jit`
# raise for the same array ("numpy masked arrays are not supported as direct inputs").
# Seen: `jnp.array` returns all numbers, fill values such as -999 among them, without a word. JAX
# 0.7.2, 0.10.2 and 0.12.0.1 do so.
# Guessed before: both constructors treat it alike.
# Source: JAX 0.10.2 itself; https://docs.jax.dev/en/latest/_autosummary/jax.numpy.array.html says
# that `jnp.array` and `jnp.asarray` differ in whether they copy.
#
# Exits with 0 as long as this is so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PROGRAM'
import jax
import jax.numpy as jnp
import numpy as np

x = np.ma.array([1.0, 2.0, -999.0], mask=[0, 0, 1], dtype=np.float32)
try:
    jnp.asarray(x)
    refused = False
except ValueError as e:
    refused = "masked arrays" in str(e)
seen = jnp.array(x)
print("jax", jax.__version__, "asarray refuses:", refused, "array returns:", seen)
assert refused and seen.tolist() == [1.0, 2.0, -999.0]
PROGRAM
