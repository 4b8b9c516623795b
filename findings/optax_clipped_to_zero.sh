#!/usr/bin/env bash
# `optax.clip_by_global_norm` turns float16 gradients with a norm above 256 into zeros.
#
# Expected: a gradient of norm 424 is scaled to norm 1, as in float32.
# Seen: zeros, without a warning: squares are summed in float16, where they exceed 65,504, and the
# gradient is divided by infinity. In float32, a norm of 1.4e20 does the same. optax 0.2.8 does so.
# Guessed before: norms are computed in float32, or the result is NaN and is noticed.
# Source: optax 0.2.8 itself;
# https://optax.readthedocs.io/en/latest/api/transformations.html
#
# Exits with 0 as long as this is so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet \
    optax==0.2.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PROGRAM'
import jax.numpy as jnp
import optax

clip = optax.clip_by_global_norm(1.0)


def clipped(gradient):
    return clip.update(gradient, clip.init(gradient))[0].tolist()


half = jnp.array([300.0, 300.0], jnp.float16)
seen = [clipped(half), clipped(half.astype(jnp.float32)), clipped(jnp.full(2, 1e20))]
print("optax", optax.__version__, "float16, float32, large:", seen)
assert seen[0] == seen[2] == [0, 0]
assert abs(seen[1][0] - 0.5**0.5) < 1e-6
PROGRAM
