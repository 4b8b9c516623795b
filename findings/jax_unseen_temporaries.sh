#!/usr/bin/env bash
# On CPUs, `memory_analysis` reports no temporaries for attention that takes 256 MB of them.
#
# Expected: `temp_size_in_bytes` has at least the scores of 4 heads with 4,000 tokens, 256 MB, and
# `peak_memory_in_bytes` is larger than that.
# Seen: 0, and a peak that is the size of arguments and results, while the process grows by the
# scores. Both products are fusions for a library (YNNPACK), which allocates on its own. It is so in
# JAX 0.10.2 and 0.12.0.1; 0.9.0.1 reports all temporaries, but no peak that has them.
# Guessed before: what is allocated at run time is in the plan of the compiler.
# Source: JAX 0.10.2 itself.
#
# Exits with 0 as long as this is so. The process's memory is read as Linux counts it.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PROGRAM'
import resource

import jax
import jax.numpy as jnp
import numpy as np


def most_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def attention(q, k, v):
    scores = jnp.einsum("hid,hjd->hij", q, k)
    return jax.nn.softmax(scores, axis=-1) @ v


draw = np.random.default_rng(0)
arrays = [draw.standard_normal((4, 4000, 32), np.float32) for _ in range(3)]
arrays = jax.device_put(arrays)
run = jax.jit(attention).lower(*arrays).compile()
report = run.memory_analysis()
before = most_memory()
jax.block_until_ready(run(*arrays))
grown = (most_memory() - before) / 1e6
temporaries, peak = report.temp_size_in_bytes, report.peak_memory_in_bytes
print("jax", jax.__version__, "reported:", temporaries, peak, "grown by MB:", grown)
assert temporaries == 0 and peak < 10e6 and grown > 120
PROGRAM
