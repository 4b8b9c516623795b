#!/usr/bin/env bash
# On CPUs, `lax.dynamic_update_slice` at a uint8 index writes to another row of a long array.
#
# Expected: with 300 rows, a write at `uint8(100)` changes row 100, and so has the derivative of
# `lax.dynamic_slice`, which JAX computes by such a write.
# Seen: row 43 changes: the last row, 299, is 43 in 8 bits, and indices are clamped to it. Reading
# is right. JAX 0.7.2, 0.9.0.1 and 0.10.2 do so, and JAX 0.11.2 and 0.12.0.1 do not.
# Guessed before: an index that the type can hold is the row that is meant.
# Source: JAX 0.10.2 itself. The same in reads was https://github.com/openxla/xla/issues/4491.
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

table, index = jnp.arange(300.0), jnp.uint8(100)
read = lambda table: jax.lax.dynamic_slice(table, (index,), (1,)).sum()
written = jax.lax.dynamic_update_slice(jnp.zeros(300), jnp.ones(1), (index,))
gradient = jax.grad(read)(table)
print("jax", jax.__version__, "read:", read(table), "written:", written.nonzero()[0])
assert read(table) == 100
assert written.nonzero()[0].tolist() == gradient.nonzero()[0].tolist() == [43]
PROGRAM
