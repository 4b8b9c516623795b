#!/usr/bin/env bash
# On CPUs, an einsum of two arrays with the same axes first writes both of them in another order.
#
# Expected: `jnp.einsum("nqm,qnm->nm", x, y)` multiplies entries and adds up, as
# `(x * y.swapaxes(0, 1)).sum(1)` does, in the same time and memory.
# Seen in JAX 0.7.2, 0.9.0.1 and 0.12.0.1: both arrays are transposed in memory so that the axis of the sum
# is the last one, and then multiplied entry by entry. Temporary memory is that of both arrays, where the
# product with `sum` takes none, and that of one array in JAX 0.12. For 512 by 4 by 512 entries, the einsum
# took 4 times as long, and 2.3 times with JAX 0.12. With both arrays in one order,
# `"qnm,qnm->nm"`, this is so up to JAX 0.9, and not in 0.12.
# Guessed before: XLA turns a product without free axes into a sum wherever its axes are.
# Source: the text of the compiled program, by `jax.stages.Compiled.as_text`; no report was found.
#
# Exits with 0 as long as this is so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PROGRAM'
import jax
import jax.numpy as jnp


def temporaries(fun):
    x = jax.ShapeDtypeStruct((512, 4, 512), jnp.float32)
    y = jax.ShapeDtypeStruct((4, 512, 512), jnp.float32)
    used = jax.jit(fun).lower(x, y).compile().memory_analysis().temp_size_in_bytes
    return used / (4 * 4 * 512 * 512)


by_einsum = temporaries(lambda x, y: jnp.einsum("nqm,qnm->nm", x, y))
by_sum = temporaries(lambda x, y: (x * y.swapaxes(0, 1)).sum(1))
print("jax", jax.__version__, "arrays of temporaries, einsum:", by_einsum, "sum:", by_sum)
assert (by_einsum, by_sum) == (2.0, 1.0)
PROGRAM
