#!/usr/bin/env bash
# On CPUs, a result and its transpose take memory for a third array since JAX 0.12.
#
# Expected: `(y, y.T)` is `y` and one pass that writes its transpose: no memory beside the two results,
# as for `y.T` alone.
# Seen in JAX 0.12.0 and 0.12.0.1: temporary memory as large as `y`, for one pass that copies `y` with
# its axes named in the other order, and a second one that transposes it. So it is for an argument and
# its transpose. JAX 0.7.2, 0.9.0, 0.10.0, 0.10.2 and 0.11.0 need none. A kernel of 2,000 by 2,000
# entries took 1.6 to 2.2 times as long with its transpose as with a second program that transposes it.
# Guessed before: a transpose costs the same whether its operand is a result or not.
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
    x = jax.ShapeDtypeStruct((1_000, 1_000), jnp.float32)
    return jax.jit(fun).lower(x).compile().memory_analysis().temp_size_in_bytes


def both(x):
    y = jnp.exp(x)
    return y, y.T


alone, seen = temporaries(lambda x: jnp.exp(x).T), temporaries(both)
print("jax", jax.__version__, "bytes for the transpose alone:", alone, "for both:", seen)
assert (alone, seen) == (0, 4_000_000)
PROGRAM
