"""Matrices of second derivatives of a loss, or of a loss of a model's output.

For a loss of an output, the matrix is a Gauss-Newton matrix: `J^T C J` for each
example, with `C` the Hessian of the loss in the output. It takes one backward pass for
each output. What replaces `C`, such as a product of random vectors, takes fewer.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, Generic, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Inexact, Key, PRNGKeyArray, PyTree, Real, UInt32

from .._base.checks import check_at_least
from .._base.differentiable import (
    Derivative,
    derivative_of_program,
    pushforward,
    without_forward_mode,
    without_reverse_mode,
)
from .._base.dtypes import as_complex, as_real, common_dtype, widened
from .._base.jaxprs import TracedFunction
from .._base.mesh import error_if
from .._base.mistakes import called, warn_user
from .._base.trees import described, safe_zip, shown
from .._batch.derivative import AbstractOverExamples, check_value, Loss
from .._batch.transform import Model, Out, P
from .._sites.trace import Program
from .by_sites import SiteHessian
from .columns import (
    check_mode,
    check_outputs,
    expanded,
    Expansion,
    expansion,
    Gradient,
    hessian_products,
    Linear,
    Mode,
    Products,
    replaced,
    with_both_modes,
)
from .gauss_newton import Curve, SiteGaussNewton
from .pytree import joined, Unravel
from .site_blocks import AbstractSiteMatrix, RequestedBlocks


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

    def product(self, rows: list, weights: Weights, vector: list) -> list[Array]:
        """The product of the matrix of some examples with one vector."""
        products = self.products(rows, weights, self.axes, True)
        everything = list(range(len(self.leaves)))
        return products(self.leaves, everything, everything)(vector)


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
        # The numbers that the key of each example is made from.
        keys = jr.key_data(jr.split(self._typed_key, blocks.total))
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
        self.program = loss.traced(_IF_WHOLE)
        self._checkpoint, self._mode = checkpoint, mode
        self._holomorphic, self.has_aux = loss.holomorphic, loss.has_aux
        self.allows_sites = mode != "rev" and not loss.holomorphic
        self._answers: dict[frozenset[int], str | None] = {}

    def excludes_sites(self, leaves: set[int]) -> bool:
        # Whatever depends on a leaf with sites depends on their outputs.
        return self._without_forward_mode(leaves) is not None

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
        is_reverse = self._mode == "rev"
        if not is_reverse:
            reason = self._without_forward_mode(range(len(self.leaves)))
            is_reverse = reason is not None
            check_mode(self._mode, "the gradient of `fun`", reason)
            if reason is not None:
                warn_user(
                    "The gradient has no forward-mode derivative, so it is "
                    "differentiated in reverse mode, which is slower and takes more "
                    "memory. Set `mode='rev'` to do so without a warning. "
                    f"({reason})"
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
            return weighted_sum(self.program.many(leaves, rows)[0], weights)

        value = jax.checkpoint(value) if self._checkpoint else value

        def gradient(leaves: list, which: Sequence[int]) -> list:
            changed = lambda values: value(replaced(leaves, which, values))
            point = [leaves[i] for i in which]
            return jax.grad(changed, holomorphic=self._holomorphic)(point)

        return gradient

    def _without_forward_mode(self, leaves: Iterable[int]) -> str | None:
        """The reason why the gradient has no forward mode in some leaves, or None."""
        key = frozenset(leaves)
        if key not in self._answers:
            which = sorted(key)
            point = [self.leaves[i] for i in which]

            def ask(rows: list) -> str | None:
                gradient = self._gradient(rows)
                changed = lambda values: replaced(self.leaves, which, values)
                return without_forward_mode(
                    lambda values: gradient(changed(values), which), point
                )

            self._answers[key] = self.program.at_example(ask)
        return self._answers[key]


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
        self._traced = model.traced(if_whole, run)
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
            return without_reverse_mode(loss, outs) is None

        return jax.grad if self._traced.at_example(ask) else jax.jacfwd

    @functools.cached_property
    def _is_reverse(self) -> bool:
        """Whether the loss's gradient in the outputs lacks forward mode."""

        def ask(rows: list) -> bool:
            gradient = self._gradient(lambda outs: self._loss_of(outs, rows))
            outs = self._traced.one(self.leaves, rows)
            return without_forward_mode(gradient, outs) is not None

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
            value = lambda outs: weighted_sum(_over(one, axes, rows, outs), weights)
            if self._is_reverse:  # A Hessian is its own transpose.
                pull = jax.vjp(jax.grad(value), outs)[1]
                return lambda seeds: pull(seeds)[0]
            return jax.linearize(jax.grad(value), outs)[1]
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
    if kwargs:
        raise ValueError(
            "`sampler` draws the label, which replaces the last positional argument; "
            f"got the keyword arguments {(*kwargs,)}, one of which may be it. Pass all "
            "arguments by position."
        )
    if not args:
        raise ValueError(
            "`sampler` draws the label, which replaces the last positional argument; "
            "got a call without arguments after the first."
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


def weighted_sum(values: Array, weights: Array | None) -> Array:
    if weights is not None:
        values = values * weights.astype(values.dtype)
    return jnp.sum(values)
