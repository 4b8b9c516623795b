"""One place where a parameter enters a program."""

import dataclasses
from collections.abc import Callable

import jax
from jaxtyping import Array

from .rules import Axes, leaf_rule, Rule
from .views import is_complex, leaf_view, View


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
