#!/usr/bin/env bash
# The gradient through `lax.map` of a function with a mutable array of its own is zero.
#
# Expected: the gradient through `jax.vmap` of the same function, 2 x.
# Seen: zeros from `jax.grad` of `lax.map`, although the values are right, in JAX 0.7.2, 0.10.2 and
# 0.12.0.1.
# Guessed before: the same gradient, or an error.
# Source: JAX 0.10.2 itself; mutable arrays are described in
# https://docs.jax.dev/en/latest/array_refs.html.
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


def squares(x):
    scratch = jax.new_ref(jnp.zeros(3))
    scratch[...] = x
    return jnp.sum(scratch[...] ** 2)


x = jnp.arange(6.0).reshape(2, 3)
through_vmap = jax.grad(lambda x: jax.vmap(squares)(x).sum())(x)
through_map = jax.grad(lambda x: jax.lax.map(squares, x).sum())(x)
print("jax", jax.__version__, "vmap:", through_vmap, "map:", through_map)
assert (through_vmap == 2 * x).all() and (through_map == 0).all()
assert (jax.lax.map(squares, x) == jax.vmap(squares)(x)).all()
PROGRAM
