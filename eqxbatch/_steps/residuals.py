"""Residuals of one function of an example or of several, and their Jacobian."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from .._base.checks import check_equal
from .._base.dtypes import (
    common_power_of_two,
    is_complex,
    weighted_totals,
    widened,
    widest,
)
from .._base.mesh import vary_as
from .._base.modes import Derivative, derivative_of_program, pushed
from .._base.narrow import is_narrow_dtype, wide
from .._base.platforms import products_of
from .._base.traced_function import TracedFunction
from .._base.trees import safe_zip
from .._batch.accumulators import Concat
from .._batch.arguments import Dtype, RowArrays
from .._batch.loop import accumulated
from .._batch.loss import check_outputs, Loss
from .._batch.memory import explained_failure
from .._batch.padding import Padding
from .._batch.rows import Rows
from .._batch.sums import check_real, Mean, Sum
from .._curvature.columns import with_both_modes
from .._curvature.pytree import Unravel


class JoinedTerms(eqx.Module):
    """Several functions as one, with an argument for the batch of each."""

    functions: tuple[Callable, ...]

    def __call__(self, model: PyTree, /, *batches: PyTree) -> PyTree:
        pairs = safe_zip(self.functions, batches)
        return tuple(function(model, batch) for function, batch in pairs)


class _Outputs(NamedTuple):
    """What the function of a term returns for one example.

    - `out`: what is differentiated.
    - `residual`: the residual, if that is another output.
    """

    out: PyTree[Array]
    residual: PyTree[Array] = None


class ResidualTerm(eqx.Module):
    """The residual of one example, as a function of parameters and of a batch's rows.

    It returns a real vector in at least float32, which contains all outputs. Complex
    outputs contribute their real, then their imaginary part.

    - `loss`: the user's function, which returns a pair of the differentiated output and
        the residual if it `has_aux`.
    - `means`: for a centred term, the mean over the examples of the derivative in each
        leaf. A linear function with this derivative is subtracted, so the Jacobian is
        centred entry by entry, before any products. Centring products would lose all
        digits where the mean is much larger than the spread.
    """

    loss: Loss
    means: list | None = None

    def __call__(self, leaves: list[Array], *rows: Array) -> Float[Array, " entries"]:
        out = _flat(self._returned(leaves, rows).out)
        # Of a mean, `[entries, *leaf]`, the linear function `Re sum(conj(mean) * leaf)`
        # has the derivative that is subtracted.
        for mean, leaf in safe_zip(self.means, leaves) if self.means else ():
            product = jnp.conj(mean) * leaf.astype(mean.dtype)[None]
            total = jnp.sum(product, axis=tuple(range(1, mean.ndim)))
            out -= total.real.astype(out.dtype)
        return out

    def residual(self, leaves: list[Array], *rows: Array) -> Float[Array, " entries"]:
        """The same term with the residual in place of the differentiated output."""
        out, residual = self._returned(leaves, rows)
        return _flat(residual, out)

    def _returned(self, leaves: list[Array], rows: Sequence[Array]) -> _Outputs:
        diff = jtu.tree_unflatten(jtu.tree_structure(self.loss.diff), leaves)
        out, residual = self.loss.outputs(diff, [*rows])
        # Without `has_residual`, the residual is what is differentiated.
        if not self.loss.has_aux:
            return _Outputs(_residual_arrays(out))
        out, residual = _residual_arrays(out), _residual_arrays(residual)
        shapes = [jtu.tree_map(jnp.shape, tree) for tree in (residual, out)]
        what = "With `has_residual=True`, the shapes of the second output of `residual`"
        check_equal(what, *shapes)
        return _Outputs(out, residual)


def _residual_arrays(out: PyTree) -> PyTree:
    """The outputs of a residual function, as arrays."""
    is_number = lambda x: eqx.is_array_like(x) and not isinstance(x, int)
    out = jtu.tree_map(lambda x: jnp.asarray(x) if is_number(x) else x, out)
    check_outputs(out, "`residual`", "the residuals, whose squares are summed")
    return out


def _flat(tree: PyTree[Array], like: PyTree[Array] = None) -> Float[Array, " entries"]:
    """All numbers in one real vector, with imaginary parts where `like` is complex."""
    leaves = jtu.tree_leaves(tree)
    vectors = []
    # A real residual of a complex output has an imaginary part of zero, so that entries
    # of both vectors match.
    types = leaves if like is None else jtu.tree_leaves(like)
    for x, of_type in safe_zip(leaves, types):
        x = widened(x).reshape(-1)
        vectors += [x.real, x.imag] if is_complex(of_type) else [x.real]
    dtype = widest(*(x.dtype for x in vectors))
    return jnp.concatenate([x.astype(dtype) for x in vectors])


_IF_WHOLE = "Give the residual of one example."


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
        terms: list[ResidualTerm],
        leaves: list[Array],
        weights: Callable[[Any], list[Float[Array, " _"]]],
        *,
        centre: bool,
        microbatch_size: int | None,
    ):
        self.terms, self.centre, self._size = terms, centre, microbatch_size
        batches = [term.loss.batch for term in terms]
        # Inside `jax.shard_map`, JAX sums a derivative over devices if its input is the
        # same on all of them. A step uses the examples of its device only.
        arrays = [x for batch in batches for x in batch.arrays]
        self._given = vary_as(arrays, leaves)
        self.leaves = [*map(wide, self._given)]
        self.rows = [x.rows() for x in batches]
        # Each function is asked once for its modes of derivative. If it has only one,
        # its Jacobian gives the other, which costs more: it is used where it must be.
        self._one_mode = [self._traced(term, i) for i, term in enumerate(terms)]
        self._derivatives: list[Derivative] = [
            derivative_of_program("`residual`", program) for program in self._one_mode
        ]
        self.programs = [
            _linear(self._with(i, "columns", self._one_mode[i])) for i in self.numbers
        ]
        self.entries = [program.structs[0].shape[0] for program in self.programs]
        # Systems are solved in one dtype, at least float32, for all terms.
        dtypes = [program.structs[0].dtype for program in self.programs]
        self.dtype = widest(*dtypes, *(x.dtype for x in leaves))
        self.weights = vary_as(arrays, weights(self.dtype))
        pairs = safe_zip(self.rows, self.entries)
        shapes = [(rows.total, entries) for rows, entries in pairs]
        # From one vector of all residuals to those of the terms.
        self.unravel = Unravel([jax.ShapeDtypeStruct(x, self.dtype) for x in shapes])

    @functools.cached_property
    def centred_terms(self) -> list[ResidualTerm]:
        """The terms with centred derivatives, if required."""
        if not self.centre:
            return self.terms
        return [
            dataclasses.replace(term, means=self._means(number))
            for number, term in enumerate(self.terms)
        ]

    def _means(self, number: int) -> list[Array]:
        """The weighted mean over the examples of each entry's derivative."""
        # Seeds `[examples, entries]`, with the shares of examples in one column, pull
        # back to the mean derivative of that entry.
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
        # The function of a whole batch is tried only to explain a failure.
        rows, of_row = self.rows[number], lambda leaves, row: fun(leaves, *row)
        whole = functools.partial(of_row, self._given)
        batch = self.terms[number].loss.batch
        with explained_failure(whole, batch, "example", _IF_WHOLE, name="residual"):
            return TracedFunction(of_row, self._given, rows.arrays, rows.axes)

    def _with(
        self, number: int, derivative: Derivative, program: TracedFunction
    ) -> TracedFunction:
        """The program of a term, with its Jacobian if that is its only derivative."""
        if self._derivatives[number] != derivative:
            return program
        return with_both_modes(program, derivative)

    @property
    def are_narrow(self) -> bool:
        """Whether parameters have fewer than 16 bits."""
        return any(is_narrow_dtype(x.dtype) for x in self._given)

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
        # With `has_residual`, they are another output than what is differentiated.
        programs = [
            self._traced(term.residual, i) if term.loss.has_aux else self._one_mode[i]
            for i, term in enumerate(self.terms)
        ]
        return self._of_all(lambda i, rows: programs[i].many(self.leaves, rows)[0])

    def push(self, tangents: list[Array]) -> Vectors:
        """The product of the Jacobian with a vector, centred if required."""
        # JAX wants tangents in the dtypes of their parameters.
        pairs = safe_zip(tangents, self.leaves)
        tangents = [x.astype(leaf.dtype) for x, leaf in pairs]
        programs = [self._with(i, "rows", self._one_mode[i]) for i in self.numbers]

        def push(number: int, rows: RowArrays) -> Array:
            values = lambda leaves: programs[number].many(leaves, rows)
            derivative = self._derivatives[number]
            return pushed(values, self.leaves, tangents, derivative)[0]

        return self._of_all(push)

    def _of_all(self, fun: Callable[[int, list], Array]) -> Vectors:
        """What `fun(number, rows)` returns for all rows of each term."""
        vectors = []
        for i, rows in enumerate(self.rows):
            of_rows = lambda rows, i=i: fun(i, rows.arrays)
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
        # The gradients of an example take `entries * parameters` numbers, and the
        # matrix takes `parameters ** 2`.
        most = max(1, self.num_parameters // max(*self.entries, 1))
        programs = self.centred_programs

        def sums(number: int) -> Callable[[Rows], list]:
            term, axes = programs[number], self.rows[number].axes

            def of_one(row: list[Array], seed: Array) -> list[Array]:
                values = lambda leaves: term.one(leaves, row)[0]
                out, pullback = jax.vjp(values, self.leaves)
                # Means cancel exactly only before anything is multiplied.
                (jacobian,) = jax.vmap(pullback)(jnp.eye(out.size, dtype=out.dtype))
                wide = map(widened, jacobian)
                with products_of(term.closed):
                    return [jnp.tensordot(seed.astype(x.dtype), x, 1) for x in wide]

            of_each = jax.vmap(of_one, ([*axes], 0))

            def summed(rows: Rows) -> list[Array]:
                return [jnp.sum(x, axis=0) for x in of_each(rows.arrays, rows.seeds)]

            return summed

        centred = self.centred(vectors, is_transpose=True)
        size = self._size or size or most
        return self._pulled(dict(enumerate(centred)), sums, size)

    def pull_as_it_is(self, vectors: dict[int, Array]) -> list[Array]:
        """Like `pull`, for the terms with some indices, without centring."""

        def sums(number: int) -> Callable[[Rows], list]:
            term = self.programs[number]

            def pulled(rows: Rows) -> list[Array]:
                values = lambda leaves: term.many(leaves, rows.arrays)[0]
                outs, pullback = jax.vjp(values, self.leaves)
                seeds = lambda share: (share * rows.seeds).astype(outs.dtype)
                sums = lambda _, share: pullback(seeds(share))[0]
                return weighted_totals(sums, rows.total, None, term.is_narrow)

            return pulled

        return self._pulled(vectors, sums, self._size)

    def _pulled(
        self,
        vectors: dict[int, Array],
        sums: Callable[[int], Callable[[Rows], list]],
        size: int | None,
    ) -> list[Array]:
        """Adds up gradients of terms by index, from sums over some examples of each."""
        # One scale for all terms, by which their sum is multiplied in the end.
        totals = self.zeros()
        scaled, scale = in_range([*vectors.values()])
        for number, vector in safe_zip(vectors, scaled):
            rows = self.rows[number].with_(seeds=vector)
            gradient = accumulated(sums(number), rows, size, Sum())
            # For a complex parameter `x + 1j y`, JAX returns `d/dx - 1j d/dy`.
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
        # With the column `m` of shares and the column `1` of ones, a vector `v` becomes
        # `v - 1 m^T v`, and the transpose is `v - m 1^T v`.
        pairs = safe_zip(vectors, map(shares, self.weights))
        if is_transpose:
            return [x - jnp.outer(mean, jnp.sum(x, axis=0)) for x, mean in pairs]
        return [centred_along(x, mean, 0) for x, mean in pairs]

    def weighted(self, vectors: Vectors, power: float = 1.0) -> Vectors:
        """Multiplies by the weights of the examples, or by a power of them."""
        pairs = safe_zip(vectors, self.weights)
        return [x * (weights**power)[:, None] for x, weights in pairs]


def _linear(program: TracedFunction) -> TracedFunction:
    """The program, with its Jacobian if a backward pass is not known to be linear."""
    is_linear = program.backward.is_linear
    return program if is_linear else with_both_modes(program, "rows")


def centred_along(x: Float[Array, "..."], weights: Array, axis: int) -> Array:
    mean = jnp.tensordot(weights, x, axes=(0, axis))
    return x - jnp.expand_dims(mean, axis)


class Scaled(NamedTuple):
    """Vectors divided by a scale."""

    vectors: list[Float[Array, "..."]]
    scale: Float[Array, ""]


def in_range(vectors: list[Float[Array, "..."]]) -> Scaled:
    """Vectors scaled to the range of half precision.

    In a half-precision backward pass, small numbers would underflow.
    """
    # A power of two, by which nothing is rounded.
    largest = [jnp.max(jnp.abs(x), initial=0) for x in vectors]
    size = common_power_of_two(largest)
    return Scaled([x / size for x in vectors], size)


def shares(weights: Float[Array, " n"]) -> Float[Array, " n"]:
    """The weights of a mean."""
    # If all weights are zero, so is each mean, in place of NaN.
    total = jnp.sum(weights)
    return weights / jnp.where(total > 0, total, jnp.ones_like(total))


def without_padding(term: ResidualTerm, accumulator: Sum | Mean) -> ResidualTerm:
    """The term with other examples in place of those of weight 0."""
    batch, weights = term.loss.batch, accumulator.weights
    check_real(type(accumulator).__name__, weights, batch.total())
    rows = batch.rows().with_(weights=weights)
    padding = Padding.of(rows)
    if padding is None:
        return term
    # Once for the whole batch: each row is read several times, by products.
    batch = dataclasses.replace(batch, arrays=padding.replaced(rows).arrays)
    return dataclasses.replace(term, loss=dataclasses.replace(term.loss, batch=batch))


def weights_of_term(
    term: ResidualTerm, factor: ArrayLike, accumulator: Sum | Mean, dtype: Dtype
) -> Float[Array, " n"]:
    weights = jnp.ones(term.loss.batch.total(), dtype)
    if accumulator.weights is not None:
        weights = accumulator.weights.astype(dtype)
    if isinstance(accumulator, Mean):
        weights = shares(weights)
    return weights * jnp.asarray(factor, dtype)
