"""Gradients in microbatches: their settings, moments, and how they are computed."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Concatenate, Generic, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Inexact, PyTree, Real, Shaped

from .._base.checks import (
    check_at_least,
    check_callable,
    check_equal,
    check_exclusive,
    warn_user,
)
from .._base.dtypes import widened, widest
from .._base.mesh import auto_sharded, examples_spec, explicit_mesh, spec_of, sum_except
from .._base.structs import array_structs, is_struct
from .._base.traced_function import TracedFunction
from .._base.trees import described, safe_zip, shown
from .._base.types import as_jax, check_types
from .._base.versions import varying
from .._batch.accumulators import Concat
from .._batch.arguments import Arguments
from .._batch.blocks import Blocks
from .._batch.derivative import AbstractDerivative, like_parameters
from .._batch.loop import run_blocks, runs_once
from .._batch.loss import Loss
from .._batch.padding import Padding
from .._batch.reading import is_state
from .._batch.rows import Rows
from .._batch.slots import (
    all_count_new,
    as_slots,
    canonicalise,
    is_accumulator,
    is_number,
    Slots,
)
from .._batch.sums import (
    is_running,
    is_summary,
    Mean,
    OfTotals,
    rows_and_weights,
    Sum,
    Variance,
)
from .._batch.transform import AbstractEarlyStop, Model, P, run_compiled
from .._sites.cost import Method
from .._sites.features import AbstractFeatures, AbstractProjection
from .clipping import checked_bound, clipping_groups, Norms
from .gradients_by_sites import gradients_by_sites
from .per_example import (
    BlockGradients,
    gradient_of_coupled,
    gradient_of_microbatch,
    gradient_of_nonlinear,
    gradient_of_sum,
    inner_product,
    materialised_gradients,
    Results,
)


class GradientMoments(NamedTuple):
    """What [`eqxbatch.filter_micro_value_and_grad`][] returns with `moments=True`.

    - `mean`: the mean of the per-example gradients, a PyTree like the gradient.
    - `variance`: the variance of each entry over the examples, with divisor `n - 1`, in
        the dtype of the gradient.
    - `noise_scale`: the sum of all variances divided by the squared norm of the true
        gradient, shape `()`. The squared norm is estimated without bias, so it can be
        zero or negative if noise dominates the gradient. Batch sizes much larger than
        the noise scale bring little benefit.
    """

    mean: PyTree
    variance: PyTree
    noise_scale: Real[Array, ""]


class GradientStatistics(NamedTuple):
    """Per-example statistics of [`eqxbatch.filter_micro_value_and_grad`][].

    - `norms`: the norms of the per-example gradients before clipping, shape `(n,)`. If
        `clip_norm` is a PyTree of bounds, a PyTree with one such array for each. With a
        `transform`, these are the norms of its results.
    - `metrics`: the results of `metrics`, with the examples along axis 0.
    - `moments`: an [`eqxbatch.results.GradientMoments`][].

    - `inner_products`: the inner product of each per-example gradient with the
        direction `against`, shape `(n,)`. A complex leaf counts as its real and its
        imaginary part.
    - `features`: the projection `features` of each per-example gradient, shape
        `(n, dim)`.

    Statistics that were not requested are None.
    """

    norms: PyTree[Real[Array, " n"]]
    metrics: PyTree[Shaped[Array, "n ..."]]
    moments: GradientMoments | None
    inner_products: Real[Array, " n"] | None = None
    features: Inexact[Array, "n dim"] | None = None


def moments_of(diff: PyTree, moments: PyTree, num: int | Array) -> GradientMoments:
    """The moments of gradients with respect to `diff`, from those in a wider dtype."""
    leaves, treedef = jtu.tree_flatten(diff)
    means, variances = safe_zip(*treedef.flatten_up_to(moments))
    dtype = widest(*(x.dtype for x in variances))
    # All parameters are one vector, whatever their dtypes are.
    total = lambda xs: sum(jnp.sum(x).astype(dtype) for x in xs)
    noise = total(variances)
    signal = total(jnp.abs(x) ** 2 for x in means)
    # The squared mean overestimates by the variance of the mean.
    signal = signal - noise / jnp.asarray(num).astype(dtype)
    # They are rounded once, here: the noise scale comes from what was in a wider dtype.
    mean, variance = (
        treedef.unflatten(x.astype(d) for x, d in safe_zip(xs, dtypes))
        for xs, dtypes in (
            (means, [x.dtype for x in leaves]),
            (variances, [x.real.dtype for x in leaves]),
        )
    )
    return GradientMoments(mean, variance, noise / signal)


_ACCUMULATORS = (
    "`accumulator=Mean()` if it is a mean over the examples, or `accumulator=Sum()` if "
    "it is a sum"
)


_IF_WHOLE = (
    f"If it is the loss of a whole batch, pass `batched=True` and {_ACCUMULATORS}; or "
    "pass the loss of one example."
)


def _as_projection(features: Any) -> AbstractProjection | None:
    if features is None or isinstance(features, AbstractProjection):
        return features
    raise TypeError(
        f"`features` must be a `Projection` or None; got {described(features)}. Pass "
        "`eqxbatch.Projection(dim, key)`, with the number of features."
    )


class AbstractMicroGradient(AbstractDerivative, AbstractEarlyStop, Generic[Model, P]):
    """The settings of gradients that do not change the type of the result."""

    fun: Callable[Concatenate[Model, P], Any]
    holomorphic: ClassVar[None] = None
    allows_complex: ClassVar[bool] = True
    _: dataclasses.KW_ONLY
    in_axes: PyTree = eqx.if_array(0)
    batched: bool = False
    accumulator: PyTree = Mean()
    clip_norm: PyTree = eqx.field(
        default=None, converter=lambda bounds: jtu.tree_map(as_jax, bounds)
    )
    scale: Callable[[PyTree], PyTree] | None = None
    nan_safe: bool = False
    method: Method = "auto"


class AbstractAnyMicroGradient(AbstractMicroGradient[Model, P]):
    """A gradient with all settings, whose results can be anything."""

    _: dataclasses.KW_ONLY
    axis_name: Hashable | None = None
    value_accumulator: PyTree = None
    aux_accumulator: PyTree = Concat()
    return_norms: bool = False
    norms: Norms = None
    transform: Callable[[PyTree], PyTree] | None = None
    metrics: Callable[[PyTree], PyTree] | None = None
    moments: bool = False
    against: PyTree = eqx.field(
        default=None, converter=lambda tree: jtu.tree_map(as_jax, tree)
    )
    features: AbstractProjection | None = eqx.field(
        default=None, converter=_as_projection
    )

    @abc.abstractmethod
    def outputs(self, results: dict[str, Any]) -> list:
        """What is returned, apart from statistics."""

    def __call__(self, model: Model, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return run_compiled(self, model, *args, **kwargs)

    def __check_init__(self) -> None:
        # Arrays are checked at run time.
        for bound in jtu.tree_leaves(self.clip_norm):
            check_types({"clip_norm": bound}, {"clip_norm": _Bound}, always=True)
            if not eqx.is_array(bound):
                remedy = "Use None for parts that are not clipped."
                check_at_least("clip_norm", bound, 0, remedy)
        # Gradients that no function needs are not materialised.
        functions = {"transform": self.transform, "metrics": self.metrics}
        of_gradients = [name for name, x in functions.items() if x is not None]
        if self.method == "sites" and of_gradients:
            raise ValueError(
                "`method='sites'` does not materialise per-example gradients, but "
                f"`{of_gradients[0]}` needs them. Use `method='auto'`."
            )
        check_exclusive(
            "`scale=lambda norm: jnp.minimum(1, bound / norm)` is what `clip_norm` "
            "does, but for gradients that are zero. Leave one out.",
            clip_norm=self.clip_norm,
            scale=self.scale,
        )
        if self.norms is not None:
            if self.norms != "leaf":
                what = "'leaf' or a function from a path and a leaf to a group"
                check_callable("norms", self.norms, what)
            if not (self.return_norms or self.scale is not None):
                raise ValueError(
                    "`norms` says which norms `return_norms` returns and `scale` gets, "
                    "but neither is given. Pass one of them, or leave `norms` out."
                )
        # What is about single examples needs a loss of one example.
        norms = ["clip_norm, scale, nan_safe or return_norms"] * self.needs_norms
        optional = {"against": self.against, "features": self.features}
        more = ["moments"] * self.moments
        more += [name for name, x in optional.items() if x is not None]
        per_example = [*of_gradients, *norms, *more]
        if per_example and (self.batched or self.axis_name is not None):
            why = (
                "with `batched=True` the loss is that of a whole microbatch. Pass the "
                "loss of one example, without `batched`."
                if self.batched
                else "`axis_name` couples those of a microbatch. Switch layers that "
                "use it to inference mode, and leave it out."
            )
            raise ValueError(f"`{per_example[0]}` is about single examples, but {why}")
        if self.axis_name is not None and self.batched:
            raise ValueError(
                "`axis_name` is for the loss of one example, but with `batched=True` "
                "the loss is that of a whole microbatch, which calls `jax.vmap` with "
                "an `axis_name` itself. Leave one of them out."
            )
        # Gradients are added up over examples before an accumulator could see them.
        accumulator = self.gradient_accumulator
        if self.transform is None and not isinstance(accumulator, Sum | Mean):
            raise TypeError(
                "`accumulator` must be a Sum or a Mean, as it is for "
                f"gradients; got {shown(accumulator)}. With a `transform`, it can be "
                "any accumulator, or a PyTree prefix of them."
            )
        if self.moments and self.weights is not None:
            raise ValueError(
                "`moments` are those of unweighted examples, but the accumulator has "
                "weights. Compute them without weights."
            )
        # The default is for a loss of one example.
        if self.batched and self.accumulator is type(self).accumulator:
            raise TypeError(
                "`batched=True` needs an `accumulator`, because eqxbatch cannot tell "
                f"what the loss of a whole microbatch is: {_ACCUMULATORS}. The wrong "
                "one of them makes the result depend on the microbatch size."
            )

    @property
    def gradient_accumulator(self) -> PyTree:
        """The `accumulator`, with accumulators of this package in place of others."""
        return jtu.tree_map(canonicalise, self.accumulator, is_leaf=is_accumulator)

    @property
    def weights(self) -> Array | None:
        """The weights of the examples."""
        # Other accumulators, with a `transform`, can have a field of this name, too.
        accumulator = self.gradient_accumulator
        return accumulator.weights if isinstance(accumulator, Sum | Mean) else None

    @property
    def overlaps(self) -> bool:
        # Microbatches that overlap have some examples twice, with a weight of a half in
        # the sums of gradients; accumulators of all other results leave them out.
        accumulators = self.gradient_accumulator, self.value_accumulator
        is_known = all_count_new((*accumulators, self.aux_accumulator))
        # A running mean forms no sums, so that it has no weights.
        has_sums = not is_running(accumulators[0])
        is_whole = self.num_real_microbatches is None
        couples = self.batched or self.axis_name is not None
        return is_known and has_sums and is_whole and not couples

    @property
    def couples(self) -> bool:
        return self.axis_name is not None

    @property
    def needs_norms(self) -> bool:
        """Whether the norms of per-example gradients are computed."""
        settings = self.clip_norm, self.scale
        is_bounded = any(x is not None for x in settings)
        return is_bounded or self.nan_safe or self.return_norms

    def sensitivity(self, model: Model, /, weight: float | None = None) -> Array:
        """The largest norm of the share that one example has in a sum of gradients.

        This is what noise for differential privacy is proportional to, where examples
        are added or removed: the root of the sum of the squares of the bounds in
        `clip_norm`, times the largest weight that an example can have. `model` is the
        first argument of the function; its values do not matter. For a mean with
        a fixed divisor, which random batch sizes need, pass
        `accumulator=Sum(weights=mask / divisor)` and `weight=1 / divisor`.

        Warns without `nan_safe=True`: the share of an example whose gradient is not
        finite then has no bound. Raises `ValueError` without bounds on the whole
        gradient, for a [`eqxbatch.Mean`][], whose divisor depends on the examples, and
        for weights without `weight`.
        """
        # A leaf in a group without a bound leaves the share of an example unbounded.
        diff, _ = self.parameters((model,), {})
        groups = clipping_groups(self.clip_norm, None, None, False, diff)
        bounds = [x for x, leaves in safe_zip(groups.bounds, groups.members) if leaves]
        if any(bound is None for bound in bounds):
            raise ValueError(
                "`sensitivity` needs a bound on the whole gradient, but `clip_norm` is "
                f"{shown(self.clip_norm)}. Pass a number, or one for each part."
            )
        # One example more changes a mean by its divisor, too.
        if not isinstance(self.gradient_accumulator, Sum):
            raise ValueError(
                "`sensitivity` is that of a sum, but the accumulator is "
                f"{shown(self.gradient_accumulator)}, which divides by a number that "
                "depends on the examples. Pass `accumulator=Sum()`, or "
                "`Sum(weights=mask / divisor)` for a mean with a fixed divisor."
            )
        if self.weights is not None and weight is None:
            raise ValueError(
                "`weight` must be the largest weight that an example can have, because "
                "those of this batch may all be smaller; got None."
            )
        if not self.nan_safe:
            warn_user(
                "`sensitivity` is no bound for an example whose gradient is not "
                "finite, which makes the whole sum NaN and so shows that the example "
                "is there. Pass `nan_safe=True`, by which such an example counts as "
                "zero."
            )
        # Groups share no entries. Of bounds for each example, the largest counts.
        squares = (jnp.max(jnp.asarray(bound)) ** 2 for bound in bounds)
        return jnp.sqrt(sum(squares, jnp.zeros(()))) * (1 if weight is None else weight)

    @property
    def has_gaps(self) -> bool:
        return True

    @property
    def coupling_axis(self) -> Hashable | None:
        return self.axis_name

    def apply(self, args: Arguments, kwargs: dict[str, Any]) -> Any:
        loss = self.loss_of(args, kwargs)
        diff, batch = loss.diff, loss.batch
        blocks = self.blocks(batch, args, kwargs, batch.total())
        batch = batch.on_devices_of(blocks)
        loss = dataclasses.replace(loss, batch=batch)
        example = None
        if explicit_mesh(loss) is None:  # Otherwise, it is traced with automatic axes.
            example = self._example(loss)
        if example is not None and not example.backward.is_linear:
            # With shares of two microbatches, gradients would be formed; see
            # `gradient_of_nonlinear`.
            blocks = dataclasses.replace(blocks, overlaps=False)
        # Weights and bounds of examples are cut as their arrays are.
        rows = rows_and_weights(self.gradient_accumulator, batch)
        loss = dataclasses.replace(loss, padding=Padding.of(rows))
        bounds = self._bounds_of_examples
        for bound in bounds:
            what = "The shape of a `clip_norm` with a bound for each example"
            check_equal(what, bound.shape, (rows.total,))
        rows = rows.with_(bounds=[*map(checked_bound, bounds)])
        # Where microbatches overlap, the weight of a row has its share as a factor.
        # Random directions are drawn once for all microbatches.
        projection = self.features
        features = None if projection is None else projection.drawn(diff)
        gradients = self._gradients_on_mesh(loss, example, features, rows)
        run = lambda rows: gradients(rows.weighted())
        limit = self.limit(blocks)
        out = run_blocks(run, rows, blocks, self.slots, limit)
        results = {**out.of_whole, **out.of_each}
        # Parameters that devices share have one gradient, summed over these.
        if self.transform is None:
            results["gradient"] = jtu.tree_map(
                lambda x, d: sum_except(d.astype(x.dtype), varying(jax.typeof(x))),
                diff,
                results["gradient"],
            )
        return self.returned(diff, results, blocks)

    @property
    def _bounds_of_examples(self) -> list[Array]:
        """The bounds of which there is one for each example."""
        return [x for x in jtu.tree_leaves(self.clip_norm) if np.ndim(x)]

    def _example(self, loss: Loss) -> TracedFunction | None:
        """The loss of one example, traced; None if there is no such loss."""
        if self.batched or self.axis_name is not None:
            return None
        return loss.traced(_IF_WHOLE)

    def _gradients_on_mesh(
        self,
        loss: Loss,
        example: TracedFunction | None,
        features: AbstractFeatures | None,
        rows: Rows,
    ) -> BlockGradients:
        """The function that computes the gradients of a microbatch, on any devices.

        Of the `rows`, which are those of the batch, only the types matter.
        """
        if explicit_mesh(loss) is None:
            return self.block_gradients(loss, example, features)

        def run(
            transform: Any, loss: Loss, features: AbstractFeatures | None, rows: Rows
        ) -> Results:
            # The example is traced here, where axes are automatic.
            example = transform._example(loss)
            return transform.block_gradients(loss, example, features)(rows)

        # Gradients are sharded as their parameters, and results of examples as these.
        examples = examples_spec(loss.batch.arrays, loss.batch.axes)
        gradient = jtu.tree_map(spec_of, loss.diff)
        # Coupled examples have one state.
        is_one = lambda x: self.axis_name is not None and is_state(x)
        of_each = lambda x: PartitionSpec() if is_one(x) else examples
        specs = lambda out: Results(
            {n: gradient if n == "gradient" else examples for n in out.of_whole},
            jtu.tree_map(of_each, out.of_each, is_leaf=is_one),
        )
        return auto_sharded(run, (self, loss, features), (rows,), specs)

    def block_gradients(
        self,
        loss: Loss,
        example: TracedFunction | None,
        features: AbstractFeatures | None,
    ) -> BlockGradients:
        """The function that computes the gradients of a microbatch."""
        if self.batched:
            return gradient_of_microbatch(loss)
        # A running mean is chosen to avoid sums, so no sum is formed.
        is_mean = is_running(self.gradient_accumulator)
        if self.axis_name is not None:
            return gradient_of_coupled(loss, is_mean)
        assert example is not None
        # Functions of the user's need each gradient as a whole.
        functions = {"transform": self.transform, "metrics": self.metrics}
        functions = {name: f for name, f in functions.items() if f is not None}
        groups = None
        if self.needs_norms:
            settings = self.clip_norm, self.scale, self.norms, self.nan_safe
            groups = functools.partial(clipping_groups, *settings)
        direction = self.against
        if direction is not None:
            direction = like_parameters("`against`", direction, loss.diff)
        # Sums over a microbatch in float16 may overflow, and so may products of a
        # layer's inputs with a direction.
        has_sums = self.moments or direction is not None
        if functions or (has_sums and example.is_narrow):
            if self.moments:
                # Squares of numbers in half precision would be out of range.
                functions["moments"] = functools.partial(jtu.tree_map, widened)
            if direction is not None:
                functions["inner_products"] = lambda x: inner_product(direction, x)
            return materialised_gradients(example, groups, functions, features)
        # Otherwise, each leaf takes the cheaper of its factors and formed gradients.
        by_sites = functools.partial(
            gradients_by_sites,
            example,
            groups,
            self.method,
            is_mean,
            self.moments,
            direction,
            features,
            has_padding=self.weights is not None,
        )
        settings = groups, direction, features
        if self.moments or any(x is not None for x in settings):
            return by_sites()
        # Without norms, the sum is one backward pass, as in plain JAX.
        keeps_outputs = self._keeps_outputs(example)
        if keeps_outputs and loss.padding is not None and runs_once(example.closed):
            # Outputs of padding would take another run.
            return by_sites()
        by_sum = gradient_of_sum(
            example, is_mean, padding=loss.padding, keeps_outputs=keeps_outputs
        )
        if example.backward.is_linear:
            return by_sum
        # Running means seed a backward pass with `1 / num`, float16 with powers of two.
        is_scaled = is_mean or example.is_narrow
        is_of_sum = example.backward.has_examples and not is_scaled
        return gradient_of_nonlinear(by_sum, by_sites, is_of_sum=is_of_sum)

    def _keeps_outputs(self, example: TracedFunction) -> bool:
        """Whether values and aux are more than sums with the weights of gradients."""
        _, aux = example.out
        return self.value_accumulator is not None or bool(array_structs(aux))

    def slots(self, output: Results) -> Slots:
        """The accumulators for the results of a microbatch."""
        # Values are weighted as gradients are, unless the user says otherwise.
        accumulator, of_values = self.gradient_accumulator, self.value_accumulator
        if of_values is None:
            of_values = accumulator if isinstance(accumulator, Sum | Mean) else Mean()
        accumulators: dict[str, PyTree] = {
            "gradient": accumulator,
            "value": of_values,
            "aux": self.aux_accumulator,
            "norms": Concat(),
            "metrics": Concat(),
            "inner_products": Concat(),
            "features": Concat(),
            "moments": Variance(ddof=1),
        }
        # What has no numbers, such as aux of None, stays as it is.
        of_whole, of_each = (
            {
                name: accumulators[name] if _has_results(result) else None
                for name, result in results.items()
            }
            for results in output
        )
        # Other gradients are sums over a microbatch, whatever the accumulator is.
        if of_whole and not (self.batched or is_running(accumulator)):
            of_whole["gradient"] = OfTotals(accumulator)
        # Moments by sites come as summaries of several arrays, each of them one value.
        if "moments" in of_whole:
            of_leaf = lambda _: accumulators["moments"]
            moments = output.of_whole["moments"]
            of_whole["moments"] = jtu.tree_map(of_leaf, moments, is_leaf=is_summary)
        slots = as_slots(Results(of_whole, of_each), output)
        # Results for each example come last.
        first = len(array_structs(output.of_whole))
        couples = self.axis_name is not None
        is_row = lambda s: s.indices[0] >= first and not (couples and s.in_state)
        flagged = lambda s: dataclasses.replace(s, per_example=is_row(s))
        return dataclasses.replace(slots, slots=[*map(flagged, slots.slots)])

    def returned(self, diff: PyTree, results: dict[str, Any], blocks: Blocks) -> Any:
        """The return value of the transformed function."""
        moments = None
        if self.moments:
            moments = moments_of(diff, results["moments"], self.num_examples(blocks))
        norms = results["norms"] if self.return_norms else None
        names = "metrics", "inner_products", "features"
        metrics, *linear = map(results.get, names)
        statistics = GradientStatistics(norms, metrics, moments, *linear)
        outputs = self.outputs(results)
        # The settings decide: a function of the user's may return None.
        settings = self.metrics, self.against, self.features
        requested = any(x is not None for x in settings)
        if requested or self.return_norms or self.moments:
            outputs.append(statistics)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


# A bound on the norm of a gradient, or one for each example.
_Bound = float | Real[Array, ""] | Real[Array, " n"]


def _has_results(result: PyTree) -> bool:
    return any(is_struct(x) or is_number(x) for x in jtu.tree_leaves(result))
