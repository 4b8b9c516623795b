#!/usr/bin/env bash
# JAX 0.10.1 on CPUs: sums of small products of many vectors are wrong from row 32,768 on.
#
# Expected: `jit(vmap(p -> sum(A p)))` equals NumPy for every row, as without `jit`, and as in
# JAX 0.9.0.1 and 0.12.
# Seen: with A of shape (2, 3) and 40,000 vectors, 7,231 rows differ, the first of them row 32,768
# (after 128 kB of each component). The report names squares in 0.10.2 and says that 0.10.1 is
# right; for sums and maxima, 0.9.1, 0.9.2, 0.10.0 and 0.10.1 are wrong, too.
# Guessed before: 0.10.1 is right.
# Source: https://github.com/jax-ml/jax/issues/39103
#
# Exits with 0 as long as this is so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet jax==0.10.1 jaxlib==0.10.1 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PROGRAM'
import jax
import jax.numpy as jnp
import numpy as np

draw = np.random.default_rng(0)
points = draw.standard_normal((40_000, 3), dtype=np.float32)
matrix = draw.standard_normal((2, 3), dtype=np.float32)
expected = (points @ matrix.T).sum(1)
seen = np.asarray(jax.jit(jax.vmap(lambda p: jnp.sum(matrix @ p)))(points))
wrong = ~np.isclose(seen, expected, rtol=1e-4, atol=1e-4)
print("jax", jax.__version__, "wrong rows:", wrong.sum(), "first:", wrong.argmax())
assert wrong.sum() > 7_000 and wrong.argmax() == 32_768
PROGRAM
