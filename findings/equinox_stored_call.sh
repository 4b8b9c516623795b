#!/usr/bin/env bash
# A module that stores `layer.__call__` has no parameters, and one that stores `layer.forward` has.
#
# Expected: methods of an `equinox.Module` are PyTrees that hold its arrays, so that a stored method
# trains like its layer.
# Seen: `layer.__call__` is a method of Python without arrays. Gradients and updates leave its layer
# out without a word. Equinox 0.13.8 does so, with JAX 0.10.2 and 0.12.0.1.
# Guessed before: all methods are alike.
# Source: Equinox 0.13.8 itself; https://docs.kidger.site/equinox/all-of-equinox/ describes bound
# methods as PyTrees.
#
# Exits with 0 as long as this is so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet \
    equinox==0.13.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PROGRAM'
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp


class Layer(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return self.weight * x

    def forward(self, x):
        return self.weight * x


class Model(eqx.Module):
    run: Callable


def gradients(model):
    loss = lambda model: model.run(jnp.ones(2)).sum()
    return [x.tolist() for x in jax.tree.leaves(eqx.filter_grad(loss)(model))]


layer = Layer(jnp.ones(2))
seen = gradients(Model(layer.forward)), gradients(Model(layer.__call__))
print("equinox", eqx.__version__, "gradients:", *seen)
assert seen == ([[1.0, 1.0]], [])
PROGRAM
