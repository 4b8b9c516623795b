#!/usr/bin/env bash
# `optax.microbatch` that stops early takes rows from all over the batch, and divides by all parts.
#
# Expected: `num_real_microbatches=2` of 4 is for batches with 4 rows of 8, padded at the end: the
# mean of the first 4 rows, 2.5.
# Seen: MEAN returns 1.75, half of 3.5, the mean of rows 1, 2, 5 and 6: a microbatch has every
# fourth row, and the sum is divided by 4. RUNNING_MEAN returns 3.5. optax 0.2.8 does so.
# Guessed before: microbatches are rows that follow each other, and means count what ran.
# Source: optax 0.2.8 itself; its docstring says that it terminates early "after this many steps".
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
from optax.microbatching import AccumulationType

x = jnp.arange(1.0, 9.0)


def mean(accumulator):
    run = optax.microbatching.microbatch(
        jnp.mean, 0, 2, accumulator, num_real_microbatches=2
    )
    return run(x).item()


seen = [mean(AccumulationType.MEAN), mean(AccumulationType.RUNNING_MEAN)]
print("optax", optax.__version__, "MEAN, RUNNING_MEAN:", seen)
assert seen == [1.75, 3.5]
PROGRAM
