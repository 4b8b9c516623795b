#!/usr/bin/env bash
# `@equinox.filter_jacfwd` on a method loses `self`, and `@equinox.filter_grad` does not.
#
# Expected: transforms of Equinox can decorate methods, as `filter_jit`, `filter_grad` and
# `filter_checkpoint` do.
# Seen: a TypeError about a missing argument from methods with `filter_jacfwd` and `filter_hessian`.
# Equinox 0.13.8 does so, with JAX 0.10.2 and 0.12.0.1.
# Guessed before: all of them are descriptors.
# Source: Equinox 0.13.8 itself; https://docs.kidger.site/equinox/api/transformations/
#
# Exits with 0 as long as this is so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet \
    equinox==0.13.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PROGRAM'
import equinox as eqx
import jax
import jax.numpy as jnp


class Model(eqx.Module):
    weight: jax.Array

    @eqx.filter_grad
    def gradient(self, x):
        return jnp.sum(self.weight * x)

    @eqx.filter_jacfwd
    def jacobian(self, x):
        return self.weight * x

    @eqx.filter_hessian
    def hessian(self, x):
        return jnp.sum((self.weight * x) ** 2)


model, x = Model(jnp.ones(2)), jnp.array([1.0, 2.0])
assert model.gradient(x).weight.tolist() == [1.0, 2.0]
messages = []
for method in (model.jacobian, model.hessian):
    try:
        method(x)
    except TypeError as e:
        messages.append(str(e))
print("equinox", eqx.__version__, messages)
assert len(messages) == 2 and all("missing 1 required" in x for x in messages)
PROGRAM
