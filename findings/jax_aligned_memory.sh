#!/usr/bin/env bash
# On CPUs, `device_put(x, may_alias=False)` and `from_dlpack(x, copy=True)` share memory of NumPy.
#
# Expected: arrays of their own, which later writes to `x` do not change. Both arguments ask for a
# copy.
# Seen: both, and `jnp.asarray(x, x.dtype)`, change with `x` if its memory begins at a multiple of
# 64 bytes; `jnp.asarray(x)`, without the dtype, does not. So it is in JAX 0.10.2 and 0.12.0.1. In
# JAX 0.7.2, `from_dlpack` copies, and `jnp.asarray(x)` does not.
# Guessed before: only `jnp.asarray` may share.
# Source: https://github.com/jax-ml/jax/issues/37830
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
import numpy as np

WAYS = {
    "device_put": lambda x: jax.device_put(x, may_alias=False),
    "from_dlpack": lambda x: jnp.from_dlpack(x, copy=True),
    "asarray with the dtype": lambda x: jnp.asarray(x, x.dtype),
    "asarray": jnp.asarray,
    "array": jnp.array,
}
seen = {}
for name, convert in WAYS.items():
    memory = np.zeros(4064, np.uint8)
    start = -memory.ctypes.data % 64
    x = memory[start : start + 4000].view(np.float32)
    y = jax.block_until_ready(convert(x))
    x[:] = 1
    seen[name] = bool(y[0] == 1)
print("jax", jax.__version__, "changed:", seen)
assert [*seen.values()] == [True, True, True, False, False]
PROGRAM
