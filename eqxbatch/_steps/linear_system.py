"""The linear system of a step, in sample space and in parameter space."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Float, PyTree

from .._base.dtypes import as_complex, as_real, widened
from .._base.mesh import error_if
from .._base.trees import import_extra
from .._batch.moments import Sum
from .._curvature.curvature_matrices import filter_ggn
from .sample_space import SampleKernel
from .terms import CentredTerm, in_range, Residuals, Term


class System(eqx.Module):
    """How systems are solved.

    - `damping`: a number that is added to the diagonal.
    - `solver`: `"cholesky"`, `"eigh"`, or a lineax solver, which uses products.
    - `block_size`: the size of the blocks of a matrix that are computed at a time.
    - `microbatch_size`: the number of examples that are processed at a time.
    """

    damping: Any
    solver: Any
    block_size: int | None
    microbatch_size: int | None

    def in_samples(self, residuals: Residuals, values: list) -> list[Array]:
        """`J^T W (J J^T W + damping)^-1 values`, with weights `W`."""
        vector = residuals.join(residuals.weighted(values, 0.5))

        def spread(vector: Array) -> list[Array]:
            return residuals.weighted(residuals.split(vector), 0.5)

        def product(vector: Array) -> Array:
            pulled = residuals.pull(spread(vector))
            pairs = zip(pulled, residuals.leaves, strict=True)
            tangents = [x.astype(leaf.dtype) for x, leaf in pairs]
            pushed = residuals.weighted(residuals.push(tangents), 0.5)
            return residuals.join(pushed)

        if isinstance(self.solver, str):
            kernel = SampleKernel(residuals, self.block_size, self.microbatch_size)
            return kernel.pull(spread(self._solved(kernel.matrix(), vector)))
        return residuals.pull(spread(self._solved_by_products(product, vector)))

    def in_parameters(self, residuals: Residuals, gradient: list) -> list[Array]:
        """`(J^T W J + damping)^-1 gradient`, with weights `W`."""
        real, treedef = jtu.tree_flatten(as_real(gradient))
        vector = jnp.concatenate([x.reshape(-1).astype(residuals.dtype) for x in real])

        def split(vector: Array) -> list[Array]:
            leaves, start = [], 0
            for x in real:
                leaves.append(vector[start : start + x.size].reshape(x.shape))
                start += x.size
            return as_complex(jtu.tree_unflatten(treedef, leaves))

        def product(vector: Array) -> Array:
            pairs = zip(split(vector), residuals.leaves, strict=True)
            tangents = [x.astype(leaf.dtype) for x, leaf in pairs]
            pushed = residuals.weighted(residuals.push(tangents))
            pulled = jtu.tree_leaves(as_real(residuals.pull(pushed)))
            return jnp.concatenate([x.reshape(-1).astype(vector.dtype) for x in pulled])

        if isinstance(self.solver, str):
            return split(self._solved(self._matrix(residuals), vector))
        return split(self._solved_by_products(product, vector))

    def _matrix(self, residuals: Residuals) -> Float[Array, "p p"]:
        """The Gauss-Newton matrix of real parameters."""
        total: Any = 0
        # The matrix has the dtype of its parameters.
        wide = jtu.tree_map(widened, as_real(residuals.leaves))
        dtypes = tuple(x.dtype for x in residuals.leaves)
        terms = residuals.centred_terms
        for term, rows, weights in zip(
            terms, residuals.rows, residuals.weights, strict=True
        ):
            if rows.total == 0:
                continue
            matrix = filter_ggn(
                _OfReal(term, dtypes),
                _half_of_squares,
                in_axes=rows.axes,
                flat=True,
                accumulator=Sum(weights=weights),
                block_size=self.block_size,
                microbatch_size=self.microbatch_size,
                # Products add up examples before they subtract the mean.
                method="sites" if residuals.centre else "auto",
            )
            of_term, _ = matrix(wide, *rows.arrays)
            total = total + of_term.astype(residuals.dtype)
        return total

    def _solved(
        self, matrix: Float[Array, "n n"], vector: Float[Array, " n"]
    ) -> Float[Array, " n"]:
        damping = jnp.asarray(self.damping, matrix.dtype)
        if self.solver == "eigh":
            values, vectors = jnp.linalg.eigh(matrix)
            # Without damping, eigenvalues that are zero up to rounding do not count.
            # With it, they are still much larger than `damping` may be.
            largest = jnp.max(values, initial=0)
            rounding = largest * values.size * jnp.finfo(values.dtype).eps
            least = jnp.where(damping > 0, 0, rounding)
            damped = jnp.where(values > least, values, 0) + damping
            is_zero = damped <= 0
            inverse = jnp.where(is_zero, 0, 1 / jnp.where(is_zero, 1, damped))
            times = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
            solve = lambda inverse, x: times(vectors, inverse * times(vectors.T, x))
            found = solve(inverse, vector)
            # All eigenvalues are as inexact as the largest one: what they leave of the
            # right-hand side is solved for, too. It would grow where a value is far
            # below zero.
            inverse = jnp.where(2 * values > -damping, inverse, 0)
            for _ in range(3):
                rest = vector - times(matrix, found) - damping * found
                found += solve(inverse, rest)
            return found
        shifted = matrix + damping * jnp.eye(matrix.shape[0], dtype=matrix.dtype)
        factor = jnp.linalg.cholesky(shifted)
        solution = jsl.cho_solve((factor, True), vector)
        is_finite = jnp.all(jnp.isfinite(shifted)) & jnp.all(jnp.isfinite(vector))
        return error_if(
            solution,
            is_finite & ~jnp.all(jnp.isfinite(solution)),
            "The matrix of the step, with `damping` on its diagonal, is not positive "
            f"definite in {matrix.dtype}. Use more `damping`, `solver='eigh'`, or "
            "64-bit mode.",
        )

    def _solved_by_products(
        self, product: Callable[[Array], Array], vector: Float[Array, " n"]
    ) -> Float[Array, " n"]:
        lineax = import_extra("lineax", "solver", "linalg")
        damping = jnp.asarray(self.damping, vector.dtype)
        # Absolute tolerances are then relative to the largest entry.
        (scaled,), size = in_range([vector])
        operator = lineax.FunctionLinearOperator(
            lambda x: product(x) + damping * x,
            jax.eval_shape(lambda: vector),
            lineax.positive_semidefinite_tag,
        )
        return lineax.linear_solve(operator, scaled, self.solver).value * size


class _OfReal(eqx.Module):
    """A term as a function of real parameters only, in at least float32.

    - `dtypes`: the dtypes in which the term takes its parameters.
    """

    term: Term | CentredTerm
    dtypes: tuple = eqx.field(static=True)

    def __call__(self, leaves: PyTree, *rows: Array) -> Float[Array, " entries"]:
        pairs = zip(as_complex(leaves), self.dtypes, strict=True)
        return self.term([x.astype(dtype) for x, dtype in pairs], *rows)


def _half_of_squares(out: Array, *rows: Array) -> Array:
    del rows
    return 0.5 * jnp.sum(out**2)
