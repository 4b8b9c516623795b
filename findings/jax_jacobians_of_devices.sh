#!/usr/bin/env bash
# In `jax.shard_map`, `jax.jacrev` adds up the Jacobians of all devices, and `jax.jacfwd` does not.
#
# Expected: both return the Jacobian of a device's own rows, as outside of `shard_map`, where they
# only differ in speed.
# Seen: with replicated parameters, each device has the same sum from `jacrev`, whose rows belong to
# no output, and its own Jacobian from `jacfwd`. With `check_vma=False`, they agree. JAX 0.7.2,
# 0.10.2 and 0.12.0.1 do so.
# Guessed before: gradients of replicated parameters are summed, because they are of a sum of
# losses; rows of a Jacobian are not.
# Source: JAX 0.10.2 itself; https://docs.jax.dev/en/latest/notebooks/shard_map.html
#
# Exits with 0 as long as this is so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2 \
    "$folder/env/bin/python" - <<'PROGRAM'
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
weights, x = jnp.array([1.0, 2.0]), jnp.array([[1.0, 2.0], [3.0, 4.0]])
predict = lambda weights, x: x @ weights


def seen(jacobian, check_vma):
    rows = jax.shard_map(
        jacobian(predict),
        mesh=mesh,
        in_specs=(P(), P("rows")),
        out_specs=P("rows"),
        check_vma=check_vma,
    )
    return rows(weights, x).tolist()


print("jax", jax.__version__, seen(jax.jacrev, True), seen(jax.jacfwd, True))
assert seen(jax.jacrev, True) == [[4.0, 6.0], [4.0, 6.0]]
assert seen(jax.jacfwd, True) == seen(jax.jacfwd, False) == x.tolist()
assert seen(jax.jacrev, False) == x.tolist()
PROGRAM
