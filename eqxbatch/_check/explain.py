"""`explain_sites`: the sites of a function, and a check of derivatives against JAX."""

import contextlib
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
from .._base.mistakes import no_arrays_remedy
from .._base.trees import shown
from .._batch.batch import Batch, explained_failure, split_batch
from .._batch.derivative import Selection, split_examples
from .._sites.report import LeafCheck, report_of, SitesCheck, SitesReport
from .first_order import first_order
from .second_order import second_order
from .subject import Call, double_precision, make_subject


@checked
def explain_sites(
    fun: Callable[..., PyTree],
    model: PyTree,
    /,
    *args: Any,
    check: bool = False,
    where: Callable[[Any], Any] | None = None,
    filter_spec: PyTree = eqx.is_inexact_array,
    in_axes: PyTree = None,
    **kwargs: Any,
) -> SitesReport:
    """Reports where the parameters of a function enter it (its sites), and their cost.

    A site is an operation in which a parameter meets the rest of the computation, such
    as a matrix product. There, the per-example gradient is a contraction of two small
    factors, so norms and weighted sums of gradients can be computed without
    materialising the gradients. `clip_norm` of
    [`eqxbatch.filter_micro_value_and_grad`][] uses this, and so do kernels, Hessians
    and Gauss-Newton matrices.

    With `check=True`, results from sites are compared with those of JAX for your
    function.

    **Arguments:**

    - `fun`: a function of one example, such as a loss or a model, called as
        `fun(model, *args, **kwargs)`. It is traced but not run, unless `check=True`.
    - `model`: a PyTree whose arrays of an inexact dtype are the parameters.
    - `args`, `kwargs`: the arguments for one example, without a batch axis. Without
        `check`, anything with a shape and a dtype is accepted as an array, such as a
        `jax.ShapeDtypeStruct`.
    - `check`: whether to compare gradients, norms, kernels, Hessians, their diagonals
        and Gauss-Newton matrices with those of JAX, leaf by leaf. This compiles and
        runs the function, which takes seconds to minutes.
    - `where`: a function from `model` to the part (or parts) of it to differentiate
        with respect to, such as the last layer. The default is all of it.
    - `filter_spec`: which leaves are parameters, as for `equinox.filter`.
    - `in_axes`: the batch axes of the arguments, as for [`eqxbatch.filter_hessian`][],
        if these are a batch and not a single example. A check then uses the first three
        examples.

    **Returns:**

    An [`eqxbatch.SitesReport`][]. Printed, it is a table with the sites of each
    parameter, the contraction that is cheapest by an estimate of operations and memory
    traffic, its block in [`eqxbatch.filter_kfac`][] of a model and, for parameters
    without a rule, the reason. With `check`, a table of the largest errors follows;
    these are in the field `check` of the report.

    A check uses float64: the arrays of the model and the arguments are cast to it. If
    the function then raises an exception, the check uses the original dtypes, and the
    report gives the reason. All contractions that are exact for a parameter are
    compared, not only the cheapest one. If `fun` returns a real scalar, this is
    differentiated. Otherwise, gradients and Hessians are those of a quadratic function
    of the output, and outputs with more than eight numbers are first projected randomly
    to eight.

    The memory of a check is bounded. For each example, it is that of eight gradients,
    and of at most 128 Hessian blocks with eight million entries in total. Larger
    blocks, blocks of parameters whose sites return more than a thousand numbers, and
    Hessians in complex parameters are not compared. For parameters with more than 64
    entries, blocks are compared by products with random directions, and diagonals at
    some of their entries. The table has a `-` for everything that is not compared.

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
        >>> print(eqxbatch.explain_sites(loss, model, jnp.ones(256)))
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
        ...     lambda model, x: model(x), model, x, in_axes=0, check=True
        ... )
        >>> report.check.max_error < 1e-10
        True

        ```
    """
    if not jtu.tree_leaves(eqx.filter(model, eqx.is_inexact_array)):
        raise ValueError(
            "`model` has no arrays of an inexact dtype, so it has no parameters; got "
            f"{shown(model)}.{no_arrays_remedy(model)}"
        )
    diff, nondiff = Selection(model, where, filter_spec).partition(model)
    leaves, treedef = jtu.tree_flatten(diff)
    one = (args, kwargs)
    if in_axes is not None:
        one = _first_example(fun, model, in_axes, args, kwargs)
    dynamic, static = eqx.partition(one, _has_shape)

    def flat(leaves: list, dynamic: PyTree) -> PyTree:
        args, kwargs = eqx.combine(dynamic, static)
        model = eqx.combine(jtu.tree_unflatten(treedef, leaves), nondiff)
        return fun(model, *args, **kwargs)

    with _told_apart(fun, model, in_axes, args, kwargs):
        closed, _, _ = eqx.filter_make_jaxpr(flat)(leaves, dynamic)
    paths = [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(diff)]
    report = report_of(closed, paths)
    if not check:
        return report
    batch = _batch(fun, model, in_axes, args, kwargs)
    compared = _checked(Call(fun, diff, nondiff, batch), paths)
    return dataclasses.replace(report, check=compared)


def _told_apart(
    fun: Callable, model: PyTree, in_axes: PyTree, args: tuple, kwargs: dict[str, Any]
) -> contextlib.AbstractContextManager:
    """A context that names the mistake if the function takes a whole batch."""
    if in_axes is None:
        return contextlib.nullcontext()
    split = lambda args, kwargs: split_examples(fun, in_axes, (model, *args), kwargs)
    batch = eqx.filter_eval_shape(split, *_as_arrays((args, kwargs)))
    whole = lambda _: eqx.filter_eval_shape(fun, model, *args, **kwargs)
    return explained_failure(whole, batch, "example", _IF_WHOLE)


_IF_WHOLE = "Give the function of one example."


def _has_shape(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _first_example(
    fun: Callable, model: PyTree, in_axes: PyTree, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """The types of the arguments of one example of a batch."""

    def first(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        all_args = (model, *args)
        batch = split_examples(fun, in_axes, all_args, kwargs)
        if batch.total() == 0:
            raise ValueError("There are no examples to look at: the batch is empty.")
        rows = [
            lax.index_in_dim(x, 0, axis, keepdims=False)
            for x, axis in zip(batch.arrays, batch.axes, strict=True)
        ]
        (_, *args_of_one), kwargs_of_one = batch.arguments(rows)
        return tuple(args_of_one), kwargs_of_one

    return eqx.filter_eval_shape(first, *_as_arrays((args, kwargs)))


def _as_arrays(tree: PyTree) -> PyTree:
    """Converts NumPy arrays to JAX arrays."""
    is_numpy = lambda x: isinstance(x, (np.ndarray, np.generic))
    return jtu.tree_map(lambda x: jnp.asarray(x) if is_numpy(x) else x, tree)


def _batch(
    fun: Callable, model: PyTree, in_axes: PyTree, args: tuple, kwargs: dict[str, Any]
) -> Batch:
    """The arguments of a call; one example is a batch of one."""
    args, kwargs = _as_arrays((args, kwargs))
    for path, x in jtu.tree_leaves_with_path((args, kwargs)):
        is_traced = isinstance(x, Tracer)
        if _has_shape(x) and (is_traced or not eqx.is_array(x)):
            in_kwargs, *rest = path
            name = ("args", "kwargs")[in_kwargs.idx] + jtu.keystr(tuple(rest))
            raise ValueError(
                "`check=True` runs the function, so that it needs arrays with values; "
                f"got {x} for `{name}`. Give arrays, or leave out `check`."
            )
    if in_axes is not None:
        return split_examples(fun, in_axes, (model, *args), kwargs)
    expand = lambda x: x[None] if eqx.is_array(x) else x
    args, kwargs = jtu.tree_map(expand, (args, kwargs))
    in_all = (None, *(eqx.if_array(0) for _ in args))
    return split_batch(fun, in_all, (model, *args), kwargs)


def _checked(call: Call, paths: list[str]) -> SitesCheck:
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
    subject = make_subject(call)
    errors, whole, jacobians = first_order(subject)
    curvature = second_order(subject, jacobians)
    leaves = [
        LeafCheck(path, **first, **second)
        for path, first, second in zip(paths, errors, curvature, strict=True)
    ]
    together = LeafCheck("all together", **whole)
    return SitesCheck(tuple(leaves), together, subject.num, dtype, reason)
