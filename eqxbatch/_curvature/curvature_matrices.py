"""Hessians and Gauss-Newton matrices, their diagonals and their blocks.

A matrix of second derivatives is that of a loss, or of a loss of a model's output. For
a loss of an output, it is a Gauss-Newton matrix: `J^T C J` for each example, with `C`
the Hessian of the loss in the output. It takes one backward pass for each output. What
replaces `C`, such as a product of random vectors, takes fewer.
"""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Concatenate, Generic, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Inexact, Key, PRNGKeyArray, PyTree, Real, UInt32

from .._base.checks import called, check_at_least, warn_user
from .._base.dtypes import as_complex, as_real, common_dtype, widened
from .._base.jaxprs import first_use, varying
from .._base.mesh import error_if, sum_except
from .._base.modes import (
    Derivative,
    derivative_of_program,
    pushforward,
    without_forward_mode,
    without_reverse_mode,
)
from .._base.platforms import num_bytes, platform, products_of
from .._base.traced_function import TracedFunction
from .._base.trees import described, log, safe_zip, shown
from .._batch.batch import MemoryBudget
from .._batch.derivative import AbstractOverExamples, check_value, Loss
from .._batch.loop import accumulated_sums, current_passes
from .._batch.transform import also_decorator, Model, Out, P, run_compiled
from .._sites.gram import unless_cancelled
from .._sites.trace import Program
from .by_sites import (
    AbstractSiteMatrix,
    cheapest,
    Curve,
    is_covered,
    SiteGaussNewton,
    SiteHessian,
)
from .columns import (
    AbstractColumns,
    check_mode,
    check_outputs,
    expanded,
    Expansion,
    expansion,
    Gradient,
    hessian_products,
    Linear,
    Mode,
    product_blocks,
    product_costs,
    Products,
    replaced,
    with_both_modes,
)
from .pytree import arranged, joined, leaves_of_parts, Pair, RequestedBlocks, Unravel


_T = TypeVar("_T")


# The weights of some examples; None for ones.
Weights = Real[Array, " n"] | None


class AbstractCurvature(abc.ABC):
    """A sum over examples that has a matrix of second derivatives.

    - `program`: a program of the differentiated leaves and of one example.
    - `has_aux`: whether it returns a pair of values and an auxiliary output.
    - `num_outputs`: the number of differentiated outputs, which come first.
    - `allows_sites`: whether sites may be used at all.
    - `forms_rest`: whether leaves without a rule are left to sites, which form their
        Jacobian, because products would form it, too.
    """

    program: TracedFunction
    has_aux: bool = False
    num_outputs: int
    allows_sites: bool
    forms_rest: bool

    @property
    def leaves(self) -> list[Array]:
        """The differentiated leaves."""
        return self.program.leaves

    @property
    def axes(self) -> list[int]:
        """The batch axes; empty without a batch."""
        return self.program.axes

    @abc.abstractmethod
    def excludes_sites(self, leaves: set[int]) -> bool:
        """Whether JAX lacks derivatives that sites of these leaves need."""

    @abc.abstractmethod
    def of_sites(
        self, program: Program, requested: RequestedBlocks, counts_cancelled: bool
    ) -> AbstractSiteMatrix:
        """The requested blocks, from sites."""

    def aux(self, rows: list) -> PyTree:
        """The auxiliary output of the function for some examples, if it has one."""
        if not self.has_aux:
            return None
        run = self.program.many if self.axes else self.program.one
        return self.program.output(run(self.leaves, rows))[1]

    @abc.abstractmethod
    def products(
        self, rows: list, weights: Weights, axes: Sequence[int], is_single: bool
    ) -> Products:
        """Products with the matrix of some examples; of one, if there are no `axes`.

        With `is_single`, there is one product only.
        """


_IF_WHOLE = (
    "Give the function of one example; or pass `in_axes=None`, if it is one function "
    "of all its arguments."
)


class AbstractSecondOrder(AbstractOverExamples):
    """A transform that takes second derivatives.

    - `checkpoint`: whether intermediate values are recomputed.
    """

    _: dataclasses.KW_ONLY
    checkpoint: bool = False

    @abc.abstractmethod
    def curvature(self, fun: Loss) -> AbstractCurvature:
        """The matrix of a function, called with some examples."""


class AbstractOfLoss(AbstractSecondOrder):
    """A transform of a loss.

    - `mode`: how gradients are differentiated.
    """

    _: dataclasses.KW_ONLY
    in_axes: PyTree = None  # As for `equinox.filter_hessian`.
    mode: Mode = "auto"

    def curvature(self, fun: Loss) -> AbstractCurvature:
        return LossCurvature(fun, self.mode, self.checkpoint)


class AbstractOfOutputs(AbstractOverExamples, Generic[Model, P, Out]):
    """A transform of a model and a `loss` of its outputs."""

    fun: Callable[Concatenate[Model, P], Out]
    loss: Callable[Concatenate[Out, ...], ArrayLike]
    _: dataclasses.KW_ONLY
    in_axes: PyTree = eqx.if_array(0)

    @property
    def has_aux(self) -> bool:
        return False

    @property
    def holomorphic(self) -> None:
        return None


def _as_fisher(
    fisher: Literal["exact", "type-2", "mc", "empirical"],
) -> Literal["exact", "mc", "empirical"]:
    return "exact" if fisher == "type-2" else fisher


class AbstractFisher(AbstractOfOutputs[Model, P, Out]):
    """A transform with a choice of what replaces the Hessian of the loss.

    - `fisher`: `"exact"` (or `"type-2"`) uses this Hessian. `"mc"` uses its square root
        times random vectors, or gradients for drawn labels. `"empirical"` uses the
        gradient.
    - `key`, `num_samples`: settings for random draws, shared by all examples.
    - `sampler`: draws labels, as `sampler(key, out)`.
    """

    _: dataclasses.KW_ONLY
    fisher: Literal["exact", "type-2", "mc", "empirical"] = eqx.field(
        converter=_as_fisher, default="exact"
    )
    key: PRNGKeyArray | UInt32[Array, "2"] | None = None
    num_samples: int = 1
    sampler: Callable[..., Any] | None = None

    def __check_init__(self) -> None:
        check_at_least("num_samples", self.num_samples, 1)
        is_mc = self.fisher == "mc"
        if is_mc and self.key is None:
            raise ValueError(
                "`fisher='mc'` draws random vectors: give it a `key`, such as "
                "`jax.random.key(0)`; got `key=None`."
            )
        for name, is_passed in (
            ("key", self.key is not None),
            ("sampler", self.sampler is not None),
            ("num_samples", self.num_samples != 1),
        ):
            if is_passed and not is_mc:
                raise ValueError(
                    f"`{name}` is for `fisher='mc'`, as nothing is drawn otherwise; "
                    f"got it with `fisher={self.fisher!r}`. Leave it out."
                )

    def with_keys(self, loss: Loss) -> Loss:
        """Appends keys as the last of the rows if anything is drawn at random."""
        batch, blocks = loss.batch, loss.blocks
        if self.key is None or blocks is None:
            return loss
        # The numbers that the key of each example is made from. By the numbers of the
        # examples, keys do not depend on how many examples there are.
        passes = current_passes()
        start = 0 if passes is None else passes.start
        numbers = start + jnp.arange(blocks.total, dtype=jnp.int32)
        keys = jr.key_data(jax.vmap(jr.fold_in, (None, 0))(self._typed_key, numbers))
        batch = dataclasses.replace(
            batch,
            arrays=[*batch.arrays, keys],
            axes=(*batch.axes, 0),
            names=(*batch.names, "`key`"),
        )
        return dataclasses.replace(loss, batch=batch)

    @property
    def _typed_key(self) -> Key[Array, ""]:
        key = self.key
        assert key is not None
        is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        return key if is_typed else jr.wrap_key_data(key)

    def keys(self, row: UInt32[Array, " words"] | None) -> Key[Array, " samples"]:
        """The keys of all samples of an example, from its `row`."""
        key = self._typed_key
        if row is not None:
            key = jr.wrap_key_data(row, impl=jr.key_impl(key))
        return jr.split(key, self.num_samples)


class LossCurvature(AbstractCurvature):
    """The Hessian of a loss."""

    num_outputs = 1
    forms_rest = False

    def __init__(self, loss: Loss, mode: Mode = "auto", checkpoint: bool = False):
        self.program = loss.traced_on_device(1, _IF_WHOLE)
        self._checkpoint, self._mode = checkpoint, mode
        self._holomorphic, self.has_aux = loss.holomorphic, loss.has_aux
        self.allows_sites = mode != "rev" and not loss.holomorphic
        self._answers: dict[frozenset[int], str | None] = {}

    def excludes_sites(self, leaves: set[int]) -> bool:
        # Whatever depends on a leaf with sites depends on their outputs.
        key = frozenset(leaves)
        if key not in self._answers:
            self._answers[key] = self._asked(without_forward_mode, sorted(key))
        return self._answers[key] is not None

    def of_sites(
        self, program: Program, requested: RequestedBlocks, counts_cancelled: bool
    ) -> AbstractSiteMatrix:
        return SiteHessian(
            program,
            requested,
            checkpoint=self._checkpoint,
            counts_cancelled=counts_cancelled,
        )

    def products(
        self, rows: list, weights: Weights, axes: Sequence[int], is_single: bool
    ) -> Products:
        reason = self._without_mode
        is_reverse = self._mode == "rev" or reason is not None
        if reason is not None:
            warn_user(
                "The gradient has no forward-mode derivative, so it is "
                "differentiated in reverse mode, which is slower and takes more "
                f"memory. Set `mode='rev'` to do so without a warning. ({reason})"
            )
        gradient = self._gradient(rows, weights, axes)
        return hessian_products(gradient, is_reverse=is_reverse, is_single=is_single)

    def _gradient(
        self, rows: list, weights: Array | None = None, axes: Sequence[int] = ()
    ) -> Gradient:
        """The gradient of the weighted sum of some examples, or of one."""

        def value(leaves: list) -> Array:
            if not axes:
                return self.program.one(leaves, rows)[0]
            return total_loss(self.program.many(leaves, rows)[0], weights)

        value = jax.checkpoint(value) if self._checkpoint else value

        def gradient(leaves: list, which: Sequence[int]) -> list:
            changed = lambda values: value(replaced(leaves, which, values))
            point = [leaves[i] for i in which]
            return jax.grad(changed, holomorphic=self._holomorphic)(point)

        return gradient

    @functools.cached_property
    def _without_mode(self) -> str | None:
        """The reason why the gradient lacks the mode that is asked for, or None.

        Raises `TypeError` if it lacks both modes, or the one that is chosen.
        """
        is_reverse = self._mode == "rev"
        ask = without_reverse_mode if is_reverse else without_forward_mode

        def checked(gradient: Linear, point: list[Array]) -> str | None:
            reason = ask(gradient, point)
            check_mode(self._mode, "the gradient of `fun`", reason, gradient, point)
            return reason

        return self._asked(checked, range(len(self.leaves)))

    def _asked(
        self, ask: Callable[[Linear, list[Array]], _T], which: Sequence[int]
    ) -> _T:
        """The untraced answer of `ask(gradient, point)`, about these leaves."""
        point = [self.leaves[i] for i in which]

        def of_example(rows: list) -> _T:
            gradient = self._gradient(rows)
            changed = lambda values: replaced(self.leaves, which, values)
            return ask(lambda values: gradient(changed(values), which), point)

        return self.program.at_example(of_example)


class GaussNewtonCurvature(AbstractCurvature):
    """The generalised Gauss-Newton matrix of a `loss` of a function's output.

    `model` is the function and a call of it. `loss(out, *args)` is a scalar, where
    `args` are all arguments of the call except the first. `fisher` has the settings of
    what replaces the Hessian of the loss; None for this Hessian. If it has a key, the
    last of the rows are keys.
    """

    allows_sites = True

    def __init__(
        self,
        model: Loss,
        loss: Callable,
        checkpoint: bool = False,
        fisher: AbstractFisher | None = None,
        if_whole: str = _IF_WHOLE,
    ):
        # Complex outputs count as their real and imaginary parts.
        run = lambda diff, rows: as_real(model.outputs(diff, rows)[0])
        self._traced = model.traced_on_device(None, if_whole, run)
        self._structs = check_outputs(self._traced.out)
        self.num_outputs = len(self._structs)
        self._model, self._loss, self._checkpoint = model, loss, checkpoint
        is_exact = fisher is None or fisher.fisher == "exact"
        self._fisher = None if is_exact else fisher
        self._derivative: Derivative = derivative_of_program("`fun`", self._traced)
        self.forms_rest = self._derivative in ("rows", "columns")
        # Sites need reverse mode only.
        self.program = self._traced
        if self._derivative == "columns":
            self.program = with_both_modes(self._traced, "columns")

    @functools.cached_property
    def _gradient(self) -> Callable[[Callable[..., Array]], Callable[..., list]]:
        """`jax.grad` for functions of outputs, in the mode that the loss has."""

        def ask(rows: list) -> bool:
            loss = lambda outs: self._loss_of(outs, rows)
            outs = self._traced.one(self.leaves, rows)
            reason = without_reverse_mode(loss, outs)
            check_mode("auto", "`loss`", reason, loss, outs)
            return reason is None

        return jax.grad if self._traced.at_example(ask) else jax.jacfwd

    @functools.cached_property
    def _is_reverse(self) -> bool:
        """Whether the loss's gradient in the outputs lacks forward mode."""

        def ask(rows: list) -> bool:
            gradient = self._gradient(lambda outs: self._loss_of(outs, rows))
            outs = self._traced.one(self.leaves, rows)
            reason = without_forward_mode(gradient, outs)
            check_mode("auto", "the gradient of `loss`", reason, gradient, outs)
            return reason is not None

        return self._traced.at_example(ask)

    @property
    def formed(self) -> Sequence[int]:
        """The leaves with a Jacobian of columns in place of sites."""
        return range(len(self.leaves)) if self._derivative == "columns" else ()

    def excludes_sites(self, leaves: set[int]) -> bool:
        return False

    def of_sites(
        self, program: Program, requested: RequestedBlocks, counts_cancelled: bool
    ) -> AbstractSiteMatrix:
        del counts_cancelled  # Jacobians whose terms may cancel are formed.
        return SiteGaussNewton(
            program,
            requested,
            self.of_outputs,
            num_vectors=self.num_vectors,
            has_curve=self._fisher is None,
        )

    @property
    def num_vectors(self) -> int:
        """The number of vectors for each example."""
        if self._fisher is None:
            return sum(x.size for x in self._structs)
        return self._fisher.num_samples

    def of_outputs(self, outs: list, rows: list) -> tuple[list, Array | None]:
        """The vectors to pull back, and the curvature between them."""
        if self._fisher is not None:
            return self._seeds(self._fisher, outs, rows), None
        unravel = Unravel(outs)
        every = jnp.eye(sum(unravel.sizes), dtype=unravel.dtype)
        return unravel(every), self._curve(outs, rows)

    def products(
        self, rows: list, weights: Weights, axes: Sequence[int], is_single: bool
    ) -> Products:
        del is_single
        outputs = self._outputs(rows, axes)

        def products(leaves: list, group: list[int], of: list[int]) -> Linear:
            """`J^T C J`, for the Jacobian of outputs and a matrix for them."""
            changed = lambda values: outputs(replaced(leaves, group, values))
            point = [leaves[i] for i in group]
            outs, push = pushforward(changed, point, self._derivative)
            curve = self._curvature(outs, rows, weights, axes)
            changed = lambda values: outputs(replaced(leaves, of, values))
            pull = jax.vjp(changed, [leaves[i] for i in of])[1]
            return lambda seeds: pull(curve(push(seeds)))[0]

        return products

    def _outputs(self, rows: list, axes: Sequence[int]) -> Linear:
        """The outputs of some examples as a function of all leaves."""
        point, run = self.leaves, self._traced.one
        if not self.forms_rest:
            run = jax.checkpoint(run) if self._checkpoint else run
            return lambda leaves: _over(lambda rows: run(leaves, rows), axes, rows)

        def of_one(rows: list) -> Expansion:
            return expansion(lambda leaves: run(leaves, rows), point, self._derivative)

        # The Jacobian is computed once for all products.
        expansions = _over(of_one, axes, rows)
        expand = lambda leaves: lambda _, known: expanded(known, point, leaves)
        return lambda leaves: _over(expand(leaves), axes, rows, expansions)

    def _curvature(
        self, outs: list, rows: list, weights: Array | None, axes: Sequence[int]
    ) -> Linear:
        """The product with the Hessian of all losses, or with what replaces it."""
        if self._fisher is None and self._gradient is jax.grad:
            one = lambda rows, outs: self._loss_of(outs, rows)
            value = lambda outs: jnp.sum(_over(one, axes, rows, outs))
            if self._is_reverse:  # A Hessian is its own transpose.
                pull = jax.vjp(jax.grad(value), outs)[1]
                curve = lambda seeds: pull(seeds)[0]
            else:
                curve = jax.linearize(jax.grad(value), outs)[1]
            # The loss may have a backward pass that is not linear.
            return lambda seeds: _times_weights(curve(seeds), weights)
        vectors = _over(
            lambda rows, outs: self.of_outputs(outs, rows), axes, rows, outs
        )

        def product(_: list, factors: tuple[list, list, Curve, Array | None]) -> list:
            seeds, vectors, curve, weight = factors
            dtype = common_dtype(*(seed.dtype for seed in seeds))
            parts = [
                jnp.tensordot(x, seed, seed.ndim).astype(dtype)
                for x, seed in safe_zip(vectors, seeds)
            ]
            along = functools.reduce(jnp.add, parts)
            along = along if curve is None else curve @ along
            along = along if weight is None else weight.astype(along.dtype) * along
            return [jnp.tensordot(along.astype(x.dtype), x, 1) for x in vectors]

        return lambda seeds: _over(product, axes, rows, (seeds, *vectors, weights))

    def _seeds(
        self, fisher: AbstractFisher, outs: list, rows: list
    ) -> list[Inexact[Array, "samples *out"]]:
        """For each output of an example, vectors whose outer products give the matrix.

        For random vectors `s` with covariance `C`, the mean of `(J^T s) (J^T s)^T` is
        `J^T C J`.
        """
        loss = lambda outs, key=None: self._loss_of(outs, rows, key)
        gradient, outs = self._gradient(loss), lax.stop_gradient(outs)
        row = rows[-1] if fisher.key is not None and self.axes else None
        if fisher.fisher == "empirical":
            vectors = [x[None] for x in gradient(outs)]
        elif fisher.sampler is None:
            # Terms that cancel where a classifier is confident do not cancel at zero.
            terms = jnp.abs(self._curve([jnp.zeros_like(x) for x in outs], rows))
            terms = jnp.where(jnp.isfinite(terms), terms, 0)
            factor = root(self._curve(outs, rows), terms)
            signs = lambda key: jr.rademacher(key, factor.shape[:1], factor.dtype)
            vectors = Unravel(outs)(jax.vmap(signs)(fisher.keys(row)) @ factor)
        else:
            vectors = jax.vmap(lambda key: gradient(outs, key))(fisher.keys(row))
        scale = fisher.num_samples**-0.5
        return [lax.stop_gradient(x * scale) for x in vectors]

    def _loss_of(self, outs: list, rows: list, key: Array | None = None) -> Array:
        """The loss of an example, or of a label that is drawn for it with a key."""
        (_, *rest), kwargs = self._model.batch.arguments(rows)
        out = as_complex(self._traced.output(outs))
        if key is not None and self._fisher is not None and self._fisher.sampler:
            draw = functools.partial(self._fisher.sampler, key)
            rest = [*rest[:-1], _drawn(draw, out, rest, kwargs)]
        value = called(self._loss, (out, *rest), kwargs, _LOSS)
        return check_value(value, what="loss")

    def _curve(self, outs: list, rows: list) -> Inexact[Array, "outputs outputs"]:
        unravel = Unravel(outs)
        flat = joined(outs, unravel.dtype)
        value = lambda flat: self._loss_of(unravel(flat), rows)
        jacobian = jax.jacrev if self._is_reverse else jax.jacfwd
        return jacobian(self._gradient(value))(flat)


_LOSS = "`loss`, whose arguments are the output of `fun` and all but its first,"


# How far below zero eigenvalues may be, in units of the rounding error.
_ROUNDING = 8.0


def root(
    matrix: Real[Array, "outputs outputs"], terms: Real[Array, "outputs outputs"]
) -> Real[Array, "outputs outputs"]:
    """An array `x` with `x.T @ x` equal to a positive semidefinite matrix.

    `terms` is as large as what was subtracted to form the matrix: eigenvalues below
    zero by its rounding count as zero.
    """
    eps = float(jnp.finfo(matrix.dtype).eps)
    matrix, terms = widened(matrix), widened(terms)
    lowest = jnp.min(jnp.linalg.eigvalsh(matrix), initial=0)
    largest = jnp.max(jnp.maximum(jnp.abs(matrix), terms), initial=0)
    # Each row is judged by its own size, so that small curvatures beside large ones
    # keep their digits. It is that of the diagonal, which is bounded below by the other
    # entries, as its own digits may have cancelled.
    sizes = jnp.diagonal(matrix)
    sizes = matrix / jnp.where(sizes > 0, sizes, jnp.inf)[None] * matrix
    sizes = jnp.max(sizes, axis=1, initial=0)
    scales = jnp.sqrt(jnp.where(sizes == 0, 1, sizes))
    values, vectors = jnp.linalg.eigh(matrix / scales[:, None] / scales[None])
    message = (
        "`fisher='mc'` takes the square root of the loss's Hessian in what `fun` "
        "returns, but that has a negative eigenvalue: the loss is not convex there. "
        "Use `fisher='exact'`, which needs no root, or pass a `sampler`."
    )
    is_negative = lowest < -_ROUNDING * matrix.shape[0] * eps * largest
    values = error_if(values, (is_negative, message))
    # The root of an eigenvalue that is zero up to rounding would be as large as that of
    # eps. The symmetric root does not depend on the choice of eigenvectors.
    least = 4 * eps * jnp.max(values, initial=0)
    roots = jnp.where(values <= least, 0, jnp.sqrt(jnp.maximum(values, 0)))
    return (vectors * roots[None]) @ vectors.T * scales[None]


def _drawn(
    draw: Callable[[PyTree], PyTree], out: PyTree, args: list, kwargs: dict[str, Any]
) -> PyTree:
    """A label for an output of the model, to replace the last argument."""
    if kwargs or not args:
        got = f"the keyword arguments {(*kwargs,)}, one of which may be it"
        got = got if kwargs else "a call without arguments after the first"
        raise ValueError(
            "`sampler` draws the label, which replaces the last positional argument; "
            f"got {got}. Pass all arguments by position."
        )
    try:
        label = lax.stop_gradient(draw(out))
    except Exception as e:
        e.add_note(
            f"`sampler` is called as `sampler(key, out)`; `out` is {shown(out)}."
        )
        raise
    forms = [
        (jtu.tree_structure(tree), [jnp.shape(x) for x in jtu.tree_leaves(tree)])
        for tree in (label, args[-1])
    ]
    if forms[0] != forms[1]:
        raise ValueError(
            "`sampler` must return a label with the structure and shapes of the last "
            f"positional argument, {described(args[-1])}; got {described(label)}."
        )
    return label


def _over(
    one: Callable[..., Any], axes: Sequence[int], rows: list, *others: PyTree
) -> Any:
    """Maps `one(rows, *others)` over examples; `others` have them along axis 0.

    Without `axes`, there is one example.
    """
    if not axes:
        return one(rows, *others)
    in_axes = [list(axes), *(0 for _ in others)]
    return jax.vmap(one, in_axes)(rows, *others)


def _times_weights(outs: list, weights: Weights) -> list:
    """Arrays of examples along axis 0, times the weights of these."""
    if weights is None:
        return outs
    expanded = lambda x: jnp.expand_dims(weights.astype(x.dtype), range(1, x.ndim))
    return [x * expanded(x) for x in outs]


def total_loss(values: Array, weights: Array | None) -> Array:
    if weights is not None:
        values = values * weights.astype(values.dtype)
    return jnp.sum(values)


_LEAST_COLUMNS = 32


class AbstractBySites(AbstractSecondOrder, AbstractColumns):
    """A transform that computes second derivatives by sites or by products."""

    _: dataclasses.KW_ONLY
    method: Literal["auto", "sites", "products"] = "auto"


class AbstractMatrix(AbstractBySites, Generic[P]):
    """A part of a matrix of second derivatives.

    - `flat`: whether it is returned as an array.
    - `is_block`: which parts of the parameters are blocks, if these are computed.
    """

    _: dataclasses.KW_ONLY
    flat: bool = False
    part: ClassVar[Literal["full", "diagonal", "blocks"]]

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return run_compiled(self, *args, **kwargs)

    @property
    def has_gaps(self) -> bool:
        return not self.flat

    @property
    def is_block(self) -> Callable[[Any], bool] | None:
        return None

    def apply(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        sized = self
        if isinstance(self.block_size, MemoryBudget):
            # The batch is cut first, so that the two sizes are chosen one after the
            # other.
            sized = dataclasses.replace(self, block_size=_LEAST_COLUMNS)
        fun = sized.in_microbatches(args, kwargs)
        if isinstance(self, AbstractFisher):
            fun = self.with_keys(fun)
        diff, leaves = fun.diff, jtu.tree_leaves(fun.diff)
        num = sum(x.size for x in leaves)
        of_fun = None if fun.blocks is None else fun.blocks.size
        size = self.num_columns(num, args, kwargs, microbatch_size=of_fun)
        curvature = self.curvature(fun)
        # The whole matrix has a single part.
        is_block = (lambda _: True) if self.part == "full" else self.is_block
        parts = leaves_of_parts(diff, is_block)
        is_diagonal = self.part == "diagonal"
        all_pairs = functools.partial(itertools.combinations_with_replacement, r=2)
        pairs = itertools.chain.from_iterable(map(all_pairs, parts))
        requested = RequestedBlocks([*pairs], is_diagonal)
        blocks = CurvatureBlocks(curvature, requested, self.method, size)
        program = curvature.program
        with products_of(program.closed):
            sums, aux = self.total(fun, program, blocks.sums, curvature.aux)
        groups = (_over_devices(*x, leaves) for x in safe_zip(blocks.groups, sums))
        matrix = arranged(
            diff,
            [*itertools.chain.from_iterable(groups)],
            is_block,
            flat=self.flat,
            is_diagonal=is_diagonal,
            is_whole=self.part == "full" and blocks.is_whole,
        )
        return (matrix, aux) if self.has_aux else matrix


def _over_devices(
    pairs: list[Pair], blocks: Array, leaves: list[Array]
) -> Iterator[tuple[list[Pair], Array]]:
    """Sums blocks over the devices that have the same parameters, as for a gradient.

    Devices keep their own block of two leaves if one of these differs between them.
    """
    kinds = [
        varying(jax.typeof(leaves[i])) | varying(jax.typeof(leaves[j]))
        for i, j in pairs
    ]
    for names in dict.fromkeys(kinds):
        which = [i for i, kind in enumerate(kinds) if kind == names]
        of_names = blocks if len(which) == len(pairs) else blocks[np.array(which)]
        yield [pairs[i] for i in which], sum_except(of_names, names)


class AbstractHessian(AbstractOfLoss, AbstractBySites):
    """A part of the Hessian of a loss."""

    _: dataclasses.KW_ONLY
    num_blocks: int | None = None
    holomorphic: bool = False

    def __check_init__(self) -> None:
        if self.method == "sites" and self.mode == "rev":
            raise ValueError(
                "`method='sites'` differentiates gradients in forward mode; got "
                "`mode='rev'`. Use `method='auto'` or `mode='auto'`."
            )


class Hessian(AbstractMatrix[P], AbstractHessian):
    """The Hessian of a function of a PyTree, in blocks.

    Like `equinox.filter_hessian`, with less time and memory: by symmetry, only the
    blocks on and above the diagonal are computed, and only a block of columns at a
    time. The result is exactly symmetric. The only exception is a single array, all
    columns of which are computed at once by products: as for `jax.hessian`, which does
    the same, entries and their mirror images may differ by rounding.

    **Arguments:**

    - `fun`: a function that returns a real scalar. It is differentiated twice with
        respect to all arrays of an inexact dtype in its first argument. With `in_axes`,
        it is the loss of one example.
    - `block_size`: how many of the `n` columns are computed at a time, at least 1. A
        block has columns of one leaf or of several small leaves. An
        [`eqxbatch.MemoryBudget`][] chooses the largest number that fits; `None`
        computes all columns of a leaf at once.
    - `num_blocks`: an alternative to `block_size`, which becomes `n / num_blocks`,
        rounded up. There may be more blocks than this, since a block can end with its
        leaf.
    - `checkpoint`: whether to recompute intermediate values for each block instead of
        storing them.
    - `has_aux`: whether `fun` returns a pair `(value, aux)`.
    - `flat`: whether to return a matrix, and a function that turns vectors into
        PyTrees.
    - `method`: `"products"` computes one Hessian-vector product for each parameter
        entry. `"sites"` differentiates each example with respect to the outputs of
        layers, which have fewer entries than the parameters, and contracts the result
        with the layers' inputs. Parameters without a rule use products. `"auto"`
        chooses the cheaper one for each parameter, and products where uses or positions
        of a parameter nearly cancel. Without `in_axes`, for a function of many
        examples, this is mostly products.
    - `mode`: how Hessian-vector products differentiate the gradient: in forward mode
        with `"fwd"`, in reverse mode with `"rev"`. Some functions with custom
        derivatives need the latter. `"auto"` uses forward mode; if JAX cannot do that,
        it warns and uses reverse mode.
    - `where`: a function from the first argument to the part (or parts) of it to
        differentiate with respect to, such as the last layer. The default is all of it.
    - `filter_spec`: which leaves are parameters, as for `equinox.filter`.
    - `holomorphic`: whether `fun` is a holomorphic function of complex arrays; it must
        return a complex scalar. For other functions of complex arrays, pass real and
        imaginary parts as separate arrays.
    - `in_axes`: the batch axes of the arguments after the first, as for
        [`eqxbatch.filter_micro_value_and_grad`][]. The result is then the Hessian of
        the mean of `fun` over all examples. With the default, `None`, there is no
        batch, as for `equinox.filter_hessian`: `fun` is called once with all arguments.
    - `microbatch_size`: how many examples are processed at a time, at least 1. An
        [`eqxbatch.MemoryBudget`][] chooses the largest number that fits; `None` means
        all of them.
    - `accumulator`: [`eqxbatch.Mean`][] or [`eqxbatch.Sum`][], over the examples; their
        `weights` weight the examples.

    **Returns:**

    A function with the arguments of `fun` that returns the Hessian, or `(hessian, aux)`
    with `has_aux`. The Hessian is a PyTree of PyTrees: it has the structure of the
    first argument, with `None` for everything that is not differentiated, and each leaf
    is such a PyTree again. The array for two leaves has the axes of the first, then
    those of the second. With `in_axes`, `aux` has the examples along axis 0.

    With `flat`, the Hessian is a pair of a matrix of shape `(n, n)`, in the order of
    `jax.flatten_util.ravel_pytree`, and `unravel` (an [`eqxbatch.results.Unravel`][]),
    which turns vectors of shape `(n,)` into PyTrees. [`eqxbatch.hessian_to_pytree`][]
    turns matrices into PyTrees of PyTrees.

    The function is compiled on the first call; repeated calls with the same function
    and shapes are not retraced.

    **Raises:**

    - `ValueError` for a value that is not a real scalar, if there is nothing to
        differentiate, for an unknown `method` or `mode`, for `method="sites"` with
        `mode="rev"`, for sizes below 1, for both `block_size` and `num_blocks`, and for
        `microbatch_size`, or weights of an `accumulator`, without `in_axes`.
    - `TypeError` for complex arrays without `holomorphic`, for real arrays with it, for
        an `accumulator` of another type, and if `mode="fwd"` or `method="sites"` is
        used for a gradient without a forward-mode derivative.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, "scalar", 8, 2, jnp.tanh, key=jax.random.key(0))
        >>> loss = lambda model, x, y: (model(x) - y) ** 2
        >>> x, y = jnp.ones((100, 2)), jnp.zeros(100)
        >>> hessian = eqxbatch.filter_hessian(loss, in_axes=0)(model, x, y)
        >>> hessian.layers[0].weight.layers[1].bias.shape
        (8, 2, 8)
        >>> of_last = eqxbatch.filter_hessian(
        ...     loss, in_axes=0, where=lambda model: model.layers[-1], flat=True
        ... )
        >>> matrix, unravel = of_last(model, x, y)
        >>> matrix.shape, unravel(matrix[0]).layers[-1].weight.shape
        ((9, 9), (1, 8))

        ```

    ??? cite

        Hessian-vector products follow Pearlmutter, "Fast exact multiplication by the
        Hessian", [Neural Computation 6, 1994](
        https://doi.org/10.1162/neco.1994.6.1.147). Second derivatives with respect to
        the outputs of layers, contracted with the layers' inputs, are used by Botev et
        al., "Practical Gauss-Newton optimisation for deep learning",
        [arXiv:1706.03662](https://arxiv.org/abs/1706.03662), and Dangel et al.,
        "Modular block-diagonal curvature approximations for feedforward architectures",
        [arXiv:1902.01813](https://arxiv.org/abs/1902.01813), for blocks on the
        diagonal.
    """

    fun: Callable[P, Any]
    _: dataclasses.KW_ONLY
    has_aux: bool = False
    part: ClassVar = "full"


class AbstractHessianDiagonal(AbstractHessian, Generic[Model, P]):
    """`filter_hessian_diagonal` with results of the type of the first argument."""

    fun: Callable[Concatenate[Model, P], Any]

    @abc.abstractmethod
    def __call__(self, x: Model, /, *args: P.args, **kwargs: P.kwargs) -> Model: ...


class HessianDiagonal(
    AbstractMatrix[Concatenate[Model, P]], AbstractHessianDiagonal[Model, P]
):
    """The diagonal of the Hessian of a function of a PyTree, exactly.

    Like [`eqxbatch.filter_hessian`][], with the same errors, but the Hessian is never
    materialised. With `method="sites"`, each example is differentiated only with
    respect to the outputs of layers. The arguments are the same:

    - `fun`, `has_aux`, `where`, `filter_spec`, `holomorphic`: what is differentiated.
    - `in_axes`, `microbatch_size`, `accumulator`: over which examples.
    - `block_size`, `num_blocks`, `checkpoint`, `method`, `mode`: how it is computed.

    The transformed function returns a PyTree with the structure and shapes of the
    parameters. With `flat`, it returns a pair of a vector of shape `(n,)` and
    `unravel`. With `has_aux`, it returns a pair of this and `aux`.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> cubes = lambda x: jnp.sum(x["a"] ** 3) + x["b"] ** 2 * x["a"][0]
        >>> x = {"a": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)}
        >>> diagonal = eqxbatch.filter_hessian_diagonal(cubes)(x)
        >>> print(diagonal["a"], diagonal["b"])
        [ 6. 12.] 2.0

        ```
    """

    _: dataclasses.KW_ONLY
    has_aux: bool = False
    part: ClassVar = "diagonal"


class HessianBlocks(AbstractMatrix[P], AbstractHessian):
    """The block diagonal of the Hessian of a function of a PyTree.

    Like [`eqxbatch.filter_hessian`][], with the same errors, but only the blocks on the
    diagonal are computed: one for each array, or one for each part that `is_block`
    selects.

    **Arguments:**

    All arguments except `is_block` are those of [`eqxbatch.filter_hessian`][].

    - `fun`, `has_aux`, `where`, `filter_spec`, `holomorphic`: what is differentiated.
    - `in_axes`, `microbatch_size`, `accumulator`: over which examples.
    - `block_size`, `num_blocks`, `checkpoint`, `method`, `mode`: how it is computed.
    - `is_block`: a predicate on parts of the first argument: whether the part is one
        block, such as `lambda x: isinstance(x, equinox.nn.Linear)` for layers. The
        default is one block for each array.

    **Returns:**

    A function that returns a PyTree with the structure of the first argument. An array
    of shape `s` is replaced by an array of shape `(*s, *s)`. A part that `is_block`
    selects is replaced by what [`eqxbatch.filter_hessian`][] returns for it. With
    `flat`, each block is a pair of a matrix and `unravel`, or `None` if nothing in it
    is differentiated. With `has_aux`, the function returns a pair of this and `aux`.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, "scalar", 8, 1, jnp.tanh, key=jax.random.key(0))
        >>> blocks = eqxbatch.filter_hessian_blocks(
        ...     lambda model, x: model(x) ** 2,
        ...     in_axes=0,
        ...     is_block=lambda x: isinstance(x, eqx.nn.Linear),
        ...     flat=True,
        ... )(model, jnp.ones((10, 2)))
        >>> [matrix.shape for matrix, unravel in blocks.layers]
        [(24, 24), (9, 9)]

        ```
    """

    fun: Callable[P, Any]
    _: dataclasses.KW_ONLY
    is_block: Callable[[Any], bool] | None = None
    has_aux: bool = False
    part: ClassVar = "blocks"


class AbstractGGN(AbstractFisher[Model, P, Out], AbstractBySites):
    """A part of a Gauss-Newton matrix."""

    def curvature(self, fun: Loss) -> AbstractCurvature:
        return GaussNewtonCurvature(fun, self.loss, self.checkpoint, self)


class GGN(AbstractMatrix[Concatenate[Model, P]], AbstractGGN[Model, P, Out]):
    """The generalised Gauss-Newton matrix of a function of a PyTree, in blocks.

    Let `J` be the Jacobian of the outputs of `fun` and `H` the Hessian of `loss` with
    respect to these outputs. The matrix is `J.T @ H @ J`, accumulated over the
    examples: the Hessian without the second derivatives of `fun`. It is positive
    semidefinite if `loss` is convex. It equals the Fisher information if `loss` is the
    negative log-likelihood of an exponential family in its natural parameters.

    **Arguments:**

    - `fun`: the model: a function of the parameters and of one example that returns a
        PyTree of arrays of an inexact dtype. It may have a derivative in forward mode
        or in reverse mode only. If it has one mode only, the Jacobian of the examples
        of a microbatch is materialised.
    - `loss`: a function of the output of `fun` and of all arguments of `fun` after the
        first. It returns a real scalar. Pass it by keyword if you use this as a
        decorator.
    - `fisher`: `"exact"` (or `"type-2"`) computes the matrix itself, with one backward
        pass for each output of an example, and a single one for the last layer, each
        entry of which is one output.
        `"mc"` is an unbiased Monte-Carlo estimate, with one backward pass for each
        sample. It uses the gradients for labels drawn by a `sampler` or, without one,
        pulls back random vectors with covariance `H`. `"empirical"` (the empirical
        Fisher) uses the gradients for the given labels. It is a different matrix, not
        an estimate of this one.
    - `key`: the random key, which `fisher="mc"` requires. Samples of an example do not
        depend on the microbatch size.
    - `num_samples`: how many samples to draw for each example with `fisher="mc"`, at
        least 1.
    - `sampler`: draws a label as `sampler(key, out)`, where `out` is the output of
        `fun` for an example. The label replaces the last argument, so all arguments
        must be given by position. The estimate is unbiased if `loss` is the model's
        negative log-likelihood and labels are drawn from this likelihood. Without a
        `sampler`, `loss` must be convex in `out`.
    - `method`: `"products"` computes products of the matrix with one-hot vectors.
        `"sites"` pulls each output of an example back to the outputs of layers and
        contracts the result with the layers' inputs. `"auto"` chooses the cheaper one
        for each parameter.
    - `in_axes`: the batch axes of the arguments after the first, as for
        [`eqxbatch.filter_micro_value_and_grad`][]: axis 0 of all arrays by default.
        With None, there is no batch: `fun` is called once with all arguments.
    - `where`, `filter_spec`, `microbatch_size`, `accumulator`, `block_size`,
        `checkpoint`, `flat`: as for [`eqxbatch.filter_hessian`][].

    **Returns:**

    A function with the arguments of `fun` that returns the matrix in the same form as
    [`eqxbatch.filter_hessian`][].

    **Raises:**

    The errors of [`eqxbatch.filter_hessian`][], and:

    - `ValueError` for outputs of `fun` that are not arrays of an inexact dtype, for
        `fisher="mc"` without a `key`, for `key`, `num_samples` or `sampler` with any
        other `fisher`, for an unknown `fisher`, and for a label from `sampler` that
        does not have the structure and shapes of the last argument.
    - `TypeError` for a `loss` that is not callable, and for a `fun` that JAX can
        differentiate in neither mode.
    - `RuntimeError` at run time for a loss that is not convex, with `fisher="mc"` and
        no `sampler`. Inside `jax.shard_map`, the result is NaN instead.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.Linear(2, 3, key=jax.random.key(0))
        >>> ggn = eqxbatch.filter_ggn(
        ...     lambda model, x, label: model(x),
        ...     lambda logits, x, label: -jax.nn.log_softmax(logits)[label],
        ...     flat=True,
        ... )
        >>> matrix, unravel = ggn(model, jnp.ones((10, 2)), jnp.arange(10) % 3)
        >>> matrix.shape
        (9, 9)

        ```

    ??? cite

        Schraudolph, "Fast curvature matrix-vector products for second-order gradient
        descent", [Neural Computation 14, 2002](
        https://doi.org/10.1162/08997660260028683); Martens, "New insights and
        perspectives on the natural gradient method",
        [arXiv:1412.1193](https://arxiv.org/abs/1412.1193), for the three kinds of
        Fisher matrices; Kunstner et al., "Limitations of the empirical Fisher
        approximation", [arXiv:1905.12558](https://arxiv.org/abs/1905.12558).
    """

    part: ClassVar = "full"


class AbstractGGNDiagonal(AbstractGGN[Model, P, Out]):
    """`filter_ggn_diagonal` with results of the type of the first argument."""

    @abc.abstractmethod
    def __call__(self, x: Model, /, *args: P.args, **kwargs: P.kwargs) -> Model: ...


class GGNDiagonal(
    AbstractMatrix[Concatenate[Model, P]], AbstractGGNDiagonal[Model, P, Out]
):
    """The diagonal of the generalised Gauss-Newton matrix of a function of a PyTree.

    Like [`eqxbatch.filter_ggn`][], with the same errors, but the matrix is never
    materialised. With `fisher="empirical"`, the diagonal is the mean (or sum) of the
    squared per-example gradients. The arguments are the same:

    - `fun`, `loss`, `where`, `filter_spec`: what is differentiated.
    - `fisher`, `key`, `num_samples`, `sampler`: the exact matrix, or an estimate.
    - `in_axes`, `microbatch_size`, `accumulator`: over which examples.
    - `block_size`, `checkpoint`, `method`: how it is computed.

    The transformed function returns a PyTree with the structure and shapes of the
    parameters. With `flat`, it returns a pair of a vector of shape `(n,)` and
    `unravel`.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, 3, 8, 1, key=jax.random.key(0))
        >>> diagonal = eqxbatch.filter_ggn_diagonal(
        ...     lambda model, x, label: model(x),
        ...     lambda logits, x, label: -jax.nn.log_softmax(logits)[label],
        ...     fisher="mc",
        ...     key=jax.random.key(1),
        ...     sampler=jax.random.categorical,
        ... )
        >>> found = diagonal(model, jnp.ones((10, 2)), jnp.arange(10) % 3)
        >>> found.layers[0].weight.shape
        (8, 2)

        ```

    ??? cite

        Dangel et al., "BackPACK: packing more into backprop",
        [arXiv:1912.10985](https://arxiv.org/abs/1912.10985), for the exact diagonal and
        its Monte-Carlo estimate.
    """

    part: ClassVar = "diagonal"


class GGNBlocks(AbstractMatrix[Concatenate[Model, P]], AbstractGGN[Model, P, Out]):
    """The block diagonal of the generalised Gauss-Newton matrix.

    Like [`eqxbatch.filter_ggn`][], with the same errors, but only the blocks on the
    diagonal are computed: one for each array, or one for each part that `is_block`
    selects.

    **Arguments:**

    All arguments except `is_block` are those of [`eqxbatch.filter_ggn`][].

    - `fun`, `loss`, `where`, `filter_spec`: what is differentiated.
    - `fisher`, `key`, `num_samples`, `sampler`: the exact matrix, or an estimate.
    - `in_axes`, `microbatch_size`, `accumulator`: over which examples.
    - `block_size`, `checkpoint`, `method`: how it is computed.
    - `is_block`: which parts are one block, as for
        [`eqxbatch.filter_hessian_blocks`][].

    **Returns:**

    The transformed function returns a PyTree of the same form as for
    [`eqxbatch.filter_hessian_blocks`][], also with `flat`.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, 3, 8, 1, key=jax.random.key(0))
        >>> blocks = eqxbatch.filter_ggn_blocks(
        ...     lambda model, x, y: model(x),
        ...     lambda out, x, y: jnp.sum((out - y) ** 2),
        ...     is_block=lambda x: isinstance(x, eqx.nn.Linear),
        ...     flat=True,
        ... )(model, jnp.ones((10, 2)), jnp.zeros((10, 3)))
        >>> [matrix.shape for matrix, unravel in blocks.layers]
        [(24, 24), (27, 27)]

        ```
    """

    _: dataclasses.KW_ONLY
    is_block: Callable[[Any], bool] | None = None
    part: ClassVar = "blocks"


# The number of examples for which contractions are estimated.
_COUNTED = 32


class CurvatureBlocks:
    """Blocks of a matrix of second derivatives.

    - `method`: `"sites"` for all leaves that have rules, `"products"` for none, or
        `"auto"` for those where that is cheaper.
    - `size`: the number of columns that products compute at a time.
    """

    def __init__(
        self,
        curvature: AbstractCurvature,
        requested: RequestedBlocks,
        method: Literal["auto", "sites", "products"],
        size: int | None,
    ):
        self.curvature, self.requested = curvature, requested
        self.method, self.size = method, size
        self._sites = self._choose()
        by_sites = self._sites.requested.leaves if self._sites else ()
        log.debug(
            "Second derivatives: method=%r takes %d of %d arrays by sites.",
            *(method, len(by_sites), len(requested.leaves)),
        )

    @property
    def is_whole(self) -> bool:
        """Whether this is a Hessian of one array, with all columns at once.

        There is nothing to gain by symmetry then: a copy of all entries above the
        diagonal would only come on top.
        """
        if self._sites is not None or not isinstance(self.curvature, LossCurvature):
            return False
        sizes = [x.size for x in self.curvature.leaves]
        return len(sizes) == 1 and (self.size is None or self.size >= sizes[0])

    def sums(
        self, rows: list, weights: Real[Array, " n"] | None
    ) -> list[Inexact[Array, "pairs ..."]]:
        """The blocks of each group of pairs, summed over some examples."""
        sums: list[Array] = []
        rest = self.requested.leaves
        if self._sites is not None:
            sums += self._by_sites(self._sites, rows, weights)
            if self._sites.counts_cancelled:
                sums = self._unless_cancelled(sums, rows, weights)
            rest -= self._sites.requested.leaves
        others = [pair for (pair,) in self.groups[len(sums) :]]
        if others:
            by_products = self._by_products(others, rest, rows, weights, self.size)
            sums += (by_products[pair][None] for pair in others)
        return sums

    def _unless_cancelled(
        self, sums: list[Array], rows: list, weights: Array | None
    ) -> list[Array]:
        """The blocks from sites, or from products if terms cancel for some examples."""
        assert self._sites is not None
        *sums, num_cancelled = sums
        groups, program = self._sites.groups, self._sites.program
        leaves = self._sites.requested.leaves
        total = rows[0].shape[self.curvature.axes[0]] if rows else 1
        kept = num_bytes([program.perturbations, program.operands])
        # The branch takes no more memory than the blocks from sites. A column keeps the
        # tangents of values and of their cotangents.
        most = min(total * self._sites.bytes, platform().factor_bytes)
        size = max(1, most // max(2 * total * kept, 1))
        size = size if self.size is None else min(size, self.size)

        def products() -> list[Array]:
            pairs = [pair for pairs in groups for pair in pairs]
            blocks = self._by_products(pairs, leaves, rows, weights, size)
            return [jnp.stack([blocks[pair] for pair in pairs]) for pairs in groups]

        arrays = [*self.curvature.leaves, *rows]
        return unless_cancelled(num_cancelled[None] > 0, arrays, sums, products)

    @property
    def groups(self) -> list[list[Pair]]:
        """The requested pairs of leaves, in the groups that `sums` uses."""
        groups = [] if self._sites is None else self._sites.groups
        known = {pair for pairs in groups for pair in pairs}
        return [
            *groups,
            *([pair] for pair in self.requested.pairs if pair not in known),
        ]

    def _by_sites(
        self, sites: AbstractSiteMatrix, rows: list, weights: Array | None
    ) -> list[Array]:
        """Computes sums from sites, in blocks of examples whose factors are small."""
        requested, axes = self.requested, self.curvature.axes
        if not axes:
            return sites.sums(rows, axes, weights)
        sums = lambda rows, weights: sites.sums(rows, axes, weights)
        total = rows[0].shape[axes[0]]
        sizes = (requested.num_bytes(x, sites.leaves) for x in requested.pairs)
        most = max(sum(sizes) // 4, platform().factor_bytes)
        size = _even(total, max(1, min(total, most // max(sites.bytes, 1))))
        return accumulated_sums(sums, rows, axes, weights, size)

    def _by_products(
        self,
        pairs: list[Pair],
        columns: set[int],
        rows: list,
        weights: Array | None,
        size: int | None,
    ) -> dict[Pair, Array]:
        products = self.curvature.products(rows, weights, self.curvature.axes, False)
        requested = RequestedBlocks(pairs, self.requested.is_diagonal)
        order, leaves = self._in_order(columns), self.curvature.leaves
        return product_blocks(products, leaves, order, requested, size)

    def _in_order(self, leaves: set[int]) -> list[int]:
        """The leaves in the order in which the function uses them."""
        jaxpr = self.curvature.program.closed.jaxpr
        return sorted(leaves, key=lambda i: first_use(jaxpr, jaxpr.invars[i]))

    def _choose(self) -> AbstractSiteMatrix | None:
        """The leaves that are computed from sites."""
        curvature, num = self.curvature, len(self.curvature.leaves)
        if self.method == "products" or not curvature.allows_sites:
            return None

        def of_sites(program: Program, leaves: set[int]) -> AbstractSiteMatrix:
            requested = self.requested.among(leaves)
            return curvature.of_sites(program, requested, self.method == "auto")

        program, covered = self._program(set(range(num)))
        if not self.requested.among(covered).pairs:
            return None
        if self.method == "auto" and curvature.excludes_sites(covered):
            return None
        sites = of_sites(program, covered)
        if self.method == "sites" or curvature.forms_rest:
            return sites
        counted = _COUNTED if curvature.axes else 1
        products = curvature.products(curvature.program.zeros()[1], None, (), False)
        order = self._in_order(self.requested.leaves)
        columns = {
            leaf: counted * cost
            for leaf, cost in product_costs(products, curvature.leaves, order).items()
        }
        chosen = cheapest(program, covered, sites.estimate(counted), columns)
        if chosen == covered:
            return sites
        if not self.requested.among(chosen).pairs:
            return None
        return of_sites(*self._program(chosen))

    def _program(self, leaves: set[int]) -> tuple[Program, set[int]]:
        """The function with the sites of some leaves, and the leaves that have rules.

        Leaves without a rule are not perturbed, or their Jacobian is formed.
        """
        curvature, num = self.curvature, len(self.curvature.leaves)
        formed: set[int] = set()
        # Gauss-Newton matrices form the Jacobians whose terms may cancel.
        is_of_loss = isinstance(curvature, LossCurvature)
        counts_cancelled = self.method == "auto" and is_of_loss
        is_known = functools.partial(
            is_covered, requested=self.requested, counts_cancelled=counts_cancelled
        )
        while True:
            program = Program(
                curvature.program,
                constant=set(range(num)) - leaves,
                formed=formed,
                num_outputs=curvature.num_outputs,
                order=2,
            )
            covered = {i for i in leaves if i in formed or is_known(program, i)}
            if covered == leaves:
                return program, covered
            if curvature.forms_rest:
                formed |= leaves - covered
            else:
                leaves = covered


def _even(total: int, size: int) -> int:
    """A size without a remainder, if one is at least half as large.

    A remainder would need a program of its own.
    """
    divisors = (i for i in range(size, size // 2, -1) if total % i == 0)
    return next(divisors, size)


filter_hessian = also_decorator("filter_hessian", Hessian)


filter_hessian_diagonal = also_decorator(
    "filter_hessian_diagonal", HessianDiagonal, AbstractHessianDiagonal
)


filter_hessian_blocks = also_decorator("filter_hessian_blocks", HessianBlocks)


filter_ggn = also_decorator("filter_ggn", GGN)


filter_ggn_diagonal = also_decorator(
    "filter_ggn_diagonal", GGNDiagonal, AbstractGGNDiagonal
)


filter_ggn_blocks = also_decorator("filter_ggn_blocks", GGNBlocks)
