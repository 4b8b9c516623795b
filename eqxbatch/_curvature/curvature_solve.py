"""`curvature_solve`: damped systems with a matrix that is known by its products."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Int, PyTree, Real

from .._base.checks import check_at_least
from .._base.compile import compiled
from .._base.dtypes import (
    is_complex,
    reachable_rtol,
)
from .._base.mesh import check_shared, on_one_mesh
from .._base.platforms import exact_products
from .._base.run_time_checks import error_if, on_devices_of
from .._base.trees import described, difference, import_extra, safe_zip, shown
from .._base.types import AnyArray, as_jax, checked
from .._base.versions import varying
from .._batch.accumulators import Concat
from .._batch.loop import accumulated
from .._batch.parameters import UNRAVEL
from .._batch.progress import (
    AbstractProgressMeter,
    as_meter,
    check_takes_residual,
    metered,
    Progress,
)
from .._batch.rows import Rows
from .preconditioned_steps import begun, State, System


class CurvatureSolution(eqx.Module):
    """What [`eqxbatch.curvature_solve`][] returns.

    For one right-hand side, all numbers have shape `()`; for `k` of them, `(k,)`.

    - `solution`: like `vectors`. It is NaN for a right-hand side with NaNs or
        infinities, and if a product has some.
    - `residuals`: the norm of each residual, relative to that of its right-hand side.
        If it has not converged, this is the residual that steps update, which differs
        from the true one by rounding.
    - `num_products`: the number of products with the matrix.
    - `has_converged`: whether the residual is at most `rtol`, by a product with the
        solution itself.
    - `is_indefinite`: whether a direction was found in which the matrix plus damping,
        or the preconditioner, is not positive. The solution is then the one of the
        steps before.
    """

    solution: PyTree
    residuals: Real[Array, "..."]
    num_products: Int[Array, "..."]
    has_converged: Bool[Array, "..."]
    is_indefinite: Bool[Array, "..."]


@checked
def curvature_solve(
    operator: Any,
    vectors: PyTree,
    *,
    damping: float | Real[AnyArray, ""],
    preconditioner: Any = None,
    rtol: float | None = None,
    max_steps: int = 1_000,
    block_size: int | None = 16,
    progress: Progress = None,
) -> CurvatureSolution:
    """Solves damped systems with a curvature matrix, for one or many right-hand sides.

    Solves `(matrix + damping * identity) @ solution = vector` by preconditioned
    conjugate gradients, from products with the matrix alone. With a good
    preconditioner, a few steps suffice: for influence functions, two steps correct the
    inverse of EK-FAC by what it neglects. The first step returns the preconditioned
    vector, up to a factor.

    Each right-hand side is a column with steps of its own: it does not depend on the
    others, and does not change any more when it is solved. A block of columns takes
    each product together. The recursively updated residual of conjugate gradients
    drifts away from the true one. Once it is small enough, the true residual is
    computed, and the iteration restarts if that is too large.

    **Arguments:**

    - `operator`: a symmetric matrix, such as an [`eqxbatch.GGNOperator`][], an
        [`eqxbatch.HessianOperator`][] or another linear operator of lineax with real
        vectors. With a `microbatch_size`, memory does not grow with the number of its
        examples.
    - `vectors`: a right-hand side, which is a PyTree like the parameters; or `k` of
        them, where each array has a new leading axis of size `k`, such as the gradients
        of some queries.
    - `damping`: a number that is added to the diagonal, at least 0.
    - `preconditioner`: an approximation of the inverse of the matrix plus damping, as a
        positive definite lineax operator, such as the `inverse()` of an
        [`eqxbatch.KroneckerOperator`][]. The default is the identity.
    - `rtol`: the norm to reach for each residual, relative to the norm of its
        right-hand side; between 0 and 1. The default is 1e-6 in float64. Otherwise it
        is 1,000 times the rounding error of the parameters (1.2e-4 in float32), and at
        most 0.01.
    - `max_steps`: the largest number of products, for each block of columns. To stop
        early on purpose is an ordinary use, and no error: `has_converged` is then
        False.
    - `block_size`: how many columns are solved at the same time, at least 1. `None`
        solves all of them at once. Memory is that of one product with so many columns,
        and of the solutions.
    - `progress`: True for a progress bar, or an [`eqxbatch.AbstractProgressMeter`][],
        which receives the largest relative residual of a block after each product. The
        loop is then in Python.

    **Returns:**

    An [`eqxbatch.results.CurvatureSolution`][]. Nothing is raised if a column is not
    solved: its entries of `has_converged` and `is_indefinite` say so.

    It works inside of `jax.jit` and `jax.vmap`. It has no derivative, as that of a few
    steps is not the one of the solution.

    **Raises:**

    - `ValueError` for an operator that is not symmetric or has complex vectors, for
        vectors or a preconditioner of another structure, for a `damping`, `rtol`,
        `max_steps` or `block_size` out of range, and inside of `jax.shard_map` for
        vectors that differ between devices which share a product.
    - `TypeError` for what is no linear operator, for arguments of another type, for
        `progress` inside of `jax.jit` and other transforms, and if it is
        differentiated; use `lineax.linear_solve` there.
    - `RuntimeError` for a negative `damping` that is known at run time only; on several
        devices, solutions are NaN instead.
    - `ImportError` if lineax is not installed.

    !!! example

        Influence functions: the solutions are directions, and
        `filter_micro_grad(..., against=)` has their inner products with all gradients,
        of which it stores none.

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(4, 3, 8, 1, jnp.tanh, key=jax.random.key(0))
        >>> predict = lambda model, x, label: model(x)
        >>> error = lambda logits, x, label: -jax.nn.log_softmax(logits)[label]
        >>> loss = lambda model, x, label: error(model(x), x, label)
        >>> train = jax.random.normal(jax.random.key(1), (100, 4)), jnp.arange(100) % 3
        >>> queries = jax.random.normal(jax.random.key(2), (5, 4)), jnp.arange(5) % 3
        >>> kfac = eqxbatch.filter_kfac(predict, error, corrected=True)
        >>> solved = eqxbatch.curvature_solve(
        ...     eqxbatch.GGNOperator(predict, error, model, *train, microbatch_size=20),
        ...     eqx.filter_vmap(eqx.filter_grad(loss), in_axes=(None, 0, 0))(
        ...         model, *queries
        ...     ),
        ...     damping=0.01,
        ...     preconditioner=kfac(model, *train).operator(damping=0.01).inverse(),
        ...     max_steps=2,
        ... )
        >>> solved.residuals.shape, bool(jnp.any(solved.is_indefinite))
        ((5,), False)
        >>> def scores(direction):
        ...     against = eqxbatch.filter_micro_grad(
        ...         loss, against=direction, microbatch_size=20
        ...     )
        ...     return against(model, *train)[1].inner_products
        >>> jax.lax.map(scores, solved.solution).shape
        (5, 100)

        ```

    ??? cite

        Martens, "Deep learning via Hessian-free optimization",
        [ICML 2010](https://www.cs.toronto.edu/~jmartens/docs/Deep_HessianFree.pdf).
        For influence functions: Koh and Liang, "Understanding black-box predictions via
        influence functions", [arXiv:1703.04730](https://arxiv.org/abs/1703.04730).
    """
    import_extra("lineax", "curvature_solve", "linalg")
    structure = _checked_structure("operator", operator)
    if preconditioner is not None:
        _check_preconditioner(preconditioner, structure)
    check_at_least("max_steps", max_steps, 1)
    if block_size is not None:
        check_at_least("block_size", block_size, 1, "Use None for one block.")
    columns = _checked_columns(operator, vectors, structure)
    dtypes = [x.dtype for x in columns.leaves]
    rtol = max(map(reachable_rtol, dtypes), default=0.01) if rtol is None else rtol
    if not 0 < rtol < 1:
        raise ValueError(f"`rtol` must be between 0 and 1; got {rtol}.")
    # The solve runs on the devices of all arrays, and so does a check of the damping.
    with on_devices_of((operator, preconditioner, columns)):
        damping = _checked_damping(damping)
    # What all columns have in common is on one mesh with them.
    system = System(
        operator,
        preconditioner,
        damping,
        jnp.asarray(rtol, float),
        jnp.asarray(min(max_steps, jnp.iinfo(jnp.int32).max), jnp.int32),
    )
    system, leaves = on_one_mesh((system, columns.leaves))
    columns = dataclasses.replace(columns, leaves=leaves)
    system, columns = _without_derivative(system, columns)
    size = min(block_size or columns.num, max(columns.num, 1))
    meter = as_meter(progress)
    if meter is None:
        found = _solve(system, columns, size)
    else:
        _check_outside(system, columns)
        check_takes_residual(meter, "curvature_solve")
        found = _solve_with_meter(system, columns, size, meter)
    return jtu.tree_map(lambda x: x[0], found) if columns.is_one else found


def _without_derivative(*trees: PyTree) -> PyTree:
    """The same, but an error if what is computed from it is differentiated."""
    arrays, rest = eqx.partition(trees, eqx.is_inexact_array)
    leaves, treedef = jtu.tree_flatten(arrays)
    same = jtu.tree_unflatten(treedef, _not_differentiable(leaves))
    return eqx.combine(same, rest)


@jax.custom_jvp
def _not_differentiable(arrays: list[Array]) -> list[Array]:
    return arrays


@_not_differentiable.defjvp
def _refuse(primals: tuple, tangents: tuple) -> NoReturn:
    raise TypeError(
        "`curvature_solve` has no derivative: that of a few steps is not the one of "
        "the solution. Use `lineax.linear_solve`, or `jax.lax.stop_gradient` for what "
        "goes into it."
    )


class _Columns(eqx.Module):
    """Right-hand sides, one along axis 0 of each array.

    - `is_one`: whether there is only one, which came without that axis.
    """

    leaves: list[Array]
    num: int = eqx.field(static=True)
    is_one: bool = eqx.field(static=True)

    def blocks(self, size: int) -> Iterator[list[Array]]:
        for start in range(0, self.num, max(size, 1)):
            yield [x[start : start + size] for x in self.leaves]


def _finished(system: System, state: State) -> CurvatureSolution:
    """What is returned of the last state of a column."""
    structs, treedef = jtu.tree_flatten(system.operator.in_structure())
    # What is not a solution must not look like one.
    fill = jnp.where(jnp.isfinite(state.norm), state.size, jnp.nan)
    leaves = [
        (x * fill.astype(x.dtype)).astype(struct.dtype)
        for x, struct in safe_zip(state.solution, structs)
    ]
    # A solution may be too large for the dtypes of the parameters.
    is_finite = functools.reduce(
        jnp.logical_and, (jnp.all(jnp.isfinite(x)) for x in leaves)
    )
    return CurvatureSolution(
        jtu.tree_unflatten(treedef, leaves),
        system.residual(state),
        state.num_products,
        system.is_solved(state) & is_finite,
        state.is_indefinite,
    )


def _any_open(system: System, state: State) -> Bool[Array, ""]:
    return jnp.any(jax.vmap(system.is_open)(state))


@compiled
def _solve(system: System, columns: _Columns, size: int) -> CurvatureSolution:
    """The solutions, with one loop over blocks and one over steps, in one program."""

    def solve(rows: Rows) -> CurvatureSolution:
        is_open = lambda state: _any_open(system, state)
        start = begun(system, rows.arrays)
        state = lax.while_loop(is_open, jax.vmap(system.step), start)
        return jax.vmap(lambda state: _finished(system, state))(state)

    rows = Rows(columns.leaves, (0,) * len(columns.leaves), columns.num)
    with exact_products():
        return accumulated(solve, rows, size, Concat())


class _Progress(eqx.Module):
    """States of a block, whether one needs another step, and the largest residual."""

    state: State
    is_open: Array
    residual: Array


def _progress(system: System, state: State) -> _Progress:
    residuals = jax.vmap(system.residual)(state)
    return _Progress(state, _any_open(system, state), jnp.max(residuals))


@compiled
def _begin(system: System, block: list[Array]) -> _Progress:
    with exact_products():
        return _progress(system, begun(system, block))


@compiled
def _step(system: System, state: State) -> _Progress:
    with exact_products():
        return _progress(system, jax.vmap(system.step)(state))


@compiled
def _finish(system: System, state: State) -> CurvatureSolution:
    return jax.vmap(lambda state: _finished(system, state))(state)


def _solve_with_meter(
    system: System, columns: _Columns, size: int, meter: AbstractProgressMeter
) -> CurvatureSolution:
    """The same solutions by loops in Python, which tell a meter of each product."""
    # Without columns there is nothing to tell.
    if columns.num == 0:
        return _solve(system, columns, size)
    blocks = [*columns.blocks(size)]
    most = len(blocks) * int(system.max_steps)
    solutions = []
    with metered(meter, most, 0, "curvature solve", "product") as step:
        for block in blocks:
            progress = _begin(system, block)
            while progress.is_open:
                progress = _step(system, progress.state)
                step(0, float(progress.residual))
            solutions.append(_finish(system, progress.state))
    return jtu.tree_map(lambda *xs: jnp.concatenate(xs), *solutions)


def _check_outside(system: System, columns: _Columns) -> None:
    if any(isinstance(x, Tracer) for x in jtu.tree_leaves((system, columns))):
        raise TypeError(
            "`progress` is for calls outside of `jax.jit` and other transforms, as it "
            "is a loop in Python. Leave it out inside of them."
        )


def _checked_damping(damping: float | AnyArray) -> Real[Array, ""]:
    remedy = "It is added to the diagonal of a matrix."
    if not isinstance(damping, Tracer):
        check_at_least("damping", float(damping), 0, remedy)
        return jnp.asarray(damping, float)
    message = "`damping` must be at least 0, and no NaN."
    return error_if(damping.astype(float), (~(damping >= 0), message))


def _checked_structure(name: str, operator: Any) -> PyTree:
    """The structure of the vectors of a symmetric operator."""
    lineax = import_extra("lineax", "curvature_solve", "linalg")
    if not isinstance(operator, lineax.AbstractLinearOperator):
        remedies = {
            "operator": "Pass an `eqxbatch.GGNOperator` or an "
            "`eqxbatch.HessianOperator`, or wrap products in a "
            "`lineax.FunctionLinearOperator`.",
            "preconditioner": "Kronecker factors of `filter_kfac` have one: "
            "`factors.operator(damping=...).inverse()`.",
        }
        raise TypeError(
            f"`{name}` must be a `lineax.AbstractLinearOperator`; got "
            f"{described(operator)}. {remedies[name]}"
        )
    is_known = lineax.is_symmetric, lineax.is_positive_semidefinite
    if not any(question(operator) for question in is_known):
        raise ValueError(
            f"`{name}` must be symmetric; got one of type `{type(operator).__name__}` "
            "that is not known to be. If it is, tag it: "
            "`lineax.TaggedLinearOperator(operator, lineax.symmetric_tag)`."
        )
    structure = operator.in_structure()
    if any(map(is_complex, jtu.tree_leaves(structure))):
        raise ValueError(
            f"`{name}` must be for real vectors; got {shown(structure)}. Pass real and "
            "imaginary parts as separate arrays."
        )
    if not jtu.tree_leaves(structure):
        raise ValueError(
            f"`{name}` must have parameters; got one for {shown(structure)}. See its "
            "`where` and `filter_spec`."
        )
    return structure


def _types(tree: PyTree) -> tuple:
    leaves, treedef = jtu.tree_flatten(tree)
    return treedef, [(x.shape, x.dtype) for x in leaves]


def _check_preconditioner(preconditioner: Any, structure: PyTree) -> None:
    own = _checked_structure("preconditioner", preconditioner)
    if _types(own) != _types(structure):
        raise ValueError(
            "`preconditioner` must be for the vectors of `operator`, "
            f"{shown(structure)}; got one for {shown(own)}. "
            f"{difference(structure, own)}"
        )


def _checked_columns(operator: Any, vectors: PyTree, structure: PyTree) -> _Columns:
    """The right-hand sides as columns, which are as the operator needs them."""
    arrays = eqx.filter(jtu.tree_map(as_jax, vectors), eqx.is_inexact_array)
    treedef, expected = _types(structure)
    found, types = _types(arrays)
    leaves = jtu.tree_leaves(arrays)
    is_alike = found == treedef and [x.dtype for x in leaves] == [
        d for _, d in expected
    ]
    is_one = types == expected
    # All arrays have the same number of columns.
    nums = {x.shape[0] for x in leaves if x.ndim}
    shapes = [((num, *shape), d) for num in nums for shape, d in expected]
    if not is_alike or not (is_one or (len(nums) == 1 and types == shapes)):
        is_vector = eqx.is_array(arrays)
        remedy = UNRAVEL if is_vector else difference(structure, arrays)
        raise ValueError(
            "`vectors` must have the structure, shapes and dtypes of the vectors of "
            f"`operator`, {shown(structure)}, or the same with a leading axis for "
            f"several right-hand sides; got {shown(vectors)}. {remedy}".rstrip()
        )
    leaves = [x[None] for x in leaves] if is_one else leaves
    _check_shared(operator, leaves, treedef)
    return _Columns(leaves, leaves[0].shape[0], is_one)


def _check_shared(operator: Any, leaves: list[Array], treedef: Any) -> None:
    """Raises for columns of devices whose products the operator would add up."""
    structs = [jax.typeof(x) for x in leaves]
    if not any(map(varying, structs)):
        return
    product = jax.vmap(lambda leaves: operator.mv(jtu.tree_unflatten(treedef, leaves)))
    images = jtu.tree_leaves(jax.eval_shape(product, leaves))
    check_shared("`vectors`", structs, images)
