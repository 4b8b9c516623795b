"""`explain_sites`: the sites of a function, and a check of derivatives against JAX."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import PyTree

from .._base.checks import checked
from .._base.jaxprs import TracedFunction
from .._base.mistakes import called
from .._base.platforms import for_platform, platform
from .._base.trees import safe_zip
from .._batch.batch import Batch, explained_failure, unbatched
from .._batch.derivative import Loss, Selection, split_examples
from .._sites.report import report_of, SitesReport
from .compare import Call, check_of


@checked
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
    diff, nondiff = Selection(model, where, filter_spec).partition(model)
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
        "are those of one example."
    )
    with explained_failure(whole, batch, "example", remedy):
        traced = TracedFunction(of_one, diff, [dynamic])
    paths = [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(diff)]
    with for_platform(platform([*traced.leaves, *jtu.tree_leaves(one)])):
        report = report_of(traced, paths)
    if not check:
        return report
    args, kwargs = _with_values(args, kwargs)
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
    first = lambda arrays: [
        lax.index_in_dim(x, 0, axis, keepdims=False)
        for x, axis in safe_zip(arrays, batch.axes)
    ]
    rows = eqx.filter_eval_shape(first, batch.arrays)
    (_, *args), kwargs = batch.arguments(rows)
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
