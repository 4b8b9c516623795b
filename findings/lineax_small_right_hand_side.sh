#!/usr/bin/env bash
# `lineax.CG` returns zeros for a right-hand side of 1e-20, and says that it has solved the system.
#
# Expected: with `atol=0`, the solution for `1e-20 * b` is 1e-20 times that for `b`, or an error.
# Seen: zeros and RESULTS.successful after 0 steps, also if failures are to raise: squares of the
# residual are 0 in float32. BiCGStab and GMRES fail from 1e-10 on, and say so. It is lineax 0.1.1.
# Guessed before: a relative tolerance does not depend on the scale of `b`.
# Source: lineax 0.1.1 itself; https://docs.kidger.site/lineax/api/solvers/
#
# Exits with 0 as long as this is so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet \
    lineax==0.1.1 equinox==0.13.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PROGRAM'
import jax.numpy as jnp
import lineax

matrix = jnp.diag(jnp.array([1.0, 2.0, 3.0]))
operator = lineax.MatrixLinearOperator(matrix, lineax.positive_semidefinite_tag)
solver = lineax.CG(rtol=1e-5, atol=0.0)
b = jnp.ones(3)
solution = lineax.linear_solve(operator, b, solver)
small = lineax.linear_solve(operator, 1e-20 * b, solver)
solved = bool(small.result == lineax.RESULTS.successful)
print("lineax", lineax.__version__, "seen:", small.value, "successful:", solved)
assert jnp.allclose(solution.value, 1 / jnp.array([1.0, 2.0, 3.0]))
assert (small.value == 0).all() and solved
PROGRAM
