#!/usr/bin/env bash
# Through a custom backward pass that clips, the gradient of `lax.map` depends on its `batch_size`.
#
# Expected: `batch_size` trades memory for speed, and changes no number.
# Seen: 0.5, 1.5 or 1.0 for the same gradient, with one, two or all of three examples at a time. A
# parameter that all examples share is no batched argument, so the backward pass runs once for each
# batch, with a sum of cotangents, in `jax.vmap`, too. JAX 0.7.2, 0.10.2 and 0.12.0.1 do so.
# Guessed before: the backward pass runs for each example.
# Source: JAX 0.10.2 itself; https://docs.jax.dev/en/latest/_autosummary/jax.lax.map.html
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


@jax.custom_vjp
def with_clipped_gradient(x):
    return x


with_clipped_gradient.defvjp(
    lambda x: (x, None), lambda _, cotangent: (jnp.clip(cotangent, -1, 1),)
)
x = jnp.array([3.0, -2.0, 0.5])


def gradient(size):
    def total(weight):
        of_one = lambda x: with_clipped_gradient(weight) * x
        return jax.lax.map(of_one, x, batch_size=size).sum()

    return jax.grad(total)(1.0).item()


seen = {size: gradient(size) for size in (1, 2, 3)}
print("jax", jax.__version__, "gradient for each size:", seen)
assert seen == {1: 0.5, 2: 1.5, 3: 1.0}
PROGRAM
