"""Which parameters have Kronecker factors, and on which of their axes.

At a matrix product, a per-example gradient is `sum_t d_t a_t^T` over the positions `t`
that share the weight. Its axes are those of the input `a`, those of the cotangent `d`,
and those of both, such as the groups of a convolution: each entry of the latter has
separate factors. So has each expert of a mixture, from the positions that meet it.
"""

import collections
import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._base.mesh import whole_rows, with_type_of
from .._base.primitives import SUMS
from .._base.traced_function import TracedFunction
from .._base.trees import safe_zip
from .axes import Axes, axes_in, Axis, Named, Role
from .contract import aligned
from .factors import Factors, has_weights, scale_of
from .program import Program
from .site import AxisNames, has_named_axes, positions, Site
from .table import SiteTable
from .values import nodes_up_to


class MatrixSizes(NamedTuple):
    """The number of the matrices of a weight, and of their rows and columns."""

    batch: int
    outputs: int
    inputs: int


class BiasAxes(NamedTuple):
    """The shape of a bias, and the axes of a layout that its axes belong to."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A weight as a batch of matrices.

    - `leaf_shape`: the shape of the weight; in `shape`, some axes are split in two, so
        that each axis is of one kind.
    - `batch`, `outputs`, `inputs`: the axes of each kind; axes of size 1 may be of no
        kind.
    - `bias`: the axes of a bias that counts as one more input, if there is one.
    """

    leaf_shape: tuple[int, ...]
    shape: tuple[int, ...]
    batch: tuple[int, ...]
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    bias: BiasAxes | None = None

    def size(self, axes: Sequence[int]) -> int:
        return math.prod(self.shape[axis] for axis in axes)

    @property
    def sizes(self) -> MatrixSizes:
        """The number of matrices, and the numbers of their rows and columns."""
        # The bias is one more column.
        num = self.size(self.inputs) + (self.bias is not None)
        return MatrixSizes(self.size(self.batch), self.size(self.outputs), num)

    @property
    def _order(self) -> list[int]:
        """All axes, those of no kind first."""
        order = [*self.batch, *self.outputs, *self.inputs]
        return [*(i for i, _ in enumerate(self.shape) if i not in order), *order]

    def matrices(
        self, leaves: Sequence[Inexact[Array, "..."]]
    ) -> Inexact[Array, "batch outputs inputs"]:
        """The weight as matrices, with the bias as the last column."""
        weight, *bias = leaves
        # Axes of one kind are neighbours, so that they can be merged; those of no kind
        # have size 1.
        weight = jnp.transpose(weight.reshape(self.shape), self._order)
        num, rows, _ = self.sizes
        weight = weight.reshape(num, rows, self.size(self.inputs))
        if self.bias is None:
            return weight
        axes = self.bias.axes
        # The bias is the column of an input that is always one.
        column = bias[0].reshape([self.shape[axis] for axis in axes])
        wanted = (*self.batch, *self.outputs)
        column = jnp.transpose(column, [axes.index(axis) for axis in wanted])
        # On explicit meshes, some versions of JAX join only arrays that lie alike.
        weight = whole_rows(weight, 2)
        column = with_type_of(jax.typeof(weight), column.reshape(num, rows, 1))
        return jnp.concatenate([weight, column], axis=2)

    def leaves(
        self, matrices: Inexact[Array, "batch outputs inputs"]
    ) -> list[Inexact[Array, "..."]]:
        """The arrays of weight and bias: the inverse of `matrices`."""
        # The inverse of each step, in reverse.
        order = self._order
        weight = matrices[..., : self.size(self.inputs)]
        weight = weight.reshape([self.shape[axis] for axis in order])
        weight = jnp.transpose(weight, [order.index(i) for i, _ in enumerate(order)])
        weight = weight.reshape(self.leaf_shape)
        if self.bias is None:
            return [weight]
        shape, axes = self.bias
        wanted = (*self.batch, *self.outputs)
        column = matrices[..., -1].reshape([self.shape[axis] for axis in wanted])
        column = jnp.transpose(column, [wanted.index(axis) for axis in axes])
        return [weight, column.reshape(shape)]


class UseTerms(NamedTuple):
    """The factors of one use of a weight.

    - `shared`: the positions that the operand and the cotangent share.
    - `met`: where a position meets the matrix of a group, if there are groups.
    """

    operand: Named
    cotangent: Named
    shared: Axes
    met: Named | None


@dataclasses.dataclass(frozen=True)
class AxisRoles:
    """How the axes of a site correspond to the layout of its weight.

    - `by_name`: the axes that the site names.
    - `is_swapped`: whether the operand has the outputs of the layout, for example if an
        embedding is also the last layer.
    - `has_bias`: whether the bias of the layout, if there is one, is added here.
    """

    site: Site
    by_name: dict[str, Axis]
    is_swapped: bool
    has_bias: bool

    def terms(self, factors: Factors) -> UseTerms:
        """The operand and the cotangent, summed over axes that only one of them has.

        The cotangent is multiplied by the scale of the site. If a position meets the
        matrix of one group, both are zero for all others.
        """
        operand, met, cotangent = factors.terms(self.site, by_name=self.by_name)
        assert operand is not None
        if met is not None:
            operand, cotangent = _times(operand, met), _times(cotangent, met)
        (a, of_a), (d, of_d) = operand, cotangent
        # The gradient sums over positions. Those of one factor only are summed first,
        # but tokens are no numbers to add.
        shared = [axis for axis in of_a if axis in of_d and axis.is_position]
        sums: list[Named] = []
        for x, axes in ((a, of_a), (d, of_d)):
            alone = [
                number
                for number, axis in enumerate(axes)
                if axis.is_position and axis not in shared
            ]
            left = tuple(axis for i, axis in enumerate(axes) if i not in alone)
            is_tokens = x is a and self.site.rule.token is not None
            total = x if is_tokens else jnp.sum(x, axis=tuple(alone))
            sums.append(Named(total, left))
        (d, of_d) = sums[1]
        scaled = Named(d * scale_of(self.site), of_d)
        return UseTerms(sums[0], scaled, tuple(shared), met)


def _times(term: Named, other: Named) -> Named:
    """The product of two terms, with the axes of both."""
    axes = tuple(axes_in([term, other]))
    return Named(aligned(*term, axes) * aligned(*other, axes), axes)


Structure = Literal["kronecker", "block", "diagonal"]


@dataclasses.dataclass(frozen=True)
class Part:
    """A block of an approximate curvature matrix, for one or several leaves.

    - `leaves`, `shapes`: the indices and shapes of the leaves.
    - `structure`: Kronecker factors, the exact block, or its diagonal.
    - `layout`: for Kronecker factors, the axes of the first leaf. The second leaf, if
        there is one, is its bias.
    - `is_counted`: whether the factor of the inputs is diagonal, with counts of the
        tokens that an embedding looks up.
    - `reason`: why there are no Kronecker factors.
    """

    leaves: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    structure: Structure
    layout: Layout | None = None
    is_counted: bool = False
    reason: str | None = None

    def __repr__(self) -> str:
        return f"<block of the leaves {', '.join(map(str, self.leaves))}: {self}>"

    def __str__(self) -> str:
        """The sizes of the two factors: outputs and inputs."""
        if self.layout is None:
            return self.structure
        num, rows, columns = self.layout.sizes
        first = f"diagonal {columns}" if self.is_counted else str(columns)
        text = f"{rows} (x) {first}"
        return text if num == 1 else f"{num} of {text}"


def kronecker_program(traced: TracedFunction, formed: Collection[int] = ()) -> Program:
    """The program whose sites Kronecker factors are made of.

    The derivative of a layer `w a` along a coordinate is `w` times the derivative of
    `a`, which is a constant in the first layer: one more position of the weight.
    Elsewhere, its product with a constant is part of a function of parameters. What
    nested derivatives compute again is no further position.
    """
    every, traced = range(len(traced.leaves)), traced.without_repeats()
    program = Program(traced, formed=formed, uses=every)
    table = program.table
    of_constants = {site.leaf for site in table.sites if site.is_of_constant}
    kept = {leaf for leaf in of_constants if _has_positions(table, leaf)}
    if kept == of_constants:
        return program
    return Program(traced, formed=formed, uses=kept)


def _has_positions(table: SiteTable, leaf: int) -> bool:
    """Whether products of a leaf with constants are positions of a weight."""
    if isinstance(_layout(table, leaf), str):
        return False
    # The weight of a layer meets examples, too. If nothing else uses it and there is
    # one position, the product of the two factors is exact.
    sites = table.of(leaf)
    is_single = len(sites) == 1 and not positions(sites[0])
    return is_single or not all(site.is_of_constant for site in sites)


# The largest number of columns of the exact block of an array without factors.
_LARGEST = 512


def parts_of(table: SiteTable, chosen: Sequence[Sequence[int]] | None) -> list[Part]:
    """The blocks of leaves; a bias joins its weight unless blocks are `chosen`."""
    num = len(table.leaves)
    joined: dict[int, tuple[int, Layout]] = {}
    layouts = {leaf: _layout(table, leaf) for leaf in range(num)}
    for weight, layout in layouts.items():
        if isinstance(layout, str):
            continue
        # A bias is added to the product, so it has the cotangent of the weight.
        met = {site.perturbation for site in table.of(weight)}
        sharing = {x.leaf for x in table.sites if x.perturbation in met} - {weight}
        for bias in sorted(sharing):
            extended = _with_bias(table, weight, layout, bias)
            if extended is not None:
                joined[weight] = (bias, extended)
                break
    if chosen is None:
        # A bias that is added to the products of two weights belongs to neither.
        counts = collections.Counter(bias for bias, _ in joined.values())
        biases = {w: (bias,) for w, (bias, _) in joined.items() if counts[bias] == 1}
        first = {*range(num)}.difference(*biases.values())
        chosen = [(leaf, *biases.get(leaf, ())) for leaf in sorted(first)]
    return [_part(table, leaves, layouts, joined) for leaves in chosen]


def _part(
    table: SiteTable,
    leaves: Sequence[int],
    layouts: dict[int, Layout | str],
    joined: dict[int, tuple[int, Layout]],
) -> Part:
    layout = layouts[leaves[0]]
    if len(leaves) > 1:
        layout = "several arrays are one block"
    # Two leaves of one block have factors only if one is the bias of the other.
    for weight in leaves if len(leaves) == 2 else ():
        if weight in joined and joined[weight][0] in leaves:
            bias, layout = joined[weight]
            leaves = weight, bias
    shapes = tuple(table.leaves[leaf].shape for leaf in leaves)
    if isinstance(layout, Layout):
        sites = table.of(leaves[0])
        is_counted = all(site.rule.token is not None for site in sites)
        return Part(tuple(leaves), shapes, "kronecker", layout, is_counted)
    is_small = len(leaves) > 1 or table.leaves[leaves[0]].size <= _LARGEST
    structure: Structure = "block" if is_small else "diagonal"
    return Part(tuple(leaves), shapes, structure, reason=layout)


def multiplied(table: SiteTable, leaf: int) -> int | None:
    """Another leaf that a leaf is multiplied with, or None."""
    for i in (i for site in table.of(leaf) for i in site.view.reads):
        nodes = nodes_up_to([table.nodes[i]])
        leaves = {x.leaf for x in nodes if x.leaf is not None and x.varies} - {leaf}
        if leaves:
            return min(leaves)
    return None


def uses_of(table: SiteTable, part: Part) -> list[AxisRoles]:
    """The sites of a weight with Kronecker factors."""
    layout = part.layout
    assert layout is not None
    weight, *biases = part.leaves
    biased = {site.perturbation for bias in biases for site in table.of(bias)}
    return [
        AxisRoles(
            site,
            _split_axes(table, site).by_name,
            _is_swapped(table, site, layout),
            not biases or site.perturbation in biased,
        )
        for site in table.of(weight)
    ]


def _is_swapped(table: SiteTable, site: Site, layout: Layout) -> bool:
    """Whether a site has the axes of a layout, that of the first use, swapped."""
    kinds = _kinds(site, _split_axes(table, site).by_name)
    assert kinds is not None
    of_outputs = kinds.outputs, layout.outputs
    outputs, of_layout = (_present(axes, layout.shape) for axes in of_outputs)
    return outputs != of_layout


def _present(axes: Sequence[int], shape: tuple[int, ...]) -> set[int]:
    """The axes with more than one entry; others may be of any kind."""
    return {axis for axis in axes if shape[axis] != 1}


class _SplitAxes(NamedTuple):
    """The axes of a site by name, and the shape of its leaf with axes split."""

    by_name: dict[str, Axis]
    shape: tuple[int, ...]


def _split_axes(table: SiteTable, site: Site) -> _SplitAxes:
    """The axes of a site, each of which is one name of its rule.

    A grouped convolution splits the outputs of a kernel into groups and the rest.
    """
    axes, sizes = site.view.axes, site.sizes
    assert axes is not None
    # An axis may have several names, whose sizes multiply to its length.
    names = iter(site.w_axes)
    of_axes: dict[int, list[str]] = {}
    for axis, length in safe_zip(axes, site.view_shape):
        split = [next(names)]
        while math.prod(sizes[name] for name in split) != length:
            split.append(next(names))
        if axis is not None:
            of_axes[axis] = split
    shape: list[int] = []
    # What is no axis of the leaf is a position, also where the leaf is repeated.
    by_name = {name: Axis(Role.POSITION, name, 0) for name in sizes}
    for axis, length in enumerate(table.leaves[site.leaf].shape):
        split = of_axes.get(axis, [])
        numbered = enumerate(split, len(shape))
        by_name.update((name, Axis(Role.LEAF, i)) for i, name in numbered)
        shape += [sizes[x] for x in split] or [length]
    return _SplitAxes(by_name, tuple(shape))


class _Kinds(NamedTuple):
    """The axes of a leaf by their kind in a product of matrices, as in a `Layout`."""

    batch: tuple[int, ...]
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]


def _kinds(site: Site, by_name: dict[str, Axis]) -> _Kinds | None:
    """The axes of a leaf in both factors, in the cotangent and in the operand.

    None if the site is not a matrix product.
    """
    token = () if site.rule.token is None else (site.rule.token,)
    group = () if site.rule.group is None else (site.rule.group,)
    # Tokens stand for one-hot rows, and groups for a mask, with these axes.
    of_a = {by_name[name] for name in (*site.a_axes, *token, *group)}
    of_d = {by_name[name] for name in (*site.d_axes, *group)}
    # Axes of both factors make a batch; others are outputs or inputs.
    kinds = _Kinds(
        *(
            tuple(sorted(axis.number for axis in axes if not axis.is_position))
            for axes in (of_a & of_d, of_d - of_a, of_a - of_d)
        )
    )
    return kinds if kinds.inputs and site.operand is not None else None


def _layout(table: SiteTable, leaf: int) -> Layout | str:
    """The layout of a leaf, or the reason why it has no Kronecker factors."""
    if leaf in table.fallbacks:
        return table.fallbacks[leaf]
    sites, shape = table.of(leaf), table.leaves[leaf].shape
    if not sites:
        return "the function does not use it"
    # Each use must be a product with all of the leaf, along the same axes.
    layouts: list[Layout] = []
    for site in sites:
        reason = _reason(site)
        if reason is not None:
            return reason
        # A slice has fewer entries than the leaf.
        by_name, split = _split_axes(table, site)
        of_leaf = [name for name, axis in by_name.items() if axis.role is Role.LEAF]
        if math.prod(site.sizes[name] for name in of_leaf) != math.prod(shape):
            return "only a part of it is used"
        # Without inputs, a gradient has no second factor.
        kinds = _kinds(site, by_name)
        if kinds is None:
            return "it is added, or multiplied entry by entry"
        layouts.append(Layout(shape, split, *kinds))
        if not _fits(layouts[-1], layouts[0]):
            return "it is used in products along several axes"
    return layouts[0]


def _reason(site: Site) -> str | None:
    """Why a site is not a matrix product."""
    view = site.view
    if site.is_in_branch:
        return "it is used in a branch, which not all examples take"
    if site.is_complex or view.is_complex:
        return "it meets complex numbers"
    is_named = has_named_axes(site) or (site.rule.splits and view.is_whole)
    if not is_named or view.place is not None:
        steps = ", ".join(f"`{name}`" for name in dict.fromkeys(view.step_names))
        return f"it is used after {steps}" if steps else "only a part of it is used"
    if has_weights(site) or view.is_weighted:
        return "its entries are multiplied with numbers of their own"
    if site.rule.token is not None and any(loop.is_sliced for loop in site.loops):
        return "tokens are looked up in one table for each step of a loop"
    return None


def _fits(layout: Layout, other: Layout) -> bool:
    """Whether two uses have the same axes, possibly with inputs and outputs swapped."""
    if layout.shape != other.shape:
        return False
    of = lambda x: [_present(y, x.shape) for y in (x.batch, x.outputs, x.inputs)]
    batch, outputs, inputs = of(layout)
    return of(other) in ([batch, outputs, inputs], [batch, inputs, outputs])


def _with_bias(
    table: SiteTable, weight: int, layout: Layout, bias: int
) -> Layout | None:
    """The layout with a bias as one more input; None if it is not one.

    A bias is one if it is added to products with the weight, and to nothing else. In a
    product without it, its input is 0 in place of 1: derivatives of a layer have none.
    """
    of_weight, of_bias = table.of(weight), table.of(bias)
    if bias in table.fallbacks:
        return None
    # The factor of tokens is diagonal, which it would not be with one more input. Where
    # a position meets no group, there is no product, but a bias is added. With swapped
    # axes, inputs are outputs.
    if any(
        site.rule.token is not None
        or site.which is not None
        or _is_swapped(table, site, layout)
        for site in of_weight
    ):
        return None
    # Each use of the bias is matched with the use of the weight that has its cotangent.
    by_perturbation = {site.perturbation: site for site in of_weight}
    matches = {
        _bias_axes(table, by_perturbation.get(use.perturbation), use) for use in of_bias
    }
    if len(by_perturbation) != len(of_weight) or len(matches) != 1:
        return None
    if len({use.perturbation for use in of_bias}) != len(of_bias):
        return None
    (axes,) = matches
    # One entry for each output of each matrix, no fewer and no more.
    wanted = _present((*layout.batch, *layout.outputs), layout.shape)
    if axes is None or _present(axes, layout.shape) != wanted:
        return None
    # Axes of size 1, which a bias may lack.
    missing = {*layout.batch, *layout.outputs} - {*axes}
    axes = (*axes, *sorted(missing))
    shape = table.leaves[bias].shape
    return dataclasses.replace(layout, bias=BiasAxes(shape, axes))


def _bias_axes(
    table: SiteTable, site: Site | None, other: Site
) -> tuple[int, ...] | None:
    """The axes of a weight that match those of an array added to the product."""
    if site is None or other.rule.kind not in SUMS:
        return None
    # The bias must be added as it is, to the product as it is, in the same steps.
    if _reason(other) is not None or scale_of(site) != scale_of(other):
        return None
    steps = lambda x: [(loop.loop, loop.length, loop.start) for loop in x.loops]
    if steps(site) != steps(other):
        return None
    of_weight, _ = _split_axes(table, site)
    of_bias, shape = _split_axes(table, other)
    if math.prod(shape) != table.leaves[other.leaf].size:
        return None
    # The two rules name the axes of one output: from names of the bias to those of the
    # weight.
    names: dict[str, AxisNames] = {
        f"loop{i}": (f"loop{i}",) for i, _ in enumerate(site.loops)
    }
    for of_site, of_other in safe_zip(site.rule.y_axes, other.rule.y_axes):
        names.update((name, of_site) for name in of_other)
    matches: dict[int, list[Axis]] = {}
    for name, axis in of_bias.items():
        if axis.role is Role.LEAF and name in names and other.sizes[name] != 1:
            matches[axis.number] = [of_weight[x] for x in names[name]]
    # In the order of the bias's axes. If one runs along positions, so that each
    # position has an entry of its own, it is no bias.
    of_leaf = [axis for _, axes in sorted(matches.items()) for axis in axes]
    if any(axis.is_position for axis in of_leaf):
        return None
    numbers = tuple(axis.number for axis in of_leaf)
    return numbers if len({*numbers}) == len(numbers) else None
