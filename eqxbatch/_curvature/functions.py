"""The functions whose second derivatives a matrix has.

A matrix of second derivatives is that of a loss, or of a loss of a model's output. For
a loss of an output, it is a Gauss-Newton matrix: `J^T C J` for each example, with `C`
the Hessian of the loss in the output. It takes one backward pass for each output. What
replaces `C`, such as a product of random vectors, takes fewer.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jaxtyping import Array, Inexact, PyTree, Real

from .._base.checks import called, warn_user
from .._base.dtypes import as_complex, as_real, common_dtype
from .._base.modes import (
    Derivative,
    derivative_of_program,
    pushforward,
    without_forward_mode,
    without_reverse_mode,
)
from .._base.traced_function import TracedFunction
from .._base.trees import safe_zip
from .._batch.arguments import RowArrays
from .._batch.derivative import AbstractOverExamples
from .._batch.loss import check_outputs, check_value, Loss
from .._batch.rows import Rows
from .._sites.program import Program, Seeds
from .by_sites import AbstractSiteMatrix
from .columns import (
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
from .fisher import AbstractFisher, drawn_labels, root
from .ggn_by_sites import SiteGaussNewton
from .hessian_by_sites import SiteHessian
from .jacobian import check_mode
from .pytree import joined, RequestedBlocks, Unravel


_T = TypeVar("_T")


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

    def aux(self, rows: RowArrays) -> PyTree:
        """The auxiliary output of the function for some examples, if it has one."""
        if not self.has_aux:
            return None
        # The output has the arrays of values and aux, of which the latter are wanted.
        run = self.program.many if self.axes else self.program.one
        return self.program.output(run(self.leaves, rows))[1]

    @abc.abstractmethod
    def products(self, rows: Rows, *, is_single: bool = False) -> Products:
        """Products with the matrix of some examples, or of a single one.

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
        # What has forward mode in all leaves has it in some: then one answer does for
        # sites and for products. Whatever depends on a leaf with sites depends on their
        # outputs.
        every = range(len(self.leaves))
        return all(self._without_forward(x) is not None for x in (every, leaves))

    def _without_forward(self, leaves: Iterable[int]) -> str | None:
        """Why the gradient has no forward mode in some leaves; None if it has."""
        key = frozenset(leaves)
        if key not in self._answers:
            self._answers[key] = self._asked(without_forward_mode, sorted(key))
        return self._answers[key]

    def of_sites(
        self, program: Program, requested: RequestedBlocks, counts_cancelled: bool
    ) -> AbstractSiteMatrix:
        return SiteHessian(
            program,
            requested,
            checkpoint=self._checkpoint,
            counts_cancelled=counts_cancelled,
        )

    def products(self, rows: Rows, *, is_single: bool = False) -> Products:
        reason = self._without_mode
        is_reverse = self._mode == "rev" or reason is not None
        if reason is not None:
            warn_user(
                "The gradient has no forward-mode derivative, so it is "
                "differentiated in reverse mode, which is slower and takes more "
                f"memory. Set `mode='rev'` to do so without a warning. ({reason})"
            )
        gradient = self._gradient(rows)
        return hessian_products(gradient, is_reverse=is_reverse, is_single=is_single)

    def _gradient(self, rows: Rows) -> Gradient:
        """The gradient of the weighted sum of some examples, or of one."""

        def value(leaves: list[Array]) -> Array:
            # There is one value without a batch, and one for each example with it.
            if not rows.axes:
                return self.program.one(leaves, rows.arrays)[0]
            return total_loss(self.program.many(leaves, rows.arrays)[0], rows.weights)

        value = jax.checkpoint(value) if self._checkpoint else value

        def gradient(leaves: list[Array], which: Sequence[int]) -> list:
            changed = lambda values: value(replaced(leaves, which, values))
            point = [leaves[i] for i in which]
            return jax.grad(changed, holomorphic=self._holomorphic)(point)

        return gradient

    @functools.cached_property
    def _without_mode(self) -> str | None:
        """The reason why the gradient lacks the mode that is asked for, or None.

        Raises `TypeError` if it lacks both modes, or the one that is chosen.
        """
        every = range(len(self.leaves))
        if self._mode == "rev":
            reason = self._asked(without_reverse_mode, every)
        else:
            reason = self._without_forward(every)
        if reason is not None:
            settings = self._mode, "the gradient of `fun`", reason
            self._asked(functools.partial(check_mode, *settings), every)
        return reason

    def _asked(
        self, ask: Callable[[Linear, list[Array]], _T], which: Sequence[int]
    ) -> _T:
        """The untraced answer of `ask(gradient, point)`, about these leaves."""
        # A mode may be missing for some leaves only, so no others are moved.
        point = [self.leaves[i] for i in which]

        def of_example(rows: RowArrays) -> _T:
            # Derivative modes are those of the function of one example, which is what
            # is mapped.
            gradient = self._gradient(Rows(rows, (), 1))
            changed = lambda values: replaced(self.leaves, which, values)
            return ask(lambda values: gradient(changed(values), which), point)

        return self.program.at_example(of_example)


class GaussNewtonCurvature(AbstractCurvature):
    """The generalised Gauss-Newton matrix of a `loss` of a function's output.

    `model` is the function and a call of it. `loss(out, *args)` is a scalar, where
    `args` are all arguments of the call except the first. `fisher` has the settings of
    what replaces the Hessian of the loss; None for this Hessian.
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
        # From here on, None stands for the Hessian of the loss itself.
        is_exact = fisher is None or fisher.fisher == "exact"
        self._fisher = None if is_exact else fisher
        self.derivative: Derivative = derivative_of_program("`fun`", self._traced)
        self.forms_rest = self.derivative in ("rows", "columns")
        # Sites need reverse mode only.
        self.program = self._traced
        # A function without reverse mode is replaced by its expansion, which has it.
        if self.derivative == "columns":
            self.program = with_both_modes(self._traced, "columns")

    @functools.cached_property
    def _gradient(self) -> Callable[[Callable[..., Array]], Callable[..., list]]:
        """`jax.grad` for functions of outputs, in the mode that the loss has."""

        def ask(rows: RowArrays) -> bool:
            loss = lambda outs: self._loss_of(outs, rows)
            outs = self._traced.one(self.leaves, rows)
            reason = without_reverse_mode(loss, outs)
            check_mode("auto", "`loss`", reason, loss, outs)
            return reason is None

        return jax.grad if self._traced.at_example(ask) else jax.jacfwd

    @functools.cached_property
    def _is_reverse(self) -> bool:
        """Whether the loss's gradient in the outputs lacks forward mode."""

        def ask(rows: RowArrays) -> bool:
            gradient = self._gradient(lambda outs: self._loss_of(outs, rows))
            outs = self._traced.one(self.leaves, rows)
            reason = without_forward_mode(gradient, outs)
            check_mode("auto", "the gradient of `loss`", reason, gradient, outs)
            return reason is not None

        return self._traced.at_example(ask)

    @property
    def formed(self) -> Sequence[int]:
        """The leaves with a Jacobian of columns in place of sites."""
        return range(len(self.leaves)) if self.derivative == "columns" else ()

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

    def of_outputs(self, outs: list[Array], example: Rows) -> Seeds:
        """The vectors to pull back, and the curvature between them."""
        # What replaces the Hessian comes as vectors: their outer products sum up to it.
        if self._fisher is not None:
            return Seeds(self._seeds(self._fisher, outs, example))
        unravel = Unravel(outs)
        # One direction for each entry of the outputs, and the Hessian between them.
        every = jnp.eye(sum(unravel.sizes), dtype=unravel.dtype)
        return Seeds(unravel(every), self._curve(outs, example.arrays))

    def products(self, rows: Rows, *, is_single: bool = False) -> Products:
        del is_single
        outputs = self.outputs(rows)

        def products(leaves: list[Array], group: list[int], of: list[int]) -> Linear:
            """`J^T C J`, for the Jacobian of outputs and a matrix for them."""
            changed = lambda values: outputs(replaced(leaves, group, values))
            point = [leaves[i] for i in group]
            # The Jacobian's columns are needed for one group of leaves, its rows for
            # another.
            outs, push = pushforward(changed, point, self.derivative)
            curve = self.curved(outs, rows)
            changed = lambda values: outputs(replaced(leaves, of, values))
            pull = jax.vjp(changed, [leaves[i] for i in of])[1]
            return lambda seeds: pull(curve(push(seeds)))[0]

        return products

    def outputs(self, rows: Rows) -> Linear:
        """The outputs of some examples as a function of all leaves."""
        point, run, rows = self.leaves, self._traced.one, rows.unweighted()
        # With both modes, or with the transpose of reverse mode, products need no
        # Jacobian.
        if not self.forms_rest:
            run = jax.checkpoint(run) if self._checkpoint else run
            of_one = lambda leaves: lambda example: run(leaves, example.arrays)
            return lambda leaves: rows.of_each(of_one(leaves))

        def expanded_at(example: Rows) -> Expansion:
            outputs = lambda leaves: run(leaves, example.arrays)
            return expansion(outputs, point, self.derivative)

        # The Jacobian is computed once for all products.
        expansions = rows.of_each(expanded_at)
        expand = lambda leaves: lambda _, known: expanded(known, point, leaves)
        return lambda leaves: rows.of_each(expand(leaves), expansions)

    def curved(self, outs: list[Array], rows: Rows) -> Linear:
        """The product with the Hessian of all losses, or with what replaces it."""
        # The sum of all losses has the Hessian of each on its diagonal, and JAX
        # differentiates it without forming any.
        if self._fisher is None and self._gradient is jax.grad:
            one = lambda example, outs: self._loss_of(outs, example.arrays)
            value = lambda outs: jnp.sum(rows.unweighted().of_each(one, outs))
            if self._is_reverse:  # A Hessian is its own transpose.
                pull = jax.vjp(jax.grad(value), outs)[1]
                curve = lambda seeds: pull(seeds)[0]
            else:
                curve = jax.linearize(jax.grad(value), outs)[1]
            # The loss may have a backward pass that is not linear.
            return lambda seeds: _times_weights(curve(seeds), rows.weights)
        # Otherwise, the curvature of each example is an array: `sum_kl s_k C_kl s_l^T`.
        of_one = lambda example, outs: self.of_outputs(outs, example)
        of_outputs = rows.unweighted().of_each(of_one, outs)

        def product(example: Rows, seeds: list[Array], of_outputs: Seeds) -> list:
            (vectors, curve), weight = of_outputs, example.weights
            dtype = common_dtype(*(seed.dtype for seed in seeds))
            parts = [
                jnp.tensordot(x, seed, seed.ndim).astype(dtype)
                for x, seed in safe_zip(vectors, seeds)
            ]
            # `parts` are the products of each vector with the direction, for each array
            # of outputs.
            along = functools.reduce(jnp.add, parts)
            along = along if curve is None else curve @ along
            along = along if weight is None else weight.astype(along.dtype) * along
            return [jnp.tensordot(along.astype(x.dtype), x, 1) for x in vectors]

        return lambda seeds: rows.of_each(product, seeds, of_outputs)

    def _seeds(
        self, fisher: AbstractFisher, outs: list[Array], example: Rows
    ) -> list[Inexact[Array, "samples *out"]]:
        """For each output of an example, vectors whose outer products give the matrix.

        For random vectors `s` with covariance `C`, the mean of `(J^T s) (J^T s)^T` is
        `J^T C J`.
        """
        rows = example.arrays
        loss = lambda outs, key=None: self._loss_of(outs, rows, key)
        gradient, outs = self._gradient(loss), lax.stop_gradient(outs)
        # The gradient for the given label is one vector.
        if fisher.fisher == "empirical":
            vectors = [x[None] for x in gradient(outs)]
        elif fisher.sampler is None:
            # Terms that cancel where a classifier is confident do not cancel at zero.
            terms = jnp.abs(self._curve([jnp.zeros_like(x) for x in outs], rows))
            terms = jnp.where(jnp.isfinite(terms), terms, 0)
            factor = root(self._curve(outs, rows), terms)
            # Random signs have the identity as their covariance, so their products with
            # the root have the Hessian.
            signs = lambda key: jr.rademacher(key, factor.shape[:1], factor.dtype)
            keys = fisher.keys_of_samples(example)
            vectors = Unravel(outs)(jax.vmap(signs)(keys) @ factor)
        else:
            # The gradients for labels that are drawn from the model.
            keys = fisher.keys_of_samples(example)
            vectors = jax.vmap(lambda key: gradient(outs, key))(keys)
        # The matrix has the mean over samples, and each vector comes in twice.
        scale = fisher.num_samples**-0.5
        return [lax.stop_gradient(x * scale) for x in vectors]

    def _loss_of(
        self, outs: list[Array], rows: RowArrays, key: Array | None = None
    ) -> Array:
        """The loss of an example, or of a label that is drawn for it with a key."""
        (_, *rest), kwargs = self._model.batch.arguments(rows)
        # `loss` takes what `fun` returned, not its real and imaginary parts.
        out = as_complex(self._traced.output(outs))
        if key is not None and self._fisher is not None and self._fisher.sampler:
            draw = functools.partial(self._fisher.sampler, key)
            rest = [*rest[:-1], drawn_labels(draw, out, rest, kwargs)]
        of = "one example" if self._model.batch.arrays else None
        value = called(self._loss, (out, *rest), kwargs, _LOSS, of)
        return check_value(value, what="loss")

    def _curve(
        self, outs: list[Array], rows: RowArrays
    ) -> Inexact[Array, "outputs outputs"]:
        unravel = Unravel(outs)
        flat = joined(outs, unravel.dtype)
        value = lambda flat: self._loss_of(unravel(flat), rows)
        # The Hessian of the loss as a matrix, for the entries of all outputs in one
        # vector.
        jacobian = jax.jacrev if self._is_reverse else jax.jacfwd
        return jacobian(self._gradient(value))(flat)


_LOSS = "`loss`, whose arguments are the output of `fun` and all but its first,"


def _times_weights(outs: list[Array], weights: Real[Array, " n"] | None) -> list:
    """Arrays of examples along axis 0, times the weights of these."""
    if weights is None:
        return outs
    expanded = lambda x: jnp.expand_dims(weights.astype(x.dtype), range(1, x.ndim))
    return [x * expanded(x) for x in outs]


def total_loss(values: Array, weights: Array | None) -> Array:
    if weights is not None:
        values = values * weights.astype(values.dtype)
    return jnp.sum(values)
