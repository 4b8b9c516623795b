"""`scale_by_kfac`: K-FAC as an optax gradient transformation."""

from typing import Any, cast, NamedTuple, TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Int, PyTree, Real

from .._base.checks import check_at_least
from .._base.dtypes import widened
from .._base.mesh import with_type_of
from .._base.trees import described
from .._base.types import checked
from .._curvature.kronecker_factors import KroneckerFactors
from .._curvature.pytree import form_of


if TYPE_CHECKING:
    import optax

    from .._curvature.kronecker_operator import KroneckerOperator


_Number = float | Real[Array, ""]


class ScaleByKFACState(NamedTuple):
    """The state of [`eqxbatch.scale_by_kfac`][].

    - `count`: the number of updates.
    - `average`: the average of the factors.
    - `inverse`: the damped inverse of an average of the last few updates.
    """

    count: Int[Array, ""]
    average: KroneckerFactors
    inverse: "KroneckerOperator"


@checked
def scale_by_kfac(
    factors: KroneckerFactors,
    *,
    damping: _Number,
    decay: _Number = 0.95,
    inverse_update_period: int = 1,
    norm_constraint: _Number | None = None,
) -> "optax.GradientTransformationExtraArgs":
    """Natural gradients by K-FAC, as an optax gradient transformation.

    It averages Kronecker factors over updates and multiplies the gradient by the
    inverse of the average plus `damping` times the identity. Each call of `update`
    takes the gradient and, as the keyword argument `factors`, the result of
    [`eqxbatch.filter_kfac`][] for the same examples or some of them. In an
    `optax.chain`, put it before the learning rate.

    The state is a PyTree of arrays: it has the `count` of updates, the `average` of the
    factors and its damped `inverse`. It works in `jax.jit` and `jax.lax.scan`, and
    `equinox.tree_serialise_leaves` saves it.

    **Arguments:**

    - `factors`: the result of [`eqxbatch.filter_kfac`][] for any batch, or its shapes,
        from `equinox.filter_eval_shape`. Only the structure matters.
    - `damping`: a number that is added to the eigenvalues, at least 0.
    - `decay`: the decay of the exponential average, at least 0 and below 1. The average
        has no bias towards its start: after the first update, it is the first factors.
    - `inverse_update_period`: the inverse is computed anew in the first of so many
        updates, by an eigendecomposition of each factor. With more than 1, bound the
        step by `norm_constraint`: the factors change fast in the first updates.
    - `norm_constraint`: a bound on the squared norm of the step in the metric of the
        damped matrix: the product of the step and the gradient. A longer step is scaled
        down to it. With a Fisher matrix, half of the squared norm is about the KL
        divergence between the predictions before and after the step. The bound is on
        the step before it is multiplied by a learning rate.

    **Returns:**

    An `optax.GradientTransformationExtraArgs`. With `optax.inject_hyperparams`,
    `damping`, `decay` and `norm_constraint` can follow a schedule.

    **Raises:**

    - `ValueError` for negative `damping`, for a `decay` outside of this range, for an
        `inverse_update_period` below 1, for a `norm_constraint` of at most 0, for
        factors with `corrected=True`, which cannot be averaged, and for an update with
        factors of another structure.
    - `TypeError` for an update without `factors`.
    - `RuntimeError` at run time if the damped matrix is not positive definite.
    - `ImportError` if lineax is not installed.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp, optax
        >>> model = eqx.nn.MLP(2, 3, 8, 1, key=jax.random.key(0))
        >>> x, labels = jnp.ones((10, 2)), jnp.arange(10) % 3
        >>> predict = lambda model, x, label: model(x)
        >>> loss = lambda logits, x, label: -jax.nn.log_softmax(logits)[label]
        >>> gradient = eqxbatch.filter_micro_grad(
        ...     lambda model, x, label: loss(predict(model, x, label), x, label)
        ... )
        >>> kfac = eqxbatch.filter_kfac(predict, loss)
        >>> optimiser = optax.chain(
        ...     eqxbatch.scale_by_kfac(kfac(model, x, labels), damping=1e-2),
        ...     optax.scale_by_learning_rate(0.5),
        ... )
        >>> state = optimiser.init(eqxbatch.parameters(model))
        >>> for _ in range(3):
        ...     updates, state = optimiser.update(
        ...         gradient(model, x, labels), state, factors=kfac(model, x, labels)
        ...     )
        ...     model = eqx.apply_updates(model, updates)

        ```

    ??? cite

        Martens and Grosse, "Optimizing neural networks with Kronecker-factored
        approximate curvature", [arXiv:1503.05671](https://arxiv.org/abs/1503.05671);
        for `norm_constraint`, Ba, Grosse and Martens, "Distributed second-order
        optimization using Kronecker-factored approximations",
        [ICLR 2017](https://openreview.net/forum?id=SkkTMpjex). The names of the
        settings are those of
        [kfac-jax](https://github.com/google-deepmind/kfac-jax).
    """
    import optax

    # Numbers of `optax.inject_hyperparams` are traced, and cannot be checked here.
    check_at_least("inverse_update_period", inverse_update_period, 1)
    if not isinstance(decay, Tracer) and not 0 <= float(decay) < 1:
        raise ValueError(f"`decay` must be at least 0 and below 1; got {decay}.")
    bound = norm_constraint
    if not isinstance(bound, Tracer | None) and not float(bound) > 0:
        raise ValueError(f"`norm_constraint` must be above 0; got {bound}.")
    if any(block.moments is not None for block in factors.blocks):
        raise ValueError(
            "`factors` with `corrected=True` cannot be averaged over updates, as each "
            "have their own eigenvectors. Compute them without `corrected`."
        )

    def inverse_of(average: KroneckerFactors) -> "KroneckerOperator":
        return average.operator(damping=damping).inverse()

    # Only types are needed, so that `factors` may be types, too.
    structs = jax.eval_shape(
        lambda factors: ScaleByKFACState(
            jnp.zeros((), jnp.int32), factors, inverse_of(factors)
        ),
        factors,
    )

    def init(params: Any) -> Any:
        # The first update takes nothing from these zeros.
        del params
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), structs)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        factors: KroneckerFactors | None = None,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        # Other transformations of a chain may need more arguments.
        del params, extra_args
        if not isinstance(factors, KroneckerFactors):
            raise TypeError(
                "`update` of `scale_by_kfac` needs the Kronecker factors of the "
                "examples: pass `factors=kfac(model, ...)`, where `kfac` is a function "
                f"that `filter_kfac` returned; got {described(factors)}."
            )
        if form_of(factors) != form_of(structs.average):
            raise ValueError(
                "`factors` must have the structure of those that `scale_by_kfac` was "
                f"made with. These have the blocks\n{structs.average}\nbut `update` "
                f"got\n{factors}\nMake both with the same settings of `filter_kfac`, "
                "for the same model."
            )
        # The average weights an update of some age by `decay ** age`, divided by the
        # sum of all weights: the first update has a share of 1, the second one of
        # `1 / (1 + decay)`.
        count = cast(Array, optax.safe_increment(state.count))
        rate, num = (jnp.asarray(x, jnp.result_type(float)) for x in (decay, count))
        share = (1 - rate) / (1 - rate**num)
        average = jax.tree.map(
            lambda new, old: old + share.astype(old.dtype) * (new - old),
            factors,
            state.average,
        )
        # By the count before this update, the first one computes an inverse.
        inverse = (
            inverse_of(average)
            if inverse_update_period == 1
            else jax.lax.cond(
                state.count % inverse_update_period == 0,
                lambda: inverse_of(average),
                lambda: state.inverse,
            )
        )
        state = ScaleByKFACState(count, average, inverse)
        step = inverse.mv(updates)
        if bound is None:
            return step, state
        # The product of the step and the gradient is the squared norm of the step in
        # the metric of the damped matrix. Below the bound, the scale is 1.
        squared = _inner(*(jax.tree.map(widened, x) for x in (step, updates)))
        most = jnp.asarray(bound, squared.dtype)
        scale = jnp.sqrt(most / jnp.maximum(squared, most))

        # Rounded to half precision, the scale could lengthen a step beyond the bound.
        def shorter(x: Array) -> Array:
            wide = widened(x)
            return (wide * scale.astype(wide.dtype)).astype(x.dtype)

        return jax.tree.map(shorter, step), state

    return optax.GradientTransformationExtraArgs(init, update)


def _inner(first: PyTree, second: PyTree) -> Array:
    """The inner product of two PyTrees, also if arrays lie differently on a mesh."""

    # `jnp.vdot` is ambiguous for arrays that explicit axes of a mesh share.
    def inner(x: Array, y: Array) -> Array:
        return jnp.sum(x * with_type_of(jax.typeof(x), y))

    return jnp.asarray(sum(jax.tree.leaves(jax.tree.map(inner, first, second))))
