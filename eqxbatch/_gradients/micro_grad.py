"""`filter_micro_grad`: gradient accumulation and per-example gradients."""

import abc
import dataclasses
from typing import Any

from jaxtyping import Array

from .._batch.transform import also_decorator, Model, P
from .gradient import AbstractAnyMicroGradient, AbstractMicroGradient


class AbstractMicroValueAndGrad(AbstractMicroGradient[Model, P]):
    """`filter_micro_value_and_grad` with gradients of the type of the model."""

    @abc.abstractmethod
    def __call__(
        self, model: Model, /, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[Array, Model]: ...


class AbstractMicroGrad(AbstractMicroGradient[Model, P]):
    """`filter_micro_grad` with gradients of the type of the model."""

    @abc.abstractmethod
    def __call__(self, model: Model, /, *args: P.args, **kwargs: P.kwargs) -> Model: ...


class MicroValueAndGrad(
    AbstractAnyMicroGradient[Model, P], AbstractMicroValueAndGrad[Model, P]
):
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
        The gradient is None elsewhere, and norms and statistics are those of this part.
        Initialise an optax optimiser with the same part.
    - `filter_spec`: which leaves are parameters, as for `equinox.filter`.
    - `in_axes`: the batch axes of the arguments after the first: a tuple with a prefix
        for each argument, or one prefix for all, with ints, `None` (not batched), or
        callables from a leaf to these; or a dict from argument names to such prefixes.
        The default is axis 0 of all arrays. It also applies to keyword arguments and to
        arguments that a dict does not name.
    - `axis_name`: a name for the axis of the examples of a microbatch, if layers of the
        model couple them, as `equinox.nn.BatchNorm` does in training mode. Collectives
        over it act within a microbatch, which has the same examples on any number of
        devices. An `equinox.nn.State` is then shared by all examples. If `fun` returns
        it, as in `(value, state)`, this counts as `has_aux`, and those of the
        microbatches are merged into one: floats are averaged over the examples, and of
        flags and counters, the last are returned. There are no per-example gradients.
    - `batched`: whether `fun` is the loss of a whole microbatch instead. This requires
        an `accumulator`: `Mean()` if the loss is a mean over its examples, `Sum()` if
        it is a sum. Value and gradient are then exact for any microbatch size, provided
        that `fun` does not couple examples. If it does, results also depend on the
        number of devices: on a mesh, a microbatch has an equal share of the rows of
        each. For `Mean(weights=w)`, the loss must be the mean with the same weights:
        pass `w` to `fun` as a batched argument as well.
    - `microbatch_size`: the number of examples in a microbatch, at least 1. It need not
        divide the batch size `n`. An [`eqxbatch.MemoryBudget`][] chooses the largest
        size that fits; `None` means `n`.
    - `accumulator`: how gradients are combined: [`eqxbatch.Mean`][] (the default for a
        loss of one example) or [`eqxbatch.Sum`][]. Their `weights` weight the examples.
        With a `transform`, it can be any [`eqxbatch.AbstractAccumulator`][], or a
        PyTree prefix of what `transform` returns with accumulators as leaves.
    - `value_accumulator`: the same for the values. The default is `accumulator`, or a
        mean if that is neither of them.
    - `aux_accumulator`: the same for `aux`, a PyTree prefix. The default is
        [`eqxbatch.Concat`][], which returns `aux` for all examples along axis 0. With
        `batched`, an `equinox.nn.State` is merged as [`eqxbatch.filter_microbatch`][]
        does.
    - `clip_norm`: a bound on the norm of each per-example gradient. Longer gradients
        are scaled down to this norm. A number bounds the global norm; a PyTree prefix
        of the gradient, with a number or `None` for each part, bounds the norm of each
        part. Arrays of shape `()`, or `(n,)` with a bound for each example, are
        allowed, and changing their values does not cause recompilation.
    - `scale`: a function from the norm of a per-example gradient to the factor that it
        is multiplied by, in place of `clip_norm`: `lambda norm: 1 / (norm + 0.01)` for
        automatic clipping. With `norms`, it takes the norms of one example as
        `return_norms` returns them, and returns one factor, or a PyTree prefix of
        factors. It is traced.
    - `nan_safe`: whether a per-example gradient with a non-finite norm is replaced by
        zero. Otherwise, one non-finite gradient makes the whole result non-finite.
        Values and norms are returned unchanged in both cases.
    - `return_norms`: whether to return the norms of the per-example gradients.
    - `norms`: which norms `return_norms` returns and `scale` gets. The default is that
        of the whole gradient, or of each part of a PyTree `clip_norm`. `"leaf"` stands
        for a PyTree with the norm of each leaf. A function from the path of a leaf,
        such as `".layers[0].weight"`, and the leaf, to the name of a group stands for a
        dict with the norm of each group. Bounds are those of `clip_norm` all the same.
    - `transform`: a function of a per-example gradient. Its result takes the place of
        the gradient: it is clipped and accumulated, and norms are those of the result.
    - `metrics`: a function of a per-example gradient (before `transform`). Its results
        are returned for each example.
    - `moments`: whether to return mean, variance and noise scale of the per-example
        gradients (before `transform`). Few per-example gradients exist at a time.
    - `against`: a direction, a PyTree like the gradient. The inner product of each
        per-example gradient (before `transform`) with it is returned: for cosines,
        gradient matching, and the influence of an example on a step. It takes no
        gradients, and changing its values does not cause recompilation.
    - `features`: an [`eqxbatch.Projection`][]. The projection of each per-example
        gradient (before `transform`) is returned: the numbers that the `features` of an
        [`eqxbatch.EmpiricalNTK`][] of the loss have with this `metric`, for the same
        parameters, but without a pass of their own. Parameters must be real.
    - `method`: how per-example gradient norms are computed. `"materialise"`
        materialises the per-example gradients of a microbatch; `transform` and
        `metrics` always do. `"sites"` computes norms and clipped sums from the
        inputs of layers and the gradients of their outputs, without materialising those
        of parameters, for each parameter where this is cheaper. `"auto"` chooses the
        cheaper of the two; [`eqxbatch.explain_sites`][] shows both. If nothing
        per-example is requested, neither is used: each microbatch takes a single
        backward pass.
    - `num_real_microbatches`: if given, only this many microbatches run: an int or an
        integer array, which may be traced.

    **Returns:**

    A function with the arguments of `fun` that returns `(value, gradient)`, or
    `((value, aux), gradient)` with `has_aux`. The gradient has the structure of the
    first argument, with `None` for everything that is not differentiated, as optax and
    `equinox.apply_updates` expect. With a `transform`, its accumulated results are
    returned instead. With `return_norms`, `metrics`, `moments`, `against` or
    `features`, an [`eqxbatch.results.GradientStatistics`][] follows as the last
    element.

    The function is compiled on the first call; repeated calls with the same function
    and shapes are not retraced.

    **Raises:**

    - `ValueError` for a value that is not a real scalar, if there is nothing to
        differentiate, for a `clip_norm` that is negative, NaN, or not a prefix of the
        gradient, for both `clip_norm` and `scale`, for results of `scale` that are no
        factors, for bounds of another number of examples, for `norms` without
        `return_norms` or `scale`, for an unknown `method`, for `method="sites"` with
        `transform` or `metrics`, for `moments` with weights, for an `against` that is
        not like the gradient, for `features` with the errors of the `metric` of an
        [`eqxbatch.EmpiricalNTK`][], for `batched` or `axis_name` with a per-example
        setting or with each other, and wherever
        [`eqxbatch.filter_micro_vmap`][] raises it.
    - `TypeError` for an accumulator that does not apply to gradients, for `batched`
        without an accumulator, and for settings of the wrong type.
    - `RuntimeError` at run time, for arrays: if `clip_norm` is negative or NaN, or
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

        Per-example gradient norms from inputs and output gradients follow Goodfellow,
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
        Second moments from the squares of both factors follow Dangel et al.,
        "BackPACK: packing more into backprop",
        [arXiv:1912.10985](https://arxiv.org/abs/1912.10985), and automatic clipping is
        that of Bu et al., "Automatic clipping: differentially private deep learning
        made easier and stronger",
        [arXiv:2206.07136](https://arxiv.org/abs/2206.07136). Products of gradients at
        the steps of training are influences of Pruthi et al., "Estimating training data
        influence by tracing gradient descent",
        [arXiv:2002.08484](https://arxiv.org/abs/2002.08484).
    """

    _: dataclasses.KW_ONLY
    has_aux: bool = False

    def outputs(self, results: dict[str, Any]) -> list:
        value, gradient = results["value"], results["gradient"]
        # The state of coupled examples is returned as aux is, also without `has_aux`.
        has_aux = self.has_aux or results["aux"] is not None
        return [(value, results["aux"]) if has_aux else value, gradient]


class MicroGrad(AbstractAnyMicroGradient[Model, P], AbstractMicroGrad[Model, P]):
    """The gradient of a mean loss over a batch, one microbatch at a time.

    Like [`eqxbatch.filter_micro_value_and_grad`][], but the value is not returned: the
    result is the gradient, or `(gradient, aux)` with `has_aux`. With `return_norms`,
    `metrics`, `moments`, `against` or `features`, an
    [`eqxbatch.results.GradientStatistics`][] follows. The arguments are the same:

    - `fun`, `has_aux`, `where`, `filter_spec`, `in_axes`, `batched`, `axis_name`: what
        is differentiated.
    - `microbatch_size`, `num_real_microbatches`: how the batch is cut.
    - `clip_norm`, `scale`, `nan_safe`, `transform`, `method`: what happens to each
        per-example gradient.
    - `accumulator`, `aux_accumulator`: how results are combined. `value_accumulator`
        has no effect, because no values are returned.
    - `return_norms`, `norms`, `metrics`, `moments`, `against`, `features`: which
        statistics are returned.

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

    _: dataclasses.KW_ONLY
    has_aux: bool = False

    def outputs(self, results: dict[str, Any]) -> list:
        # As above: the state of coupled examples comes without `has_aux`.
        has_aux = self.has_aux or results["aux"] is not None
        return [results["gradient"], *[results["aux"]] * has_aux]


# For type checkers, the second class lacks the settings that change what is returned.
filter_micro_value_and_grad = also_decorator(
    "filter_micro_value_and_grad", MicroValueAndGrad, AbstractMicroValueAndGrad
)


filter_micro_grad = also_decorator("filter_micro_grad", MicroGrad, AbstractMicroGrad)
