"""Solutions of the damped system of a Gauss-Newton step."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
from jax import lax
from jaxtyping import Array, Float

from .._base.run_time_checks import error_if
from .._base.trees import import_extra
from .residuals import in_range


# The solvers that need the matrix.
DENSE = ("cholesky", "eigh")


class DampedSolver(NamedTuple):
    """How systems `(matrix + damping * I) @ x = vector` are solved.

    The matrix is symmetric and positive semi-definite.

    - `solver`: one of `DENSE`, or a solver of lineax.
    - `wrong_numbers`: for settings known at run time, whether one is wrong, and the
        error.
    """

    damping: Any
    solver: Any
    wrong_numbers: Callable[[], list[tuple[Array, str]]]

    @property
    def needs_matrix(self) -> bool:
        return isinstance(self.solver, str)

    def solved(
        self, matrix: Float[Array, "n n"], vector: Float[Array, " n"]
    ) -> Float[Array, " n"]:
        """The solution, from the matrix."""
        by = self._by_eigenvalues if self.solver == "eigh" else self._by_cholesky
        return by(matrix, vector, jnp.asarray(self.damping, matrix.dtype))

    def _by_eigenvalues(
        self,
        matrix: Float[Array, "n n"],
        vector: Float[Array, " n"],
        damping: Float[Array, ""],
    ) -> Float[Array, " n"]:
        values, vectors = jnp.linalg.eigh(matrix)
        # Without damping, eigenvalues that are zero up to rounding do not count.
        # With it, they are still much larger than `damping` may be.
        largest = jnp.max(values, initial=0)
        rounding = largest * values.size * jnp.finfo(values.dtype).eps
        least = jnp.where(damping > 0, 0, rounding)
        damped = jnp.where(values > least, values, 0) + damping
        # A division by zero that is not selected would still have a derivative of NaN.
        is_zero = damped <= 0
        inverse = jnp.where(is_zero, 0, 1 / jnp.where(is_zero, 1, damped))
        times = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
        solve = lambda inverse, x: times(vectors, inverse * times(vectors.T, x))
        solution = solve(inverse, vector)
        # All eigenvalues are as inexact as the largest one: what they leave of the
        # right-hand side is solved for, too. It would grow where a value is far
        # below zero.
        inverse = jnp.where(2 * values > -damping, inverse, 0)
        for _ in range(3):
            residual = vector - times(matrix, solution) - damping * solution
            solution += solve(inverse, residual)
        return error_if(solution, *self.wrong_numbers())

    def _by_cholesky(
        self,
        matrix: Float[Array, "n n"],
        vector: Float[Array, " n"],
        damping: Float[Array, ""],
    ) -> Float[Array, " n"]:
        shifted = matrix + damping * jnp.eye(matrix.shape[0], dtype=matrix.dtype)
        # JAX fills the factor of a matrix that is not positive definite with NaN.
        factor = jnp.linalg.cholesky(shifted)
        solution = jsl.cho_solve((factor, True), vector)
        # NaN that comes from the residuals is theirs: it is no error of the matrix.
        is_finite = jnp.all(jnp.isfinite(shifted)) & jnp.all(jnp.isfinite(vector))
        is_indefinite = is_finite & ~jnp.all(jnp.isfinite(solution))
        message = (
            "The matrix of the step, with `damping` on its diagonal, is not positive "
            f"definite in {matrix.dtype}. Use more `damping`, `solver='eigh'`, or "
            "64-bit mode."
        )
        return error_if(solution, *self.wrong_numbers(), (is_indefinite, message))

    def solved_by_products(
        self, product: Callable[[Array], Array], vector: Float[Array, " n"]
    ) -> Float[Array, " n"]:
        """The solution by lineax, from products of the matrix with vectors."""
        lineax = import_extra("lineax", "solver", "linalg")
        damping = jnp.asarray(self.damping, vector.dtype)
        # Before the solver says that it did not converge.
        vector = error_if(vector, *self.wrong_numbers())
        # Absolute tolerances are then relative to the largest entry.
        (scaled,), size = in_range([vector])
        operator = lineax.FunctionLinearOperator(
            lambda x: product(x) + damping * x,
            jax.eval_shape(lambda: vector),
            lineax.positive_semidefinite_tag,
        )
        return lineax.linear_solve(operator, scaled, self.solver).value * size
