"""One place where a parameter enters a program, and which contractions it allows.

The gradient of an example at a site is a contraction of its operand `a` and cotangent
`d` over all axes that `w` lacks, brought back from the view to the leaf. That is the
transpose of linear functions, and exact for every site. Everything else is a shortcut
around forming it, and each asks something of the site:

- `"gram"`, the inner product of the gradients of two sites, and so a norm: the gradient
    is the contraction itself, and not its real part; and the inner product of what is
    contracted is that of what is brought back. It is where both views are the same and
    an isometry, or where each axis of both views is known to be an axis of the leaf, or
    to repeat it. Tokens that choose rows must not themselves differ along the axis that
    the tokens of the other site choose from.
- `"hessian"`, the second derivatives of a pair of sites: perturbations are of real
    numbers, so nothing at either site is complex.
- `"diagonal"`, only the diagonal of those: each axis of the views is, besides, known to
    be one of the leaf, so that the factors have it.

What is not known to hold is not used: the leaf takes the gradient, or products.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
from jaxtyping import Array

from .rules import Axes, leaf_rule, Rule
from .views import is_complex, leaf_view, View


Form = Literal["gram", "hessian", "diagonal"]


Label = tuple  # A pair: of one side, or of a leaf or view that both share.


_Struct = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Site:
    """One use of a leaf.

    - `view`: what the leaf is there, and `rule` what it meets.
    - `perturbation`: which cotangent `d` belongs to it.
    - `operand`: which operand `a` does; None if it has none.
    - `is_complex`: whether `d` is.
    - `loops`: for each `scan` around it, outermost first, whether it takes slices of
        the leaf, and how many steps it has. `a` and `d` have an axis for each.
    """

    view: View
    rule: Rule
    perturbation: int
    operand: int | None
    is_complex: bool
    loops: tuple[tuple[bool, int], ...] = ()

    @property
    def leaf(self) -> int:
        return self.view.leaf

    @property
    def takes_real_part(self) -> bool:
        """Whether the leaf is real, and its gradient a real part."""
        return self.is_complex and not self.view.is_complex

    @property
    def sizes(self) -> dict[str, int]:
        steps = {f"loop{i}": length for i, (_, length) in enumerate(self.loops)}
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
            for i, (is_sliced, _) in enumerate(self.loops)
            if is_sliced or not only_sliced
        )

    def output(self, a: Array | None, leaf: Array) -> Array:
        """What comes out of the site, of one example, linear in the leaf."""
        op = self.rule.op
        for is_sliced, length in reversed(self.loops):
            in_axes = (None if a is None else 0, 0 if is_sliced else None)
            op = jax.vmap(op, in_axes, axis_size=length)
        return op(a, self.view.apply(leaf))

    def expand(self, a: Array) -> Array:
        return self._in_loops(self.rule.expand)(a)

    def arrange(self, d: Array) -> Array:
        return self._in_loops(self.rule.arrange)(d)

    def _in_loops(self, fun: Callable) -> Callable:
        for _ in self.loops:
            fun = jax.vmap(fun)
        return fun


def leaf_site(leaf: int, struct: _Struct, perturbation: int) -> Site:
    """The site of a leaf that is perturbed itself."""
    view, rule = leaf_view(leaf, struct), leaf_rule(struct.shape)
    return Site(view, rule, perturbation, None, is_complex(struct.dtype))


def is_allowed(form: Form, site: Site, other: Site) -> bool:
    """Whether a form of contraction is exact for two sites of one kind of leaf."""
    if form == "gram":
        if site.takes_real_part or other.takes_real_part:
            return False
        have_axes = is_lettered(site) and is_lettered(other)
        return (have_axes or _same_isometry(site, other)) and not _cross(site, other)
    if site.is_complex or other.is_complex:
        return False
    return form == "hessian" or (is_lettered(site) and is_lettered(other))


def is_lettered(site: Site) -> bool:
    """Whether the axes of `w` at the site are axes of the leaf, each another one."""
    axes = site.view.axes
    if axes is None or site.rule.splits:
        return False
    known = [axis for axis in axes if axis is not None]
    return len(known) == len(set(known))


def labels_of(site: Site, side: int) -> dict[str, Label]:
    """The labels of the named axes of a site: equal where two sites share an axis."""
    labels: dict[str, Label] = {name: (side, name) for name in site.sizes}
    if is_lettered(site):
        assert site.view.axes is not None
        for name, axis in zip(site.w_axes, site.view.axes, strict=True):
            if axis is not None:
                labels[name] = ("leaf", axis)
    else:
        labels.update((name, ("view", i)) for i, name in enumerate(site.w_axes))
    return labels


def positions(site: Site) -> list[str]:
    """The axes of a site's factors that `w` lacks, so that its gradient is a sum."""
    labels = labels_of(site, 0)
    names = dict.fromkeys((*site.a_axes, *site.d_axes))
    return [name for name in names if labels[name][0] == 0 and site.sizes[name] != 1]


def _same_isometry(site: Site, other: Site) -> bool:
    """Whether two views are the same, and their transpose keeps inner products."""
    return site.view.is_isometry and _identity(site) == _identity(other)


def _identity(site: Site) -> tuple:
    shape = tuple(site.sizes[name] for name in site.w_axes)
    return (is_lettered(site), site.view.key, site.rule.splits, shape)


def _cross(site: Site, other: Site) -> bool:
    """Whether the tokens of one site differ along what those of the other choose from.

    As where a `scan` slices a table along the axis that another lookup chooses from.
    """
    if site.rule.token is None or other.rule.token is None:
        return False
    sides = [(own, labels_of(own, side)) for side, own in enumerate((site, other))]
    chosen = [labels[str(own.rule.token)] for own, labels in sides]
    return any(
        choice in _labelled(own.a_axes, labels)
        for choice, (own, labels) in zip(chosen, sides[::-1], strict=True)
    )


def _labelled(names: Axes, labels: dict[str, Label]) -> list[Label]:
    return [labels[name] for name in names]
