"""`filter_gauss_newton_step`: damped Gauss-Newton steps in the smaller space.

`Residuals` are those of one function of an example or of several, and multiply by their
Jacobian. `SampleKernel` computes its products with itself.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, Concatenate, Generic, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Float, Inexact, PyTree

from .._base.checks import AnyArray, as_jax, check_callable, check_equal
from .._base.dtypes import (
    as_complex,
    as_real,
    common_power_of_two,
    is_complex,
    weighted_totals,
    widened,
    widest,
)
from .._base.mesh import error_if, spec_of, vary_as
from .._base.modes import Derivative, derivative_of_program, pushed
from .._base.narrow import is_narrow_dtype, wide
from .._base.platforms import exact_products, products_of
from .._base.traced_function import TracedFunction
from .._base.trees import described, import_extra, log, safe_zip, shown
from .._batch.accumulators import check_adds, check_real, Concat, Mean, Sum
from .._batch.batch import as_block_size, as_microbatch_size, MemoryBudget, Size
from .._batch.derivative import (
    AbstractDerivative,
    check_outputs,
    like_parameters,
    Loss,
    split_examples,
)
from .._batch.loop import accumulated, is_accumulator, Rows
from .._batch.padding import Padding
from .._batch.transform import (
    AbstractSharded,
    also_decorator,
    Model,
    P,
    run_compiled,
    with_second,
)
from .._curvature.columns import with_both_modes
from .._curvature.curvature_matrices import filter_ggn
from .._curvature.pytree import joined, Unravel
from .._kernels.engine import on_device
from .._kernels.kernel import Grid, room_of
from .._ntk.pairings import choose_formed, ExampleFactors, ModelKernel, Sites
from .._ntk.traced_model import Mirror, OutputAxes
from .._sites.factors import Factors, weighted_sum
from .._sites.site import Site


class JoinedTerms(eqx.Module):
    """Several functions as one, with an argument for the batch of each."""

    functions: tuple[Callable, ...]

    def __call__(self, model: PyTree, /, *batches: PyTree) -> tuple:
        pairs = safe_zip(self.functions, batches)
        return tuple(function(model, batch) for function, batch in pairs)


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
        diff = jtu.tree_unflatten(jtu.tree_structure(self.loss.diff), leaves)
        out, residual = self.loss.outputs(diff, [*rows])
        if not self.loss.has_aux:
            return _checked(out), None
        out, residual = _checked(out), _checked(residual)
        shapes = [jtu.tree_map(jnp.shape, tree) for tree in (residual, out)]
        what = "With `has_residual=True`, the shapes of the second output of `residual`"
        check_equal(what, *shapes)
        return out, residual


def _checked(out: PyTree) -> PyTree:
    """The outputs of a residual function, as arrays."""
    is_number = lambda x: eqx.is_array_like(x) and not isinstance(x, int)
    out = jtu.tree_map(lambda x: jnp.asarray(x) if is_number(x) else x, out)
    check_outputs(out, "`residual`", "the residuals, whose squares are summed")
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


# Those of the function, of a setting and of its pair, as for `Loss`.
_NAMES = ("residual", "has_residual", "(output, residual)")


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
        self.rows = [Rows(x.arrays, x.axes, x.total()) for x in batches]
        self._one_mode = [self._traced(term, i) for i, term in enumerate(terms)]
        self._derivatives: list[Derivative] = [
            derivative_of_program("`residual`", program) for program in self._one_mode
        ]
        self.programs = [
            _linear(self._with(i, "columns", self._one_mode[i])) for i in self.numbers
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
        programs = [
            self._traced(term.residual, i) if term.loss.has_aux else self._one_mode[i]
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

            of_rows = jax.vmap(of_one, (*axes, 0))
            return lambda arrays, _: [jnp.sum(x, axis=0) for x in of_rows(*arrays)]

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
                sums = lambda _, share: pullback((share * seeds).astype(outs.dtype))[0]
                return weighted_totals(sums, size, None, term.is_narrow)

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


def _linear(program: TracedFunction) -> TracedFunction:
    """The program, with its Jacobian if a backward pass is not known to be linear."""
    is_linear = program.backward.is_linear
    return program if is_linear else with_both_modes(program, "rows")


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
        sizes = self._size, self._size
        return ModelKernel(
            lambda _: pairing,
            symmetric=Mirror((), ()) if is_same else None,
            sizes=sizes,
            room=0 if self._size is None else room_of(sizes),
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
        sums = lambda _, share: [weighted_sum(sites, factors, leaf, share * vector)]
        (total,) = weighted_totals(sums, vector.shape[0], None, is_narrow)
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
    size = common_power_of_two(largest)
    return [x / size for x in vectors], size


def shares(weights: Float[Array, " n"]) -> Float[Array, " n"]:
    """The weights of a mean."""
    total = jnp.sum(weights)
    return weights / jnp.where(total > 0, total, jnp.ones_like(total))


Number = float | Float[AnyArray, ""]


class AbstractGaussNewtonStep(AbstractDerivative, AbstractSharded, Generic[Model, P]):
    """`filter_gauss_newton_step` without another argument for the previous step."""

    residual: Callable[Concatenate[Model, P], Any]
    has_aux: ClassVar[bool] = False
    holomorphic: ClassVar[None] = None
    allows_complex: ClassVar[bool] = True
    _: dataclasses.KW_ONLY
    damping: Number = eqx.field(converter=as_jax)
    space: Literal["auto", "sample", "parameter"] = "auto"
    centre: bool = False
    has_residual: bool = False
    weights: Number | Sequence[Number] = eqx.field(
        default=1.0, converter=lambda weights: jtu.tree_map(as_jax, weights)
    )
    accumulator: Sum | Mean | Sequence[Sum | Mean] = Mean()
    solver: Any = "cholesky"
    in_axes: PyTree = eqx.if_array(0)
    block_size: Size = eqx.field(default=None, converter=as_block_size)
    microbatch_size: Size = eqx.field(default=None, converter=as_microbatch_size)

    def __call__(self, model: Model, /, *args: P.args, **kwargs: P.kwargs) -> Model:
        return run_compiled(self, model, *args, **kwargs)


class GaussNewtonStep(AbstractGaussNewtonStep[Model, P]):
    """Damped Gauss-Newton steps, solved in sample or parameter space.

    Let `r` be the residuals of all examples and `J` their Jacobian with respect to the
    parameters. The step solves

        (J.T @ W @ J + damping * I) @ step = J.T @ W @ r

    where the diagonal matrix `W` has entries `1 / n` for `n` examples. This is the
    gradient of half the mean squared residual, preconditioned by its damped
    Gauss-Newton matrix. By Woodbury's identity, it equals

        step = J.T @ R @ inverse(R @ J @ J.T @ R + damping * I) @ R @ r

    with the root `R` of `W`, so the linear system has either one row for each parameter
    (parameter space) or one for each residual (sample space). The matrix `J @ J.T` of
    the latter is the neural tangent kernel, computed as in [`eqxbatch.EmpiricalNTK`][].

    **Arguments:**

    - `residual`: a function of the model and of one example that returns a PyTree of
        arrays of an inexact dtype. For several terms with separate batches, such as the
        interior and the boundary of a PINN, pass a tuple or list of functions: each
        takes the model and its batch as a single argument.
    - `damping`: a non-negative number or scalar array that is added to the diagonal. It
        is relative to means over the examples, not sums, so it need not change with the
        batch size.
    - `space`: `"sample"` solves with the kernel of the residuals, `"parameter"` with
        the Gauss-Newton matrix, and `"auto"` with the smaller of the two. The step is
        the same in each case. Each works for a `residual` that has a derivative in
        forward mode or in reverse mode only.
    - `centre`: whether to subtract the weighted mean over the examples from `J` and
        `r`, for each term. This is stochastic reconfiguration.
    - `has_residual`: whether `residual` returns a pair `(output, residual)` of the same
        structure. `J` is then the Jacobian of `output`, and `r` is `residual`, which is
        not differentiated. In variational Monte Carlo, these are the logarithm of the
        amplitude and the local energy.
    - `momentum`: a number or a scalar array. The transformed function then takes the
        previous step as its second argument, and returns the step closest to
        `momentum * previous`: it solves the system above for the part of `r` that
        remains after this step, and adds the solution to it. This is SPRING.
    - `weights`: the weights of the squared residuals: a number or scalar array for all
        terms, or a tuple with one for each term.
    - `accumulator`: [`eqxbatch.Mean`][] (the default) or [`eqxbatch.Sum`][], or a tuple
        with one for each term. With `Sum`, `W` has ones instead of `1 / n`. Their
        `weights` weight single examples, for importance sampling in a mean or for
        quadrature in a sum.
    - `solver`: `"cholesky"`; or `"eigh"`, which also handles singular matrices, and
        uses the pseudoinverse if `damping` is 0; or an iterative lineax solver such as
        `lineax.CG(rtol=1e-4, atol=1e-4)`, which only needs matrix-vector products and
        never materialises the matrix. The right-hand side is scaled to about 1, so
        `atol` is relative to its largest entry. In float32, an iterative solver may not
        converge if `damping` is much smaller than 1e-4 times the largest eigenvalue;
        lineax then raises an error, and 64-bit mode (`jax_enable_x64`) helps.
    - `where`, `filter_spec`: which leaves of the model are parameters, as for
        [`eqxbatch.filter_micro_value_and_grad`][].
    - `in_axes`: the batch axes of the arguments after the model, as for
        [`eqxbatch.filter_micro_value_and_grad`][]. For several terms, a tuple with a
        prefix for the batch of each, or one prefix for all.
    - `block_size`: the number of rows and columns of the matrix that are computed at a
        time: in examples for the kernel, in parameters for the Gauss-Newton matrix. An
        [`eqxbatch.MemoryBudget`][] chooses the largest number that fits, and None means
        all of them.
    - `microbatch_size`: the number of examples that run through the model at a time, as
        for `block_size`.

    **Returns:**

    A function with the arguments of `residual`. For several terms, its arguments are
    the model and one batch for each term. With `momentum`, the second argument is the
    previous step, or None at first. The function returns the step, with the structure
    of the model, the dtypes of the parameters, and None for everything that is not a
    parameter.

    The step has the sign of a gradient: it points uphill and can replace the gradient
    in an optax chain. Without optax, subtract it from the parameters.

    A complex residual counts as two real ones. Products of its Jacobian with real
    parameters are therefore real parts of complex products, as usual in stochastic
    reconfiguration. A complex parameter counts as two real ones, too. Its step is the
    direction itself, not the conjugate that JAX returns for gradients. For a function
    that is holomorphic in all parameters, the step is the solution in complex numbers.

    With `centre`, the mean is subtracted from the Jacobian of each example before any
    products, so digits are kept where the mean is much larger than the spread. The
    Jacobian of the examples of a block is then materialised. Iterative solvers subtract
    the mean after products with vectors, which keeps fewer digits.

    Matrices are in at least float32, even if the model is not. In float32, `damping`
    should not be much smaller than 1e-6 times the largest eigenvalue. Inside
    `jax.shard_map`, a step uses the examples of its device only, and is NaN where it
    would otherwise raise an error at run time.

    **Raises:**

    - `ValueError` if there are no parameters, for outputs that are not arrays of an
        inexact dtype, for an unknown `space`, for numbers that are negative, NaN or
        infinite, and for settings or batches that do not match the number of terms.
    - `TypeError` for an unknown `solver`, for settings of the wrong type, and for a
        `residual` that JAX can differentiate in neither mode.
    - `RuntimeError` at run time, for such numbers in JAX arrays, for negative weights
        of an `accumulator` and, with `solver="cholesky"`, for a matrix that is not
        positive definite.
    - `ImportError` for an iterative solver if lineax is not installed.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp, optax
        >>> model = eqx.nn.MLP(1, 1, 32, 2, key=jax.random.key(0))
        >>> x = jnp.linspace(-1.0, 1.0, 20)[:, None]
        >>> gauss_newton_step = eqxbatch.filter_gauss_newton_step(
        ...     lambda model, x: model(x) - x**2, damping=1e-3
        ... )
        >>> step = gauss_newton_step(model, x)
        >>> updates = jax.tree.map(lambda s: -0.5 * s, step)
        >>> model = eqx.apply_updates(model, updates)

        ```

        In an optax chain that clips long steps:

        ```python
        >>> optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.5))
        >>> state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
        >>> updates, state = optimiser.update(gauss_newton_step(model, x), state)
        >>> model = eqx.apply_updates(model, updates)

        ```

        Two terms with separate batches:

        ```python
        >>> slope = lambda model, x: jax.jvp(model, (x,), (jnp.ones(1),))[1] - 2 * x
        >>> ends = lambda model, x: model(x) - 1.0
        >>> two_terms = eqxbatch.filter_gauss_newton_step(
        ...     (slope, ends), damping=1e-3, weights=(1.0, 10.0)
        ... )
        >>> step = two_terms(model, x, jnp.array([[-1.0], [1.0]]))

        ```

    ??? cite

        minSR: Chen and Heyl, "Empowering deep neural quantum states through efficient
        optimization", [arXiv:2302.01941](https://arxiv.org/abs/2302.01941). Also known
        as SR(t): Rende et al., [arXiv:2310.05715](https://arxiv.org/abs/2310.05715).
        SPRING: Goldshlager et al., "A Kaczmarz-inspired approach to accelerate the
        optimization of neural network wavefunctions",
        [arXiv:2401.10190](https://arxiv.org/abs/2401.10190). For PINNs: Guzmán-Cordero
        et al., "Improving energy natural gradient descent through Woodbury, momentum,
        and randomization", [arXiv:2505.12149](https://arxiv.org/abs/2505.12149).
    """

    residual: PyTree[Callable[..., Any]]
    _: dataclasses.KW_ONLY
    momentum: Number | None = eqx.field(default=None, converter=as_jax)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return run_compiled(self, *args, **kwargs)

    def __check_init__(self) -> None:
        check_adds(self.accumulator)
        if isinstance(self.residual, (tuple, list)):
            if not self.residual:
                message = "`residual` must have at least one function; got none."
                raise ValueError(message)
            for function in self.residual:
                check_callable("residual", function, "a sequence of functions")
        for name in ("damping", "momentum", "weights"):
            for number in jtu.tree_leaves(getattr(self, name)):
                if not eqx.is_array(number) and not 0 <= number < math.inf:
                    raise ValueError(
                        f"`{name}` must not be negative, NaN or infinite; got {number}."
                    )
        is_solver = hasattr(self.solver, "compute") and hasattr(self.solver, "init")
        if not is_solver and self.solver not in _SOLVERS:
            raise TypeError(
                f"`solver` must be one of {_SOLVERS}, or a solver of lineax such as "
                "`lineax.CG(rtol=1e-4, atol=1e-4)`; got "
                f"{described(self.solver)}."
            )

    @property
    def __wrapped__(self) -> Callable:
        is_one = not isinstance(self.residual, (tuple, list))
        return self.residual if is_one else JoinedTerms(tuple(self.residual))

    @property
    def __signature__(self) -> inspect.Signature:
        signature = super().__signature__
        if self.momentum is None:
            return signature
        return with_second(signature, "previous")

    def specs(self, args: tuple, kwargs: dict[str, Any], out: PyTree) -> PyTree:
        diff, _ = self.parameters(args, kwargs)
        return jtu.tree_map(spec_of, diff)

    def apply(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        call, previous = (args, kwargs), None
        if self.momentum is not None:
            if len(args) < 2:
                raise ValueError(
                    "With `momentum`, the first two arguments, by position, are what "
                    "is differentiated and the previous step, or None for the first; "
                    f"got {len(args)} positional arguments."
                )
            args, previous = (args[0], *args[2:]), args[1]
        diff, nondiff = self.parameters(args, kwargs)
        leaves, treedef = jtu.tree_flatten(diff)
        terms = self._terms(args, kwargs, diff, nondiff)
        accumulators = _for_terms("accumulator", self.accumulator, len(terms))
        terms = [*map(_without_padding, terms, accumulators)]
        residuals = Residuals(
            terms,
            leaves,
            functools.partial(self._weights, terms),
            centre=self.centre,
            microbatch_size=_number(self.microbatch_size),
        )
        if any(isinstance(size, MemoryBudget) for size in self._sizes):
            return self._sized(residuals, *call).apply(*call)
        last = None
        if previous is not None:
            last = like_parameters("The previous step", previous, diff)
        # A system is solved to more digits than products have by default.
        with exact_products():
            step = self._step(residuals, last)
        pairs = safe_zip(step, leaves)
        return jtu.tree_unflatten(treedef, [x.astype(leaf.dtype) for x, leaf in pairs])

    @property
    def _sizes(self) -> tuple[Size, Size]:
        return self.block_size, self.microbatch_size

    def _sized(
        self, residuals: Residuals, args: tuple, kwargs: dict[str, Any]
    ) -> "GaussNewtonStep[Model, P]":
        """The same, with sizes in place of budgets, chosen one after the other."""
        sized, num = self, max(rows.total for rows in residuals.rows)
        rows = num if self._is_in_samples(residuals) else residuals.num_parameters
        if isinstance(self.microbatch_size, MemoryBudget):
            if isinstance(self.block_size, MemoryBudget):
                sized = dataclasses.replace(self, block_size=_LEAST_ROWS)
            size = sized.fitting_size("microbatch_size", num, args, kwargs)
            sized = dataclasses.replace(self, microbatch_size=size)
        if isinstance(self.block_size, MemoryBudget):
            size = sized.fitting_size("block_size", rows, args, kwargs)
            sized = dataclasses.replace(sized, block_size=size)
        return sized

    def _step(self, residuals: Residuals, previous: list | None) -> list[Array]:
        if residuals.num == 0:
            zeros = [jnp.zeros_like(x) for x in residuals.leaves]
            return zeros if previous is None else self._kept(previous)
        values = residuals.values()
        if previous is not None:
            momentum = jnp.asarray(self.momentum, residuals.dtype)
            tangents = vary_as(residuals.leaves, previous)
            pairs = safe_zip(values, residuals.push(tangents))
            values = [x - momentum * y for x, y in pairs]
        if self._is_in_samples(residuals):
            step = self._in_samples(residuals, values)
        else:
            gradient = residuals.pull_by_example(residuals.weighted(values))
            step = self._in_parameters(residuals, gradient)
        if previous is None:
            return step
        pairs = safe_zip(step, self._kept(previous))
        return [x + y.astype(x.dtype) for x, y in pairs]

    def _kept(self, previous: list) -> list[Array]:
        """The part of the previous step that is kept."""
        wide = map(widened, previous)
        return [jnp.asarray(self.momentum, x.dtype) * x for x in wide]

    def _is_in_samples(self, residuals: Residuals) -> bool:
        num, num_parameters = residuals.num, residuals.num_parameters
        if self.space != "auto":
            return self.space == "sample"
        log.debug(
            "Gauss-Newton step: %d residuals and %d parameters, as real numbers.",
            *(num, num_parameters),
        )
        return num <= num_parameters

    def _in_samples(self, residuals: Residuals, values: list) -> list[Array]:
        """`J^T W (J J^T W + damping)^-1 values`, with weights `W`."""
        vector = joined(residuals.weighted(values, 0.5), residuals.dtype)

        def spread(vector: Array) -> list[Array]:
            return residuals.weighted(residuals.unravel.split(vector), 0.5)

        def product(vector: Array) -> Array:
            pushed = residuals.push(residuals.pull(spread(vector)))
            return joined(residuals.weighted(pushed, 0.5), residuals.dtype)

        if isinstance(self.solver, str):
            kernel = SampleKernel(residuals, *map(_number, self._sizes))
            return kernel.pull(spread(self._solved(kernel.matrix(), vector)))
        return residuals.pull(spread(self._solved_by_products(product, vector)))

    def _in_parameters(self, residuals: Residuals, gradient: list) -> list[Array]:
        """`(J^T W J + damping)^-1 gradient`, with weights `W`."""
        unravel = Unravel(as_real(gradient))
        flat = lambda leaves: joined(jtu.tree_leaves(as_real(leaves)), residuals.dtype)
        vector = flat(gradient)

        def split(vector: Array) -> list[Array]:
            real = unravel.split(vector)
            return as_complex(jtu.tree_unflatten(unravel.treedef, real))

        def product(vector: Array) -> Array:
            pushed = residuals.weighted(residuals.push(split(vector)))
            return flat(residuals.pull(pushed))

        if isinstance(self.solver, str):
            return split(self._solved(self._matrix(residuals), vector))
        return split(self._solved_by_products(product, vector))

    def _matrix(self, residuals: Residuals) -> Float[Array, "p p"]:
        """The Gauss-Newton matrix of real parameters."""
        total: Any = 0
        # The matrix has the dtype of its parameters.
        parameters = jtu.tree_map(widened, as_real(residuals.leaves))
        dtypes = tuple(x.dtype for x in residuals.leaves)
        terms: Sequence[Callable] = residuals.centred_terms
        if residuals.are_narrow:
            # To cast them to their own dtype would round their derivatives to it.
            terms = [_first_of(program) for program in residuals.centred_programs]
        for term, rows, weights in safe_zip(terms, residuals.rows, residuals.weights):
            if rows.total == 0:
                continue
            matrix = filter_ggn(
                _OfReal(term, dtypes),
                _half_of_squares,
                in_axes=rows.axes,
                flat=True,
                accumulator=Sum(weights=weights),
                block_size=self.block_size,
                microbatch_size=self.microbatch_size,
                # Products add up examples before they subtract the mean.
                method="sites" if residuals.centre else "auto",
            )
            of_term, _ = matrix(parameters, *rows.arrays)
            total = total + of_term.astype(residuals.dtype)
        return total

    def _solved(
        self, matrix: Float[Array, "n n"], vector: Float[Array, " n"]
    ) -> Float[Array, " n"]:
        damping = jnp.asarray(self.damping, matrix.dtype)
        if self.solver == "eigh":
            values, vectors = jnp.linalg.eigh(matrix)
            # Without damping, eigenvalues that are zero up to rounding do not count.
            # With it, they are still much larger than `damping` may be.
            largest = jnp.max(values, initial=0)
            rounding = largest * values.size * jnp.finfo(values.dtype).eps
            least = jnp.where(damping > 0, 0, rounding)
            damped = jnp.where(values > least, values, 0) + damping
            is_zero = damped <= 0
            inverse = jnp.where(is_zero, 0, 1 / jnp.where(is_zero, 1, damped))
            times = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
            solve = lambda inverse, x: times(vectors, inverse * times(vectors.T, x))
            solution = solve(inverse, vector)
            # All eigenvalues are as inexact as the largest one: what they leave of the
            # right-hand side is solved for, too. It would grow where a value is far
            # below zero.
            inverse = jnp.where(2 * values > -damping, inverse, 0)
            for _ in range(3):
                rest = vector - times(matrix, solution) - damping * solution
                solution += solve(inverse, rest)
            return error_if(solution, *self._wrong_numbers())
        shifted = matrix + damping * jnp.eye(matrix.shape[0], dtype=matrix.dtype)
        factor = jnp.linalg.cholesky(shifted)
        solution = jsl.cho_solve((factor, True), vector)
        is_finite = jnp.all(jnp.isfinite(shifted)) & jnp.all(jnp.isfinite(vector))
        is_indefinite = is_finite & ~jnp.all(jnp.isfinite(solution))
        message = (
            "The matrix of the step, with `damping` on its diagonal, is not positive "
            f"definite in {matrix.dtype}. Use more `damping`, `solver='eigh'`, or "
            "64-bit mode."
        )
        return error_if(solution, *self._wrong_numbers(), (is_indefinite, message))

    def _solved_by_products(
        self, product: Callable[[Array], Array], vector: Float[Array, " n"]
    ) -> Float[Array, " n"]:
        lineax = import_extra("lineax", "solver", "linalg")
        damping = jnp.asarray(self.damping, vector.dtype)
        # Before the solver says that it did not converge.
        vector = error_if(vector, *self._wrong_numbers())
        # Absolute tolerances are then relative to the largest entry.
        (scaled,), size = in_range([vector])
        operator = lineax.FunctionLinearOperator(
            lambda x: product(x) + damping * x,
            jax.eval_shape(lambda: vector),
            lineax.positive_semidefinite_tag,
        )
        return lineax.linear_solve(operator, scaled, self.solver).value * size

    def _terms(
        self, args: tuple, kwargs: dict[str, Any], diff: PyTree, nondiff: PyTree
    ) -> list[ResidualTerm]:
        fun = self.__wrapped__
        term = lambda fun, batch: ResidualTerm(
            Loss(fun, batch, diff, nondiff, self.has_residual, names=_NAMES)
        )
        if not isinstance(fun, JoinedTerms):
            return [term(fun, self.batch(args, kwargs))]
        model, *batches = args
        num = len(fun.functions)
        if kwargs or len(batches) != num:
            raise ValueError(
                f"For {num} terms, the model is followed by one batch for each, by "
                f"position; got {len(batches)} and the keyword arguments "
                f"{tuple(kwargs)}. Pass what belongs to a term as one tuple or dict."
            )
        if isinstance(self.in_axes, dict):
            raise ValueError(
                "For several terms, `in_axes` must be a tuple with a prefix for the "
                f"batch of each, or one prefix for all; got {shown(self.in_axes)}."
            )
        in_axes = _for_terms("in_axes", self.in_axes, num)
        triples = safe_zip(fun.functions, in_axes, batches)
        return [
            term(function, split_examples(function, (axes,), (model, batch), {}))
            for function, axes, batch in triples
        ]

    def _weights(
        self, terms: list[ResidualTerm], dtype: Any
    ) -> list[Float[Array, " _"]]:
        """For each term, the weights of its examples' squared residuals."""
        factors = _for_terms("weights", self.weights, len(terms))
        accumulators = _for_terms("accumulator", self.accumulator, len(terms))
        triples = safe_zip(terms, factors, accumulators)
        return [_weights_of_term(*triple, dtype) for triple in triples]

    def _wrong_numbers(self) -> list[tuple[Array, str]]:
        """For numbers known at run time: whether one is wrong, and the error."""
        checks = []
        for name in ("damping", "momentum", "weights"):
            message = f"`{name}` must not be negative, NaN or infinite."
            numbers = filter(eqx.is_array, jtu.tree_leaves(getattr(self, name)))
            checks += ((~((x >= 0) & jnp.isfinite(x)), message) for x in numbers)
        for accumulator in jtu.tree_leaves(self.accumulator, is_leaf=is_accumulator):
            name, weights = type(accumulator).__name__, accumulator.weights
            if weights is not None:
                message = f"{name}(weights=...) must not be negative or NaN here."
                checks.append((~(weights >= 0), message))
        return checks


def _number(size: Size) -> int | None:
    # No budget is left where a step is computed.
    return None if isinstance(size, MemoryBudget) else size


_SOLVERS = ("cholesky", "eigh")


# The size of blocks while examples are fitted into a budget.
_LEAST_ROWS = 32


class _OfReal(eqx.Module):
    """A term as a function of real parameters only, in at least float32.

    - `dtypes`: the dtypes in which the term takes its parameters.
    """

    term: Callable
    dtypes: tuple = eqx.field(static=True)

    def __call__(self, leaves: PyTree, *rows: Array) -> Float[Array, " entries"]:
        pairs = safe_zip(as_complex(leaves), self.dtypes)
        return self.term([x.astype(dtype) for x, dtype in pairs], *rows)


def _first_of(program: TracedFunction) -> Callable:
    """The first output of a program of one example."""
    return lambda leaves, *row: program.one(leaves, row)[0]


def _half_of_squares(out: Array, *rows: Array) -> Array:
    del rows
    return 0.5 * jnp.sum(out**2)


def _without_padding(term: ResidualTerm, accumulator: Sum | Mean) -> ResidualTerm:
    """The term with other examples in place of those of weight 0."""
    batch, weights = term.loss.batch, accumulator.weights
    check_real(type(accumulator).__name__, weights, batch.total())
    padding = Padding.of(batch.arrays, batch.axes, weights)
    if padding is None:
        return term
    counting = padding.replaced(batch.arrays, weights)
    batch = dataclasses.replace(batch, arrays=counting)
    return dataclasses.replace(term, loss=dataclasses.replace(term.loss, batch=batch))


def _weights_of_term(
    term: ResidualTerm, factor: Any, accumulator: Sum | Mean, dtype: Any
) -> Float[Array, " n"]:
    weights = jnp.ones(term.loss.batch.total(), dtype)
    if accumulator.weights is not None:
        weights = accumulator.weights.astype(dtype)
    if isinstance(accumulator, Mean):
        weights = shares(weights)
    return weights * jnp.asarray(factor, dtype)


def _for_terms(name: str, value: Any, num: int) -> Sequence[Any]:
    """Expands a setting to one value for each term."""
    if not isinstance(value, (tuple, list)):
        return [value] * num
    if len(value) != num:
        raise ValueError(
            f"`{name}` must have one entry for each of {num} terms; got {len(value)}."
        )
    return value


filter_gauss_newton_step = also_decorator(
    "filter_gauss_newton_step", GaussNewtonStep, AbstractGaussNewtonStep
)
