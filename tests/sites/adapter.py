"""What the tests of sites and of random programs know of the internals.

These tests say what is computed, and this module how the package computes it. A change
of the internals changes this module alone.
"""

import contextlib
import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from eqxbatch._base import jaxprs, modes, platforms, primitives
from eqxbatch._base.traced_function import TracedFunction
from eqxbatch._batch.batch import split_batch
from eqxbatch._batch.fingerprint import digest_of_program
from eqxbatch._batch.loss import Loss
from eqxbatch._batch.rows import Rows
from eqxbatch._curvature import (
    by_sites,
    choose,
    functions,
    ggn_by_sites,
    kronecker_sums,
)
from eqxbatch._curvature.pytree import by_pairs, RequestedBlocks
from eqxbatch._gradients.gradients_by_sites import SiteGradients
from eqxbatch._ntk import example_factors, pairings
from eqxbatch._sites import (
    cancel,
    cost,
    factors,
    finder,
    formed,
    gram,
    kronecker,
    site,
)
from eqxbatch._sites.axes import Axis, EXAMPLE, OTHER_EXAMPLE, Role
from eqxbatch._sites.program import Directions, OF_LOSS, Program, Seeds
from eqxbatch._sites.table import SiteTable
from eqxbatch._sites.views import Loop


# How gradients are contracted: from factors; formed, and kept or formed again for their
# sum; or by automatic differentiation.
Form = Literal["factors", "once", "twice", "derivative"]
_EXAMPLES = (EXAMPLE, OTHER_EXAMPLE)
_OUTPUTS = (Axis(Role.OUTPUT, side=0), Axis(Role.OUTPUT, side=1))


@dataclasses.dataclass(frozen=True)
class Place:
    """A site, as far as tests ask.

    - `kind`, `num_loops`: its primitive, and how many loops are around it.
    - `input`: which input of the primitive the parameter is, as in `dot_general[0]`.
    - `steps`, `axes`, `is_isometry`: the view of the leaf there.
    - `has_named_axes`: whether all axes there are axes of the leaf.
    - `perturbation`: which cotangent is its own.
    """

    leaf: int
    kind: str
    input: str
    num_loops: int
    steps: tuple[str, ...]
    axes: tuple | None
    is_isometry: bool
    has_named_axes: bool
    perturbation: int


@dataclasses.dataclass(frozen=True)
class Sites:
    """The sites of a function."""

    _program: Program

    @property
    def _table(self) -> SiteTable:
        return self._program.table

    @classmethod
    def of(cls, fun: Callable, leaves: Any, example: list, **settings: Any) -> "Sites":
        """Those of `fun(leaves, example)`; the settings are those of `Program`."""
        return cls(Program(TracedFunction(fun, leaves, example), **settings))

    def without_rules(self) -> "Sites":
        """The same function, all of whose leaves fall back."""
        return Sites(Program(self._program.traced, use_rules=False))

    @property
    def leaves(self) -> list:
        """Shapes and dtypes."""
        return self._program.leaves

    @property
    def fallbacks(self) -> dict[int, str]:
        """The leaves without a rule, with reasons."""
        return self._table.fallbacks

    @property
    def sizes(self) -> list[int]:
        """The number of entries of each perturbation."""
        return [struct.size for struct in self._table.perturbations]

    @functools.cached_property
    def places(self) -> list[Place]:
        return [
            Place(
                leaf=x.leaf,
                kind=x.rule.kind,
                input=x.rule.key.split("(")[0],
                num_loops=len(x.loops),
                steps=tuple(x.view.key),
                axes=x.view.axes,
                is_isometry=x.view.is_isometry,
                has_named_axes=site.has_named_axes(x),
                perturbation=x.perturbation,
            )
            for x in self._table.sites
        ]

    def is_used(self, leaf: int) -> bool:
        return bool(self._table.of(leaf))

    def formed_from(self, leaf: int) -> tuple[str, str]:
        """The axes of the operand and the cotangent that a gradient is formed from."""
        (found,) = self._table.of(leaf)
        return " ".join(found.formed.a_axes), " ".join(found.formed.d_axes)

    def has_products(self, leaf: int) -> bool:
        """Whether norms and kernels of a leaf follow from its factors."""
        sites = self._table.of(leaf)
        return self.is_used(leaf) and all(
            site.is_allowed("gram", a, b) for a in sites for b in sites
        )

    def has_kernel(self, leaf: int) -> bool:
        """Whether the package would compute kernels of a leaf from its factors."""
        return gram.has_gram(self._table.of(leaf))

    def has_products_of_squares(self, leaf: int) -> bool:
        return cancel.has_products_of_squares(self._table.of(leaf))

    def forms(self, form: Form) -> list[str]:
        """What becomes of a form: of each leaf, the contraction that may be used."""
        chosen = self._contractions(form)
        return [f"{x.form}{' kept' * x.keeps}" for x in chosen]

    def _contractions(self, form: Form) -> list[cost.Contraction]:
        def one(leaf: int) -> cost.Contraction:
            kind = {"once": "gradient", "twice": "gradient"}.get(form, form)
            keeps = form == "once"
            if not self.is_used(leaf):
                kind, keeps = "none", False
            elif leaf in self.fallbacks:
                kind, keeps = "derivative", True
            elif kind == "factors" and not self.has_products(leaf):
                kind = "gradient"
            return cost.Contraction(leaf, kind, keeps, cost.Cost())  # type: ignore

        return [one(leaf) for leaf, _ in enumerate(self.leaves)]

    def examples(
        self,
        leaves: Any,
        rows: Sequence[Any],
        cotangent: Callable[[Array], Array] = jnp.ones_like,
        *,
        with_jacobians: bool = False,
    ) -> "Examples":
        """Runs the function for all rows, and its derivative for the cotangents.

        The cotangents are functions of the first output. Jacobians are of this output,
        which is a vector.
        """

        def only(seed: Array, outs: list[Array]) -> Seeds:
            return Seeds([seed, *(None for _ in outs[1:])])

        one = lambda outs, _: only(cotangent(outs[0]), outs)
        directions = [Directions(one)]
        if with_jacobians:
            every = lambda outs, _: only(
                jnp.eye(outs[0].size, dtype=outs[0].dtype), outs
            )
            directions.append(Directions(every, _OUTPUTS[:1]))
        of_one = lambda rows: self._program.of_example(
            Rows(rows, (), 1), directions, leaves
        )
        (out, *_), operands, ((pulled, _), *of_outputs) = jax.vmap(of_one)([*rows])
        settings = {"num": rows[0].shape[0], "values": self._program.values(leaves)}
        sides = [
            factors.Factors(operands, cotangents, (axis,), **settings)
            for cotangents, _ in of_outputs
            for axis in _OUTPUTS
        ]
        return Examples(
            self, leaves, out, factors.Factors(operands, pulled, **settings), sides
        )


@dataclasses.dataclass(frozen=True)
class Examples:
    """The outputs of some examples, and contractions of their factors."""

    _sites: Sites
    _leaves: Any
    outputs: Array
    _factors: factors.Factors
    _sides: list[factors.Factors]

    def _of(self, leaf: int, of: factors.Factors | None = None) -> gram.OfLeaf:
        table = self._sites._table
        of = self._factors if of is None else of
        return gram.OfLeaf(table.of(leaf), of, table.leaves[leaf])

    def gradients(self, leaf: int) -> Array:
        return formed.gradients(*self._of(leaf))

    def jacobians(self, leaf: int) -> Array:
        return formed.gradients(*self._of(leaf, self._sides[0]))

    def weighted_sum(self, leaf: int, weights: Array) -> Array:
        return formed.weighted_sum(*self._of(leaf), weights)

    def squared_norms(self, leaf: int) -> list[Array]:
        return cancel.squared_norms([self._of(leaf)])

    def squared_distances(self, leaf: int, mean: Array, weights: Array) -> Array:
        """The weighted sum of `abs(gradient - mean) ** 2`, entry by entry."""
        (found,) = cancel.squared_distances([self._of(leaf)], [mean], weights)
        return found

    def squared_sum(self, leaf: int, weights: Array) -> Array:
        """The weighted sum of `abs(gradient) ** 2`, from squares of factors."""
        return cancel.squared_sum(self._of(leaf), weights)[0]

    def inner_products(self, leaf: int, direction: Array) -> Array:
        of_leaf = self._of(leaf)
        return formed.inner_products(of_leaf.sites, of_leaf.factors, direction)

    def kernel(self, leaf: int) -> Array:
        """The inner products of all gradients."""
        of_leaf = self._of(leaf)
        return gram.gram(of_leaf, of_leaf, _EXAMPLES[1], _EXAMPLES)

    def kernel_of_outputs(self, leaf: int) -> Array:
        """The inner products of all Jacobians: by example and output, on both sides."""
        first, second = (self._of(leaf, side) for side in self._sides)
        axes = (_EXAMPLES[0], _OUTPUTS[0], _EXAMPLES[1], _OUTPUTS[1])
        return gram.gram(first, second, _EXAMPLES[1], axes)

    def contracted(
        self, form: Form, weights: Array, is_kept: Array
    ) -> tuple[list[Array], list[Array]]:
        """Of each leaf, squared norms and the weighted sum of those that are kept."""
        found = SiteGradients(
            self._sites._table,
            self._sites._contractions(form),
            self._factors,
            self._leaves,
        )
        sums = found.weighted_sums([weights for _ in self._sites.leaves], is_kept)
        return [x.number for x in found.squares()], sums


@dataclasses.dataclass(frozen=True)
class Curvature:
    """The Hessian of `fun(leaves, rows)`, or the Gauss-Newton matrix of its loss."""

    fun: Callable
    loss: Callable | None
    leaves: list
    rows: list

    @functools.cached_property
    def _curvature(self) -> functions.AbstractCurvature:
        batch = split_batch(self.fun, (None, 0), (self.leaves, self.rows), {})
        constants = [None for _ in self.leaves]
        loss = Loss(self.fun, batch, self.leaves, constants, has_aux=False)
        if self.loss is None:
            return functions.LossCurvature(loss)
        return functions.GaussNewtonCurvature(loss, self._of_outputs)

    def _of_outputs(self, outs: Array, rows: list) -> Array:
        assert self.loss is not None
        return self.loss(outs)

    @functools.cached_property
    def sites(self) -> Sites:
        num_outputs = self._curvature.num_outputs
        program = self._curvature.program
        return Sites(Program(program, num_outputs=num_outputs, order=2))

    def is_covered(self, leaf: int, *, is_diagonal: bool) -> bool:
        """Whether the block of a leaf with itself can be computed from sites."""
        pairs = [(i, i) for i, _ in enumerate(self.leaves)]
        requested = RequestedBlocks(pairs, is_diagonal)
        return by_sites.is_covered(
            self.sites._table, leaf, requested, counts_cancelled=False
        )

    def excludes_sites(self, leaves: set[int]) -> bool:
        """Whether blocks of some leaves are never computed from sites."""
        return self.loss is None and self._curvature.excludes_sites(leaves)

    def blocks(self, pairs: list[tuple[int, int]], *, is_diagonal: bool) -> list[Array]:
        """The blocks of some pairs of leaves, from sites, summed over the examples."""
        if not pairs:
            return []
        requested = RequestedBlocks(pairs, is_diagonal)
        blocks = choose.CurvatureBlocks(self._curvature, requested, "sites", None)
        sums = blocks.sums(_rows_of(self.rows))
        found = by_pairs([*zip(blocks.groups, sums, strict=True)], self.leaves)
        return [found[pair] for pair in pairs]


def _rows_of(arrays: list) -> Rows:
    """The rows of arrays that have the examples along axis 0."""
    return Rows(arrays, tuple(0 for _ in arrays), arrays[0].shape[0])


# What the package chooses by cost, chosen by tests.


def most_sites() -> int:
    """How many uses of a leaf have all of their products taken."""
    return gram.MOST_SITES


def with_most_sites(num: int) -> contextlib.AbstractContextManager:
    return mock.patch.object(gram, "MOST_SITES", num)


@contextlib.contextmanager
def with_kernels_by(form: str) -> Iterator[None]:
    """Kernels by factors or Jacobians of all leaves that have them; or as by default.

    `form` is `"gram"`, `"formed"` or `"auto"`.
    """
    real = pairings.choose_formed

    def chosen(
        first: Any, second: Any, which: int, schedule: Any
    ) -> example_factors.Formed:
        if form == "auto":
            return real(first, second, which, schedule)
        costs = example_factors.leaf_costs(first, second, which, schedule)
        wanted = {
            "gram": lambda gram, own: math.isinf(gram),
            "formed": lambda _, own: not math.isinf(own),
        }
        leaves = range(len(costs))
        used = [leaf for leaf in leaves if first.table.of(leaf)]
        leaves = [leaf for leaf in used if wanted[form](*costs[leaf])]
        return example_factors.Formed(leaves, 0.0)

    with mock.patch.object(pairings, "choose_formed", chosen):
        yield


@contextlib.contextmanager
def with_hessians_by_sites(
    is_chosen: Callable[[int], bool], *, in_turn: bool
) -> Iterator[None]:
    """Hessians by sites for the chosen leaves, and by products for the others.

    With `in_turn`, as if they were large: blocks and examples one after the other.
    """
    some = lambda table, covered, *_: {i for i in sorted(covered) if is_chosen(i)}
    with contextlib.ExitStack() as stack:
        patch = mock.patch.object(choose, "cheapest", some)
        stack.enter_context(patch)
        if in_turn:
            small = dataclasses.replace(platforms.CPU, factor_bytes=0)
            stack.enter_context(platforms.for_platform(small))
        yield


# What is broken on purpose.


@contextlib.contextmanager
def broken_products(
    scale: float | None = None, change: Callable[[Callable], Callable] | None = None
) -> Iterator[None]:
    """Gives products with a parameter another scale, or another operation."""
    find_rule = finder.find_rule

    def broken(eqn: Any, position: int) -> Any:
        rule = find_rule(eqn, position)
        if rule is None or rule.kind != "dot_general":
            return rule
        rule = rule if scale is None else dataclasses.replace(rule, scale=scale)
        return rule if change is None else dataclasses.replace(rule, op=change(rule.op))

    with mock.patch.object(finder, "find_rule", broken):
        yield


@contextlib.contextmanager
def doubled_norms() -> Iterator[None]:
    """Squared norms from factors are twice as large."""
    terms = gram.gram_terms

    def broken(uses: Any, other: Any, example: Any = EXAMPLE) -> Any:
        factor = 2 if uses is other and example == EXAMPLE else 1
        pairs = terms(uses, other, example)
        return [pair._replace(scale=factor * pair.scale) for pair in pairs]

    with mock.patch.object(gram, "gram_terms", broken):
        yield


def scaled_products_of_factors(scale: float) -> contextlib.AbstractContextManager:
    """All products of factors have a wrong scale."""
    return mock.patch.object(gram, "_scale", return_value=scale)


@contextlib.contextmanager
def first_entry_of_blocks_scaled(scale: float) -> Iterator[None]:
    """Each block of a Hessian or Gauss-Newton matrix has one wrong entry."""
    contract = by_sites.contract

    def broken(terms: Any, out: Any) -> Array:
        block = contract(terms, out)
        return block.at[(0,) * block.ndim].multiply(scale)

    with mock.patch.object(by_sites, "contract", broken):
        yield


# What the package knows of primitives.


def without_parameters(
    name: str, unknown: set[str]
) -> contextlib.AbstractContextManager:
    """As if these parameters of a primitive were unknown."""
    words, known = primitives._KNOWN[name]
    assert known is not None
    return mock.patch.dict(primitives._KNOWN, {name: (words, known - unknown)})


def with_known_class(name: str, primitive: str) -> contextlib.AbstractContextManager:
    """As if objects of a class of JAX were known to be a primitive."""
    return mock.patch.dict(primitives._CLASSES, {name: primitive})


def name_of(eqn: Any) -> str:
    return primitives.name_of(eqn)


def called(eqn: Any) -> Any:
    """The program in place of which an equation stands, or None."""
    return jaxprs.callee(eqn)


def is_product(name: str) -> bool:
    """Whether a primitive has a `precision`."""
    return name in primitives.PRODUCTS


def reason_without_mode(mode: Literal["forward", "reverse"], *args: Any) -> str | None:
    """Why a function of some arrays has no derivative in a mode."""
    if mode == "forward":
        return modes.without_forward_mode(*args)
    return modes.without_reverse_mode(*args)


def digest_of(closed: Any) -> Any:
    """What tells programs apart that stored kernels are computed by."""
    return digest_of_program(closed)


def printed(fun: Callable, leaves: list, rows: list) -> dict[str, str]:
    """How a program of `fun(leaves, row)`, its first site and its factors print."""
    program = Program(TracedFunction(fun, leaves, rows, [0 for _ in rows]))
    found, *_ = program.table.sites
    of_rows = program.factors(_rows_of(rows), OF_LOSS)
    term = of_rows.terms(found).cotangent
    shown = {
        "program": program,
        "plan": program._plan,
        "site": found,
        "view": found.view,
        "rule": found.rule,
        "values": program.table.nodes,
        "directions": [OF_LOSS, Directions(OF_LOSS.seeds, _OUTPUTS)],
        "factors": of_rows,
        "factor": of_rows.operands[0],
        "term": term,
        "axis": term.axes[0],
        "blocks": kronecker.parts_of(program.table, None),
    }
    return {name: repr(x) for name, x in shown.items()}


# Sites of one equation, with random factors.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RandomUse:
    """The factors of one site, with examples first; the cotangents have outputs next.

    - `which`: the group that each position meets, if there are groups.
    """

    operand: np.ndarray | None
    cotangent: np.ndarray
    which: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class RandomSites:
    """Sites of an equation in which the first input of a function meets the others."""

    _table: SiteTable

    @classmethod
    def of(
        cls,
        fun: Callable,
        shape: tuple[int, ...],
        ins: tuple,
        num_uses: int,
        num_steps: int | None,
    ) -> "RandomSites":
        """One site for each use, in the steps of a loop if there are any."""
        leaf = jax.ShapeDtypeStruct(shape, jnp.float64)
        rows = [jnp.zeros(x) if isinstance(x, tuple) else jnp.asarray(x) for x in ins]
        traced = TracedFunction(
            lambda leaves, rows: fun(*leaves, *rows), [jnp.zeros(shape)], rows
        )
        program = Program(traced)
        (found,) = program.table.sites
        assert found.rule.kind != "leaf"
        lead = () if num_steps is None else (num_steps,)
        sites, operands, perturbations = [], [], []
        for _ in range(num_uses):
            of_operands = [x for x in (found.operand, found.which) if x is not None]
            one = dataclasses.replace(
                found,
                perturbation=len(perturbations),
                operand=None if found.operand is None else len(operands),
                which=None if found.which is None else len(operands) + 1,
            )
            sites.append(one if num_steps is None else one.within(Loop(0, num_steps)))
            structs = [program.table.operands[i] for i in of_operands]
            in_steps = lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype)
            operands += map(in_steps, structs)
            x = program.table.perturbations[found.perturbation]
            perturbations.append(in_steps(x))
        return cls(SiteTable([leaf], sites, perturbations, operands))

    def draw(self, of: np.random.Generator, num: int, num_outputs: int) -> "Drawn":
        """Random factors. Tokens and groups are indices, of which some select none."""
        uses = []
        for one in self._table.sites:
            most = one.sizes.get(str(one.rule.token or one.rule.group), 0)

            def factor(number: int | None, *, is_index: bool, most: int = most) -> Any:
                if number is None:
                    return None
                shape = (num, *self._table.operands[number].shape)
                return (
                    of.integers(most + 1, size=shape)
                    if is_index
                    else of.normal(size=shape)
                )

            d = self._table.perturbations[one.perturbation].shape
            uses.append(
                RandomUse(
                    factor(one.operand, is_index=one.rule.token is not None),
                    of.normal(size=(num, num_outputs, *d)),
                    factor(one.which, is_index=True),
                )
            )
        return Drawn(self._table, uses)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["uses"], meta_fields=["_table"]
)
@dataclasses.dataclass(frozen=True)
class Drawn:
    """Random factors of the sites of one leaf, and their contractions."""

    _table: SiteTable
    uses: list[RandomUse]

    def _factors(self, side: int = 0, output: int | None = None) -> factors.Factors:
        """Those of all outputs, or of one of them."""
        arrays = [(x.operand, x.which) for x in self.uses]
        operands = [jnp.asarray(x) for pair in arrays for x in pair if x is not None]
        cotangents = [jnp.asarray(x.cotangent) for x in self.uses]
        if output is not None:
            return factors.Factors(operands, [x[:, output] for x in cotangents])
        return factors.Factors(operands, cotangents, (_OUTPUTS[side],))

    def _of(self, **settings: Any) -> gram.OfLeaf:
        return gram.of_leaf(self._table, self._factors(**settings), 0)

    def contracted(self, other: "Drawn", weights: np.ndarray) -> dict[str, Array]:
        """Everything that is contracted from the factors of first derivatives.

        Sums are weighted. Norms, distances to the mean, and products with it, are those
        of the gradients for the first output.
        """
        of_all, of_one = self._of(), self._of(output=0)
        shares = jnp.abs(jnp.asarray(weights[:, 0]))
        mean = formed.weighted_sum(*of_one, shares) / jnp.sum(shares)
        (squares,) = cancel.squared_norms([of_one])
        (distances,) = cancel.squared_distances([of_one], [mean], shares)
        axes = (_EXAMPLES[0], _OUTPUTS[0], _EXAMPLES[1], _OUTPUTS[1])
        return {
            "jacobian": formed.gradients(*of_all),
            "sum": formed.weighted_sum(*of_all, jnp.asarray(weights)),
            "products": formed.inner_products(of_one.sites, of_one.factors, mean),
            "kernel": gram.gram(of_all, other._of(side=1), _EXAMPLES[1], axes),
            "squares": squares,
            "distances": distances,
        }

    def gauss_newton(self, scale: np.ndarray, *, is_diagonal: bool) -> Array:
        """The block of the leaf; `scale` has curvatures, or weights, of examples."""
        program = object.__new__(Program)
        program.table, program.leaves = self._table, self._table.leaves
        out = jax.ShapeDtypeStruct((1,), jnp.float64)
        program.jaxpr = types.SimpleNamespace(outvars=[types.SimpleNamespace(aval=out)])
        requested = RequestedBlocks([(0, 0)], is_diagonal)
        matrix = ggn_by_sites.SiteGaussNewton(
            program, requested, lambda *_: None, num_vectors=2, has_curve=False
        )
        of_all = dataclasses.replace(self._factors(), curve=jnp.asarray(scale))
        ((block,),) = matrix.blocks_of(of_all)
        return block

    def kronecker(self, weights: np.ndarray) -> list[Array]:
        """The weighted sums for the factors of K-FAC, or for an exact block."""
        (part,) = kronecker.parts_of(self._table, None)
        num, num_outputs = self.uses[0].cotangent.shape[:2]
        weighing = kronecker_sums.Weighing(num, num_outputs, jnp.asarray(weights), None)
        vectors = dataclasses.replace(self._factors(), outputs=(kronecker_sums.VECTOR,))
        return kronecker_sums.part_sums(self._table, part, vectors, weighing, "expand")


def close_to(got: Any, expected: Any) -> None:
    """Both are equal but for rounding in float64."""
    assert jnp.result_type(got) == jnp.float64
    np.testing.assert_allclose(
        np.broadcast_to(got, np.shape(expected)), expected, rtol=1e-10, atol=1e-10
    )
