"""`filter_kfac`: Kronecker factors of Gauss-Newton and Fisher matrices."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Inexact, PyTree, Real, Shaped

from .._base.dtypes import common_dtype, widened
from .._base.jaxprs import varying
from .._base.mesh import is_on_mesh, sum_except, vary_as
from .._base.platforms import exact_products, num_bytes, platform, products_of
from .._base.trees import safe_zip
from .._batch.accumulators import Sum
from .._batch.loop import accumulated, accumulated_sums, Rows
from .._batch.transform import also_decorator, Model, Out, P, run_compiled
from .._sites.factors import aligned, contract, EXAMPLE, Factors, gradients, Labels
from .._sites.kronecker import AxisRoles, Layout, multiplied, Part, parts_of, uses_of
from .._sites.report import table
from .._sites.site import Label
from .._sites.trace import Program
from .by_sites import Kept, of_examples, pulled_back
from .columns import AbstractReplicated
from .curvature_matrices import AbstractFisher, GaussNewtonCurvature
from .pytree import leaves_of_parts, Unravel


if TYPE_CHECKING:
    from .operators import KroneckerOperator


# There is always a batch here.
_IF_WHOLE = "Give the function of one example."


WeightSharing = Literal["expand", "reduce"]


class KroneckerBlock(eqx.Module):
    """A block that is a Kronecker product, or a block diagonal of several.

    - `part`: names the parameters, and says why the block has this structure.
    - `outputs`, `inputs`: the second moments of the cotangents and of the operands, of
        shapes `(batch, outputs, outputs)` and `(batch, inputs, inputs)`, or
        `(batch, inputs)` if the latter is diagonal. An exact or diagonal block is a
        single factor, `inputs`, over all entries.
    - `moments`: with `corrected=True`, the eigenvalues, of shape
        `(batch, outputs, inputs)`. The eigenvectors are in `output_basis` and
        `input_basis`.
    """

    part: Part = eqx.field(static=True)
    outputs: Inexact[Array, "batch outputs outputs"] | None
    inputs: Inexact[Array, "batch inputs *inputs"]
    moments: Inexact[Array, "batch outputs inputs"] | None = None
    output_basis: Inexact[Array, "batch outputs outputs"] | None = None
    input_basis: Inexact[Array, "batch inputs inputs"] | None = None

    @property
    def matrix(self) -> Inexact[Array, "entries entries"]:
        """An exact block."""
        return self._only("block")

    @property
    def diagonal(self) -> Inexact[Array, " entries"]:
        """The entries of a diagonal block."""
        return self._only("diagonal")

    def _only(self, structure: str) -> Array:
        if self.part.structure != structure:
            raise AttributeError(f"The structure of this block is {self.part}.")
        return self.inputs[0]

    def eigenvectors(self) -> list[tuple[Array, Array | None]]:
        """Eigenvalues and eigenvectors of the factors of outputs and inputs.

        For a diagonal factor, or for one that is missing, eigenvalues are in the order
        of the entries, and there is no array of eigenvectors.
        """
        outputs = jnp.ones((1, 1), self.inputs.dtype)
        outputs = outputs if self.outputs is None else self.outputs
        factors = (outputs, self.inputs)
        return [(x, None) if x.ndim == 2 else jnp.linalg.eigh(x) for x in factors]


class KroneckerFactors(eqx.Module):
    """A Gauss-Newton or Fisher matrix in blocks, most of them Kronecker products.

    This is what [`eqxbatch.filter_kfac`][] returns. It is a PyTree of arrays: it can be
    averaged over steps with `optax.incremental_update` (unless `corrected=True`), saved
    with `equinox.tree_serialise_leaves`, sharded, and passed to functions under
    `jax.jit`.

    - `blocks`: one block for each weight (together with its bias if that counts as one
        more input), and one for each other array. A Kronecker block has two factors:
        `outputs`, the second moments of the gradients of the layer's outputs, of shape
        `(batch, rows, rows)`, and `inputs`, the second moments of the inputs, of shape
        `(batch, columns, columns)`, or `(batch, columns)` if they are diagonal, as for
        an embedding. `batch` is the number of stacked matrices, such as the groups of a
        convolution. With `corrected=True`, `moments` are the eigenvalues, of shape
        `(batch, rows, columns)`. An exact block has a `matrix`, and a diagonal block a
        `diagonal`. The `part` of each block says which structure it has, and why, if it
        is not a Kronecker product.
    - `unravel`: an [`eqxbatch.results.Unravel`][], which turns vectors into PyTrees of
        parameters.
    - `is_semidefinite`: whether the matrix is known to be positive semidefinite, as it
        is with `fisher="mc"` or `"empirical"` and without `weights`.

    `print` shows a table of the blocks with the sizes of their factors.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, 3, 8, 1, key=jax.random.key(0))
        >>> factors = eqxbatch.filter_kfac(
        ...     lambda model, x, label: model(x),
        ...     lambda logits, x, label: -jax.nn.log_softmax(logits)[label],
        ... )(model, jnp.ones((10, 2)), jnp.arange(10) % 3)
        >>> print(factors)
        leaves                              structure
        .layers[0].weight, .layers[0].bias  8 (x) 3
        .layers[1].weight, .layers[1].bias  3 (x) 9
        >>> factors.blocks[0].outputs.shape
        (1, 8, 8)

        ```
    """

    blocks: tuple[KroneckerBlock, ...]
    unravel: Unravel
    is_semidefinite: bool = eqx.field(static=True, default=False)

    def operator(
        self,
        *,
        damping: Real[Array, ""] | float = 0.0,
        relative: bool = False,
        factored: bool = False,
    ) -> "KroneckerOperator":
        """The matrix plus `damping` times the identity, as a lineax linear operator.

        Returns an [`eqxbatch.KroneckerOperator`][], from an eigendecomposition of each
        factor; see there for `relative` and `factored`. Raises `ValueError` for
        negative damping, and `ImportError` if lineax is
        not installed. Raises `RuntimeError` at run time if the eigenvectors of a
        `corrected` block are not orthogonal because they were averaged.
        """
        from .operators import KroneckerOperator

        return KroneckerOperator(self, damping, relative=relative, factored=factored)

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The paths of the parameters in each block."""
        tree = jtu.tree_unflatten(self.unravel.treedef, self.unravel.structs)
        paths = [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(tree)]
        return tuple(
            tuple(paths[leaf] for leaf in block.part.leaves) for block in self.blocks
        )

    def __str__(self) -> str:
        rows = [("leaves", "structure", "")]
        for names, block in safe_zip(self.names, self.blocks):
            part = block.part
            rows.append((", ".join(names), str(part), part.reason or ""))
        return "\n".join(table(rows, num_texts=3))


class KFAC(AbstractFisher[Model, P, Out], AbstractReplicated):
    """Kronecker factors (K-FAC) of a Gauss-Newton or Fisher matrix.

    The block of a weight in [`eqxbatch.filter_ggn`][] is the second moment of `d a^T`,
    where `a` is the input of its layer and `d` the gradient of its output. K-FAC
    approximates it by the Kronecker product of the second moments of `d` and of `a`.
    These are found for every matrix product, convolution and embedding in any program:
    inside `scan`s, in custom layers, for weights that are used several times, and for
    stacked layers.

    **Arguments:**

    - `fun`, `loss`: a model, and a loss of its output for one example, as for
        [`eqxbatch.filter_ggn`][]. Pass `loss` by keyword if you use this as a
        decorator.
    - `fisher`, `key`, `num_samples`, `sampler`: the exact matrix, or an estimate that
        needs fewer backward passes, as for [`eqxbatch.filter_ggn`][].
    - `weight_sharing`: how to treat a weight that is used at several positions of one
        example, such as those of an image or a sequence, the steps of a `scan`, or
        several calls. `"expand"` treats positions as separate examples. `"reduce"` uses
        the mean of the inputs and the sum of the gradients over the positions, which
        suits models that average over positions before the loss. Embeddings are always
        expanded.
    - `corrected`: whether to correct the eigenvalues (EK-FAC). A second pass over the
        examples computes the second moments of per-example gradients along the
        eigenvectors of each Kronecker product. The result is the best approximation of
        the exact block with these eigenvectors.
    - `is_block`: a predicate on parts of the first argument: whether the part is one
        block. A weight with its bias, or a weight alone, has Kronecker factors; any
        other part gets its exact block. By default, a bias that is added to the product
        with a weight counts as one more input of the layer, and every other array is a
        block of its own. `is_block=equinox.is_array` separates biases.
    - `in_axes`: the batch axes of the arguments after the first, as for
        [`eqxbatch.filter_micro_value_and_grad`][]: axis 0 of all arrays by default.
    - `where`, `filter_spec`, `microbatch_size`, `accumulator`: as for
        [`eqxbatch.filter_hessian`][].

    **Returns:**

    A function with the arguments of `fun` that returns
    [`eqxbatch.results.KroneckerFactors`][]. Arrays that do not enter by a matrix
    product, such as the scales of a normalisation layer, have an exact block if they
    have at most 512 entries, and a diagonal block otherwise. So do arrays that are
    reshaped, sliced or masked first, and all arrays if JAX can differentiate `fun` in
    forward mode only. To see the structure of each block, print the factors or an
    [`eqxbatch.explain_sites`][] report.

    The function is compiled on the first call; repeated calls with the same function
    and shapes are not retraced.

    **Raises:**

    The errors of [`eqxbatch.filter_ggn`][], and:

    - `ValueError` for `in_axes=None`, for an unknown `weight_sharing`, and for
        parameters that are multiplied with each other before they meet an example,
        unless `is_block` is given.

    !!! example

        A natural-gradient step:

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, 3, 8, 1, key=jax.random.key(0))
        >>> predict = lambda model, x, label: model(x)
        >>> loss = lambda logits, x, label: -jax.nn.log_softmax(logits)[label]
        >>> x, labels = jnp.ones((10, 2)), jnp.arange(10) % 3
        >>> factors = eqxbatch.filter_kfac(
        ...     predict,
        ...     loss,
        ...     fisher="mc",
        ...     key=jax.random.key(1),
        ...     sampler=jax.random.categorical,
        ... )(model, x, labels)
        >>> gradient = eqxbatch.filter_micro_grad(
        ...     lambda model, x, label: loss(predict(model, x, label), x, label)
        ... )(model, x, labels)
        >>> step = factors.operator(damping=1e-2).inverse().mv(gradient)
        >>> model = eqx.apply_updates(model, jax.tree.map(jnp.negative, step))

        ```

    ??? cite

        Martens and Grosse, "Optimizing neural networks with Kronecker-factored
        approximate curvature", [arXiv:1503.05671](https://arxiv.org/abs/1503.05671);
        Grosse and Martens, "A Kronecker-factored approximate Fisher matrix for
        convolution layers", [arXiv:1602.01407](https://arxiv.org/abs/1602.01407);
        Eschenhagen et al., "Kronecker-factored approximate curvature for modern neural
        network architectures", [arXiv:2311.00636](https://arxiv.org/abs/2311.00636),
        for `weight_sharing`; George et al., "Fast approximate natural gradient descent
        in a Kronecker-factored eigenbasis",
        [arXiv:1806.03884](https://arxiv.org/abs/1806.03884), for `corrected`.
    """

    _: dataclasses.KW_ONLY
    weight_sharing: WeightSharing = "expand"
    corrected: bool = False
    is_block: Callable[[Any], bool] | None = None

    def __call__(
        self, x: Model, /, *args: P.args, **kwargs: P.kwargs
    ) -> KroneckerFactors:
        return run_compiled(self, x, *args, **kwargs)

    def __check_init__(self) -> None:
        if self.in_axes is None:
            raise ValueError(
                "`in_axes` must say which axes of the arguments after the first are "
                "the batch, as Kronecker factors are means over examples; got None. "
                "Use `in_axes=0`, with `x[None]` for a single example."
            )

    def apply(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        fun = self.with_keys(self.in_microbatches(args, kwargs))
        diff = fun.diff
        curvature = GaussNewtonCurvature(
            fun, self.loss, fisher=self, if_whole=_IF_WHOLE
        )
        program = Program(curvature.program, formed=curvature.formed)
        chosen = None
        if self.is_block is None:
            _check_not_multiplied(program, diff)
        else:
            chosen = [x for x in leaves_of_parts(diff, self.is_block) if x]
        parts = parts_of(program, chosen)
        axes = [varying(jax.typeof(x)) for x in jtu.tree_leaves(diff)]
        mesh_axes = frozenset.intersection(*axes)

        def totals(sums: Callable[[Factors, Weighing], list]) -> list:
            treedefs: list = []

            def flat(factors: Factors, weighing: Weighing) -> list[Array]:
                arrays, treedef = jtu.tree_flatten(sums(factors, weighing))
                treedefs.append(treedef)
                return arrays

            of_rows = functools.partial(_sums, curvature, program, flat)
            traced = curvature.program
            with exact_products(), products_of(traced.closed):
                of_all, _ = self.total(fun, traced, of_rows, curvature.aux)
            # A sum over examples, like a gradient. It also sums over devices, which
            # have different examples but the same parameters.
            of_all = [sum_except(x, mesh_axes) for x in of_all]
            return jtu.tree_unflatten(treedefs[0], of_all)

        of_parts = totals(
            lambda factors, weighing: [
                part_sums(program, part, factors, weighing, self.weight_sharing)
                for part in parts
            ]
        )
        blocks = [
            KroneckerBlock(part, *finished(part, of_part))
            for part, of_part in safe_zip(parts, of_parts)
        ]
        if self.corrected:
            bases = {
                block.part: [basis for _, basis in block.eigenvectors()]
                for block in blocks
                if block.part.structure == "kronecker"
            }
            # Second moments along the eigenvectors.
            moments = totals(
                lambda factors, weighing: [
                    moment_sums(program, part, factors, weighing, basis)
                    for part, basis in bases.items()
                ]
            )
            known = dict(safe_zip(bases, moments))
            blocks = [
                KroneckerBlock(part, x.outputs, x.inputs, known[part], *bases[part])
                if (part := x.part) in bases
                else x
                for x in blocks
            ]
        is_squared = self.fisher != "exact"
        is_semidefinite = is_squared and self.accumulator.weights is None
        return KroneckerFactors(tuple(blocks), Unravel(diff), is_semidefinite)


def _check_not_multiplied(program: Program, diff: PyTree) -> None:
    paths = [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(diff)]
    for leaf, path in enumerate(paths):
        other = multiplied(program, leaf)
        if other is not None:
            raise ValueError(
                f"The parameters `{path}` and `{paths[other]}` are multiplied with "
                "each other before they meet an example, so neither has Kronecker "
                "factors. Multiply them with the example one after the other, as in `a "
                "@ (b @ x)`; or leave them out with `filter_spec` or `where`; or pass "
                "`is_block=equinox.is_array` for exact blocks (diagonals of large "
                "ones), with separate biases."
            )


class Weighing(eqx.Module):
    """How examples, and the vectors that were pulled back, are weighted.

    - `curve`: the curvature between the vectors of an example; None for the identity.
    """

    num: int = eqx.field(static=True)
    num_vectors: int = eqx.field(static=True)
    weights: Real[Array, " n"] | None
    curve: Inexact[Array, "n vectors vectors"] | None

    def sum(self) -> Array:
        if self.weights is None:
            return jnp.asarray(float(self.num))
        return jnp.sum(widened(self.weights))

    def times(self, x: Inexact[Array, "n ..."]) -> Inexact[Array, "n ..."]:
        """Multiplies per-example values by the weights of the examples."""
        if self.weights is None:
            return x
        weights = self.weights.astype(x.dtype)
        return x * jnp.expand_dims(weights, range(1, x.ndim))

    def seconds(
        self, x: Inexact[Array, "n vectors ..."]
    ) -> Inexact[Array, "n vectors ..."]:
        """The array that contracts with `x` to the curvature along `x`."""
        if self.curve is not None:
            curve = self.curve.astype(common_dtype(x.dtype, self.curve.dtype))
            x = jnp.einsum("nv...,nvw->nw...", x.astype(curve.dtype), curve)
        return self.times(x)


def _sums(
    curvature: GaussNewtonCurvature,
    program: Program,
    sums: Callable[[Factors, Weighing], list[Array]],
    rows: list,
    weights: Array | None,
) -> list[Array]:
    """Adds up what `sums` returns for the factors of some examples at a time."""
    axes, num_vectors = curvature.axes, curvature.num_vectors

    def one(rows: list, _: Array | None) -> Kept:
        return pulled_back(program, rows, curvature.of_outputs)

    def of_rows(rows: list, weights: Array | None) -> list[Array]:
        cotangents, operands, curve = of_examples(one, rows, axes, weights)
        labels: Labels = (VECTOR,)
        num, values = rows[0].shape[axes[0]], program.values()
        factors = Factors(operands, cotangents, labels, num, values)
        return sums(factors, Weighing(num, num_vectors, weights, curve))

    kept = _bytes(program, num_vectors)
    size = max(1, 4 * platform().factor_bytes // max(kept, 1))
    return accumulated_sums(of_rows, rows, axes, weights, size)


def _bytes(program: Program, num_vectors: int) -> int:
    """The bytes kept for one example, with the largest operand as its site uses it.

    The patches of a convolution are several times as large as its input.
    """
    structs = [*program.operands, *(num_vectors * [*program.perturbations])]
    size = lambda site, axes: math.prod(site.sizes[name] for name in axes)
    expanded = [
        size(site, site.a_axes) * program.operands[site.operand].dtype.itemsize
        for site in program.sites
        if site.operand is not None
    ]
    # Both factors are separate for each group.
    expanded += [
        site.sizes[str(site.rule.group)]
        * (size(site, site.a_axes) + num_vectors * size(site, site.d_axes))
        * program.perturbations[site.perturbation].dtype.itemsize
        for site in program.sites
        if site.which is not None
    ]
    return num_bytes(structs) + max(expanded, default=0)


VECTOR: Label = ("output", 0)


class _Use(eqx.Module):
    """The factors at one site, flat, with examples along axis 0.

    - `tokens`: the indices that an embedding looks up, instead of an operand.
    - `met`: one where a position meets a matrix, and zero where it does not; None if
        each position meets all of them.
    """

    a: Inexact[Array, "n positions batch inputs"] | None
    d: Inexact[Array, "n vectors positions batch outputs"]
    tokens: Shaped[Array, "n positions"] | None
    is_swapped: bool = eqx.field(static=True)
    met: Inexact[Array, "n positions batch"] | None = None

    @property
    def num(self) -> int | Inexact[Array, "n batch"]:
        """How many positions of each example meet each matrix."""
        return self.d.shape[2] if self.met is None else jnp.sum(self.met, 1)


def flat_use(use: AxisRoles, factors: Factors, layout: Layout) -> _Use:
    (a, of_a), (d, of_d), shared, met = use.terms(factors)
    sides = (layout.inputs, layout.outputs)
    into, out = sides[::-1] if use.is_swapped else sides
    num, vectors = d.shape[:2]
    positions = math.prod(d.shape[of_d.index(label)] for label in shared)
    d = _in_order(d, of_d, (EXAMPLE, VECTOR), shared, layout.batch, out)
    count, rows = layout.size(layout.batch), layout.size(out)
    d = d.reshape(num, vectors, positions, count, rows)
    if use.site.rule.token is not None:
        tokens = _in_order(a, of_a, (EXAMPLE,), shared, (), ())
        return _Use(None, d, tokens.reshape(num, positions), use.is_swapped)
    a = _in_order(a, of_a, (EXAMPLE,), shared, layout.batch, into)
    a = a.reshape(num, positions, count, layout.size(into))
    if met is not None:
        batch = (("leaf", axis) for axis in layout.batch)
        met = aligned(*met, (EXAMPLE, *shared, *batch))
        met = met.reshape(met.shape[0], positions, count)
        met = jnp.broadcast_to(met, (num, positions, count))
    return _Use(a, d, None, use.is_swapped, met)


def _in_order(
    x: Array, labels: Labels, lead: Labels, shared: Labels, *axes: Sequence[int]
) -> Array:
    of_leaf = [("leaf", axis) for group in axes for axis in group]
    wanted = (*lead, *shared, *(label for label in of_leaf if label in labels))
    return contract([(x, labels)], wanted)


def _gram(
    x: Inexact[Array, "*sum batch k"], y: Inexact[Array, "*sum batch k"]
) -> Inexact[Array, "batch k k"]:
    """The sum of outer products, as a single matrix product if possible."""
    x, y = (z.reshape(math.prod(z.shape[:-2]), *z.shape[-2:]) for z in (x, y))
    if x.shape[1] == 1:
        return jnp.einsum("zi,zj->ij", x[:, 0], y[:, 0])[None]
    return jnp.einsum("zbi,zbj->bij", x, y)


def symmetric(x: Inexact[Array, "*batch k k"]) -> Inexact[Array, "*batch k k"]:
    """Makes a matrix that is symmetric up to rounding exactly symmetric."""
    return (x + jnp.swapaxes(x, -1, -2)) / 2


def part_sums(
    program: Program,
    part: Part,
    factors: Factors,
    weighing: Weighing,
    sharing: WeightSharing,
) -> list[Array]:
    """The arrays that are summed over examples for one block.

    For Kronecker factors, these are, for each of the (up to two) roles of operands that
    the weight has: the second moment of the operands, their sum, the second moment of
    the cotangents, and the number of positions, for each matrix if they differ.
    """
    layout = part.layout
    if layout is None:
        return [_exact_sum(program, part, factors, weighing)]
    sums: list[Array] = []
    uses = [flat_use(use, factors, layout) for use in uses_of(program, part)]
    for is_swapped in (False, True):
        of_role = [use for use in uses if use.is_swapped is is_swapped]
        if of_role:
            sums += _role_sums(of_role, part, weighing, sharing)
    return sums


def _role_sums(
    uses: list[_Use], part: Part, weighing: Weighing, sharing: WeightSharing
) -> list[Array]:
    positions = sum(use.num for use in uses)
    if sharing == "reduce" and all(use.a is not None for use in uses):
        # The mean of the operands, and the sum of the cotangents, over the positions.
        operands = (jnp.sum(use.a, 1) for use in uses if use.a is not None)
        total = functools.reduce(jnp.add, operands)
        d = functools.reduce(jnp.add, (jnp.sum(use.d, 2) for use in uses))
        met = None
        if isinstance(positions, int):
            a, positions = total / max(positions, 1), 1
        else:
            a = total / jnp.maximum(positions, 1)[..., None]
            positions = (positions > 0).astype(positions.dtype)
            met = positions[:, None]
        uses = [_Use(a[:, None], d[:, :, None], None, uses[0].is_swapped, met)]
    grams, sums, outputs = safe_zip(*(_use_sums(use, part, weighing) for use in uses))
    add = functools.partial(functools.reduce, jnp.add)
    gram = add(grams)
    if isinstance(positions, int):
        count = weighing.sum() * positions
    else:
        count = jnp.sum(weighing.times(positions), 0)
    # If the sums vary over devices in `jax.shard_map`, so must the count.
    count = vary_as([gram], count.astype(outputs[0].dtype))
    return [gram, add(sums), add(outputs), count]


def _use_sums(use: _Use, part: Part, weighing: Weighing) -> tuple[Array, Array, Array]:
    outputs = _gram(use.d, weighing.seconds(use.d))
    if use.tokens is None:
        assert use.a is not None
        weighted = weighing.times(use.a)
        return _gram(use.a, weighted), jnp.sum(weighted, (0, 1)), outputs
    assert part.layout is not None
    side = part.layout.outputs if use.is_swapped else part.layout.inputs
    table = jnp.zeros(part.layout.size(side), outputs.dtype)
    tokens = use.tokens
    take = lambda table: jnp.take(table, tokens, mode="fill", fill_value=0)
    ones = weighing.times(jnp.ones(tokens.shape, table.dtype))
    # How often each row of the table is looked up.
    counts = jax.linear_transpose(take, table)(ones)[0]
    gram = counts if part.is_counted else jnp.diag(counts)
    return gram[None], counts[None], outputs


def _exact_sum(
    program: Program, part: Part, factors: Factors, weighing: Weighing
) -> Array:
    # The flattened gradient of each example along each vector.
    lead = weighing.num, weighing.num_vectors
    parts = []
    for leaf in part.leaves:
        struct, sites = program.leaves[leaf], program.sites_of(leaf)
        x = jnp.zeros((*lead, *struct.shape), struct.dtype)
        x = widened(gradients(sites, factors, struct)) if sites else x
        parts.append(x.reshape(*lead, struct.size))
    dtype = common_dtype(*(x.dtype for x in parts))
    gradient = jnp.concatenate([x.astype(dtype) for x in parts], axis=-1)
    second = weighing.seconds(gradient)
    if part.structure == "diagonal":
        return jnp.sum(gradient * second, (0, 1))
    return _gram(gradient[..., None, :], second[..., None, :])[0]


def finished(part: Part, sums: list[Array]) -> tuple[Array | None, Array]:
    """The factors of outputs and inputs, from the sums of all examples.

    If a weight has two roles, they give the Kronecker product with the same partial
    traces as the sum of both.
    """
    layout = part.layout
    if layout is None:
        (total,) = sums
        is_diagonal = part.structure == "diagonal"
        return None, (total if is_diagonal else symmetric(total))[None]
    pairs = []
    for start in range(0, len(sums), 4):
        gram, total, outputs, count = sums[start : start + 4]
        safe = jnp.where(count == 0, 1, count)
        inputs = gram / safe.reshape(*safe.shape, *safe.ndim * (gram.ndim - 1) * (1,))
        if layout.bias is not None:
            mean = total / safe
            ones = jnp.where(count == 0, 0, jnp.ones((len(mean), 1, 1), mean.dtype))
            column = mean[:, :, None]
            inputs = jnp.block([[inputs, column], [jnp.swapaxes(column, 1, 2), ones]])
        inputs = inputs if part.is_counted else symmetric(inputs)
        pairs.append((symmetric(outputs), inputs))
    if len(pairs) == 1:
        return pairs[0]
    (second, first), (inputs, outputs) = pairs
    traces = [
        jnp.trace(x, axis1=1, axis2=2)[:, None, None]
        for x in (first, second, inputs, outputs)
    ]
    total = traces[0] * traces[1] + traces[2] * traces[3]
    safe = jnp.where(total == 0, 1, total)
    return (
        traces[0] * second + traces[2] * outputs,
        (traces[1] * first + traces[3] * inputs) / safe,
    )


def moment_sums(
    program: Program,
    part: Part,
    factors: Factors,
    weighing: Weighing,
    bases: Sequence[Array | None],
) -> Inexact[Array, "batch outputs inputs"]:
    """Second moments of the gradients of examples, along products of eigenvectors."""
    layout = part.layout
    assert layout is not None
    uses = [flat_use(use, factors, layout) for use in uses_of(program, part)]
    (use, *rest) = uses
    is_one = not rest and use.d.shape[2] == 1 and use.a is not None
    if is_one:
        # The squares of an outer product are products of squares.
        a, d = rotated(use, layout, bases)
        squares = jnp.sum(d * weighing.seconds(d), (1, 2))
        return jnp.einsum("nbi,nbo->boi", a[:, 0] ** 2, squares)

    def moments(uses: list[_Use], weighing: Weighing) -> Array:
        formed = functools.reduce(
            jnp.add, (product_in_basis(x, layout, bases) for x in uses)
        )
        return jnp.sum(formed * weighing.seconds(formed), 1)

    arrays, treedef = jax.tree.flatten((uses, weighing))

    def of_block(arrays: list, _: int) -> Array:
        return jnp.sum(moments(*jax.tree.unflatten(treedef, arrays)), 0)

    entries = math.prod(layout.sizes) * use.d.shape[1] * use.d.dtype.itemsize
    # On a mesh, cutting would gather the same examples from all devices.
    most = platform().block_bytes // max(entries, 1)
    size = None if is_on_mesh(use.d) else max(1, most)
    rows = Rows(arrays, (0,) * len(arrays), use.d.shape[0])
    return accumulated(of_block, rows, size, Sum())


def rotated(
    use: _Use, layout: Layout, bases: Sequence[Array | None]
) -> tuple[Array, Array]:
    """Operand and cotangent in the eigenbases of the factors."""
    out, into = bases[::-1] if use.is_swapped else bases
    if use.tokens is not None and into is not None and layout.bias is None:
        rows = jnp.take(into[0], use.tokens, 0, mode="fill", fill_value=0)
        a, into = rows[:, :, None], None
    elif use.tokens is not None:
        side = layout.outputs if use.is_swapped else layout.inputs
        a = jax.nn.one_hot(use.tokens, layout.size(side), dtype=use.d.dtype)[:, :, None]
    else:
        assert use.a is not None
        a = use.a
    if layout.bias is not None:
        a = jnp.concatenate([a, jnp.ones((*a.shape[:-1], 1), a.dtype)], axis=-1)
    if into is not None:
        a = jnp.einsum("npbi,bij->npbj", a, into.astype(a.dtype))
    if out is None:
        return a, use.d
    return a, jnp.einsum("nvpbo,boq->nvpbq", use.d, out.astype(use.d.dtype))


def product_in_basis(
    use: _Use, layout: Layout, bases: Sequence[Array | None]
) -> Inexact[Array, "n vectors batch outputs inputs"]:
    a, d = rotated(use, layout, bases)
    formed = jnp.einsum("npbi,nvpbo->nvboi", a, d)
    return jnp.swapaxes(formed, -1, -2) if use.is_swapped else formed


filter_kfac = also_decorator("filter_kfac", KFAC)
