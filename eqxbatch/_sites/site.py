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
import functools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Literal

import jax
from jaxtyping import Array

from .._base.dtypes import is_complex
from .._base.trees import safe_zip
from .axes import Axis, Role, Shape
from .values import Node
from .views import leaf_view, Loop, Steps, View


# Gradients with at most this many fixed directions are not formed.
_MOST_DIRECTIONS = 4


Form = Literal["gram", "hessian", "diagonal"]


_Struct = jax.ShapeDtypeStruct


AxisNames = tuple[str, ...]


def _same(x: Any) -> Any:
    return x


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one input `w` of an equation meets the rest.

    - `kind`: the name of the equation.
    - `op`: takes the operand `a` and `w`, and returns `y`; linear in `w`.
    - `operand`: takes the inputs of the equation and returns `a`; None without one.
    - `a_axes`, `d_axes`, `w_axes`: the names of the axes of the factors and of `w`.
    - `sizes`: the sizes of the named axes.
    - `expand`, `arrange`: functions that give `a` and `d` the named axes.
    - `token`: for a gather, the axis of `w` that the integers `a` index; `a` then
        stands for a one-hot array with this additional axis.
    - `drops`: whether a token may select no row. It then equals the number of rows.
    - `group`: for a product with the matrices of groups, the axis of `w` of which each
        position meets one entry, or none. `op` takes a pair then: `a`, and these
        entries. There is another factor, which is one where a position meets an entry,
        and zero elsewhere.
    - `which`: takes the inputs of the equation and returns the entry of each position;
        its axes are `which_axes`.
    - `scale`: a factor of the contraction.
    - `splits`: whether `w_axes` splits an axis of `w` in two.
    - `is_of_inverse`: whether `w` is one over the input of the equation.
    - `outputs`: the names of each axis of `y` in `d_axes`, if there is not one for
        each.
    - `forming`: a cheaper contraction by which the gradient of one output is formed, if
        there is one.
    - `key`: equal for two rules that are the same function.
    """

    kind: str
    op: Callable[[Any, Array], Array]
    operand: Callable[[list], Array] | None
    a_axes: AxisNames
    d_axes: AxisNames
    w_axes: AxisNames
    sizes: dict[str, int]
    expand: Callable[[Array], Array] = _same
    arrange: Callable[[Array], Array] = _same
    token: str | None = None
    drops: bool = False
    group: str | None = None
    which: Callable[[list], Array] | None = None
    which_axes: AxisNames = ()
    scale: float = 1.0
    splits: bool = False
    is_of_inverse: bool = False
    outputs: tuple[AxisNames, ...] | None = None
    forming: "Forming | None" = None
    key: str = ""

    def __repr__(self) -> str:
        listed = lambda axes: f"({', '.join(axes)})"
        operand = "a" if self.token is None else "tokens"
        factors = [] if self.operand is None else [f"{operand}{listed(self.a_axes)}"]
        if self.group is not None:
            factors.append(f"m{listed((*self.which_axes, self.group))}")
        factors = " ".join([*factors, f"d{listed(self.d_axes)}"])
        return f"{self.kind}: {factors} -> w{listed(self.w_axes)}"

    @property
    def y_axes(self) -> tuple[AxisNames, ...]:
        """The names of each axis of `y` in `d_axes`."""
        if self.outputs is not None:
            return self.outputs
        return tuple((name,) for name in self.d_axes)


@dataclasses.dataclass(frozen=True)
class Forming:
    """Another contraction with the same gradient as that of a rule.

    - `rule`: has the same `w_axes`, and factors with other axes. What is no axis, and
        changes no axis, is that of the rule itself.
    - `operand`, `cotangent`: functions that order the axes of the factors as the rule
        takes them. This is done for all examples at once.
    """

    rule: Rule
    operand: Callable[[Array], Array]
    cotangent: Callable[[Array], Array]


@dataclasses.dataclass(frozen=True)
class Site:
    """One use of a leaf.

    - `view`: the view of the leaf; `rule`: how it meets other values.
    - `perturbation`: the index of its cotangent `d`.
    - `operand`: the index of its operand `a`; None if it has none.
    - `is_complex`: whether `d` is.
    - `which`: the index of the operand that says which group each position meets; None
        if there are none.
    - `loops`: the `scan`s around it, outermost first. Its factors have an axis for the
        steps of each.
    - `source`: the value there, if it is not linear in the leaf.
    - `is_coupled`: whether its second derivatives are not diagonal.
    - `is_reverse`: whether it has no forward mode, and therefore no second derivatives.
    - `is_in_branch`: whether some examples may not use it, as in a branch of a `cond`.
    - `is_of_constant`: whether its operand is the same for all examples, and no tokens.
    """

    view: View
    rule: Rule
    perturbation: int
    operand: int | None
    is_complex: bool
    which: int | None = None
    loops: tuple[Steps, ...] = ()
    source: Node | None = None
    is_coupled: bool = False
    is_reverse: bool = False
    is_in_branch: bool = False
    is_of_constant: bool = False

    def __repr__(self) -> str:
        loops = "".join(f", {loop!r}" for loop in self.loops)
        operand = "" if self.operand is None else f", a = operand {self.operand}"
        factors = f"d = cotangent {self.perturbation}{operand}"
        return f"<{self.view!r} in {self.rule!r}{loops}; {factors}>"

    @property
    def leaf(self) -> int:
        return self.view.leaf

    @property
    def takes_real_part(self) -> bool:
        """Whether the leaf is real, and its gradient a real part."""
        return self.is_complex and not self.view.is_complex

    @property
    def formed(self) -> "Site":
        """The site whose factors its gradient is formed from, once they are moved."""
        if self.rule.forming is None:
            return self
        rule = dataclasses.replace(self.rule.forming.rule, scale=self.rule.scale)
        return dataclasses.replace(self, rule=rule)

    def moved_operand(self, a: Array) -> Array:
        """The operand that `formed` has."""
        forming = self.rule.forming
        return a if forming is None else self._in_loops(forming.operand)(a)

    def moved_cotangent(self, d: Array) -> Array:
        """The cotangent that `formed` has."""
        forming = self.rule.forming
        return d if forming is None else self._in_loops(forming.cotangent)(d)

    def within(self, loop: Loop) -> "Site":
        """The site in the body of a `scan`."""
        of_view = [steps for steps in self.view.loops if steps.loop == loop]
        # A view that the loop does not slice is the same in each step.
        (steps,) = of_view or [Steps(loop, loop.length, is_sliced=False)]
        return dataclasses.replace(self, loops=(steps, *self.loops))

    @property
    def view_shape(self) -> Shape:
        """The shape of the view at all steps in which it differs."""
        steps = (loop.length for loop in self.loops if loop.is_sliced)
        return (*steps, *self.view.shape)

    # Asked for each contraction that a site may be part of.
    @functools.cached_property
    def sizes(self) -> Mapping[str, int]:
        # Factors have the axes of loops before those that the rule names.
        steps = {f"loop{i}": loop.length for i, loop in enumerate(self.loops)}
        return {**steps, **self.rule.sizes}

    @functools.cached_property
    def a_axes(self) -> AxisNames:
        return (*self._loop_axes(), *self.rule.a_axes)

    @functools.cached_property
    def d_axes(self) -> AxisNames:
        return (*self._loop_axes(), *self.rule.d_axes)

    @functools.cached_property
    def which_axes(self) -> AxisNames:
        return (*self._loop_axes(), *self.rule.which_axes)

    @functools.cached_property
    def w_axes(self) -> AxisNames:
        return (*self._loop_axes(only_sliced=True), *self.rule.w_axes)

    def _loop_axes(self, *, only_sliced: bool = False) -> AxisNames:
        return tuple(
            f"loop{i}"
            for i, loop in enumerate(self.loops)
            if loop.is_sliced or not only_sliced
        )

    def operand_of(self, operands: Sequence[Any]) -> Any:
        """What `op` takes: the operand, with the groups if there are any."""
        if self.operand is None:
            return None
        a = operands[self.operand]
        return a if self.which is None else (a, operands[self.which])

    def output(self, a: Any, view: Array) -> Array:
        """The output of the site for one example, linear in the view."""
        op = self.rule.op
        # The last one that is mapped has the first axis: it must be the outermost.
        for loop in reversed(self.loops):
            in_axes = (None if a is None else 0, 0 if loop.is_sliced else None)
            op = jax.vmap(op, in_axes, axis_size=loop.length)
        return op(a, view)

    def output_of_source(self, a: Any, source: Array) -> Array:
        """The output for the value of `source`, at all steps of all loops."""
        assert self.source is not None
        op = self.rule.op
        for around in reversed(self.loops):
            axis = 0 if around.loop in self.source.loops else None
            in_axes = (None if a is None else 0, axis)
            # All steps, where `around.length` counts only those that use the leaf.
            op = jax.vmap(op, in_axes, axis_size=around.loop.length)
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

    def with_own(self, perturbation: int, operand: int, which: int) -> "Site":
        """The site with its own factors, for the steps that it has.

        `operand` and `which` are the new indices, if it has these.
        """
        # Such factors were cut to these steps before, by `at_steps`.
        loops = tuple(dataclasses.replace(loop, start=None) for loop in self.loops)
        return dataclasses.replace(
            self,
            perturbation=perturbation,
            operand=None if self.operand is None else operand,
            which=None if self.which is None else which,
            loops=loops,
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
        # The product of two real parts is no contraction of the factors.
        if site.takes_real_part or other.takes_real_part:
            return False
        # Fixed directions have inner products with any gradients, formed or not.
        if has_few_directions(site) or has_few_directions(other):
            return not (site.is_complex or other.is_complex)
        # The inner product is zero.
        if site.view.is_apart(other.view):
            return True
        # Either the axes of both are those of the leaf, which tell what meets, or both
        # are pulled back by one function that keeps inner products.
        have_axes = has_named_axes(site) and has_named_axes(other)
        return (have_axes or _same_isometry(site, other)) and not _cross(site, other)
    sites = (site, other)
    # Perturbations are real, and second derivatives contract two factors only.
    if any(x.is_complex or x.which is not None for x in sites):
        return False
    return form == "hessian" or all(
        has_named_axes(x) or has_few_directions(x) for x in sites
    )


def has_named_axes(site: Site) -> bool:
    """Whether the axes of `w` at the site are distinct axes of the leaf."""
    axes = site.view.axes
    if axes is None or site.rule.splits:
        return False
    # None is an axis along which the leaf is repeated: a contraction sums over it. If
    # two axes are one of the leaf, as on a diagonal, the gradient is no contraction.
    of_leaf = [axis for axis in axes if axis is not None]
    return len(of_leaf) == len(set(of_leaf))


def has_few_directions(site: Site) -> bool:
    """Whether a site has only a few real numbers, computed from a whole leaf."""
    view = site.view
    # In a loop, every step may have directions of its own.
    is_plain = not (has_named_axes(site) or site.loops or site.rule.token)
    is_real = not (site.is_complex or view.is_complex)
    return is_plain and is_real and math.prod(view.shape) <= _MOST_DIRECTIONS


def axes_of(site: Site, side: int) -> dict[str, Axis]:
    """The axes of a site by name. Two sites have axes of a leaf or view in common."""
    # What is no axis of the leaf stays a position, also where the leaf is repeated:
    # gradients are summed there.
    by_name = {name: Axis(Role.POSITION, name, side) for name in site.sizes}
    if has_named_axes(site):
        assert site.view.axes is not None
        for name, axis in safe_zip(site.w_axes, site.view.axes):
            if axis is not None:
                by_name[name] = Axis(Role.LEAF, axis)
    else:
        # Axes of a view are common to two sites only if the views are equal, which
        # `is_allowed` asks before.
        numbered = enumerate(site.w_axes)
        by_name.update((name, Axis(Role.VIEW, i)) for i, name in numbered)
    return by_name


def positions(site: Site) -> list[str]:
    """The axes of a site's factors that `w` lacks; the gradient sums over them."""
    by_name = axes_of(site, 0)
    names = dict.fromkeys((*site.a_axes, *site.d_axes))
    # A sum along an axis of size 1 is no sum.
    return [x for x in names if by_name[x].is_position and site.sizes[x] != 1]


def is_sum(sites: Sequence[Site], apart: Collection[str] = ()) -> bool:
    """Whether a gradient sums over uses of a leaf, positions, or entries of a view.

    These may nearly cancel. Positions along the axes in `apart` are not summed.
    """
    # Only a view of another kind may add entries up where it is pulled back.
    keeps_apart = lambda site: has_named_axes(site) or site.view.is_isometry
    sums = lambda site: {*positions(site)}.difference(apart) or not keeps_apart(site)
    return len(sites) > 1 or any(map(sums, sites))


def is_outer_product(sites: Sequence[Site]) -> bool:
    """Whether a gradient is a single outer product of dense factors."""
    return not is_sum(sites) and all(site.rule.token is None for site in sites)


def _same_isometry(site: Site, other: Site) -> bool:
    """Whether two views are the same, with a transpose that keeps inner products."""
    return site.view.is_isometry and _kind_of_view(site) == _kind_of_view(other)


def _kind_of_view(site: Site) -> Hashable:
    """A key that is equal for two sites that have the same view."""
    shape = tuple(site.sizes[name] for name in site.w_axes)
    view = site.view
    # The same slices, whichever loop takes them.
    parts = tuple((steps.start, steps.length) for steps in view.loops)
    return (has_named_axes(site), view.key, parts, site.rule.splits, shape)


def _cross(site: Site, other: Site) -> bool:
    """Whether the tokens of one site differ along the axis that the other's index.

    For example, a `scan` may slice a table along the axis that another lookup indexes.
    """
    if site.rule.token is None or other.rule.token is None:
        return False
    # Each side has a number of its own, so that only axes of the leaf are equal.
    sides = site, other
    axes = [axes_of(x, number) for number, x in enumerate(sides)]
    tokens = [by_name[str(x.rule.token)] for x, by_name in safe_zip(sides, axes)]
    is_index = lambda i: tokens[1 - i] in [axes[i][name] for name in sides[i].a_axes]
    return is_index(0) or is_index(1)


def leaf_rule(shape: tuple[int, ...]) -> Rule:
    """The rule of a leaf that is perturbed itself: `d` is its gradient.

    Other rules for which `w` has the axes of `d` are changes of this one.
    """
    axes = numbered("w", len(shape))
    return Rule(
        "leaf", lambda _, w: w, None, (), axes, axes, sizes_by_name(axes, shape)
    )


def numbered(name: str, num: int) -> AxisNames:
    return tuple(f"{name}{i}" for i in range(num))


def sizes_by_name(axes: AxisNames, shape: tuple[int, ...]) -> dict[str, int]:
    return dict(safe_zip(axes, shape))
