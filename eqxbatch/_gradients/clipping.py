"""Groups of parameters whose per-example gradients are clipped by their norm."""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Inexact, Int, PyTree, Real

from .._base.checks import is_none, match_prefix
from .._base.cpu import in_turn
from .._base.dtypes import (
    into_range,
    is_in_range,
    Scale,
    scaled_squares,
    squared_norm,
    Squares,
    sum_of_squares,
    times_two_to,
)
from .._base.mesh import is_on_mesh
from .._base.platforms import platform
from .._base.run_time_checks import error_if
from .._base.trees import described, safe_zip
from .._base.types import check_types
from .._sites.cancel import (
    unless_cancelled,
)


# What a user's function of the norms of an example returns.
_Factors = PyTree[Real[ArrayLike, ""]]


def squares_of_examples(x: Inexact[Array, "n ..."]) -> Real[Array, "n ..."]:
    """The squared norm of each example.

    On GPUs, it is the sum of what is returned, of which that of all leaves is one
    kernel: many sums of a few numbers take longer to start than to read these.
    """
    is_joined = platform().joins_sums and not is_on_mesh(x)
    return squared_norm(x, first=2 if is_joined else 1)


def squares_one_by_one() -> Callable[[Inexact[Array, "n ..."], Scale], Squares]:
    """`scaled_squares` for one array after the other.

    Otherwise, XLA for GPUs may form all gradients to square them together. XLA also
    runs a branch whatever its condition is if it only reads numbers and adds them,
    however many there are, but not with a barrier in it.
    """
    last: list[Array] = []

    def square(x: Array, scale: Scale) -> Squares:
        # An array is scaled, and so squared, only after the sum of the one before.
        scale, *_ = in_turn([scale, *last])
        square = scaled_squares(x, scale)
        last[:] = [square.value]
        return square

    return square


# The groups of a gradient's leaves whose norms are returned: one for each leaf, or for
# each result of a function of the path and the leaf.
Norms = Literal["leaf"] | Callable[[str, Any], Hashable] | None


def checked_bound(bound: Array) -> Array:
    # `~(bound >= 0)` holds for NaN, too.
    is_wrong = ~jnp.all(bound >= 0)
    return error_if(bound, (is_wrong, "`clip_norm` must not be negative or NaN."))


def clipping_groups(
    clip_norm: PyTree,
    scale: Callable[[PyTree], PyTree] | None,
    norms: Norms,
    nan_safe: bool,
    gradient: PyTree,
) -> "Groups":
    """Groups the leaves of a gradient by `clip_norm` and by `norms`.

    The values of the leaves do not matter. Raises `ValueError` if `clip_norm` is not a
    prefix of the gradient, and `TypeError` for integers, which only a `transform`
    returns.
    """
    for path, leaf in jtu.tree_leaves_with_path(gradient):
        if not eqx.is_inexact_array(leaf):
            raise TypeError(
                "`clip_norm`, `scale`, `nan_safe` and `return_norms` need the norm of "
                "what `transform` returns, so that it must consist of real or complex "
                f"arrays; got {described(leaf)} at transform(...){jtu.keystr(path)}. "
                "Cast it to a dtype such as float32 in `transform`."
            )
    what = "a number or a PyTree prefix of the gradient, with a number or None for"
    what += " each part"
    # Leaves with one bound are one group, whose norm is bounded.
    bounds, members, first = [], [], 0
    for _, bound, subtree in match_prefix("clip_norm", clip_norm, gradient, what):
        num = len(jtu.tree_leaves(subtree))
        # Those of the examples are checked before they are cut.
        is_one = isinstance(bound, jax.Array) and bound.shape == ()
        bounds.append(checked_bound(bound) if is_one else bound)
        members.append([*range(first, first + num)])
        first += num
    # Norms are returned for these groups, or for others that the user names. That the
    # list is the same says that the norms are, too.
    treedef = jtu.tree_structure(clip_norm, is_leaf=is_none)
    if norms is None:
        return Groups(bounds, members, members, treedef, scale, nan_safe)
    leaves, treedef = jtu.tree_flatten_with_path(gradient)
    if norms == "leaf":
        returned = [[i] for i in range(len(leaves))]
        return Groups(bounds, members, returned, treedef, scale, nan_safe)
    by_name: dict[Any, list[int]] = {}
    for i, (path, leaf) in enumerate(leaves):
        by_name.setdefault(norms(jtu.keystr(path), leaf), []).append(i)
    # The result is a dict by name, whose keys JAX sorts: so the groups are sorted, too.
    numbers, treedef = jtu.tree_flatten(dict(safe_zip(by_name, range(len(by_name)))))
    returned = [[*by_name.values()][i] for i in numbers]
    return Groups(bounds, members, returned, treedef, scale, nan_safe)


def _sum_of(terms: list[Real[Array, "n ..."]]) -> Real[Array, " n"]:
    """The sum of some terms, and of the numbers that make up some of them.

    Terms of shape `[n]` are added up, and rows of those of shape `[n, numbers]`, too.
    """
    # All rows side by side are one sum, which is one kernel on a GPU.
    rows = [x for x in terms if x.ndim > 1]
    terms = [x for x in terms if x.ndim == 1]
    if rows:
        terms.append(jnp.sum(jnp.concatenate(rows, axis=1), axis=1))
    return functools.reduce(jnp.add, terms)


class PlainSquares(NamedTuple):
    """Squared norms of per-example gradients as they are, of any size.

    - `squares`: for each leaf, those of its gradients, or numbers whose sum they are,
        shape `[n]` or `[n, numbers]`; None if it is cheap to scale all of them.
    - `flags`: of these, none must be set.
    """

    squares: list[Real[Array, "n ..."]] | None
    flags: list[Bool[Array, ""]]


@dataclasses.dataclass(frozen=True)
class Clipped:
    """The result of clipping for `n` examples.

    - `scales`: for each leaf, the factors of its gradients, shape `[n]`.
    - `is_kept`: which examples are kept, shape `[n]`; None if all are.
    - `norms`: a PyTree of norms before clipping, each of shape `[n]`.
    """

    scales: list[Array]
    is_kept: Array | None
    norms: PyTree


class _Norm(NamedTuple):
    """The norms of some examples: `root * 2**exponent`, of numbers of any size."""

    root: Real[Array, " n"]
    exponent: Int[Array, " n"]

    @property
    def number(self) -> Real[Array, " n"]:
        return times_two_to(self.root, self.exponent)


@dataclasses.dataclass(frozen=True)
class Groups:
    """The leaves of a gradient in groups, each with its bound.

    - `bounds`, `members`: the bound of each group, and its leaves.
    - `returned`, `treedef`: the groups of leaves whose norms are returned, and their
        PyTree.
    - `scale`: a function from these norms to factors, in place of bounds.
    - `nan_safe`: whether an example with a norm that is not finite counts as zero.
    """

    bounds: list[Any]
    members: list[list[int]]
    returned: list[list[int]]
    treedef: Any
    scale: Callable[[PyTree], PyTree] | None
    nan_safe: bool

    def __repr__(self) -> str:
        by = "bounds" if self.scale is None else "a function"
        groups = ", ".join(map(str, self.members))
        return f"<leaves in groups {groups}, scaled by {by}>"

    def of_rows(self, bounds: list[Array]) -> "Groups":
        """The groups for some examples, with the bounds that each of them has."""
        # Bounds of shape `[n]` come in their order here; a number is for all examples.
        rows = iter(bounds)
        of_rows = [next(rows) if np.ndim(x) else x for x in self.bounds]
        return dataclasses.replace(self, bounds=of_rows)

    @functools.cached_property
    def intersections(self) -> list[list[int]]:
        """The leaves that share both groups, in the order of the first of them."""
        members: dict[tuple, list[int]] = {}
        # The numbers of the groups that each leaf is in. Squares are added up within
        # intersections first, and these within either kind of group.
        groups = [
            {i: number for number, group in enumerate(of_all) for i in group}
            for of_all in (self.members, self.returned)
        ]
        for i in sorted(groups[0]):
            members.setdefault((groups[0][i], groups[1][i]), []).append(i)
        return [*members.values()]

    def clip(
        self,
        plain: PlainSquares,
        scaled: Callable[[list[Scale]], list[Squares]],
    ) -> Clipped:
        """The factors of each leaf, for some examples.

        The `plain` squares are wrong if a flag is set or a sum out of range.
        `scaled(scales)` are always right. The scales bring those gradients that are
        formed into range.
        """
        if plain.squares is None:
            return self._clipped(self._added(scaled([])))
        # Plain squares are right unless a sum leaves the range, which a flag tells. It
        # is in the widest dtype, and must be in the range of the narrowest, in which
        # some of its squares were computed.
        dtypes = [x.dtype for x in plain.squares]
        dtypes.sort(key=lambda dtype: dtype.itemsize)
        wide = [x.astype(dtypes[-1]) for x in plain.squares]
        totals, flags = [], [*plain.flags]
        for members in self.intersections:
            total = _sum_of([wide[i] for i in members])
            totals.append(Squares(total, jnp.zeros_like(total, "int32")))
            flags.append(~jnp.all(is_in_range(total.astype(dtypes[0]))))
        arrays, treedef = jtu.tree_flatten(totals)

        def with_scales() -> list[Array]:
            # These leaves get the scale that brings their sum into range: one
            # exponent for all lets their squares be added up as they are.
            scales: dict[int, Scale] = {}
            for total, members in safe_zip(totals, self.intersections):
                scales.update(dict.fromkeys(members, into_range(total.value)))
            in_order = [scales[i] for i in sorted(scales)]
            return jtu.tree_leaves(self._added(scaled(in_order)))

        # One branch for all, because the host of a GPU may wait for each.
        squares = unless_cancelled(jnp.stack(flags), arrays, arrays, with_scales)
        return self._clipped(jtu.tree_unflatten(treedef, squares))

    def _added(self, squares: list[Squares]) -> list[Squares]:
        """The squared norm of each intersection."""
        of_leaves = [[squares[i] for i in leaves] for leaves in self.intersections]
        return [*map(sum_of_squares, of_leaves)]

    def _norms(self, squares: list[Squares], groups: list[list[int]]) -> list[_Norm]:
        """The norm of each group, from the squared norm of each intersection."""
        norms = []
        for group in groups:
            # An intersection is within a group as a whole, or not at all.
            within = [
                square
                for square, leaves in safe_zip(squares, self.intersections)
                if leaves[0] in group
            ]
            # The norm of a group without leaves is zero.
            zeros = jax.tree.map(jnp.zeros_like, squares[0])
            total = [*within, zeros][0] if len(within) < 2 else sum_of_squares(within)
            value, exponent = total
            # The derivative of a norm at zero is defined as zero instead of NaN. The
            # root of `value * 4**exponent` has half of that exponent of two.
            is_positive = value > 0
            root = jnp.sqrt(jnp.where(is_positive, value, 1))
            norms.append(_Norm(jnp.where(is_positive, root, value), exponent))
        return norms

    def _clipped(self, squares: list[Squares]) -> Clipped:
        """Factors from the squared norm of each intersection."""
        of_groups = self._norms(squares, self.members)
        # Most calls return the norms that they clip by.
        is_same = self.returned is self.members
        of_returned = of_groups if is_same else self._norms(squares, self.returned)
        norms = self.treedef.unflatten([norm.number for norm in of_returned])
        factors = self._scaled(norms) if self.scale else self._bounded(of_groups)
        is_kept: Bool[Array, "..."] | None = None
        if self.nan_safe:
            # An example is left out as a whole, whichever of its norms is not finite.
            finite = [jnp.isfinite(norm.number) for norm in of_groups]
            is_kept = functools.reduce(jnp.logical_and, finite)
            # The factor that a user's function has for NaN may be NaN, too.
            factors = [jnp.where(is_kept, x, jnp.zeros((), x.dtype)) for x in factors]
        return Clipped(factors, is_kept, norms)

    def _bounded(self, norms: list[_Norm]) -> list[Array]:
        """The factor of each leaf by which no norm is above its bound."""
        factors = {}
        for bound, members, norm in safe_zip(self.bounds, self.members, norms):
            root, exponent = norm
            factor = jnp.ones_like(root)
            if bound is not None:
                limit = jnp.asarray(bound, root.dtype)
                is_longer = norm.number > limit  # The norm itself may overflow.
                if isinstance(bound, jax.Array):
                    # A wrong bound on several devices: the factor is NaN, too.
                    is_longer = is_longer | jnp.isnan(limit)
                # So its root and exponent are divided by, one after the other. Where
                # the gradient is short, a division by zero would have a derivative of
                # NaN, although it is not selected.
                divisor = jnp.where(is_longer, root, 1)
                shorter = times_two_to(limit / divisor, -exponent)
                factor = jnp.where(is_longer, shorter, 1)
                if not self.nan_safe:
                    # One non-finite entry makes the whole gradient non-finite.
                    factor = jnp.where(jnp.isfinite(root), factor, jnp.nan)
            factors.update(dict.fromkeys(members, factor))
        return [factors[i] for i in sorted(factors)]

    def _scaled(self, norms: PyTree) -> list[Array]:
        """The factor of each leaf from the user's function."""
        assert self.scale is not None
        call = functools.partial(_called_scale, self.scale)
        # It returns a prefix of what it gets, so that a factor is for one norm or for
        # all norms below it.
        factors, of_leaf = jax.vmap(call)(norms), {}
        what = "a function that returns one factor, or one for each norm that it gets"
        numbers = self.treedef.unflatten(range(len(self.returned)))
        for _, factor, subtree in match_prefix("scale", factors, numbers, what):
            for number in jtu.tree_leaves(subtree):
                of_leaf.update(dict.fromkeys(self.returned[number], factor))
        return [of_leaf[i] for i in sorted(of_leaf)]


def _called_scale(scale: Callable[[PyTree], PyTree], norms: PyTree) -> PyTree:
    factors = scale(norms)
    what = "What `scale` returns"
    check_types({what: factors}, {what: _Factors})
    return jtu.tree_map(jnp.asarray, factors)
