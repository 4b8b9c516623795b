#!/usr/bin/env bash
# `lax.top_k` takes the NaN of 0 / 0 for less than -inf, and `jnp.nan` for more than inf.
#
# Expected: NaNs have one rank, whatever their sign bit, as in `jnp.sort`, which puts both last.
# Seen: the NaN that an x86 CPU makes of 0 / 0 has the sign bit, and comes after -inf; `jnp.nan`
# comes first. JAX 0.7.2, 0.10.2 and 0.12.0.1 do so.
# Guessed before: NaNs come first, as the largest ones.
# Source: JAX 0.10.2 itself; https://docs.jax.dev/en/latest/_autosummary/jax.lax.top_k.html
#
# Exits with 0 as long as this is so. It needs an x86 CPU.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PROGRAM'
import jax
import jax.numpy as jnp

zero = jnp.zeros(())
x = jnp.array([1.0, -jnp.inf])
computed = jnp.append(x, zero / zero)
constant = jnp.append(x, jnp.nan)
places = [jax.lax.top_k(row, 3)[1].tolist() for row in (computed, constant)]
print("jax", jax.__version__, "places of 1, -inf, 0 / 0 and of 1, -inf, nan:", places)
assert places == [[0, 1, 2], [2, 0, 1]]
assert jnp.isnan(jnp.sort(computed)[-1]) and jnp.isnan(jnp.sort(constant)[-1])
PROGRAM
