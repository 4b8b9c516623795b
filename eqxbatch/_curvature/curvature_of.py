"""The functions of second-order transforms: a loss, or a loss of a model's output."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Inexact, PyTree, Real

from .._base.dtypes import as_complex, as_real, common_dtype
from .._base.jaxprs import at_example, PerExample
from .._base.mesh import vary_as
from .._base.mistakes import warn_user
from .._base.modes import (
    Derivative,
    derivative_of_program,
    without_forward_mode,
    without_reverse_mode,
)
from .._base.trees import described
from .._batch.example_or_batch import told_apart
from .._batch.objective import check_value, Example, Examples, Loss
from .._batch.slots import is_struct
from .._sites.trace import Program
from .by_one_mode import expanded, Expansion, expansion, with_both_modes
from .by_products import (
    gauss_newton_products,
    Gradient,
    hessian_products,
    Linear,
    Mode,
    Products,
    replaced,
)
from .by_sites import SiteHessian
from .fisher import Fisher, TYPE_2
from .gauss_newton import Curve, SiteGaussNewton
from .pytree import Unravel
from .site_blocks import Wanted


class AbstractCurvature(abc.ABC):
    """A sum over examples that has a matrix of second derivatives.

    - `program`: a program of the differentiated leaves and of one example.
    - `num_outputs`: the number of differentiated outputs, which come first.
    - `allows_sites`: whether sites may be used at all.
    - `forms_rest`: whether leaves without a rule are left to sites, which form their
        Jacobian, because products would form it, too.
    """

    program: PerExample
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
        self, program: Program, wanted: Wanted
    ) -> SiteHessian | SiteGaussNewton:
        """The requested blocks, from sites."""

    @abc.abstractmethod
    def aux(self, rows: list) -> PyTree:
        """The auxiliary output of the function for some examples."""

    @abc.abstractmethod
    def products(self, rows: list, weights: Real[Array, " n"] | None) -> Products:
        """Products with the matrix of some examples."""

    @abc.abstractmethod
    def product(
        self, rows: list, weights: Real[Array, " n"] | None, vector: list
    ) -> list[Array]:
        """The product of the matrix of some examples with one vector."""

    def _by_linear(self, products: Products, vector: list) -> list[Array]:
        everything = list(range(len(self.leaves)))
        return products(self.leaves, everything, everything)(vector)

    @abc.abstractmethod
    def products_of_one(self, rows: list) -> Products:
        """Products with the matrix of one example."""


IF_WHOLE = (
    "Give the function of one example; or leave out `in_axes`, if it is one function "
    "of all its arguments."
)


class LossCurvature(AbstractCurvature):
    """The Hessian of a loss."""

    num_outputs = 1
    forms_rest = False

    def __init__(self, loss: Loss, mode: Mode, checkpoint: bool):
        self.example = Example(loss, IF_WHOLE)
        self.program = self.example.program
        self._mode: Mode = mode
        self._checkpoint = checkpoint
        self._holomorphic = loss.holomorphic
        self.allows_sites = mode != "rev" and not loss.holomorphic
        self._batch = loss.batch
        self._answers: dict[frozenset[int], str | None] = {}

    def excludes_sites(self, leaves: set[int]) -> bool:
        # Whatever depends on a leaf with sites depends on their outputs.
        return self._without_forward_mode(leaves) is not None

    def of_sites(self, program: Program, wanted: Wanted) -> SiteHessian:
        return SiteHessian(program, self.leaves, wanted, checkpoint=self._checkpoint)

    def aux(self, rows: list) -> PyTree:
        if not self.example.has_aux:
            return None
        run = self.program.many if self.axes else self.program.one
        return self.example.outputs(run(self.leaves, rows))["aux"]

    def products(self, rows: list, weights: Array | None) -> Products:
        return self._products_of(self._value(rows, weights))

    def products_of_one(self, rows: list) -> Products:
        return self._products_of(self._value_of_one(rows))

    def product(self, rows: list, weights: Array | None, vector: list) -> list[Array]:
        if self._is_reverse():
            return self._by_linear(self.products(rows, weights), vector)
        # A single product needs no linear function that can be run again.
        gradient = self._gradient_of(self._value(rows, weights))
        at = lambda leaves: gradient(leaves, range(len(leaves)))
        return jax.jvp(at, (self.leaves,), (vector,))[1]

    def _products_of(self, value: Callable[[list], Array]) -> Products:
        gradient = self._gradient_of(value)
        return hessian_products(gradient, is_reverse=self._is_reverse())

    def _is_reverse(self) -> bool:
        """Whether the gradient is differentiated in reverse mode as well."""
        is_reverse = self._mode == "rev"
        if self._mode == "auto":
            reason = self._without_forward_mode(range(len(self.leaves)))
            is_reverse = reason is not None
            if reason is not None:
                warn_user(
                    "The gradient has no forward-mode derivative, so it is "
                    "differentiated in reverse mode, which is slower and takes more "
                    "memory. Set `mode='rev'` to do so without a warning. "
                    f"({reason})"
                )
        return is_reverse

    def _gradient_of(self, value: Callable[[list], Array]) -> Gradient:
        def gradient(leaves: list, which: Sequence[int]) -> list:
            at = lambda some: value(replaced(leaves, which, some))
            point = [leaves[i] for i in which]
            return jax.grad(at, holomorphic=self._holomorphic)(point)

        return gradient

    def _without_forward_mode(self, leaves: Iterable[int]) -> str | None:
        """The reason why the gradient has no forward mode in some leaves, or None."""
        key = frozenset(leaves)
        if key not in self._answers:
            which = sorted(key)
            point = [self.leaves[i] for i in which]

            def ask(rows: list) -> str | None:
                gradient = self._gradient_of(self._value_of_one(rows))
                at = lambda some: gradient(replaced(self.leaves, which, some), which)
                return without_forward_mode(at, point)

            self._answers[key] = at_example(ask, self._batch.arrays, self.axes)
        return self._answers[key]

    def _value(self, rows: list, weights: Array | None) -> Callable[[list], Array]:
        if not self.axes:
            return self._value_of_one(rows)

        def value(leaves: list) -> Array:
            return weighted_sum(self.program.many(leaves, rows)[0], weights)

        return jax.checkpoint(value) if self._checkpoint else value

    def _value_of_one(self, rows: list) -> Callable[[list], Array]:
        value = lambda leaves: self.program.one(leaves, rows)[0]
        return jax.checkpoint(value) if self._checkpoint else value


class GaussNewtonCurvature(AbstractCurvature):
    """The generalised Gauss-Newton matrix of a `loss` of a function's output.

    `model` is the function and a call of it. `loss(out, *args)` is a scalar, where
    `args` are all arguments of the call except the first. `fisher` says what replaces
    the Hessian of the loss. If it has a key, the last of the rows are keys.
    """

    allows_sites = True

    def __init__(
        self,
        model: Loss,
        loss: Callable,
        checkpoint: bool,
        fisher: Fisher,
        if_whole: str,
    ):
        # Complex outputs count as their real and imaginary parts.
        run = lambda diff, rows: as_real(model.outputs(diff, rows)[0])
        batch = model.batch
        with told_apart(functools.partial(run, model.diff), batch, "example", if_whole):
            self._own = PerExample(run, model.diff, batch.arrays, batch.axes)
        self._structs = check_outputs(self._own.out)
        self.num_outputs = len(self._structs)
        self._model, self._loss, self._checkpoint = model, loss, checkpoint
        self._fisher = fisher
        self._derivative: Derivative = derivative_of_program(
            "`fun`", self._own, batch.arrays
        )
        self.forms_rest = self._derivative in ("rows", "columns")
        # Sites need reverse mode only.
        self.program = self._own
        if self._derivative == "columns":
            self.program = with_both_modes(self._own, batch.arrays, "columns")

    @functools.cached_property
    def _gradient(self) -> Callable[[Callable[..., Array]], Callable[..., list]]:
        """`jax.grad` for functions of outputs, in the mode that the loss has."""

        def ask(rows: list) -> bool:
            loss = lambda outs: self._loss_of(outs, rows)
            return without_reverse_mode(loss, self._own.one(self.leaves, rows)) is None

        has_reverse = at_example(ask, self._model.batch.arrays, self.axes)
        return jax.grad if has_reverse else jax.jacfwd

    @functools.cached_property
    def _is_reverse(self) -> bool:
        """Whether the loss's gradient in the outputs lacks forward mode."""

        def ask(rows: list) -> bool:
            gradient = self._gradient(lambda outs: self._loss_of(outs, rows))
            outs = self._own.one(self.leaves, rows)
            return without_forward_mode(gradient, outs) is not None

        return at_example(ask, self._model.batch.arrays, self.axes)

    @property
    def formed(self) -> Sequence[int]:
        """The leaves with a Jacobian of columns in place of sites."""
        return range(len(self.leaves)) if self._derivative == "columns" else ()

    def excludes_sites(self, leaves: set[int]) -> bool:
        return False

    def of_sites(self, program: Program, wanted: Wanted) -> SiteGaussNewton:
        return SiteGaussNewton(
            program,
            self.leaves,
            wanted,
            self.of_outputs,
            num_outputs=self.num_outputs,
            num_vectors=self.num_vectors,
            has_curve=self._fisher.fisher == "type-2",
        )

    @property
    def num_vectors(self) -> int:
        """The number of vectors for each example."""
        if self._fisher.fisher == "type-2":
            return sum(x.size for x in self._structs)
        return self._fisher.num_samples

    def of_outputs(self, outs: list, rows: list) -> tuple[list, Array | None]:
        """The vectors to pull back, and the curvature between them."""
        if self._fisher.fisher != "type-2":
            return self._seeds(outs, rows), None
        unravel = Unravel(outs)
        every = jnp.eye(sum(unravel.sizes), dtype=unravel.dtype)
        return unravel(every), self._curve(outs, rows)

    def aux(self, rows: list) -> PyTree:
        return None

    def products(self, rows: list, weights: Array | None) -> Products:
        return self._products(rows, weights, self.axes)

    def product(self, rows: list, weights: Array | None, vector: list) -> list[Array]:
        return self._by_linear(self.products(rows, weights), vector)

    def products_of_one(self, rows: list) -> Products:
        return self._products(rows, None, [])

    def _products(
        self, rows: list, weights: Array | None, axes: Sequence[int]
    ) -> Products:
        outputs = self._outputs(rows, axes)
        curvature = lambda outs: self._curvature(outs, rows, weights, axes)
        return gauss_newton_products(outputs, curvature, self._derivative)

    def _outputs(self, rows: list, axes: Sequence[int]) -> Linear:
        """The outputs of some examples as a function of all leaves."""
        point, run = self.leaves, self._own.one
        if not self.forms_rest:
            run = jax.checkpoint(run) if self._checkpoint else run
            return lambda leaves: _over(lambda rows: run(leaves, rows), axes, rows)

        def of_one(rows: list) -> Expansion:
            return expansion(lambda leaves: run(leaves, rows), point, self._derivative)

        # The Jacobian is computed once for all products.
        found = _over(of_one, axes, rows)
        expand = lambda leaves: lambda _, found: expanded(found, point, leaves)
        return lambda leaves: _over(expand(leaves), axes, rows, found)

    def _curvature(
        self, outs: list, rows: list, weights: Array | None, axes: Sequence[int]
    ) -> Linear:
        """The product with the Hessian of all losses, or with what replaces it."""
        if self._fisher.fisher == "type-2" and self._gradient is jax.grad:
            one = lambda rows, outs: self._loss_of(outs, rows)
            value = lambda outs: weighted_sum(_over(one, axes, rows, outs), weights)
            if self._is_reverse:  # A Hessian is its own transpose.
                pull = jax.vjp(jax.grad(value), outs)[1]
                return lambda seeds: pull(seeds)[0]
            return jax.linearize(jax.grad(value), outs)[1]
        vectors = _over(
            lambda rows, outs: self.of_outputs(outs, rows), axes, rows, outs
        )

        def product(_: list, own: tuple[list, list, Curve, Array | None]) -> list:
            seeds, vectors, curve, weight = own
            dtype = common_dtype(*(seed.dtype for seed in seeds))
            parts = [
                jnp.tensordot(x, seed, seed.ndim).astype(dtype)
                for x, seed in zip(vectors, seeds, strict=True)
            ]
            along = functools.reduce(jnp.add, parts)
            along = along if curve is None else curve @ along
            along = along if weight is None else weight.astype(along.dtype) * along
            return [jnp.tensordot(along.astype(x.dtype), x, 1) for x in vectors]

        return lambda seeds: _over(product, axes, rows, (seeds, *vectors, weights))

    def _seeds(self, outs: list, rows: list) -> list[Array]:
        row = rows[-1] if self._fisher.key is not None and self.axes else None
        loss = lambda outs, key=None: self._loss_of(outs, rows, key)
        curve = lambda outs: self._curve(outs, rows)
        return self._fisher.seeds(self._gradient(loss), curve, outs, row)

    def _loss_of(self, outs: list, rows: list, key: Array | None = None) -> Array:
        """The loss of an example, or of a label drawn for it."""
        (_, *rest), kwargs = self._model.batch.arguments(rows)
        out = as_complex(self._own.output(outs))
        if key is not None:
            rest = [*rest[:-1], self._drawn(key, out, rest, kwargs)]
        return check_value(self._loss(out, *rest, **kwargs), what="loss")

    def _drawn(self, key: Array, out: PyTree, rest: list, kwargs: dict) -> PyTree:
        """Replaces the last argument by a drawn label."""
        if kwargs:
            raise ValueError(
                "`sampler` draws the label, which replaces the last positional "
                f"argument; got the keyword arguments {(*kwargs,)}, one of which may "
                "be it. Give all arguments by position."
            )
        if not rest:
            raise ValueError(
                "`sampler` draws the label, which replaces the last positional "
                "argument; got a call without arguments after the first."
            )
        sampler = self._fisher.sampler
        assert sampler is not None
        label = lax.stop_gradient(sampler(key, out))
        shapes = [jax.eval_shape(lambda x: x, x) for x in (label, rest[-1])]
        found, expected = (
            (jtu.tree_structure(tree), [x.shape for x in jtu.tree_leaves(tree)])
            for tree in shapes
        )
        if found != expected:
            raise ValueError(
                "`sampler` must return a label of the structure and shapes of the last "
                f"argument by position; got {described(label)}, where that is "
                f"{described(rest[-1])}."
            )
        return label

    def _curve(self, outs: list, rows: list) -> Inexact[Array, "outputs outputs"]:
        unravel = Unravel(outs)
        flat = jnp.concatenate([x.ravel().astype(unravel.dtype) for x in outs])
        value = lambda flat: self._loss_of(unravel(flat), rows)
        jacobian = jax.jacrev if self._is_reverse else jax.jacfwd
        return jacobian(self._gradient(value))(flat)


def make_curvature(
    loss: Loss,
    of_output: Callable | None,
    mode: Mode,
    checkpoint: bool,
    fisher: Fisher = TYPE_2,
    if_whole: str = IF_WHOLE,
) -> LossCurvature | GaussNewtonCurvature:
    """The Hessian of a loss or, with a `loss` of outputs, a Gauss-Newton matrix."""
    # Inside `jax.shard_map`, JAX sums a derivative over devices if the parameters do
    # not vary over them. Making them vary delays this sum until the end.
    local = vary_as(loss.batch.arrays, loss.diff)
    loss = dataclasses.replace(loss, diff=local)
    if of_output is None:
        return LossCurvature(loss, mode, checkpoint)
    return GaussNewtonCurvature(loss, of_output, checkpoint, fisher, if_whole)


def with_keys(examples: Examples, fisher: Fisher) -> Examples:
    """Appends keys as the last of the rows if anything is drawn at random."""
    batch, blocks = examples.batch, examples.blocks
    keys = None if blocks is None else fisher.rows(blocks.total)
    if keys is None:
        return examples
    batch = dataclasses.replace(
        batch,
        arrays=[*batch.arrays, keys],
        axes=(*batch.axes, 0),
        names=(*batch.names, "`key`"),
    )
    return dataclasses.replace(examples, batch=batch)


def check_loss(loss: Any) -> None:
    """Raises `TypeError` if `loss` is not a function."""
    if not callable(loss):
        raise TypeError(
            "`loss` must be a function of what `fun` returns and of the same other "
            f"arguments; got {described(loss)}. Give settings by keyword."
        )


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


def check_outputs(out: PyTree) -> list[jax.ShapeDtypeStruct]:
    """The arrays of an output; raises `ValueError` for anything else in it."""
    found = []
    for path, x in jtu.tree_leaves_with_path(out):
        if not is_struct(x) or not jnp.issubdtype(x.dtype, jnp.inexact):
            got = f"dtype {x.dtype}" if is_struct(x) else f"{x!r}"
            raise ValueError(
                "`fun` must return arrays of an inexact dtype, as only these have a "
                f"derivative; got {got} for output{jtu.keystr(path)}. Return only "
                "what is to be differentiated."
            )
        found.append(x)
    if not found:
        raise ValueError("`fun` must return at least one array; got none.")
    return found
