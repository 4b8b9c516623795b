#!/usr/bin/env bash
# On CPUs, `x.at[1:].set(x[:-1])[None]` repeats the first row in place of shifting all rows.
#
# Expected: the rows of `x`, each one place later, as without `jax.jit`, as without `[None]`, and as
# on GPUs.
# Seen: all rows are the first one, in JAX 0.7.2, 0.9.0.1, 0.10.2, 0.11.2 and 0.12.0.1. So are a sum
# over the axis that `[None]` adds, and `jax.vmap` over one example followed by such a sum.
# Guessed before: an axis of size 1 changes no number.
# Source: https://github.com/openxla/xla/issues/49176
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


def shifted(x):
    return x.at[1:].set(x[:-1])


x = jnp.array([5.0, 6.0, 7.0, 8.0])
seen = jax.jit(lambda x: shifted(x)[None])(x)[0]
summed = jax.jit(lambda x: jax.vmap(shifted)(x).sum(0))(x[None])
print("jax", jax.__version__, "with an axis:", seen, "summed:", summed)
assert jax.jit(shifted)(x).tolist() == [5.0, 5.0, 6.0, 7.0]
assert seen.tolist() == summed.tolist() == [5.0, 5.0, 5.0, 5.0]
PROGRAM
