"""One place where a parameter enters a program, and which contractions it allows.

The per-example gradient at a site is a contraction of its operand `a` and cotangent `d`
over all axes that `w` lacks, pulled back from the view to the leaf. This is the
transpose of linear functions, and exact for every site. All other contractions avoid
forming the gradient, and each has conditions:

- `"gram"`: the inner product of the gradients of two sites, and therefore norms. The
    gradient must be the contraction itself, not its real part, and pulling back must
    preserve inner products. It does if both views are the same isometry, or if each
    axis of both views is known to be an axis of the leaf, or to repeat it. That of two
    slices which have no entry in common is zero. Tokens that select rows must not
    differ along the axis that the tokens of the other site index.
    A small site, with few numbers that are computed from a whole leaf, such as a
    penalty, needs none of this: its gradients are sums of a few fixed directions.
- `"hessian"`: the second derivatives of a pair of sites. Perturbations are real, so
    nothing at either site may be complex.
- `"diagonal"`: only the diagonal of these. In addition, each axis of the views must be
    known to be an axis of the leaf, so that the factors have it; or the sites are
    small.

If a condition is not known to hold, the leaf uses the gradient, or products.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import jax
from jaxtyping import Array

from .._base.dtypes import is_complex
from .._base.trees import safe_zip
from .rules import Axes, leaf_rule, Rule
from .shared import leaf_view, Loop, Node, View


# Gradients with at most this many fixed directions are not formed.
_MOST_DIRECTIONS = 4


Form = Literal["gram", "hessian", "diagonal"]


Label = tuple  # A pair: for one side, or for a leaf or view that both share.


_Struct = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class SiteLoop:
    """A `scan` around a site. The factors have an axis for its steps.

    - `loop`: its index and length.
    - `is_sliced`: whether the view differs between steps.
    - `length`: the number of steps that use the leaf; they begin with `start`, or are
        all steps if that is None.
    """

    loop: Loop
    is_sliced: bool
    length: int
    start: int | None = None

    @classmethod
    def of(cls, view: View, loop: Loop) -> "SiteLoop":
        """A loop around the site of a view."""
        start, length = dict(view.windows).get(loop, (None, loop[1]))
        return cls(loop, loop in view.loops, length, start)


@dataclasses.dataclass(frozen=True)
class Site:
    """One use of a leaf.

    - `view`: the view of the leaf; `rule`: how it meets other values.
    - `perturbation`: the index of its cotangent `d`.
    - `operand`: the index of its operand `a`; None if it has none.
    - `is_complex`: whether `d` is.
    - `loops`: the `scan`s around it, outermost first.
    - `source`: the value there, if it is not linear in the leaf.
    - `is_coupled`: whether its second derivatives are not diagonal.
    - `is_reverse`: whether it has no forward mode, and therefore no second derivatives.
    - `is_in_branch`: whether some examples may not use it, as in a branch of a `cond`.
    """

    view: View
    rule: Rule
    perturbation: int
    operand: int | None
    is_complex: bool
    loops: tuple[SiteLoop, ...] = ()
    source: Node | None = None
    is_coupled: bool = False
    is_reverse: bool = False
    is_in_branch: bool = False

    @property
    def leaf(self) -> int:
        return self.view.leaf

    @property
    def takes_real_part(self) -> bool:
        """Whether the leaf is real, and its gradient a real part."""
        return self.is_complex and not self.view.is_complex

    @property
    def view_shape(self) -> tuple[int, ...]:
        """The shape of the view at all steps in which it differs."""
        steps = (loop.length for loop in self.loops if loop.is_sliced)
        return (*steps, *self.view.shape)

    @property
    def sizes(self) -> dict[str, int]:
        steps = {f"loop{i}": loop.length for i, loop in enumerate(self.loops)}
        return {**steps, **self.rule.sizes}

    @property
    def a_axes(self) -> Axes:
        return (*self._loop_axes(), *self.rule.a_axes)

    @property
    def d_axes(self) -> Axes:
        return (*self._loop_axes(), *self.rule.d_axes)

    @property
    def w_axes(self) -> Axes:
        return (*self._loop_axes(only_sliced=True), *self.rule.w_axes)

    def _loop_axes(self, *, only_sliced: bool = False) -> Axes:
        return tuple(
            f"loop{i}"
            for i, loop in enumerate(self.loops)
            if loop.is_sliced or not only_sliced
        )

    def output(self, a: Array | None, view: Array) -> Array:
        """The output of the site for one example, linear in the view."""
        op = self.rule.op
        for loop in reversed(self.loops):
            in_axes = (None if a is None else 0, 0 if loop.is_sliced else None)
            op = jax.vmap(op, in_axes, axis_size=loop.length)
        return op(a, view)

    def output_of_source(self, a: Array | None, source: Array) -> Array:
        """The output for the value of `source`, at all steps of all loops."""
        assert self.source is not None
        op = self.rule.op
        for around in reversed(self.loops):
            axis = 0 if around.loop in self.source.loops else None
            in_axes = (None if a is None else 0, axis)
            op = jax.vmap(op, in_axes, axis_size=around.loop[1])
        return op(a, source)

    def at_steps(self, x: Array, axis: int) -> Array:
        """The part of a factor for the steps that use the leaf.

        The axes of loops begin with this index.
        """
        for i, loop in enumerate(self.loops):
            if loop.start is not None:
                end = loop.start + loop.length
                x = jax.lax.slice_in_dim(x, loop.start, end, axis=axis + i)
        return x

    def with_own(self, perturbation: int, operand: int | None) -> "Site":
        """The site with its own factors, for the steps that it has."""
        loops = tuple(dataclasses.replace(loop, start=None) for loop in self.loops)
        return dataclasses.replace(
            self, perturbation=perturbation, operand=operand, loops=loops
        )

    def expand(self, a: Array) -> Array:
        return self._in_loops(self.rule.expand)(a)

    def arrange(self, d: Array) -> Array:
        return self._in_loops(self.rule.arrange)(d)

    def _in_loops(self, fun: Callable) -> Callable:
        for _ in self.loops:
            fun = jax.vmap(fun)
        return fun


def leaf_site(leaf: int, like: Array | _Struct, perturbation: int) -> Site:
    """The site of a leaf that is perturbed itself."""
    struct = _Struct(like.shape, like.dtype)
    view, rule = leaf_view(leaf, struct), leaf_rule(struct.shape)
    return Site(view, rule, perturbation, None, is_complex(struct))


def is_allowed(form: Form, site: Site, other: Site) -> bool:
    """Whether a form of contraction is exact for two sites of one kind of leaf."""
    if form == "gram":
        if site.takes_real_part or other.takes_real_part:
            return False
        if has_few_directions(site) or has_few_directions(other):
            return not (site.is_complex or other.is_complex)
        if site.view.is_apart(other.view):
            return True
        have_axes = has_named_axes(site) and has_named_axes(other)
        return (have_axes or _same_isometry(site, other)) and not _cross(site, other)
    if site.is_complex or other.is_complex:
        return False
    sites = (site, other)
    return form == "hessian" or all(
        has_named_axes(x) or has_few_directions(x) for x in sites
    )


def has_named_axes(site: Site) -> bool:
    """Whether the axes of `w` at the site are distinct axes of the leaf."""
    axes = site.view.axes
    if axes is None or site.rule.splits:
        return False
    known = [axis for axis in axes if axis is not None]
    return len(known) == len(set(known))


def has_few_directions(site: Site) -> bool:
    """Whether a site has only a few real numbers, computed from a whole leaf."""
    view = site.view
    is_plain = not (has_named_axes(site) or site.loops or site.rule.token)
    is_real = not (site.is_complex or view.is_complex)
    return is_plain and is_real and math.prod(view.shape) <= _MOST_DIRECTIONS


def labels_of(site: Site, side: int) -> dict[str, Label]:
    """The labels of the named axes of a site; two sites share labels of common axes."""
    labels: dict[str, Label] = {name: (side, name) for name in site.sizes}
    if has_named_axes(site):
        assert site.view.axes is not None
        for name, axis in safe_zip(site.w_axes, site.view.axes):
            if axis is not None:
                labels[name] = ("leaf", axis)
    else:
        labels.update((name, ("view", i)) for i, name in enumerate(site.w_axes))
    return labels


def positions(site: Site) -> list[str]:
    """The axes of a site's factors that `w` lacks; the gradient sums over them."""
    labels = labels_of(site, 0)
    names = dict.fromkeys((*site.a_axes, *site.d_axes))
    return [name for name in names if labels[name][0] == 0 and site.sizes[name] != 1]


def is_sum(sites: Sequence[Site], apart: Collection[str] = ()) -> bool:
    """Whether a gradient sums over uses of a leaf, positions, or entries of a view.

    These may nearly cancel. Positions along the axes in `apart` are not summed.
    """
    keeps_apart = lambda site: has_named_axes(site) or site.view.is_isometry
    sums = lambda site: {*positions(site)}.difference(apart) or not keeps_apart(site)
    return len(sites) > 1 or any(map(sums, sites))


def is_outer_product(sites: Sequence[Site]) -> bool:
    """Whether a gradient is a single outer product of dense factors."""
    return not is_sum(sites) and all(site.rule.token is None for site in sites)


def _same_isometry(site: Site, other: Site) -> bool:
    """Whether two views are the same, with a transpose that keeps inner products."""
    return site.view.is_isometry and _identity(site) == _identity(other)


def _identity(site: Site) -> tuple:
    shape = tuple(site.sizes[name] for name in site.w_axes)
    view = site.view
    windows = tuple(map(dict(view.windows).get, view.loops))
    return (has_named_axes(site), view.key, windows, site.rule.splits, shape)


def _cross(site: Site, other: Site) -> bool:
    """Whether the tokens of one site differ along the axis that the other's index.

    For example, a `scan` may slice a table along the axis that another lookup indexes.
    """
    if site.rule.token is None or other.rule.token is None:
        return False
    sides = site, other
    labels = [labels_of(x, number) for number, x in enumerate(sides)]
    tokens = [names[str(x.rule.token)] for x, names in safe_zip(sides, labels)]
    is_index = lambda i: tokens[1 - i] in [labels[i][name] for name in sides[i].a_axes]
    return is_index(0) or is_index(1)
