"""`explain_sites`: the sites of a function, and what each costs."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._base.checks import called
from .._base.platforms import for_platform, platform
from .._base.traced_function import TracedFunction
from .._base.types import checked
from .._batch.arguments import CallArguments, Leaves
from .._batch.batch import Batch, unbatched
from .._batch.loss import split_examples
from .._batch.memory import explained_failure
from .._batch.parameters import are_parameters, as_where
from .._sites.report import report_of, SitesReport


@functools.partial(checked, but=("where",))
def explain_sites(
    fun: Callable[..., PyTree],
    model: PyTree,
    /,
    *args: Any,
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

    **Arguments:**

    - `fun`: a function of one example, such as a loss or a model, called as
        `fun(model, *args, **kwargs)`. It is traced but not run.
    - `model`: a PyTree whose arrays of an inexact dtype are the parameters.
    - `args`, `kwargs`: the other arguments, for a batch of examples. Anything with a
        shape and a dtype is accepted as an array, such as a `jax.ShapeDtypeStruct`.
    - `where`: a function from `model` to the part (or parts) of it to differentiate
        with respect to, such as the last layer. The default is all of it.
    - `filter_spec`: which leaves are parameters, as for `equinox.filter`.
    - `in_axes`: the batch axes of `args`, as for
        [`eqxbatch.filter_micro_value_and_grad`][]: axis 0 of all arrays by default.
        With None, `args` and `kwargs` are those of one example, without a batch axis.

    **Returns:**

    An [`eqxbatch.results.SitesReport`][]. Printed, it is a table with the sites of each
    parameter, the contraction that is cheapest by an estimate of operations and memory
    traffic, its block in [`eqxbatch.filter_kfac`][] of a model and, for parameters
    without a rule, the reason.

    **Raises:**

    - `ValueError` if `model` has no arrays of an inexact dtype, if none is selected,
        and for an empty batch.
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
    """
    # The same choice as for derivatives, which the report is about.
    are_diff = are_parameters(model, as_where(where), filter_spec)
    diff, nondiff = eqx.partition(model, are_diff)
    split = lambda axes, args, kwargs: split_examples(fun, axes, (model, *args), kwargs)
    batch, example = unbatched(args, kwargs), (args, kwargs)
    if in_axes is not None:
        # Arguments may be types without values, so that nothing can be cut.
        batch = eqx.filter_eval_shape(split, in_axes, *_as_arrays((args, kwargs)))
        example = _first_example(batch)
    # All that has a shape is data; flags and functions are part of the program.
    dynamic, static = eqx.partition(example, _has_shape)

    def of_one(diff: PyTree, dynamic: Leaves) -> PyTree:
        args, kwargs = eqx.combine(dynamic[0], static)
        return called(fun, (eqx.combine(diff, nondiff), *args), kwargs)

    # A function of a whole batch fails for one example in ways that do not say so.
    whole = lambda _: eqx.filter_eval_shape(fun, model, *args, **kwargs)
    remedy = (
        "Give the function of one example; or pass `in_axes=None`, if the arguments "
        "belong to one example."
    )
    with explained_failure(whole, batch, "example", remedy):
        traced = TracedFunction(of_one, diff, [dynamic])
    paths = [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(diff)]
    # Costs, and so the cheapest contractions, are those of the device of the arrays.
    with for_platform(platform([*traced.leaves, *jtu.tree_leaves(example)])):
        return report_of(traced, paths)


def _has_shape(x: object) -> bool:
    # Arrays of any library count, and types of arrays: the function does not run.
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _first_example(batch: Batch) -> CallArguments:
    """The types of the arguments of one example of a batch."""
    if batch.total() == 0:
        raise ValueError("There are no examples to look at: the batch is empty.")
    # The first argument is the model, which `diff` and `nondiff` make up.
    (_, *args), kwargs = batch.arguments(batch.example())
    return tuple(args), kwargs


def _as_arrays(tree: PyTree) -> PyTree:
    """Converts NumPy arrays to JAX arrays."""
    # `equinox.if_array` gives no axis to others.
    is_numpy = lambda x: isinstance(x, (np.ndarray, np.generic))
    return jtu.tree_map(lambda x: jnp.asarray(x) if is_numpy(x) else x, tree)
