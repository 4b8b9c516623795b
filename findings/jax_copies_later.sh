#!/usr/bin/env bash
# On CPUs, `jnp.array(x)` reads large arrays of NumPy after it has returned.
#
# Expected: a copy of what `x` had when it was called, so that `x` can be filled again at once, as a
# buffer for batches is.
# Seen: in most of 20 calls, some numbers are those that were written after the call. It happens in
# JAX 0.9.0.1 and 0.10.2; the memory of `x` is not aligned, so that none is shared. It was not seen
# in JAX 0.7.2, 0.11.2 and 0.12.0.1.
# Guessed before: computations are asynchronous, and copies of arrays of the host are not.
# Source: JAX 0.10.2 itself; https://docs.jax.dev/en/latest/_autosummary/jax.numpy.array.html says
# that it copies.
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

changed = 0
for _ in range(20):
    x = np.ones(8_000_001, np.float32)[1:]
    y = jnp.array(x)
    x[:] = 2
    changed += bool(y.max() == 2)
print("jax", jax.__version__, "calls that saw a later write:", changed, "of 20")
assert changed > 0
PROGRAM
