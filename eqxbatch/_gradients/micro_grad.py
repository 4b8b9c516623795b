"""`filter_micro_grad`: gradient accumulation and per-example gradients."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast, ClassVar, TYPE_CHECKING

import equinox as eqx
import jax
import jax.tree_util as jtu
from jaxtyping import Array, Int, PyTree

from .._base.dtypes import widened
from .._base.mesh import (
    auto_sharded,
    examples_spec,
    explicit_mesh,
    spec_of,
    sum_varying,
    vary_as,
    varying,
)
from .._batch.accumulators import Concat
from .._batch.cut import Blocks
from .._batch.memory import MemoryBudget
from .._batch.moments import Mean, OfTotals, RunningMean, Sum, Variance
from .._batch.objective import Example, Loss, MicrobatchResult, Objective
from .._batch.slots import (
    canonicalise,
    is_accumulator,
    is_number,
    is_struct,
    match_accumulators,
    Slots,
)
from .._batch.transform import AbstractTransform, also_decorator, Blocking, transformed
from .._batch.weights import check_real, check_weights
from .._sites.cost import Method
from .clip import Clipping
from .gradient_settings import (
    check_settings,
    DEFAULT,
    IF_WHOLE,
    NO_ACCUMULATOR,
    TOTALS,
)
from .ways import (
    BlockGradients,
    by_norms,
    check_gradient,
    moments_of,
    of_each,
    of_microbatch,
    of_sum,
    statistics_of,
)


if TYPE_CHECKING:
    from .._batch.signatures import Typed
    from .gradient_signatures import MicroGradSignature, MicroValueAndGradSignature


class _MicroGrad(AbstractTransform):
    is_compiled: ClassVar[bool] = True
    takes_instance: ClassVar[bool] = True
    objective: Objective
    accumulator: PyTree
    of_values: PyTree
    aux_accumulator: PyTree
    returns_value: bool
    batched: bool
    transform: Callable | None
    metrics: Callable | None
    moments: bool
    clipping: Clipping | None
    return_norms: bool
    method: Method
    blocking: Blocking

    def __check_init__(self) -> None:
        check_settings(
            accumulator=self.accumulator,
            batched=self.batched,
            functions={"transform": self.transform, "metrics": self.metrics},
            moments=self.moments,
            clips=self.clipping is not None,
            method=self.method,
        )

    @property
    def weights(self) -> Array | None:
        # Other accumulators, with a `transform`, can have a field of this name, too.
        is_own = isinstance(self.accumulator, (Sum, Mean))
        return self.accumulator.weights if is_own else None

    def apply(self, fun: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        diff, nondiff = self.objective.parameters(args, kwargs)
        batch = self.objective.batch(fun, args, kwargs)
        total = batch.total()
        blocks = self.blocking.blocks(batch, total, self, (fun, args, kwargs))
        arrays, axes = batch.arrays, batch.axes
        if self.weights is not None:
            name = type(self.accumulator).__name__
            check_weights(name, self.weights, blocks)
            check_real(name, self.weights)
            arrays, axes = [*arrays, self.weights], (*axes, 0)
        # Inside `jax.shard_map`, JAX sums a derivative over devices if the parameters
        # do not vary over them. Making the parameters vary as the examples do delays
        # this sum, so that it happens once instead of for each example.
        local = vary_as(batch.arrays, diff)
        loss = self.objective.loss(fun, batch, local, nondiff)
        gradients = self._gradients_on_mesh(loss)

        def run(rows: list, _: int) -> tuple[MicrobatchResult, None]:
            weights = None if self.weights is None else rows[-1]
            return gradients(rows[: len(batch.arrays)], weights), None

        merged = self.blocking.run(arrays, axes, blocks, run, self.slots).merged()
        if self.transform is None:
            merged["gradient"] = jtu.tree_map(
                lambda x, d: sum_varying(d.astype(x.dtype), varying(jax.typeof(x))),
                diff,
                merged["gradient"],
            )
            check_gradient(diff, merged["gradient"])
        return self.returned(diff, merged, blocks)

    def _gradients_on_mesh(self, loss: Loss) -> BlockGradients:
        """The function that computes the gradients of a microbatch, on any devices."""
        call = tuple(getattr(loss, field.name) for field in dataclasses.fields(loss))
        if explicit_mesh(call) is None:
            return self.block_gradients(loss)

        def run(
            transform: _MicroGrad, call: tuple, rows: list, weights: Array | None
        ) -> MicrobatchResult:
            return transform.block_gradients(Loss(*call))(rows, weights)

        examples = examples_spec(loss.batch.arrays, loss.batch.axes)
        gradient = jtu.tree_map(spec_of, loss.diff)
        of_names = lambda names: {
            name: gradient if name == "gradient" else examples for name in names
        }
        specs = lambda out: MicrobatchResult(
            of_names(out.whole), of_names(out.total), dict.fromkeys(out.each, examples)
        )
        like = (loss.batch.arrays, self.weights)
        return auto_sharded(run, (self, call), like, specs)

    def block_gradients(self, loss: Loss) -> BlockGradients:
        """The function that computes the gradients of a microbatch."""
        if self.batched:
            return of_microbatch(loss)
        example = Example(loss, IF_WHOLE)
        # A `RunningMean` is chosen to avoid sums, so no sum is formed.
        is_mean = isinstance(self.accumulator, RunningMean)
        functions = {"transform": self.transform, "metrics": self.metrics}
        if self.moments:
            # The squares of numbers in half precision would be out of range.
            functions["moments"] = lambda gradient: jtu.tree_map(widened, gradient)
        functions = {name: f for name, f in functions.items() if f is not None}
        if not functions and self.clipping is None:
            return of_sum(example, is_mean)
        if not functions:
            assert self.clipping is not None
            return by_norms(example, self.clipping, self.method, is_mean)
        return of_each(example, self.clipping, functions)

    def slots(self, output: MicrobatchResult, _: None) -> Slots:
        """The accumulators for the results of a microbatch."""
        accumulators: dict[str, PyTree] = {
            "gradient": self.accumulator,
            "value": self.of_values,
            "aux": self.aux_accumulator,
            "norms": Concat(),
            "metrics": Concat(),
            "moments": Variance(ddof=1),
        }
        of_parts = lambda parts: {
            name: accumulators[name] if _has_results(part) else None
            for name, part in parts.items()
        }
        of_totals = {name: OfTotals(accumulators[name]) for name in output.total}
        spec = MicrobatchResult(
            of_parts(output.whole), of_totals, of_parts(output.each)
        )
        slots = match_accumulators(spec, output)
        # Flags replace the arrays, so they have the same order.
        flagged = lambda parts, flag: jtu.tree_map(
            lambda _: flag, eqx.filter(parts, is_struct)
        )
        flags = MicrobatchResult(
            flagged(output.whole, False),
            flagged(output.total, False),
            flagged(output.each, True),
        )
        is_each = jtu.tree_leaves(flags)
        return dataclasses.replace(
            slots,
            slots=[
                dataclasses.replace(slot, per_example=is_each[slot.indices[0]])
                for slot in slots.slots
            ],
        )

    def returned(self, diff: PyTree, result: dict[str, Any], blocks: Blocks) -> Any:
        """The return value of the transformed function."""
        moments = None
        if self.moments:
            num = self.blocking.num_examples(blocks)
            moments = moments_of(diff, result["moments"], num)
        norms = result["norms"] if self.return_norms else None
        statistics = statistics_of(norms, result.get("metrics"), moments, blocks.total)
        value = result["value"]
        gradient = result["gradient"]
        if self.objective.has_aux:
            aux = result["aux"]
            first = [(value, aux), gradient] if self.returns_value else [gradient, aux]
        else:
            first = [value, gradient] if self.returns_value else [gradient]
        if self.return_norms or self.moments or self.metrics is not None:
            first.append(statistics)
        return first[0] if len(first) == 1 else tuple(first)


def _has_results(part: PyTree) -> bool:
    return any(is_struct(x) or is_number(x) for x in jtu.tree_leaves(part))


@cast("Typed[MicroValueAndGradSignature]", also_decorator)
def filter_micro_value_and_grad(
    fun: Callable[..., Any] | None = None,
    *,
    has_aux: bool = False,
    where: Callable[[Any], Any] | None = None,
    filter_spec: PyTree = eqx.is_inexact_array,
    in_axes: PyTree = eqx.if_array(0),
    batched: bool = False,
    microbatch_size: int | MemoryBudget | None = None,
    accumulator: PyTree = DEFAULT,
    value_accumulator: PyTree = None,
    aux_accumulator: PyTree = Concat(),
    clip_norm: PyTree = None,
    nan_safe: bool = False,
    return_norms: bool = False,
    transform: Callable[[PyTree], PyTree] | None = None,
    metrics: Callable[[PyTree], PyTree] | None = None,
    moments: bool = False,
    method: Method = "auto",
    num_real_microbatches: int | Int[Array, ""] | None = None,
) -> Callable[..., Any]:
    """Value and gradient of a mean loss over a batch, one microbatch at a time.

    Like `equinox.filter_value_and_grad` of the mean loss, with gradient accumulation:
    peak temporary memory is that of one microbatch. Per-example gradients can be
    clipped, transformed and inspected before they are averaged.

    **Arguments:**

    - `fun`: the loss of one example, a real scalar. It is differentiated with respect
        to all arrays of an inexact dtype in its first argument, which is shared by all
        examples.
    - `has_aux`: whether `fun` returns a pair `(value, aux)`.
    - `where`: a function from the first argument to the part (or parts) of it to
        differentiate with respect to, such as the last layer. The default is all of it.
        Norms and statistics are those of the gradient of this part.
    - `filter_spec`: which leaves are parameters, as for `equinox.filter`.
    - `in_axes`: the batch axes of the arguments after the first: a tuple with a prefix
        for each argument, or one prefix for all, with ints, `None` (not batched), or
        callables from a leaf to these; or a dict from argument names to such prefixes.
        The default is axis 0 of all arrays. It also applies to keyword arguments and to
        arguments that a dict does not name.
    - `batched`: whether `fun` is the loss of a whole microbatch instead. This requires
        an `accumulator`: `Mean()` if the loss is a mean over its examples, `Sum()` if
        it is a sum. Value and gradient are then exact for any microbatch size, provided
        that `fun` does not couple examples. For `Mean(weights=w)`, the loss must be the
        mean with the same weights: pass `w` to `fun` as a batched argument as well.
    - `microbatch_size`: the number of examples in a microbatch, at least 1. It need not
        divide the batch size `n`. An [`eqxbatch.MemoryBudget`][] chooses the largest
        size that fits; `None` means `n`.
    - `accumulator`: how gradients are combined: [`eqxbatch.Mean`][] (the default for a
        loss of one example), [`eqxbatch.Sum`][] or [`eqxbatch.RunningMean`][]. The
        `weights` of the first two weight the examples. With a `transform`, it can be
        any [`eqxbatch.AbstractAccumulator`][], or a PyTree prefix of what `transform`
        returns with accumulators as leaves.
    - `value_accumulator`: the same for the values. The default is `accumulator`, or a
        mean if that is not one of the three.
    - `aux_accumulator`: the same for `aux`, a PyTree prefix. The default is
        [`eqxbatch.Concat`][], which returns `aux` for all examples along axis 0. With
        `batched`, an `equinox.nn.State` is merged as [`eqxbatch.filter_microbatch`][]
        does.
    - `clip_norm`: a bound on the norm of each per-example gradient. Longer gradients
        are scaled down to this norm. A number bounds the global norm; a PyTree prefix
        of the gradient, with a number or `None` for each part, bounds the norm of each
        part. Scalar arrays are allowed, and changing their values does not cause
        recompilation.
    - `nan_safe`: whether a per-example gradient with a non-finite norm is replaced by
        zero. Otherwise, one non-finite gradient makes the whole result non-finite.
        Values and norms are returned unchanged in both cases.
    - `return_norms`: whether to return the norms of the per-example gradients.
    - `transform`: a function of a per-example gradient. Its result takes the place of
        the gradient: it is clipped and accumulated, and norms are those of the result.
    - `metrics`: a function of a per-example gradient (before `transform`). Its results
        are returned for each example.
    - `moments`: whether to return mean, variance and noise scale of the per-example
        gradients (before `transform`).
    - `method`: how per-example gradient norms are computed. `"materialise"`
        materialises the per-example gradients of a microbatch; `transform`, `metrics`
        and `moments` always do. `"sites"` computes norms and clipped sums from layer
        inputs and output cotangents, without materialising gradients, for each
        parameter where this is cheaper. `"auto"` chooses the cheaper of the two;
        [`eqxbatch.explain_sites`][] shows both. If nothing per-example is requested,
        neither is used: each microbatch takes a single backward pass.
    - `num_real_microbatches`: if given, only this many microbatches run: an int or an
        integer array, which may be traced.

    **Returns:**

    A function with the arguments of `fun` that returns `(value, gradient)`, or
    `((value, aux), gradient)` with `has_aux`. The gradient has the structure of the
    first argument, with `None` for everything that is not differentiated, as optax and
    `equinox.apply_updates` expect. With a `transform`, its accumulated results are
    returned instead. With `return_norms`, `metrics` or `moments`, an
    [`eqxbatch.GradientStatistics`][] follows as the last element.

    The function is compiled on the first call; repeated calls with the same function
    and shapes are not retraced.

    **Raises:**

    - `ValueError` for a value that is not a real scalar, if there is nothing to
        differentiate, for a `clip_norm` that is negative, NaN, or not a prefix of the
        gradient, for an unknown `method`, for `method="sites"` with `transform`,
        `metrics` or `moments`, for `moments` with weights, for `batched` with a
        per-example setting, and wherever [`eqxbatch.filter_micro_vmap`][] raises it.
    - `TypeError` for an accumulator that does not apply to gradients, for `batched`
        without an accumulator, and for settings of the wrong type.
    - `RuntimeError` at run time, for JAX arrays: if `clip_norm` is negative or NaN, or
        if `num_real_microbatches` is out of range.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp, optax
        >>> model = eqx.nn.MLP(2, "scalar", 8, 2, key=jax.random.key(0))
        >>> optimiser = optax.adam(1e-3)
        >>> state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
        >>> @eqxbatch.filter_micro_value_and_grad(microbatch_size=32, clip_norm=1.0)
        ... def value_and_grad(model, x, y):
        ...     return (model(x) - y) ** 2
        >>> x, y = jnp.ones((100, 2)), jnp.zeros(100)
        >>> value, grads = value_and_grad(model, x, y)
        >>> updates, state = optimiser.update(grads, state)
        >>> model = eqx.apply_updates(model, updates)

        ```

    ??? cite

        Per-example gradient norms from activations and cotangents follow Goodfellow,
        "Efficient per-example gradient computations",
        [arXiv:1510.01799](https://arxiv.org/abs/1510.01799), and for layers that are
        used at many positions, Li et al., "Large language models can be strong
        differentially private learners",
        [arXiv:2110.05679](https://arxiv.org/abs/2110.05679). The clipped sum without a
        second backward pass follows Bu et al., "Differentially private optimization on
        large model at small cost",
        [arXiv:2210.00038](https://arxiv.org/abs/2210.00038). Clipping follows Abadi et
        al., "Deep learning with differential privacy",
        [arXiv:1607.00133](https://arxiv.org/abs/1607.00133); there is no privacy
        accounting. The noise scale is that of McCandlish et al., "An empirical model of
        large-batch training", [arXiv:1812.06162](https://arxiv.org/abs/1812.06162).
    """
    gradient = _micro_grad(
        objective=Objective(where, filter_spec, in_axes, has_aux),
        accumulators=(accumulator, value_accumulator, aux_accumulator),
        clip_norm=clip_norm,
        nan_safe=nan_safe,
        return_norms=return_norms,
        transform=transform,
        metrics=metrics,
        moments=moments,
        method=method,
        batched=batched,
        returns_value=True,
        blocking=Blocking(microbatch_size, num_real_microbatches, checkpoint=False),
    )
    return transformed(gradient, fun, "filter_micro_value_and_grad")


@cast("Typed[MicroGradSignature]", also_decorator)
def filter_micro_grad(
    fun: Callable[..., Any] | None = None,
    *,
    has_aux: bool = False,
    where: Callable[[Any], Any] | None = None,
    filter_spec: PyTree = eqx.is_inexact_array,
    in_axes: PyTree = eqx.if_array(0),
    batched: bool = False,
    microbatch_size: int | MemoryBudget | None = None,
    accumulator: PyTree = DEFAULT,
    value_accumulator: PyTree = None,
    aux_accumulator: PyTree = Concat(),
    clip_norm: PyTree = None,
    nan_safe: bool = False,
    return_norms: bool = False,
    transform: Callable[[PyTree], PyTree] | None = None,
    metrics: Callable[[PyTree], PyTree] | None = None,
    moments: bool = False,
    method: Method = "auto",
    num_real_microbatches: int | Int[Array, ""] | None = None,
) -> Callable[..., Any]:
    """The gradient of a mean loss over a batch, one microbatch at a time.

    Like [`eqxbatch.filter_micro_value_and_grad`][], but the value is not returned: the
    result is the gradient, or `(gradient, aux)` with `has_aux`. With `return_norms`,
    `metrics` or `moments`, an [`eqxbatch.GradientStatistics`][] follows. The arguments
    are the same:

    - `fun`, `has_aux`, `where`, `filter_spec`, `in_axes`, `batched`: what is
        differentiated.
    - `microbatch_size`, `num_real_microbatches`: how the batch is cut.
    - `clip_norm`, `nan_safe`, `transform`, `method`: what happens to each per-example
        gradient.
    - `accumulator`, `aux_accumulator`: how results are combined. `value_accumulator`
        has no effect, because no values are returned.
    - `return_norms`, `metrics`, `moments`: which statistics are returned.

    !!! example

        The largest entry of each per-example gradient, and the mean of their signs:

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> @eqxbatch.filter_micro_grad(
        ...     microbatch_size=2, transform=jnp.sign, metrics=lambda g: abs(g).max()
        ... )
        ... def grad(w, x):
        ...     return jnp.dot(w, x)
        >>> x = jnp.array([[1.0, -2.0], [3.0, 4.0], [-5.0, 6.0], [7.0, 8.0]])
        >>> signs, statistics = grad(jnp.zeros(2), x)
        >>> print(signs, statistics.metrics)
        [0.5 0.5] [2. 4. 6. 8.]

        ```
    """
    gradient = _micro_grad(
        objective=Objective(where, filter_spec, in_axes, has_aux),
        accumulators=(accumulator, value_accumulator, aux_accumulator),
        clip_norm=clip_norm,
        nan_safe=nan_safe,
        return_norms=return_norms,
        transform=transform,
        metrics=metrics,
        moments=moments,
        method=method,
        batched=batched,
        returns_value=False,
        blocking=Blocking(microbatch_size, num_real_microbatches, checkpoint=False),
    )
    return transformed(gradient, fun, "filter_micro_grad")


def _micro_grad(
    *,
    accumulators: tuple[PyTree, PyTree, PyTree],
    clip_norm: PyTree,
    nan_safe: bool,
    blocking: Blocking,
    **settings: Any,
) -> _MicroGrad:
    """The transform; `accumulators` are those of gradients, values and aux."""
    accumulator, of_value, of_aux = accumulators
    is_default = accumulator is DEFAULT
    accumulator = jtu.tree_map(canonicalise, accumulator, is_leaf=is_accumulator)
    if of_value is None:
        of_value = accumulator if isinstance(accumulator, TOTALS) else Mean()
    needs_norms = clip_norm is not None or nan_safe or settings["return_norms"]
    gradient = _MicroGrad(
        accumulator=accumulator,
        of_values=of_value,
        aux_accumulator=of_aux,
        clipping=Clipping(clip_norm, nan_safe) if needs_norms else None,
        blocking=blocking,
        **settings,
    )
    if settings["batched"] and is_default:
        raise TypeError(NO_ACCUMULATOR)
    return gradient
