#!/usr/bin/env bash
# In `jax.jit`, `x / a / b` is 0 or inf where `a * b` leaves the range of float32.
#
# Expected: 1e30 / 1e25 / 1e25 is 1e-20, and 1e-30 / 1e-25 / 1e-25 is 1e20, as without `jax.jit` and
# in NumPy. No step of either leaves the range.
# Seen: 0 and inf, in JAX 0.7.2, 0.10.2 and 0.12.0.1 on CPUs: XLA divides by the product.
# Guessed before: XLA keeps the order of divisions, or merges them only with fast-math flags.
# Source: JAX 0.10.2 itself.
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

divided = lambda x, a, b: x / a / b
large = jnp.float32([1e30, 1e25, 1e25])
small = jnp.float32([1e-30, 1e-25, 1e-25])
compiled = [jax.jit(divided)(*large).item(), jax.jit(divided)(*small).item()]
print("jax", jax.__version__, "in jit:", compiled)
assert compiled == [0, np.inf]
np.testing.assert_allclose([divided(*large), divided(*small)], [1e-20, 1e20], rtol=1e-5)
PROGRAM
