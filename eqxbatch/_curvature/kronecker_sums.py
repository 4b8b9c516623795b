"""The sums over examples that Kronecker factors are made of."""

import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Num, Real, Shaped

from .._base.dtypes import common_dtype, widened
from .._base.mesh import is_on_mesh, vary_as
from .._base.platforms import platform
from .._base.trees import safe_zip
from .._batch.loop import accumulated
from .._batch.rows import Rows
from .._batch.sums import Sum
from .._sites.axes import Axes, Axis, EXAMPLE, Named, Role
from .._sites.contract import aligned, contract
from .._sites.factors import Factors
from .._sites.formed import gradients
from .._sites.kronecker import AxisRoles, Layout, Part, uses_of
from .._sites.table import SiteTable


WeightSharing = Literal["expand", "reduce"]


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


VECTOR = Axis(Role.OUTPUT)


class FlatUse(eqx.Module):
    """The factors at one site, flat, with examples along axis 0.

    - `tokens`: the indices that an embedding looks up, instead of an operand.
    - `bias`: the operand of the bias at each position, if the layout has one.
    - `met`: one where a position meets a matrix, and zero where it does not; None if
        each position meets all of them.
    """

    a: Inexact[Array, "n positions batch inputs"] | None
    d: Inexact[Array, "n vectors positions batch outputs"]
    tokens: Shaped[Array, "n positions"] | None
    is_swapped: bool = eqx.field(static=True)
    bias: float = eqx.field(static=True)
    met: Inexact[Array, "n positions batch"] | None = None

    @property
    def num(self) -> int | Inexact[Array, "n batch"]:
        """How many positions of each example meet each matrix."""
        return self.d.shape[2] if self.met is None else jnp.sum(self.met, 1)


def flat_use(use: AxisRoles, factors: Factors, layout: Layout) -> FlatUse:
    (a, of_a), (d, of_d), shared, met = use.terms(factors)
    sides = (layout.inputs, layout.outputs)
    into, out = sides[::-1] if use.is_swapped else sides
    # Positions of all loops and windows become one axis; so do the axes of each kind.
    num, vectors = d.shape[:2]
    positions = math.prod(d.shape[of_d.index(axis)] for axis in shared)
    d = _in_order(d, of_d, (EXAMPLE, VECTOR), shared, layout.batch, out)
    count, rows = layout.size(layout.batch), layout.size(out)
    d = d.reshape(num, vectors, positions, count, rows)
    bias = float(use.has_bias)
    # A one-hot row is as long as the table, so tokens stay numbers.
    if use.site.rule.token is not None:
        tokens = _in_order(a, of_a, (EXAMPLE,), shared, (), ())
        tokens = tokens.reshape(num, positions)
        return FlatUse(None, d, tokens, use.is_swapped, bias)
    a = _in_order(a, of_a, (EXAMPLE,), shared, layout.batch, into)
    a = a.reshape(num, positions, count, layout.size(into))
    # Groups, such as the experts of a mixture, are the matrices of the batch.
    if met is not None:
        batch = (Axis(Role.LEAF, number) for number in layout.batch)
        met = aligned(*met, (EXAMPLE, *shared, *batch))
        met = met.reshape(met.shape[0], positions, count)
        met = jnp.broadcast_to(met, (num, positions, count))
    return FlatUse(a, d, None, use.is_swapped, bias, met)


def _in_order(
    x: Array, axes: Axes, lead: Axes, shared: Axes, *of_leaf: Sequence[int]
) -> Array:
    last = (Axis(Role.LEAF, number) for group in of_leaf for number in group)
    wanted = (*lead, *shared, *(axis for axis in last if axis in axes))
    return contract([Named(x, axes)], wanted)


def _gram(
    x: Inexact[Array, "*sum batch k"], y: Inexact[Array, "*sum batch k"]
) -> Inexact[Array, "batch k k"]:
    """The sum of outer products, as a single matrix product if possible."""
    x, y = (z.reshape(math.prod(z.shape[:-2]), *z.shape[-2:]) for z in (x, y))
    # A single matrix needs no batched product.
    if x.shape[1] == 1:
        return jnp.einsum("zi,zj->ij", x[:, 0], y[:, 0])[None]
    return jnp.einsum("zbi,zbj->bij", x, y)


def symmetric(x: Inexact[Array, "*batch k k"]) -> Inexact[Array, "*batch k k"]:
    """Makes a matrix that is symmetric up to rounding exactly symmetric."""
    return (x + jnp.swapaxes(x, -1, -2)) / 2


class RoleSums(NamedTuple):
    """The sums over examples and positions for the uses of a weight in one role.

    - `inputs`, `outputs`: the second moments of the operands and of the cotangents.
    - `mixed`, `biases`: the sums of the operands times that of the bias, and of the
        squares of the latter. It is 1 at all positions if `biases` is None.
    - `count`: the number of positions, for each matrix if they differ.
    """

    inputs: Inexact[Array, "batch inputs *inputs"]
    mixed: Inexact[Array, "batch inputs"]
    outputs: Inexact[Array, "batch outputs outputs"]
    count: Inexact[Array, "*batch"]
    biases: Inexact[Array, ""] | None


def part_sums(
    table: SiteTable,
    part: Part,
    factors: Factors,
    weighing: Weighing,
    sharing: WeightSharing,
) -> Array | list[RoleSums]:
    """What is summed over examples for one block.

    For Kronecker factors, these are the sums for each of the (up to two) roles of
    operands that the weight has.
    """
    layout = part.layout
    if layout is None:
        return _exact_sum(table, part, factors, weighing)
    uses = [flat_use(use, factors, layout) for use in uses_of(table, part)]
    of_roles = (
        [use for use in uses if use.is_swapped is is_swapped]
        for is_swapped in (False, True)
    )
    return [_role_sums(x, part, weighing, sharing) for x in of_roles if x]


def _role_sums(
    uses: list[FlatUse], part: Part, weighing: Weighing, sharing: WeightSharing
) -> RoleSums:
    # Calls of a weight count as further positions.
    positions = sum(use.num for use in uses)
    if sharing == "reduce" and all(use.a is not None for use in uses):
        # The mean of the operands, and the sum of the cotangents, over the positions.
        operands = (jnp.sum(use.a, 1) for use in uses if use.a is not None)
        total = functools.reduce(jnp.add, operands)
        d = functools.reduce(jnp.add, (jnp.sum(use.d, 2) for use in uses))
        met, bias = None, uses[0].bias
        # With as many positions in all examples, the mean of the operands is a single
        # one.
        if isinstance(positions, int):
            bias = sum(use.bias * use.d.shape[2] for use in uses) / max(positions, 1)
            a, positions = total / max(positions, 1), 1
        else:
            # Otherwise, the mean is over those that meet the matrix. An example without
            # any has none, and does not count.
            a = total / jnp.maximum(positions, 1)[..., None]
            positions = (positions > 0).astype(positions.dtype)
            met = positions[:, None]
        role = uses[0].is_swapped
        uses = [FlatUse(a[:, None], d[:, :, None], None, role, bias, met)]
    # Second moments are sums over all uses, as over positions.
    grams, sums, outputs = safe_zip(*(_use_sums(use, part, weighing) for use in uses))
    add = functools.partial(functools.reduce, jnp.add)
    gram = add(grams)
    pairs = [(x, use.bias) for x, use in safe_zip(sums, uses) if use.bias]
    mixed = add([x if bias == 1 else x * bias for x, bias in pairs])
    if isinstance(positions, int):
        count = weighing.sum() * positions
    else:
        count = jnp.sum(weighing.times(positions), 0)
    # If the sums vary over devices in `jax.shard_map`, so must the count.
    as_sum = lambda x: vary_as([gram], x.astype(outputs[0].dtype))
    biases = None
    if {use.bias for use in uses} != {1}:
        biases = weighing.sum() * sum(use.bias**2 * use.d.shape[2] for use in uses)
        biases = as_sum(biases)
    return RoleSums(gram, mixed, add(outputs), as_sum(count), biases)


def _use_sums(
    use: FlatUse, part: Part, weighing: Weighing
) -> tuple[Array, Array, Array]:
    outputs = _gram(use.d, weighing.seconds(use.d))
    if use.tokens is None:
        assert use.a is not None
        # The sum of the operands is their second moment with the 1 of a bias.
        weighted = weighing.times(use.a)
        return _gram(use.a, weighted), jnp.sum(weighted, (0, 1)), outputs
    assert part.layout is not None
    side = part.layout.outputs if use.is_swapped else part.layout.inputs
    table = jnp.zeros(part.layout.size(side), outputs.dtype)
    tokens = use.tokens
    take = lambda table: jnp.take(table, tokens, mode="fill", fill_value=0)
    # Looking up is linear in the table, and its transpose adds to the rows that were
    # read.
    ones = weighing.times(jnp.ones(tokens.shape, table.dtype))
    # How often each row of the table is looked up.
    counts = jax.linear_transpose(take, table)(ones)[0]
    gram = counts if part.is_counted else jnp.diag(counts)
    return gram[None], counts[None], outputs


def _exact_sum(
    table: SiteTable, part: Part, factors: Factors, weighing: Weighing
) -> Array:
    # The flattened gradient of each example along each vector.
    lead = weighing.num, weighing.num_vectors
    parts = []
    for leaf in part.leaves:
        struct, sites = table.leaves[leaf], table.of(leaf)
        # A leaf that the function does not use has a gradient of zero.
        x = jnp.zeros((*lead, *struct.shape), struct.dtype)
        x = widened(gradients(sites, factors, struct)) if sites else x
        parts.append(x.reshape(*lead, struct.size))
    dtype = common_dtype(*(x.dtype for x in parts))
    gradient = jnp.concatenate([x.astype(dtype) for x in parts], axis=-1)
    second = weighing.seconds(gradient)
    if part.structure == "diagonal":
        return jnp.sum(gradient * second, (0, 1))
    return _gram(gradient[..., None, :], second[..., None, :])[0]


def finished(part: Part, sums: Array | list[RoleSums]) -> tuple[Array | None, Array]:
    """The factors of outputs and inputs, from the sums of all examples.

    If a weight has two roles, they give the Kronecker product with the same partial
    traces as the sum of both.
    """
    layout = part.layout
    if not isinstance(sums, list):
        is_diagonal = part.structure == "diagonal"
        return None, (sums if is_diagonal else symmetric(sums))[None]
    assert layout is not None
    pairs = []
    for gram, mixed, outputs, count, biases in sums:
        # Inputs become means over examples and positions. Outputs stay sums over
        # positions, as their product with the inputs is.
        safe = jnp.where(count == 0, 1, count)
        inputs = gram / safe.reshape(*safe.shape, *safe.ndim * (gram.ndim - 1) * (1,))
        # The operand of a bias, mostly 1, adds a column of means, and its square.
        if layout.bias is not None:
            mean = mixed / safe
            corner = jnp.where(count == 0, 0, jnp.ones((len(mean), 1, 1), mean.dtype))
            if biases is not None:
                corner = corner * (biases / safe)
            column = mean[:, :, None]
            inputs = jnp.block([[inputs, column], [jnp.swapaxes(column, 1, 2), corner]])
        inputs = inputs if part.is_counted else symmetric(inputs)
        pairs.append((symmetric(outputs), inputs))
    if len(pairs) == 1:
        return pairs[0]
    # In the second role, cotangents have the layout's inputs, and operands its outputs.
    (second, first), (inputs, outputs) = pairs
    # Of `A1 x B1 + A2 x B2`, the partial traces are `tr(B1) A1 + tr(B2) A2` and `tr(A1)
    # B1 + tr(A2) B2`. Their product has the square of the trace, so it is divided by
    # the trace.
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
    table: SiteTable,
    part: Part,
    factors: Factors,
    weighing: Weighing,
    bases: Sequence[Array | None],
) -> Inexact[Array, "batch outputs inputs"]:
    """Second moments of the gradients of examples, along products of eigenvectors."""
    layout = part.layout
    assert layout is not None
    uses = [flat_use(use, factors, layout) for use in uses_of(table, part)]
    # If there is one position only, a gradient is an outer product, and need not be
    # formed.
    (use, *rest) = uses
    is_one = not rest and use.d.shape[2] == 1 and use.a is not None
    if is_one:
        # The squares of an outer product are products of squares.
        a, d = rotated(use, layout, bases)
        squares = jnp.sum(d * weighing.seconds(d), (1, 2))
        return jnp.einsum("nbi,nbo->boi", a[:, 0] ** 2, squares)

    def moments(uses: list[FlatUse], weighing: Weighing) -> Array:
        formed = functools.reduce(
            jnp.add, (product_in_basis(x, layout, bases) for x in uses)
        )
        return jnp.sum(formed * weighing.seconds(formed), 1)

    # Otherwise, gradients are formed in the eigenbasis, for some examples at a time.
    arrays, treedef = jax.tree.flatten((uses, weighing))

    def of_block(rows: Rows) -> Array:
        return jnp.sum(moments(*jax.tree.unflatten(treedef, rows.arrays)), 0)

    entries = math.prod(layout.sizes) * use.d.shape[1] * use.d.dtype.itemsize
    # On a mesh, cutting would gather the same examples from all devices.
    most = platform().block_bytes // max(entries, 1)
    size = None if is_on_mesh(use.d) else max(1, most)
    rows = Rows(arrays, (0,) * len(arrays), use.d.shape[0])
    return accumulated(of_block, rows, size, Sum())


def rotated(
    use: FlatUse, layout: Layout, bases: Sequence[Array | None]
) -> tuple[Array, Array]:
    """Operand and cotangent in the eigenbases of the factors."""
    out, into = bases[::-1] if use.is_swapped else bases
    # A one-hot row times the eigenvectors is a row of these.
    if use.tokens is not None and into is not None and layout.bias is None:
        rows = jnp.take(into[0], use.tokens, 0, mode="fill", fill_value=0)
        a, into = rows[:, :, None], None
    elif use.tokens is not None:
        side = layout.outputs if use.is_swapped else layout.inputs
        a = jax.nn.one_hot(use.tokens, layout.size(side), dtype=use.d.dtype)[:, :, None]
    else:
        assert use.a is not None
        a = use.a
    # The operand of the bias is one more input, as in `finished`.
    if layout.bias is not None:
        column = jnp.full((*a.shape[:-1], 1), use.bias, a.dtype)
        a = jnp.concatenate([a, column], axis=-1)
    if into is not None:
        a = along(a, into)
    return a, (use.d if out is None else along(use.d, out))


def along(
    x: Inexact[Array, "*lead batch k"], basis: Num[Array, "batch k j"]
) -> Inexact[Array, "*lead batch j"]:
    """The coordinates of vectors, each along the columns of one matrix of a batch."""
    basis = basis.astype(x.dtype)
    if basis.shape[0] == 1:
        # One product of two matrices. Axes of size 1 would make XLA transpose both.
        *lead, size = x.shape
        product = x.reshape(math.prod(lead), size) @ basis[0]
        return product.reshape(*lead, basis.shape[2])
    return jnp.einsum("...bi,bij->...bj", x, basis)


def product_in_basis(
    use: FlatUse, layout: Layout, bases: Sequence[Array | None]
) -> Inexact[Array, "n vectors batch outputs inputs"]:
    a, d = rotated(use, layout, bases)
    # Summed over positions; the layout's outputs come first, whatever the role.
    formed = jnp.einsum("npbi,nvpbo->nvboi", a, d)
    return jnp.swapaxes(formed, -1, -2) if use.is_swapped else formed
