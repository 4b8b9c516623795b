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
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._base.jaxprs import literal
from .rules import Axes, leaf_rule, Rule


@dataclasses.dataclass(frozen=True)
class View:
    """A linear function of one leaf, built from steps such as a transpose.

    - `leaf`: the number of the leaf, and `is_complex` whether that is.
    - `shape`: that of the view. `lead` axes more come before it in what `apply`
        returns: those that loops take slices along.
    - `key`: equal for two views that are the same function.
    - `axes`: for each axis of the view, leading ones included, the axis of the leaf
        that it is, or None if the leaf is repeated along it; None if some axis is
        neither (it comes from a reshape, a slice, and so on).
    - `scale`: what the leaf is multiplied with.
    - `is_isometry`: whether the transpose of the view keeps the norm, but for `scale`.
    """

    leaf: int
    is_complex: bool
    shape: tuple[int, ...]
    axes: tuple[int | None, ...] | None
    lead: int = 0
    steps: tuple[Callable[[Array], Array], ...] = ()
    key: tuple[str, ...] = ()
    scale: float | complex = 1.0
    is_isometry: bool = True

    def apply(self, x: Array) -> Array:
        """The view of a leaf `x`."""
        for step in self.steps:
            x = step(x)
        return x

    def scanned(self) -> "View":
        """A slice along axis 0, as the body of a scan gets it."""
        return dataclasses.replace(self, lead=self.lead + 1, shape=self.shape[1:])

    def then(
        self,
        key: str,
        step: Callable[[Array], Array],
        shape: tuple[int, ...],
        axes: tuple[int | None, ...] | None,
        *,
        is_isometry: bool = True,
        scale: float | complex = 1.0,
    ) -> "View":
        """The view after one more step.

        `step` and `axes` are about what it is given, without leading axes: `axes` has,
        for each axis of the result, the axis that it was, or None for a new one.
        """
        for _ in range(self.lead):
            step = jax.vmap(step)
        own = self.axes
        if own is not None and axes is not None:
            new = (None if axis is None else own[self.lead + axis] for axis in axes)
            composed = (*own[: self.lead], *new)
        else:
            composed = None
        return dataclasses.replace(
            self,
            shape=tuple(shape),
            axes=composed,
            steps=(*self.steps, step),
            key=(*self.key, key),
            scale=self.scale * scale,
            is_isometry=self.is_isometry and is_isometry,
        )


def leaf_view(index: int, struct: jax.ShapeDtypeStruct) -> View:
    """The leaf itself."""
    axes = tuple(range(len(struct.shape)))
    return View(index, is_complex(struct.dtype), struct.shape, axes)


def extend_view(view: View, eqn: Any, index: int) -> list[View] | None:
    """The views that an equation makes of a view, its input number `index`.

    One for each output of the equation; None if it is not linear in that input, or not
    known to be.
    """
    name = eqn.primitive.name
    shapes = [var.aval.shape for var in eqn.outvars]
    shape = shapes[0]
    given = [var.aval.shape for var in eqn.invars]
    key = f"{name}[{index}]({view.lead}, {given}, {eqn.params})"
    bind = lambda x: eqn.primitive.bind(x, **eqn.params)

    if name in ("transpose", "squeeze", "broadcast_in_dim", "reshape"):
        if len(eqn.invars) > 1:  # A shape that is not static.
            return None
        axes = _kept_axes(name, view.shape, shape, eqn.params)
        # Repeating is no isometry: its transpose is a sum.
        same = math.prod(shape) == math.prod(view.shape)
        return [view.then(key, bind, shape, axes, is_isometry=same)]
    if name in ("convert_element_type", "copy", "copy_p"):
        if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
            return None
        # The real part of something complex is not a view of the same dimension.
        old, new = (is_complex(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars))
        if old and not new:
            return None
        if new and not old:
            # Its transpose takes the real part.
            return [view.then(key, bind, shape, None, is_isometry=False)]
        return [view.then(key, bind, shape, tuple(range(len(shape))))]
    if name == "neg":
        axes = tuple(range(len(shape)))
        return [view.then(key, bind, shape, axes, scale=-1.0)]
    if name == "slice" and shape == view.shape:
        # All of it, as where an axis of size 1 is indexed.
        return [view.then(key, bind, shape, tuple(range(len(shape))))]
    if name in ("slice", "rev", "reduce_sum"):
        return [view.then(key, bind, shape, None, is_isometry=name != "reduce_sum")]
    if name == "split":
        return [
            view.then(
                f"{key}[{i}]",
                lambda x, i=i: eqn.primitive.bind(x, **eqn.params)[i],
                shape,
                None,
            )
            for i, shape in enumerate(shapes)
        ]
    if name == "concatenate":
        return [_in_zeros(view, eqn, index, key)]
    if name in ("mul", "div"):
        scaled = _scaled(view, eqn, index, key)
        return None if scaled is None else [scaled]
    return None


def _in_zeros(view: View, eqn: Any, index: int, key: str) -> View:
    """A view as a part of what `concatenate` makes."""
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]

    def concatenate(x: Array) -> Array:
        parts = [jnp.zeros(s.shape, s.dtype) for s in structs]
        parts[index] = x
        return eqn.primitive.bind(*parts, **eqn.params)

    shape = eqn.outvars[0].aval.shape
    return view.then(key, concatenate, shape, None, is_isometry=False)


def _scaled(view: View, eqn: Any, index: int, key: str) -> View | None:
    """A view times a number, or divided by one; None for anything else."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    other = eqn.invars[1 - index] if len(eqn.invars) == 2 else None
    if not isinstance(other, jex.Literal) or out.shape != view.shape:
        return None
    if name == "div" and index == 1:
        return None
    value = complex(np.asarray(other.val).astype(out.dtype).item())
    factor = value if name == "mul" else 1 / value if value else math.inf
    if not math.isfinite(abs(factor)):
        return None

    def scale(x: Array) -> Array:
        ins = [literal(other), literal(other)]
        return eqn.primitive.bind(*ins[:index], x, *ins[index + 1 :], **eqn.params)

    key, axes = f"{key} {other.val}", tuple(range(len(out.shape)))
    factor = factor if factor.imag else factor.real
    return view.then(key, scale, out.shape, axes, scale=factor)


def extend_sum(view: View, eqn: Any, index: int) -> View:
    """The part of a view in `add` or `sub`, of which it is the input `index`."""
    shape = eqn.outvars[0].aval.shape
    if view.shape != shape:
        repeat = lambda x: jnp.broadcast_to(x, shape)
        kept = (
            axis if size == shape[axis] else None
            for axis, size in enumerate(view.shape)
        )
        axes = tuple(kept) if view.shape else (None,) * len(shape)
        key = f"repeat({view.lead}, {view.shape}, {shape})"
        view = view.then(key, repeat, shape, axes, is_isometry=False)
    if eqn.primitive.name == "sub" and index == 1:
        axes = tuple(range(len(shape)))
        view = view.then("neg", lambda x: -x, shape, axes, scale=-1.0)
    return view


def is_complex(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)


def _kept_axes(
    name: str, old: tuple[int, ...], new: tuple[int, ...], params: dict[str, Any]
) -> tuple[int | None, ...] | None:
    """For each axis of the result, which axis it was; None if that is not the case."""
    if name == "transpose":
        return tuple(params["permutation"])
    if name == "squeeze":
        removed = {axis % len(old) for axis in params["dimensions"]}
        return tuple(axis for axis in range(len(old)) if axis not in removed)
    if name == "broadcast_in_dim":
        axes: list[int | None] = [None] * len(new)
        for axis, target in enumerate(params["broadcast_dimensions"]):
            if old[axis] == new[target]:
                axes[target] = axis
        return tuple(axes)
    # A reshape that only moves axes of size 1 keeps all others. It may come after a
    # transpose.
    order = params["dimensions"]
    order = range(len(old)) if order is None else order
    kept = [axis for axis in order if old[axis] != 1]
    if [old[axis] for axis in kept] != [size for size in new if size != 1]:
        return None
    return tuple(None if size == 1 else kept.pop(0) for size in new)


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
