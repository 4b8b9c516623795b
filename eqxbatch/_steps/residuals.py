"""The residuals of a step, from one function of an example or from several.

`Residuals` multiplies by their Jacobian, and `SampleKernel` computes its products with
itself.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, Inexact, PyTree

from .._base.checks import check_equal
from .._base.differentiable import Derivative, derivative_of_program, pushed
from .._base.dtypes import finite_sums, is_complex, power_of_two, widened, widest
from .._base.jaxprs import TracedFunction
from .._base.mesh import vary_as
from .._base.mistakes import called
from .._base.precision import products_of
from .._base.trees import described, safe_zip
from .._batch.accumulators import Concat
from .._batch.batch import Batch
from .._batch.loop import accumulated, Rows
from .._batch.moments import Sum
from .._curvature.columns import check_outputs, with_both_modes
from .._curvature.pytree import Unravel
from .._kernels.engine import on_device
from .._kernels.kernel import Grid, room_to_keep
from .._ntk.estimator import ModelKernel
from .._ntk.output_axes import Mirror, OutputAxes
from .._ntk.pairings import choose_formed, ExampleFactors, Sites
from .._sites.factors import Factors, weighted_sum
from .._sites.site import Site


class Terms(eqx.Module):
    """Several functions as one, with an argument for the batch of each."""

    functions: tuple[Callable, ...]

    def __call__(self, model: PyTree, /, *batches: PyTree) -> tuple:
        pairs = safe_zip(self.functions, batches)
        return tuple(function(model, batch) for function, batch in pairs)


class Term(eqx.Module):
    """A function of one example, as a function of parameters and of a batch's rows.

    It returns a real vector in at least float32, which contains all outputs. Complex
    outputs contribute their real, then their imaginary part.

    - `nondiff`, `treedef`: the part of the first argument that is not a parameter, and
        the structure of the parameters.
    - `has_residual`: whether the function returns a pair of the differentiated output
        and the residual.
    - `means`: for a centred term, the mean over the examples of the derivative in each
        leaf. A linear function with this derivative is subtracted, so the Jacobian is
        centred entry by entry, before any products. Centring products would lose all
        digits where the mean is much larger than the spread.
    """

    fun: Callable
    batch: Batch
    nondiff: PyTree
    treedef: Any = eqx.field(static=True)
    has_residual: bool = eqx.field(static=True)
    means: list | None = None

    def __call__(self, leaves: list, *rows: Array) -> Float[Array, " entries"]:
        out = _flat(self._returned(leaves, rows)[0])
        for mean, leaf in safe_zip(self.means, leaves) if self.means else ():
            product = jnp.conj(mean) * leaf.astype(mean.dtype)[None]
            total = jnp.sum(product, axis=tuple(range(1, mean.ndim)))
            out -= total.real.astype(out.dtype)
        return out

    def residual(self, leaves: list, *rows: Array) -> Float[Array, " entries"]:
        """The same term with the residual in place of the differentiated output."""
        out, residual = self._returned(leaves, rows)
        return _flat(residual, out)

    def _returned(self, leaves: list, rows: Sequence[Array]) -> tuple[PyTree, PyTree]:
        (_, *rest), kwargs = self.batch.arguments([*rows])
        diff = jtu.tree_unflatten(self.treedef, leaves)
        args = (eqx.combine(diff, self.nondiff), *rest)
        out = called(self.fun, args, kwargs, "`residual`")
        if not self.has_residual:
            return _checked(out), None
        if not isinstance(out, tuple) or len(out) != 2:
            raise ValueError(
                "With `has_residual=True`, `residual` must return a pair `(output, "
                f"residual)`; got {described(out)}."
            )
        out, residual = map(_checked, out)
        shapes = [jtu.tree_map(jnp.shape, tree) for tree in (residual, out)]
        what = "With `has_residual=True`, the shapes of the second output of `residual`"
        check_equal(what, *shapes)
        return out, residual


def _checked(out: PyTree) -> PyTree:
    """The outputs of a residual function, as arrays."""
    is_number = lambda x: eqx.is_array_like(x) and not isinstance(x, int)
    out = jtu.tree_map(lambda x: jnp.asarray(x) if is_number(x) else x, out)
    check_outputs(out, "residual", "the residuals, whose squares are summed")
    return out


def _flat(tree: PyTree[Array], like: PyTree[Array] = None) -> Float[Array, " entries"]:
    """All numbers in one real vector, with imaginary parts where `like` is complex."""
    leaves = jtu.tree_leaves(tree)
    parts = []
    others = leaves if like is None else jtu.tree_leaves(like)
    for x, y in safe_zip(leaves, others):
        x = widened(x).reshape(-1)
        parts += [x.real, x.imag] if is_complex(y) else [x.real]
    dtype = widest(*(x.dtype for x in parts))
    return jnp.concatenate([x.astype(dtype) for x in parts])


# One array for each term; sizes differ, so the axes have no names.
Vectors = list[Float[Array, "_ _"]]


class Residuals:
    """The residuals of all terms at some parameters.

    - `leaves`: the parameters. A complex one counts as two real ones: `pull` returns
        the derivative in the real part plus `1j` times that in the imaginary part.
    - `programs`, `rows`: for each term, the program of one example, and all examples.
        Programs have reverse mode.
    - `weights`: the weights of the squared residuals.
    - `centre`: whether to subtract weighted means over the examples.
    """

    def __init__(
        self,
        terms: list[Term],
        leaves: list[Array],
        weights: Callable[[Any], list[Float[Array, " _"]]],
        *,
        centre: bool,
        microbatch_size: int | None,
    ):
        self.terms, self.centre, self._size = terms, centre, microbatch_size
        batches = [term.batch for term in terms]
        # Inside `jax.shard_map`, JAX sums a derivative over devices if its input is the
        # same on all of them. A step uses the examples of its device only.
        arrays = [x for batch in batches for x in batch.arrays]
        self.leaves = vary_as(arrays, leaves)
        self.rows = [Rows(x.arrays, x.axes, x.total()) for x in batches]
        self._one_mode = [self._traced(term, i) for i, term in enumerate(terms)]
        self._derivatives: list[Derivative] = [
            derivative_of_program("`residual`", program) for program in self._one_mode
        ]
        self.programs = [
            self._with(i, "columns", self._one_mode[i]) for i in self.numbers
        ]
        self.entries = [program.structs[0].shape[0] for program in self.programs]
        dtypes = [program.structs[0].dtype for program in self.programs]
        self.dtype = widest(*dtypes, *(x.dtype for x in leaves))
        self.weights = vary_as(arrays, weights(self.dtype))
        pairs = safe_zip(self.rows, self.entries)
        shapes = [(rows.total, entries) for rows, entries in pairs]
        # From one vector of all residuals to those of the terms.
        self.unravel = Unravel([jax.ShapeDtypeStruct(x, self.dtype) for x in shapes])

    @functools.cached_property
    def centred_terms(self) -> list[Term]:
        """The terms with centred derivatives, if required."""
        if not self.centre:
            return self.terms
        return [
            dataclasses.replace(term, means=self._means(number))
            for number, term in enumerate(self.terms)
        ]

    def _means(self, number: int) -> list[Array]:
        """The weighted mean over the examples of each entry's derivative."""
        means = shares(self.weights[number])
        pull = lambda entry: self.pull_as_it_is({number: jnp.outer(means, entry)})
        return jax.vmap(pull)(jnp.eye(self.entries[number], dtype=self.dtype))

    @property
    def numbers(self) -> range:
        """The indices of the terms."""
        return range(len(self.terms))

    @functools.cached_property
    def centred_programs(self) -> list[TracedFunction]:
        """Like `programs`, with centred derivatives if required."""
        if not self.centre:
            return self.programs
        return [
            self._with(i, "columns", self._traced(term, i))
            for i, term in enumerate(self.centred_terms)
        ]

    def _traced(self, fun: Callable, number: int) -> TracedFunction:
        rows, of_row = self.rows[number], lambda leaves, row: fun(leaves, *row)
        return TracedFunction(of_row, self.leaves, rows.arrays, rows.axes)

    def _with(
        self, number: int, derivative: Derivative, program: TracedFunction
    ) -> TracedFunction:
        """The program of a term, with its Jacobian if that is its only derivative."""
        if self._derivatives[number] != derivative:
            return program
        return with_both_modes(program, derivative)

    @property
    def num(self) -> int:
        """The number of real residuals."""
        return sum(self.unravel.sizes)

    @property
    def num_parameters(self) -> int:
        """The number of real parameters."""
        return sum(x.size * (2 if is_complex(x) else 1) for x in self.leaves)

    def values(self) -> Vectors:
        """The residuals, centred if required."""
        programs = [
            self._traced(term.residual, i) if term.has_residual else self._one_mode[i]
            for i, term in enumerate(self.terms)
        ]
        return self._of_all(lambda i, rows: programs[i].many(self.leaves, rows)[0])

    def push(self, tangents: list[Array]) -> Vectors:
        """The product of the Jacobian with a vector, centred if required."""
        pairs = safe_zip(tangents, self.leaves)
        tangents = [x.astype(leaf.dtype) for x, leaf in pairs]
        programs = [self._with(i, "rows", self._one_mode[i]) for i in self.numbers]

        def push(number: int, rows: list) -> Array:
            values = lambda leaves: programs[number].many(leaves, rows)
            derivative = self._derivatives[number]
            return pushed(values, self.leaves, tangents, derivative)[0]

        return self._of_all(push)

    def _of_all(self, fun: Callable[[int, list], Array]) -> Vectors:
        """What `fun(number, rows)` returns for all rows of each term."""
        vectors = []
        for i, rows in enumerate(self.rows):
            of_rows = lambda arrays, _, i=i: fun(i, arrays)
            vectors.append(accumulated(of_rows, rows, self._size, Concat()))
        return self.centred(vectors)

    def pull(self, vectors: Vectors) -> list[Array]:
        """The transpose of `push`, with sums in at least float32."""
        vectors = self.centred(vectors, is_transpose=True)
        return self.pull_as_it_is(dict(enumerate(vectors)))

    def pull_by_example(self, vectors: Vectors, size: int | None = None) -> list[Array]:
        """Like `pull`. If means are subtracted, they are subtracted from each gradient.

        A sum over examples loses digits where the mean is much larger than the spread.
        Without a microbatch size, gradients are formed for `size` examples at a time,
        by default for as many as take the memory of the matrix in parameter space.
        """
        if not self.centre:
            return self.pull(vectors)
        most = max(1, self.num_parameters // max(*self.entries, 1))
        programs = self.centred_programs

        def sums(number: int) -> Callable[[list, int], list]:
            term, axes = programs[number], self.rows[number].axes

            def of_one(*both: Array) -> list[Array]:
                *row, vector = both
                values = lambda leaves: term.one(leaves, row)[0]
                out, pullback = jax.vjp(values, self.leaves)
                # Means cancel exactly only before anything is multiplied.
                (jacobian,) = jax.vmap(pullback)(jnp.eye(out.size, dtype=out.dtype))
                wide = map(widened, jacobian)
                with products_of(term.closed):
                    return [jnp.tensordot(vector.astype(x.dtype), x, 1) for x in wide]

            of_each = jax.vmap(of_one, (*axes, 0))
            return lambda arrays, _: [jnp.sum(x, axis=0) for x in of_each(*arrays)]

        centred = self.centred(vectors, is_transpose=True)
        size = self._size or size or most
        return self._pulled(dict(enumerate(centred)), sums, size)

    def pull_as_it_is(self, vectors: dict[int, Array]) -> list[Array]:
        """Like `pull`, for the terms with some indices, without centring."""

        def sums(number: int) -> Callable[[list, int], list]:
            term = self.programs[number]

            def pulled(arrays: list, size: int) -> list[Array]:
                *arrays, seeds = arrays
                outs, pullback = jax.vjp(
                    lambda leaves: term.many(leaves, arrays)[0], self.leaves
                )
                sums = lambda share: pullback((share * seeds).astype(outs.dtype))[0]
                return finite_sums(sums(1.0), sums, size, term.is_narrow)

            return pulled

        return self._pulled(vectors, sums, self._size)

    def _pulled(
        self,
        vectors: dict[int, Array],
        sums: Callable[[int], Callable[[list, int], list]],
        size: int | None,
    ) -> list[Array]:
        """Adds up gradients of terms by index, from sums over some examples of each."""
        totals = self.zeros()
        scaled, scale = in_range([*vectors.values()])
        for number, vector in safe_zip(vectors, scaled):
            rows = self.rows[number]
            both = Rows([*rows.arrays, vector], (*rows.axes, 0), rows.total)
            gradient = accumulated(sums(number), both, size, Sum())
            totals = [
                total + jnp.conj(x).astype(total.dtype)
                for total, x in safe_zip(totals, gradient)
            ]
        return [x * scale.astype(x.dtype) for x in totals]

    def zeros(self) -> list[Array]:
        """Zeros like the parameters, in at least float32."""
        return [jnp.zeros(x.shape, widened(x).dtype) for x in self.leaves]

    def centred(self, vectors: Vectors, *, is_transpose: bool = False) -> Vectors:
        """Subtracts the weighted mean over examples; or the transpose of that."""
        vectors = [x.astype(self.dtype) for x in vectors]
        if not self.centre:
            return vectors
        pairs = safe_zip(vectors, map(shares, self.weights))
        if is_transpose:
            return [x - jnp.outer(mean, jnp.sum(x, axis=0)) for x, mean in pairs]
        return [_centred(x, mean, 0) for x, mean in pairs]

    def weighted(self, vectors: Vectors, power: float = 1.0) -> Vectors:
        """Multiplies by the weights of the examples, or by a power of them."""
        pairs = safe_zip(vectors, self.weights)
        return [x * (weights**power)[:, None] for x, weights in pairs]


class SampleKernel:
    """The inner products of the derivatives of all residuals.

    - `block_size`: the number of examples in the rows or columns of a block; None for
        all.
    - `microbatch_size`: the number of examples whose factors are computed at a time.
    """

    def __init__(
        self, residuals: Residuals, block_size: int | None, microbatch_size: int | None
    ):
        self._residuals, self._size = residuals, block_size
        self._microbatch_size = microbatch_size
        self._programs = residuals.centred_programs
        formed = self._formed([self._factors_of(i, ()) for i in residuals.numbers])
        # One backward pass computes all gradients of a leaf. That is faster than
        # contracting the factors of its sites.
        self._factors = [self._factors_of(i, formed) for i in residuals.numbers]
        self._kernels = {pair: self._kernel(*pair) for pair in self._pairs()}
        self._kept: list[Rows] = []

    def _factors_of(self, number: int, formed: Collection[int]) -> ExampleFactors:
        rows, program = self._residuals.rows[number], self._programs[number]
        axes = self._axes(number, number, program.structs[0].dtype)
        return ExampleFactors(program, rows, [axes], num_outputs=1, formed=formed)

    def _formed(self, factors: list[ExampleFactors]) -> set[int]:
        """The leaves whose gradients are formed, for all terms."""
        if self._residuals.centre:  # Products would cancel.
            return {*range(len(self._residuals.leaves))}
        formed: set[int] = set()
        for i, j in self._pairs():
            totals = self._residuals.rows[i].total, self._residuals.rows[j].total
            grid = Grid.of(totals, (self._size, self._size), i == j)
            formed |= {*choose_formed(factors[i], factors[j], 0, grid)[0]}
        return formed

    def _axes(self, first: int, second: int, dtype: Any) -> OutputAxes:
        entries = self._residuals.entries
        shapes = (entries[first],), (entries[second],)
        return OutputAxes(0, shapes, dtype, batch=0, roles=("full", "full"))

    def _kernel(self, first: int, second: int) -> ModelKernel:
        """The kernel of two terms, which may be the same."""
        rows, is_same = self._residuals.rows, first == second
        factors = [self._factors[first], self._factors[second]][: 1 if is_same else 2]
        axes = self._axes(first, second, self._residuals.dtype)
        pairing = Sites(
            [],
            [axes],
            (rows[first], rows[second]),
            lambda: products_of(*(program.closed for program in self._programs)),
            factors,
            assemble=lambda blocks: blocks["ntk", 0],
        )
        return ModelKernel(
            lambda: pairing,
            Mirror((), ()) if is_same else None,
            (self._size, self._size),
            0 if self._size is None else room_to_keep(),
        )

    def matrix(self) -> Float[Array, "num num"]:
        """The kernel of all residuals in order, weighted and centred."""
        all_rows, size = self._residuals.rows, self._size
        blocks: dict[tuple[int, int], Array] = {}
        if size is None or all(size >= rows.total for rows in all_rows):
            for i, rows in enumerate(all_rows):
                most = self._microbatch_size or max(rows.total, 1)
                self._kept.append(self._kernels[i, i].keep(0, rows, most))
            for (i, j), kernel in self._kernels.items():
                second = None if i == j else self._kept[j]
                (blocks[i, j],) = kernel.block(self._kept[i], second)
        else:
            for pair, kernel in self._kernels.items():
                blocks[pair] = on_device(kernel)
        arranged = {pair: self._arranged(x, *pair) for pair, x in blocks.items()}
        numbers = self._residuals.numbers
        of_pair = lambda i, j: arranged[i, j] if j <= i else arranged[j, i].T
        return jnp.block([[of_pair(i, j) for j in numbers] for i in numbers])

    def pull(self, vectors: Vectors) -> list[Array]:
        """Like `Residuals.pull`, from the factors that were kept for the kernel."""
        residuals = self._residuals
        if not self._kept:
            return residuals.pull_by_example(vectors, self._size)
        totals = residuals.zeros()
        vectors, size = in_range(residuals.centred(vectors, is_transpose=True))
        for number, vector in enumerate(vectors):
            of_term, traced = self._factors[number], self._programs[number]
            kept = self._kernels[number, number].factors(0, self._kept[number])
            factors = of_term.factors(kept, 0, 0)
            for leaf, array in enumerate(residuals.leaves):
                sites = of_term.program.sites_of(leaf)
                if not sites:
                    continue
                with products_of(traced.closed):
                    gradient = _product(sites, factors, array, vector, traced.is_narrow)
                totals[leaf] += jnp.conj(gradient).astype(totals[leaf].dtype)
        return [x * size.astype(x.dtype) for x in totals]

    def _pairs(self) -> list[tuple[int, int]]:
        return [(i, j) for i in self._residuals.numbers for j in range(i + 1)]

    def _arranged(
        self, kernel: Float[Array, "n1 n2 out1 out2"], first: int, second: int
    ) -> Float[Array, "rows columns"]:
        """A block with adjacent entries for each example, weighted and centred."""
        residuals = self._residuals
        weights = residuals.weights[first], residuals.weights[second]
        if residuals.centre:
            for axis, of_side in enumerate(weights):
                kernel = _centred(kernel, shares(of_side), axis)
        roots = [jnp.sqrt(x) for x in weights]
        kernel = kernel * jnp.expand_dims(jnp.outer(roots[0], roots[1]), (2, 3))
        n1, n2, out1, out2 = kernel.shape
        return jnp.swapaxes(kernel, 1, 2).reshape(n1 * out1, n2 * out2)


def _centred(x: Float[Array, "..."], weights: Array, axis: int) -> Array:
    mean = jnp.tensordot(weights, x, axes=(0, axis))
    return x - jnp.expand_dims(mean, axis)


def _product(
    sites: Sequence[Site],
    factors: Factors,
    leaf: Array,
    vector: Float[Array, "n entries"],
    is_narrow: bool,
) -> Inexact[Array, "..."]:
    """The weighted sum of a leaf's gradients at all examples.

    `is_narrow` says whether the program uses float16.
    """
    (site, *_) = sites
    if site.rule.kind != "leaf":
        sums = lambda share: [weighted_sum(sites, factors, leaf, share * vector)]
        (total,) = finite_sums(sums(1.0), sums, vector.shape[0], is_narrow)
        return total
    _, gradients = factors.of(site)
    if not gradients.has_examples:
        vector = jnp.sum(vector, axis=0)
    wide = widened(gradients.array)
    return jnp.tensordot(vector.astype(wide.dtype), wide, vector.ndim)


def in_range(vectors: Vectors) -> tuple[Vectors, Float[Array, ""]]:
    """Vectors scaled to the range of half precision, and their scale.

    In a half-precision backward pass, small numbers would underflow.
    """
    largest = [jnp.max(jnp.abs(x), initial=0) for x in vectors]
    size = power_of_two(functools.reduce(jnp.maximum, largest))
    return [x / size for x in vectors], size


def shares(weights: Float[Array, " n"]) -> Float[Array, " n"]:
    """The weights of a mean."""
    total = jnp.sum(weights)
    return weights / jnp.where(total > 0, total, jnp.ones_like(total))
