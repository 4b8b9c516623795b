"""Blocks of a matrix of second derivatives, each leaf by the cheaper of two ways."""

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Inexact, PyTree, Real

from .._base.cpu import separate
from .._base.dtypes import as_complex, as_real
from .._base.jaxprs import at_example, first_use, PerExample
from .._base.mesh import full_varying_as, vary_as
from .._base.modes import without_forward_mode
from .._base.trees import described, log
from .._batch.moments import Sum
from .._batch.objective import check_value, Example, Loss
from .._batch.rows import accumulated, Rows
from .._batch.slots import is_struct
from .._sites.trace import Program
from .by_products import (
    gauss_newton_products,
    Gradient,
    hessian_products,
    Mode,
    ProductBlocks,
    Products,
    replaced,
    warn_reverse,
)
from .by_sites import cheapest, is_covered, SiteHessian
from .gauss_newton import SiteGaussNewton
from .pytree import Unravel
from .site_blocks import Pair, Wanted


CurvatureMethod = Literal["auto", "sites", "products"]


# With how many examples contractions are counted, and how many bytes what is kept of
# examples may take if the result is smaller than that.
_COUNTED = 32


_LEAST_BYTES = 2**24


class AbstractCurvature(abc.ABC):
    """What a matrix of second derivatives is of: a sum over examples.

    - `program`: of what is differentiated and of one example.
    - `num_outputs`: how many of its outputs are differentiated; they come first.
    - `allows_sites`: whether sites are to be used at all.
    """

    program: PerExample
    num_outputs: int
    allows_sites: bool

    @property
    def leaves(self) -> list[Array]:
        """What is differentiated."""
        return self.program.leaves

    @property
    def axes(self) -> list[int]:
        """Those of the batch; empty if there is only one example."""
        return self.program.axes

    @abc.abstractmethod
    def excludes_sites(self, leaves: set[int]) -> bool:
        """Whether JAX cannot differentiate what sites of these leaves would take."""

    @abc.abstractmethod
    def of_sites(
        self, program: Program, wanted: Wanted
    ) -> SiteHessian | SiteGaussNewton:
        """The blocks that are wanted, by sites."""

    @abc.abstractmethod
    def aux(self, rows: list) -> PyTree:
        """What the function returns besides, for some examples."""

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


class LossCurvature(AbstractCurvature):
    """The Hessian of a loss."""

    num_outputs = 1

    def __init__(self, loss: Loss, mode: Mode, checkpoint: bool):
        self.example = Example(loss)
        self.program = self.example.program
        self._mode: Mode = mode
        self._checkpoint = checkpoint
        self._holomorphic = loss.holomorphic
        self.allows_sites = mode != "rev" and not loss.holomorphic
        self._batch = loss.batch
        self._answers: dict[frozenset[int], str | None] = {}

    def excludes_sites(self, leaves: set[int]) -> bool:
        # All that follows from a leaf that has sites follows from what they return.
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
        # One product needs no linear function that is run more than once.
        gradient = self._gradient_of(self._value(rows, weights))
        at = lambda leaves: gradient(leaves, range(len(leaves)))
        return jax.jvp(at, (self.leaves,), (vector,))[1]

    def _products_of(self, value: Callable[[list], Array]) -> Products:
        gradient = self._gradient_of(value)
        return hessian_products(gradient, is_reverse=self._is_reverse())

    def _is_reverse(self) -> bool:
        """Whether the gradient is differentiated in reverse mode, too."""
        is_reverse = self._mode == "rev"
        if self._mode == "auto":
            reason = self._without_forward_mode(range(len(self.leaves)))
            is_reverse = reason is not None
            if reason is not None:
                warn_reverse(reason)
        return is_reverse

    def _gradient_of(self, value: Callable[[list], Array]) -> Gradient:
        def gradient(leaves: list, which: Sequence[int]) -> list:
            at = lambda some: value(replaced(leaves, which, some))
            point = [leaves[i] for i in which]
            return jax.grad(at, holomorphic=self._holomorphic)(point)

        return gradient

    def _without_forward_mode(self, leaves: Iterable[int]) -> str | None:
        """Why the gradient in some leaves has no forward mode; None if it has one."""
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
    """The generalised Gauss-Newton matrix of a `loss` of what a function returns.

    `model` is that function and a call of it, and `loss(out, *args)` a scalar, where
    `args` are all arguments of the call but the first.
    """

    allows_sites = True

    def __init__(self, model: Loss, loss: Callable, checkpoint: bool):
        # The curvature of a loss in complex numbers is that in their two parts.
        run = lambda diff, rows: as_real(model.outputs(diff, rows)[0])
        batch = model.batch
        self.program = PerExample(run, model.diff, batch.arrays, batch.axes)
        self._structs = check_outputs(self.program.out)
        self.num_outputs = len(self._structs)
        self._model, self._loss, self._checkpoint = model, loss, checkpoint
        self._are_reverse = at_example(
            self._asked_of_one, model.batch.arrays, self.axes
        )

    def _asked_of_one(self, rows: list) -> tuple[bool, bool]:
        """Whether the outputs, and the loss's gradient in them, lack a forward mode."""
        outputs, value = self._functions_of_one(rows)
        outs = outputs(self.leaves)
        return (
            without_forward_mode(outputs, self.leaves) is not None,
            without_forward_mode(jax.grad(value), outs) is not None,
        )

    def excludes_sites(self, leaves: set[int]) -> bool:
        return False

    def of_sites(self, program: Program, wanted: Wanted) -> SiteGaussNewton:
        num = len(self._structs)
        return SiteGaussNewton(program, self.leaves, wanted, self._curve, num)

    def aux(self, rows: list) -> PyTree:
        return None

    def products(self, rows: list, weights: Array | None) -> Products:
        functions = self._functions(rows, weights)
        return gauss_newton_products(*functions, self._are_reverse)

    def product(self, rows: list, weights: Array | None, vector: list) -> list[Array]:
        return self._by_linear(self.products(rows, weights), vector)

    def products_of_one(self, rows: list) -> Products:
        return gauss_newton_products(*self._functions_of_one(rows), self._are_reverse)

    def _functions(
        self, rows: list, weights: Array | None
    ) -> tuple[Callable[[list], list], Callable[[list], Array]]:
        """The outputs for all leaves, and the loss of all outputs."""
        if not self.axes:
            return self._functions_of_one(rows)

        def outputs(leaves: list) -> list:
            one = lambda *rows: self._outputs(leaves, list(rows))
            return jax.vmap(one, self.axes)(*rows)

        def value(outs: list) -> Array:
            one = lambda outs, *rows: self._value(outs, list(rows))
            values = jax.vmap(one, (0, *self.axes))(outs, *rows)
            return weighted_sum(values, weights)

        return outputs, value

    def _functions_of_one(
        self, rows: list
    ) -> tuple[Callable[[list], list], Callable[[list], Array]]:
        outputs = lambda leaves: self._outputs(leaves, rows)
        return outputs, lambda outs: self._value(outs, rows)

    def _outputs(self, leaves: list, rows: list) -> list[Array]:
        run = self.program.one
        return (jax.checkpoint(run) if self._checkpoint else run)(leaves, rows)

    def _value(self, outs: list, rows: list) -> Array:
        (_, *rest), kwargs = self._model.batch.arguments(rows)
        out = as_complex(self.program.output(outs))
        return check_value(self._loss(out, *rest, **kwargs), what="loss")

    def _curve(self, outs: list, rows: list) -> Inexact[Array, "outputs outputs"]:
        unravel = Unravel(outs)
        flat = jnp.concatenate([x.ravel().astype(unravel.dtype) for x in outs])
        value = lambda flat: self._value(unravel(flat), rows)
        jacobian = jax.jacrev if self._are_reverse[1] else jax.jacfwd
        return jacobian(jax.grad(value))(flat)


def make_curvature(
    loss: Loss, of_output: Callable | None, mode: Mode, checkpoint: bool
) -> LossCurvature | GaussNewtonCurvature:
    """The Hessian of a loss, or that of a loss of its output, as Gauss and Newton."""
    # Inside of `jax.shard_map`, a derivative is summed over the devices, if what it is
    # of does not vary over them. Here that is done once, at the end.
    local = vary_as(loss.batch.arrays, loss.diff)
    loss = dataclasses.replace(loss, diff=local)
    if of_output is None:
        return LossCurvature(loss, mode, checkpoint)
    return GaussNewtonCurvature(loss, of_output, checkpoint)


def check_loss(loss: Any) -> None:
    """Raises `TypeError` if it is not a function."""
    if not callable(loss):
        raise TypeError(
            "`loss` must be a function of what `fun` returns and of the same other "
            f"arguments; got {described(loss)}."
        )


def weighted_sum(values: Array, weights: Array | None) -> Array:
    if weights is not None:
        values = values * weights.astype(values.dtype)
    return jnp.sum(values)


def check_outputs(out: PyTree) -> list[jax.ShapeDtypeStruct]:
    """The arrays of an output; raises `ValueError` if it has anything else."""
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


class CurvatureBlocks:
    """Blocks of a matrix of second derivatives.

    - `method`: `"sites"` for all leaves that have rules, `"products"` for none, or
        `"auto"` for those where that is cheaper.
    - `size`: how many columns are computed at a time by products.
    """

    def __init__(
        self,
        curvature: AbstractCurvature,
        wanted: Wanted,
        method: CurvatureMethod,
        size: int | None,
    ):
        self.curvature, self.wanted = curvature, wanted
        self.method, self.size = method, size
        self._sites = self._choose()
        by_sites = self._sites.blocks.wanted.leaves if self._sites else ()
        log.debug(
            "Second derivatives: method=%r takes %d of %d arrays by sites.",
            *(method, len(by_sites), len(wanted.leaves)),
        )

    def sums(
        self, rows: list, weights: Real[Array, " n"] | None
    ) -> list[Inexact[Array, "pairs ..."]]:
        """The blocks of each group of pairs, of the sum over some examples."""
        found: list[Array] = []
        rest = self.wanted.leaves
        if self._sites is not None:
            found += self._by_sites(self._sites, rows, weights)
            rest -= self._sites.blocks.wanted.leaves
        others = [pair for (pair,) in self.groups[len(found) :]]
        if others:
            by_products = self._by_products(others, rest, rows, weights)
            found += (by_products[pair][None] for pair in others)
        return found

    def by_pairs(self, sums: list[Array]) -> dict[Pair, Inexact[Array, "..."]]:
        """The blocks that are wanted, of what `sums` returns."""
        found = {}
        separated = separate(sums, self.curvature.leaves)
        for pairs, blocks in zip(self.groups, separated, strict=True):
            found.update(zip(pairs, blocks, strict=True))
        return {pair: found[pair] for pair in self.wanted.pairs}

    @property
    def groups(self) -> list[list[Pair]]:
        """The pairs of leaves that are wanted, as `sums` has them together."""
        groups = [] if self._sites is None else self._sites.blocks.groups
        known = {pair for pairs in groups for pair in pairs}
        return [*groups, *([pair] for pair in self.wanted.pairs if pair not in known)]

    def _by_sites(
        self,
        sites: SiteHessian | SiteGaussNewton,
        rows: list,
        weights: Array | None,
    ) -> list[Array]:
        """In blocks of so many examples that what is kept of them is small."""
        leaves, axes = self.curvature.leaves, self.curvature.axes
        if not axes:
            return sites.sums(leaves, rows, axes, weights)
        extra = [] if weights is None else [weights]
        arrays, all_axes = [*rows, *extra], (*axes, *(0 for _ in extra))
        total = rows[0].shape[axes[0]]
        result = sum(_num_bytes(pair, leaves) for pair in self.wanted.pairs)
        most = max(result // 4, _LEAST_BYTES)
        size = _even(total, max(1, min(total, most // max(sites.bytes, 1))))

        def run(arrays: list, _: int) -> list[Array]:
            of_rows = None if weights is None else arrays[-1]
            return sites.sums(leaves, arrays[: len(rows)], axes, of_rows)

        return accumulated(run, Rows(arrays, all_axes, total), size, Sum())

    def _by_products(
        self,
        pairs: list[Pair],
        columns: set[int],
        rows: list,
        weights: Array | None,
    ) -> dict[Pair, Array]:
        products = self.curvature.products(rows, weights)
        wanted = Wanted(pairs, self.wanted.is_diagonal)
        order, leaves = self._in_order(columns), self.curvature.leaves
        return ProductBlocks(products, leaves, order, wanted, self.size).blocks()

    def _in_order(self, leaves: set[int]) -> list[int]:
        """The order in which the function uses them."""
        jaxpr = self.curvature.program.closed.jaxpr
        return sorted(leaves, key=lambda i: first_use(jaxpr, jaxpr.invars[i]))

    def _choose(self) -> SiteHessian | SiteGaussNewton | None:
        """What is done by sites."""
        curvature, num = self.curvature, len(self.curvature.leaves)
        if self.method == "products" or not curvature.allows_sites:
            return None
        program, covered = self._program(set(range(num)))
        if not self.wanted.among(covered).pairs:
            return None
        if self.method == "auto" and curvature.excludes_sites(covered):
            return None
        sites = curvature.of_sites(program, self.wanted.among(covered))
        if self.method == "sites":
            return sites
        counted = _COUNTED if curvature.axes else 1
        zeros = [
            full_varying_as(var.aval, 0)
            for var in curvature.program.closed.jaxpr.invars[num:]
        ]
        products = curvature.products_of_one(zeros)
        order = self._in_order(self.wanted.leaves)
        columns = ProductBlocks(
            products, curvature.leaves, order, self.wanted, self.size
        ).estimate()
        columns = {leaf: counted * cost for leaf, cost in columns.items()}
        chosen = cheapest(program, covered, sites.estimate(counted), columns)
        if chosen == covered:
            return sites
        if not self.wanted.among(chosen).pairs:
            return None
        program, covered = self._program(chosen)
        return curvature.of_sites(program, self.wanted.among(covered))

    def _program(self, leaves: set[int]) -> tuple[Program, set[int]]:
        """The function with the sites of some leaves only; and those that have rules.

        Leaves without a rule are not perturbed, so that they take no part in it.
        """
        curvature, num = self.curvature, len(self.curvature.leaves)
        while True:
            program = Program(
                curvature.program.closed,
                num,
                constant=set(range(num)) - leaves,
                num_outputs=curvature.num_outputs,
                order=2,
            )
            covered = {i for i in leaves if is_covered(program, i, self.wanted)}
            if covered == leaves:
                return program, covered
            leaves = covered


def _even(total: int, size: int) -> int:
    """A size of which there is no remainder, if one is at least half as large.

    A remainder is a program of its own.
    """
    divisors = (i for i in range(size, size // 2, -1) if total % i == 0)
    return next(divisors, size)


def _num_bytes(pair: Pair, leaves: list) -> int:
    return math.prod(leaves[i].size for i in pair) * leaves[pair[0]].dtype.itemsize
