#!/usr/bin/env bash
# `jax.lax.ragged_dot` with group sizes of 8 bits gives rows to wrong groups, or to none.
#
# Expected: 200 rows meet the first matrix and 100 rows the second one, as with sizes in int32; or an
# error.
# Seen: 244 rows meet the first matrix, none the second one, and 56 are zero, in JAX 0.7.2 and
# 0.12.0.1 (jaxlib of the same versions, CPU). The ends of the groups are added up in 8 bits.
# Guessed before: the product with each dtype of integers is the same.
# Source: JAX 0.12.0.1 itself; the function is described in
# https://docs.jax.dev/en/latest/_autosummary/jax.lax.ragged_dot.html.
#
# Exits with 0 as long as this is so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet jax==0.7.2 jaxlib==0.7.2 numpy==2.3.5
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PROGRAM'
import jax
import jax.numpy as jnp
import numpy as np

rows = jnp.ones((300, 1))
matrices = jnp.array([1.0, 2.0]).reshape(2, 1, 1)


def met(dtype):
    """How many rows meet no matrix, the first and the second one."""
    out = jax.lax.ragged_dot(rows, matrices, jnp.array([200, 100], dtype))
    return [int((np.asarray(out) == value).sum()) for value in (0, 1, 2)]


print("jax", jax.__version__, "int32:", met("int32"), "uint8:", met("uint8"))
assert met("int32") == [0, 200, 100]
assert met("uint8") == [56, 244, 0]
PROGRAM
