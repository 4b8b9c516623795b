"""`explain_sites`: the sites of a function, and a check of derivatives against JAX."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree, Real

from .._base.checks import called
from .._base.dtypes import as_real, common_dtype, is_complex
from .._base.mesh import gathered
from .._base.modes import without_forward_mode
from .._base.platforms import for_platform, platform
from .._base.traced_function import TracedFunction
from .._base.trees import safe_zip
from .._base.types import checked
from .._base.versions import double_precision
from .._batch.batch import Batch, unbatched
from .._batch.loss import Loss, split_examples
from .._batch.memory import explained_failure
from .._batch.parameters import are_parameters, as_where
from .._batch.sums import Sum
from .._curvature.matrices import filter_ggn, filter_hessian, filter_hessian_diagonal
from .._gradients.micro_grad import filter_micro_value_and_grad
from .._ntk.empirical import EmpiricalNTK
from .._sites.program import Program
from .._sites.report import LeafCheck, report_of, SitesCheck, SitesReport


# The number of examples, and the number of outputs. Larger outputs are projected to
# this many numbers, because each of them is pulled back.
_NUM_EXAMPLES, _MOST_OUTPUTS = 3, 8


# Second derivatives are those of leaves with at most this many entries together, whose
# sites return at most as many numbers, because these are differentiated, too.
_MOST_COLUMNS, _COLUMNS_AT_A_TIME = 2048, 32


@dataclasses.dataclass(frozen=True)
class Call:
    """A function called with some examples.

    The batch of `fun` has all of them.
    """

    fun: Loss

    @property
    def leaves(self) -> list[Array]:
        return jtu.tree_leaves(self.fun.diff)

    @property
    def num(self) -> int:
        """The number of examples that are used."""
        batch = self.fun.batch
        return min(batch.total(), _NUM_EXAMPLES) if batch.arrays else 1

    @property
    def rows(self) -> list[Array]:
        """Some examples. The last array is for functions without batched arguments."""
        moved = [
            jnp.moveaxis(x, axis, 0)[:_NUM_EXAMPLES]
            for x, axis in safe_zip(self.fun.batch.arrays, self.fun.batch.axes)
        ]
        return [*moved, jnp.zeros(self.num)]

    @property
    def one(self) -> list[Array]:
        """The first example."""
        return [row[0] for row in self.rows]

    def returned(self, leaves: list, rows: list) -> list[Array]:
        """The arrays of inexact dtypes that the function returns for one example."""
        diff = jtu.tree_unflatten(jtu.tree_structure(self.fun.diff), leaves)
        out, _ = self.fun.outputs(diff, rows[:-1])
        return jtu.tree_leaves(eqx.filter(out, eqx.is_inexact_array))

    def outputs(self, leaves: list, rows: list) -> Real[Array, " k"]:
        """A few real numbers that depend on everything that is returned."""
        parts = jtu.tree_leaves(as_real(self.returned(leaves, rows)))
        dtype = common_dtype(*(x.dtype for x in parts))
        flat = jnp.concatenate([x.reshape(-1).astype(dtype) for x in parts])
        if flat.size <= _MOST_OUTPUTS:
            return flat
        directions = jr.normal(jr.key(0), (_MOST_OUTPUTS, flat.size), dtype)
        return directions @ flat / flat.size**0.5

    def value(self, leaves: list, rows: list) -> Real[Array, ""]:
        """The scalar that has the gradients and Hessians."""
        outs = self.returned(leaves, rows)
        if [x.shape for x in outs] == [()] and not is_complex(outs[0]):
            return outs[0]
        outs = self.outputs(leaves, rows)
        weights = jnp.linspace(0.5, 1.5, outs.size, dtype=outs.dtype)
        return jnp.sum(weights * outs) + jnp.sum(outs**2) / 2

    def loss(self, outs: Real[Array, " k"], _: list) -> Real[Array, ""]:
        """The loss of the Gauss-Newton matrix, convex in the outputs."""
        weights = jnp.linspace(0.5, 1.5, outs.size, dtype=outs.dtype)
        return (jnp.sum(weights * outs**2) + jnp.sum(outs) ** 2) / 2

    def widened(self) -> "Call":
        """The call in double precision, which must be enabled."""

        def widen(x: Any) -> Any:
            if not eqx.is_inexact_array(x):
                return x
            return x.astype(jnp.complex128 if is_complex(x) else jnp.float64)

        wide = jtu.tree_map(widen, self.fun)
        return Call(dataclasses.replace(wide, fun=self.fun.fun))

    def refusal(self) -> str | None:
        """Why the function cannot be differentiated as it is called; None if it can.

        This only traces the function. If it fails here, it is an error of the function,
        of any type.
        """

        def gradients(leaves: list) -> Any:
            outs, pull = jax.vjp(lambda leaves: self.returned(leaves, self.one), leaves)
            return pull(outs)

        try:
            jax.eval_shape(gradients, self.leaves)
        except Exception as e:
            name, lines = type(e).__name__, str(e).strip().splitlines()
            return f"{name}: {lines[0]}" if lines else name
        return None


def check_of(call: Call, paths: list[str]) -> SitesCheck:
    """Runs the check in float64 if the function can be differentiated there."""
    with double_precision():
        wide = call.widened()
        reason = wide.refusal()
        if reason is None:
            return _compared(wide, paths, "float64", None)
    dtypes = sorted({str(x.dtype) for x in call.leaves})
    return _compared(call, paths, ", ".join(dtypes), reason)


def _compared(
    call: Call, paths: list[str], dtype: str, reason: str | None
) -> SitesCheck:
    structs = jax.eval_shape(call.returned, call.leaves, call.one)
    if not sum(struct.size for struct in structs):
        raise ValueError(
            "With `check=True`, `fun` must return an array of an inexact dtype, as "
            "only these have a derivative; it returned none. Return what is to be "
            "differentiated, or leave out `check`."
        )
    by_sites, expected = (_derivatives(call, x) for x in (True, False))
    leaves, whole = (
        {name: _errors(results[name], true[name]) for name in true}
        for results, true in safe_zip(by_sites, expected)
    )
    checks = tuple(
        LeafCheck(path, **{name: errors[i] for name, errors in leaves.items()})
        for i, path in enumerate(paths)
    )
    together = {name: max(filter(None, x), default=0.0) for name, x in whole.items()}
    return SitesCheck(
        checks, LeafCheck("all together", **together), call.num, dtype, reason
    )


def _derivatives(call: Call, by_sites: bool) -> tuple[dict[str, list], dict[str, list]]:
    """The results for each leaf and for all together, from sites or without them.

    There is a list for each quantity.
    """
    gradient, norms = _clipped(call, by_sites, [1.0 for _ in call.leaves])
    of_leaves = {"gradient": gradient, "norm": norms, **_curvature(call, by_sites)}
    gradient, norms = _clipped(call, by_sites, 1.0)
    model = eqx.Partial(call.outputs, call.leaves)
    name = "sites" if by_sites else "jacobian_contraction"
    kernel = EmpiricalNTK(model, trace_axes=(), method=name)(call.rows)
    return of_leaves, {"gradient": gradient, "norm": [norms], "kernel": [kernel]}


def _clipped(call: Call, by_sites: bool, bounds: PyTree) -> tuple[list, Any]:
    """The sum of clipped gradients, and the norms before."""
    # With equal weights, gradients that only differ in sign would cancel.
    weights = jnp.linspace(0.5, 1.5, call.num)
    transform = filter_micro_value_and_grad(
        call.value,
        accumulator=Sum(weights=weights),
        clip_norm=bounds,
        return_norms=True,
        method="sites" if by_sites else "materialise",
    )
    _, gradient, statistics = transform(call.leaves, call.rows)
    return gradient, statistics.norms


def _curvature(call: Call, by_sites: bool) -> dict[str, list]:
    """Matrices of second derivatives, of the leaves for which they are small."""
    small = _small_leaves(call)
    if not any(small):
        return {}
    settings: dict[str, Any] = {
        "filter_spec": small,
        "in_axes": 0,
        "accumulator": Sum(),
        "method": "sites" if by_sites else "products",
        "block_size": None if by_sites else _COLUMNS_AT_A_TIME,
    }
    transforms: dict[str, Callable[..., list]] = {
        "gauss_newton": filter_ggn(call.outputs, call.loss, **settings)
    }
    gradient = lambda leaves: jax.grad(call.value)(leaves, call.one)
    if without_forward_mode(gradient, call.leaves) is None:
        transforms["hessian"] = filter_hessian(call.value, **settings)
        transforms["diagonal"] = filter_hessian_diagonal(call.value, **settings)
    return {name: run(call.leaves, call.rows) for name, run in transforms.items()}


def _small_leaves(call: Call) -> list[bool]:
    """Which leaves have second derivatives that are small enough to compare.

    Complex parameters have these only in their real and imaginary parts.
    """
    chosen, columns, perturbed = [False for _ in call.leaves], 0, set()
    if any(map(is_complex, call.leaves)):
        return chosen
    program = Program(TracedFunction(call.value, call.leaves, call.one), order=2)
    for leaf in sorted(range(len(chosen)), key=lambda i: call.leaves[i].size):
        num = columns + call.leaves[leaf].size
        more = perturbed | {site.perturbation for site in program.table.of(leaf)}
        num_at_sites = sum(program.table.perturbations[i].size for i in more)
        if max(num, num_at_sites) <= _MOST_COLUMNS:
            chosen[leaf], columns, perturbed = True, num, more
    return chosen


def _errors(results: list, expected: list) -> list[float | None]:
    """The largest error of each entry of a list; None if there is nothing in it."""
    pairs = [(_flat(x), _flat(y)) for x, y in safe_zip(results, expected)]
    scales = [np.max(np.abs(y), initial=0.0, where=np.isfinite(y)) for _, y in pairs]
    # What is tiny beside the other entries is rounding error, as the gradient of a bias
    # of attention keys is.
    eps = jnp.finfo(jtu.tree_leaves(expected)[0].dtype).eps
    least = float(eps) ** 0.25 * max(scales)
    errors: list[float | None] = []
    for (x, y), scale in safe_zip(pairs, scales):
        with np.errstate(invalid="ignore"):
            differ = np.abs(x - y)
        differ[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
        differ[np.isnan(differ)] = np.inf
        error = float(np.max(differ, initial=0.0) / (max(scale, least) or 1.0))
        errors.append(error if y.size else None)
    return errors


def _flat(tree: PyTree) -> np.ndarray:
    """All numbers of a PyTree, of any dtype."""
    arrays = [np.asarray(x).astype(np.complex128) for x in jtu.tree_leaves(tree)]
    return np.concatenate([np.zeros(0), *(x.reshape(-1) for x in arrays)])


@functools.partial(checked, but=("where",))
def explain_sites(
    fun: Callable[..., PyTree],
    model: PyTree,
    /,
    *args: Any,
    check: bool = False,
    where: Callable[[Any], Any] | None = None,
    filter_spec: PyTree = eqx.is_inexact_array,
    in_axes: PyTree = eqx.if_array(0),
    **kwargs: Any,
) -> SitesReport:
    """Reports where the parameters of a function enter it (its sites), and their cost.

    A site is an operation in which a parameter meets the rest of the computation, such
    as a matrix product. There, the per-example gradient is a contraction of two small
    factors, so norms and weighted sums of gradients can be computed without
    materialising the gradients. `clip_norm` of
    [`eqxbatch.filter_micro_value_and_grad`][] uses this, and so do kernels, Hessians
    and Gauss-Newton matrices.

    With `check=True`, results from sites are compared for your function with those of
    the methods without them, which JAX's derivatives form entry by entry.

    **Arguments:**

    - `fun`: a function of one example, such as a loss or a model, called as
        `fun(model, *args, **kwargs)`. It is traced but not run, unless `check=True`.
    - `model`: a PyTree whose arrays of an inexact dtype are the parameters.
    - `args`, `kwargs`: the other arguments, for a batch of examples. Without `check`,
        anything with a shape and a dtype is accepted as an array, such as a
        `jax.ShapeDtypeStruct`.
    - `check`: whether to compare gradients, norms, kernels, Hessians, their diagonals
        and Gauss-Newton matrices with those without sites. This compiles and runs the
        function, which takes seconds to minutes.
    - `where`: a function from `model` to the part (or parts) of it to differentiate
        with respect to, such as the last layer. The default is all of it.
    - `filter_spec`: which leaves are parameters, as for `equinox.filter`.
    - `in_axes`: the batch axes of `args`, as for
        [`eqxbatch.filter_micro_value_and_grad`][]: axis 0 of all arrays by default. A
        check uses the first three examples. With None, `args` and `kwargs` are those of
        one example, without a batch axis.

    **Returns:**

    An [`eqxbatch.results.SitesReport`][]. Printed, it is a table with the sites of each
    parameter, the contraction that is cheapest by an estimate of operations and memory
    traffic, its block in [`eqxbatch.filter_kfac`][] of a model and, for parameters
    without a rule, the reason. With `check`, a table of the largest errors follows;
    these are in the field `check` of the report.

    A check uses float64: the arrays of the model and the arguments are cast to it. If
    the function then raises an exception, the check uses the original dtypes, and the
    report gives the reason. If `fun` returns a real scalar, this is differentiated.
    Otherwise, gradients and Hessians are those of a quadratic function of the output,
    and outputs with more than eight numbers are first projected randomly to eight.

    Gradients and norms are compared leaf by leaf: sums of gradients that are clipped
    for each leaf. For all leaves together, these are clipped as one, and the kernel is
    compared, too. Second derivatives are those of the smallest leaves, which have at
    most 2,048 entries together and whose sites return at most as many numbers. So the
    memory for each example is that of eight gradients and of a few matrices of this
    size. Hessians in complex parameters are not compared. The table has a `-` for
    everything that is not compared; select a part of the model to compare that.

    **Raises:**

    - `ValueError` if `model` has no arrays of an inexact dtype, if none is selected,
        and for an empty batch. With `check`, also for arguments that are shapes instead
        of arrays, and if the function returns no arrays of an inexact dtype.
    - `TypeError` for arguments of the wrong type.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.Linear(256, 128, use_bias=False, key=jax.random.key(0))
        >>> def loss(model, x):
        ...     return jnp.sum(model(x) ** 2)
        >>> print(eqxbatch.explain_sites(loss, model, jnp.ones((10, 256))))
        leaf          shape    sites        contraction  K-FAC        kFLOP     kB
        --------------------------------------------------------------------------
        .weight       128x256  dot_general  factors      128 (x) 256   65.9    3.1
        --------------------------------------------------------------------------
        by sites                                                       65.9    3.1
        materialised                                                  196.6  394.8
        method="auto" is "sites"

        ```

        Check the derivatives of a model:

        ```python
        >>> model = eqx.nn.MLP(2, 3, 8, 1, key=jax.random.key(0))
        >>> x = jax.random.normal(jax.random.key(1), (3, 2))
        >>> report = eqxbatch.explain_sites(
        ...     lambda model, x: model(x), model, x, check=True
        ... )
        >>> report.check.max_error < 1e-10
        True

        ```
    """
    chosen = are_parameters(model, as_where(where), filter_spec)
    diff, nondiff = eqx.partition(model, chosen)
    split = lambda axes, args, kwargs: split_examples(fun, axes, (model, *args), kwargs)
    batch, one = unbatched(args, kwargs), (args, kwargs)
    if in_axes is not None:
        batch = eqx.filter_eval_shape(split, in_axes, *_as_arrays((args, kwargs)))
        one = _first_example(batch)
    dynamic, static = eqx.partition(one, _has_shape)

    def of_one(diff: PyTree, dynamic: list) -> PyTree:
        args, kwargs = eqx.combine(dynamic[0], static)
        return called(fun, (eqx.combine(diff, nondiff), *args), kwargs)

    whole = lambda _: eqx.filter_eval_shape(fun, model, *args, **kwargs)
    remedy = (
        "Give the function of one example; or pass `in_axes=None`, if the arguments "
        "belong to one example."
    )
    with explained_failure(whole, batch, "example", remedy):
        traced = TracedFunction(of_one, diff, [dynamic])
    paths = [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(diff)]
    with for_platform(platform([*traced.leaves, *jtu.tree_leaves(one)])):
        report = report_of(traced, paths)
    if not check:
        return report
    # The first few examples cannot be taken from explicitly sharded ones.
    diff, nondiff, args, kwargs = gathered((diff, nondiff, *_with_values(args, kwargs)))
    if in_axes is None:  # One example is a batch of one.
        expand = lambda x: x[None] if eqx.is_array(x) else x
        args, kwargs = jtu.tree_map(expand, (args, kwargs))
        in_axes = eqx.if_array(0)
    batch = split(in_axes, args, kwargs)
    call = Call(Loss(fun, batch, diff, nondiff, has_aux=False))
    return dataclasses.replace(report, check=check_of(call, paths))


def _has_shape(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _first_example(batch: Batch) -> tuple[tuple, dict[str, Any]]:
    """The types of the arguments of one example of a batch."""
    if batch.total() == 0:
        raise ValueError("There are no examples to look at: the batch is empty.")
    (_, *args), kwargs = batch.arguments(batch.example())
    return tuple(args), kwargs


def _as_arrays(tree: PyTree) -> PyTree:
    """Converts NumPy arrays to JAX arrays."""
    is_numpy = lambda x: isinstance(x, (np.ndarray, np.generic))
    return jtu.tree_map(lambda x: jnp.asarray(x) if is_numpy(x) else x, tree)


def _with_values(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments as JAX arrays; raises `ValueError` if one has no values."""
    for path, x in jtu.tree_leaves_with_path((args, kwargs)):
        has_values = eqx.is_array_like(x) and not isinstance(x, Tracer)
        if _has_shape(x) and not has_values:
            in_kwargs, *rest = path
            name = ("args", "kwargs")[in_kwargs.idx] + jtu.keystr(tuple(rest))
            raise ValueError(
                "`check=True` runs the function, so that it needs arrays with values; "
                f"got {x} for `{name}`. Give arrays, or leave out `check`."
            )
    return _as_arrays((args, kwargs))
