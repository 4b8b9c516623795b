"""Matrices of second derivatives of a loss, or of a loss of a model's output.

`CurvatureBlocks` computes their blocks, with the cheaper method for each leaf.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Inexact, PyTree, Real

from .._base.cpu import unstack
from .._base.differentiable import (
    Derivative,
    derivative_of_program,
    without_forward_mode,
    without_reverse_mode,
)
from .._base.dtypes import as_complex, as_real, common_dtype
from .._base.jaxprs import at_example, first_use, TracedFunction
from .._base.mesh import full_varying_as, vary_as
from .._base.mistakes import warn_user
from .._base.trees import described, log
from .._batch.batch import explained_failure
from .._batch.derivative import AbstractOverExamples, check_value, Loss, TracedLoss
from .._batch.loop import accumulated_sums
from .._batch.slots import is_struct
from .._sites.cancellation import unless_cancelled
from .._sites.trace import Program
from .by_one_mode import expanded, Expansion, expansion, with_both_modes
from .by_products import (
    gauss_newton_products,
    Gradient,
    hessian_products,
    Linear,
    Mode,
    ProductBlocks,
    Products,
    replaced,
)
from .by_sites import cheapest, is_covered, SiteHessian
from .fisher import AbstractFisher
from .gauss_newton import Curve, SiteGaussNewton
from .pytree import Unravel
from .site_blocks import AbstractSiteMatrix, Pair, RequestedBlocks


class AbstractCurvature(abc.ABC):
    """A sum over examples that has a matrix of second derivatives.

    - `program`: a program of the differentiated leaves and of one example.
    - `num_outputs`: the number of differentiated outputs, which come first.
    - `allows_sites`: whether sites may be used at all.
    - `forms_rest`: whether leaves without a rule are left to sites, which form their
        Jacobian, because products would form it, too.
    """

    program: TracedFunction
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


_IF_WHOLE = (
    "Give the function of one example; or leave out `in_axes`, if it is one function "
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
    mode: Mode = "auto"

    def curvature(self, fun: Loss) -> AbstractCurvature:
        return LossCurvature(fun, self.mode, self.checkpoint)


class LossCurvature(AbstractCurvature):
    """The Hessian of a loss."""

    num_outputs = 1
    forms_rest = False

    def __init__(self, loss: Loss, mode: Mode = "auto", checkpoint: bool = False):
        loss = _varying(loss)
        self.example = TracedLoss(loss, _IF_WHOLE)
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

    def of_sites(
        self, program: Program, requested: RequestedBlocks, counts_cancelled: bool
    ) -> AbstractSiteMatrix:
        return SiteHessian(
            program,
            self.leaves,
            requested,
            checkpoint=self._checkpoint,
            counts_cancelled=counts_cancelled,
        )

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
        whole = lambda leaves: gradient(leaves, range(len(leaves)))
        return jax.jvp(whole, (self.leaves,), (vector,))[1]

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
                gradient = self._gradient_of(self._value_of_one(rows))
                changed = lambda values: replaced(self.leaves, which, values)
                return without_forward_mode(
                    lambda values: gradient(changed(values), which), point
                )

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
        model = _varying(model)
        # Complex outputs count as their real and imaginary parts.
        run = lambda diff, rows: as_real(model.outputs(diff, rows)[0])
        batch = model.batch
        with explained_failure(
            functools.partial(run, model.diff), batch, "example", if_whole
        ):
            self._traced = TracedFunction(run, model.diff, batch.arrays, batch.axes)
        self._structs = check_outputs(self._traced.out)
        self.num_outputs = len(self._structs)
        self._model, self._loss, self._checkpoint = model, loss, checkpoint
        is_exact = fisher is None or fisher.fisher == "type-2"
        self._fisher = None if is_exact else fisher
        self._derivative: Derivative = derivative_of_program(
            "`fun`", self._traced, batch.arrays
        )
        self.forms_rest = self._derivative in ("rows", "columns")
        # Sites need reverse mode only.
        self.program = self._traced
        if self._derivative == "columns":
            self.program = with_both_modes(self._traced, batch.arrays, "columns")

    @functools.cached_property
    def _gradient(self) -> Callable[[Callable[..., Array]], Callable[..., list]]:
        """`jax.grad` for functions of outputs, in the mode that the loss has."""

        def ask(rows: list) -> bool:
            loss = lambda outs: self._loss_of(outs, rows)
            return (
                without_reverse_mode(loss, self._traced.one(self.leaves, rows)) is None
            )

        has_reverse = at_example(ask, self._model.batch.arrays, self.axes)
        return jax.grad if has_reverse else jax.jacfwd

    @functools.cached_property
    def _is_reverse(self) -> bool:
        """Whether the loss's gradient in the outputs lacks forward mode."""

        def ask(rows: list) -> bool:
            gradient = self._gradient(lambda outs: self._loss_of(outs, rows))
            outs = self._traced.one(self.leaves, rows)
            return without_forward_mode(gradient, outs) is not None

        return at_example(ask, self._model.batch.arrays, self.axes)

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
            self.leaves,
            requested,
            self.of_outputs,
            num_outputs=self.num_outputs,
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
                for x, seed in zip(vectors, seeds, strict=True)
            ]
            along = functools.reduce(jnp.add, parts)
            along = along if curve is None else curve @ along
            along = along if weight is None else weight.astype(along.dtype) * along
            return [jnp.tensordot(along.astype(x.dtype), x, 1) for x in vectors]

        return lambda seeds: _over(product, axes, rows, (seeds, *vectors, weights))

    def _seeds(self, fisher: AbstractFisher, outs: list, rows: list) -> list[Array]:
        row = rows[-1] if fisher.key is not None and self.axes else None
        sampler = fisher.sampler
        loss = lambda outs, key=None: self._loss_of(outs, rows, key, sampler)
        curve = lambda outs: self._curve(outs, rows)
        return fisher.seeds(self._gradient(loss), curve, outs, row)

    def _loss_of(
        self,
        outs: list,
        rows: list,
        key: Array | None = None,
        sampler: Callable | None = None,
    ) -> Array:
        """The loss of an example, or of a label drawn for it."""
        (_, *rest), kwargs = self._model.batch.arguments(rows)
        out = as_complex(self._traced.output(outs))
        if key is not None and sampler is not None:
            draw = functools.partial(sampler, key)
            rest = [*rest[:-1], _drawn(draw, out, rest, kwargs)]
        return check_value(self._loss(out, *rest, **kwargs), what="loss")

    def _curve(self, outs: list, rows: list) -> Inexact[Array, "outputs outputs"]:
        unravel = Unravel(outs)
        flat = jnp.concatenate([x.ravel().astype(unravel.dtype) for x in outs])
        value = lambda flat: self._loss_of(unravel(flat), rows)
        jacobian = jax.jacrev if self._is_reverse else jax.jacfwd
        return jacobian(self._gradient(value))(flat)


def _varying(loss: Loss) -> Loss:
    """The same, with parameters that vary over the devices that examples vary over.

    Inside `jax.shard_map`, JAX sums a derivative over devices if the parameters do not
    vary over them. Making them vary delays this sum until the end.
    """
    return dataclasses.replace(loss, diff=vary_as(loss.batch.arrays, loss.diff))


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
    label = lax.stop_gradient(draw(out))
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


def check_outputs(out: PyTree) -> list[jax.ShapeDtypeStruct]:
    """The arrays of an output; raises `ValueError` for anything else in it."""
    structs = []
    for path, x in jtu.tree_leaves_with_path(out):
        if not is_struct(x) or not jnp.issubdtype(x.dtype, jnp.inexact):
            got = f"dtype {x.dtype}" if is_struct(x) else f"{x!r}"
            raise ValueError(
                "`fun` must return arrays of an inexact dtype, as only these have a "
                f"derivative; got {got} for output{jtu.keystr(path)}. Return only "
                "what is to be differentiated."
            )
        structs.append(x)
    if not structs:
        raise ValueError("`fun` must return at least one array; got none.")
    return structs


# The number of examples for which contractions are estimated, and the number of bytes
# that factors of examples may take if the result is smaller.
_COUNTED = 32


_LEAST_BYTES = 2**24


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
                *sums, num_cancelled = sums
                sums = self._unless_cancelled(num_cancelled, sums, rows, weights)
            rest -= self._sites.requested.leaves
        others = [pair for (pair,) in self.groups[len(sums) :]]
        if others:
            by_products = self._by_products(others, rest, rows, weights, self.size)
            sums += (by_products[pair][None] for pair in others)
        return sums

    def _unless_cancelled(
        self,
        num_cancelled: Array,
        sums: list[Array],
        rows: list,
        weights: Array | None,
    ) -> list[Array]:
        """The blocks from sites, or from products if terms cancel for some examples."""
        assert self._sites is not None
        groups, program = self._sites.groups, self._sites.program
        leaves = self._sites.requested.leaves
        total = rows[0].shape[self.curvature.axes[0]] if rows else 1
        kept = sum(
            x.size * x.dtype.itemsize
            for x in (*program.perturbations, *program.operands)
        )
        # The branch takes no more memory than the blocks from sites. A column keeps the
        # tangents of values and of their cotangents.
        most = min(total * self._sites.bytes, _LEAST_BYTES)
        size = max(1, most // max(2 * total * kept, 1))
        size = size if self.size is None else min(size, self.size)

        def products() -> list[Array]:
            pairs = [pair for pairs in groups for pair in pairs]
            blocks = self._by_products(pairs, leaves, rows, weights, size)
            return [jnp.stack([blocks[pair] for pair in pairs]) for pairs in groups]

        arrays = [*self.curvature.leaves, *rows]
        return unless_cancelled(num_cancelled[None] > 0, arrays, sums, products)

    def by_pairs(self, sums: list[Array]) -> dict[Pair, Inexact[Array, "..."]]:
        """The requested blocks, from what `sums` returns."""
        result = {}
        separated = unstack(sums, self.curvature.leaves)
        for pairs, blocks in zip(self.groups, separated, strict=True):
            result.update(zip(pairs, blocks, strict=True))
        return {pair: result[pair] for pair in self.requested.pairs}

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
        most = max(sum(sizes) // 4, _LEAST_BYTES)
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
        products = self.curvature.products(rows, weights)
        requested = RequestedBlocks(pairs, self.requested.is_diagonal)
        order, leaves = self._in_order(columns), self.curvature.leaves
        return ProductBlocks(products, leaves, order, requested, size).blocks()

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
        zeros = [
            full_varying_as(var.aval, 0)
            for var in curvature.program.closed.jaxpr.invars[num:]
        ]
        products = curvature.products_of_one(zeros)
        order = self._in_order(self.requested.leaves)
        columns = ProductBlocks(
            products, curvature.leaves, order, self.requested, self.size
        ).estimate()
        columns = {leaf: counted * cost for leaf, cost in columns.items()}
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
        while True:
            program = Program(
                curvature.program.closed,
                num,
                constant=set(range(num)) - leaves,
                formed=formed,
                num_outputs=curvature.num_outputs,
                order=2,
            )
            covered = {
                i
                for i in leaves
                if i in formed or is_covered(program, i, self.requested)
            }
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
