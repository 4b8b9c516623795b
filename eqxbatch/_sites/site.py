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
    nothing at either site may be complex. Products with the matrices of groups have
    one factor more, and are left out.
- `"diagonal"`: only the diagonal of these. In addition, each axis of the views must be
    known to be an axis of the leaf, so that the factors have it; or the sites are
    small.

If a condition is not known to hold, the leaf uses the gradient, or products.

Rules say how a parameter meets the rest of an equation that is linear in it. At
`y = w(a)`, the gradient of anything with respect to `w` is a contraction of the operand
`a` and the cotangent `d` of `y`. A rule names the axes of both and of `w`: the gradient
is the sum over all axes that `w` does not have.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Integer

from .._base.dtypes import is_complex
from .._base.jaxprs import full_varying_as, literal, SUMS
from .._base.platforms import patches
from .._base.ragged import groups_of_rows, product_with_groups, RaggedAxes
from .._base.trees import safe_zip
from .shared import leaf_view, Loop, Node, Steps, View


# Gradients with at most this many fixed directions are not formed.
_MOST_DIRECTIONS = 4


Form = Literal["gram", "hessian", "diagonal"]


Label = tuple  # A pair: for one side, or for a leaf or view that both share.


_Struct = jax.ShapeDtypeStruct


Axes = tuple[str, ...]


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
    - `key`: equal for two rules that are the same function.
    """

    kind: str
    op: Callable[[Any, Array], Array]
    operand: Callable[[list], Array] | None
    a_axes: Axes
    d_axes: Axes
    w_axes: Axes
    sizes: dict[str, int]
    expand: Callable[[Array], Array] = _same
    arrange: Callable[[Array], Array] = _same
    token: str | None = None
    drops: bool = False
    group: str | None = None
    which: Callable[[list], Array] | None = None
    which_axes: Axes = ()
    scale: float = 1.0
    splits: bool = False
    is_of_inverse: bool = False
    outputs: tuple[Axes, ...] | None = None
    key: str = ""

    @property
    def y_axes(self) -> tuple[Axes, ...]:
        """The names of each axis of `y` in `d_axes`."""
        if self.outputs is not None:
            return self.outputs
        return tuple((name,) for name in self.d_axes)


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

    @property
    def leaf(self) -> int:
        return self.view.leaf

    @property
    def takes_real_part(self) -> bool:
        """Whether the leaf is real, and its gradient a real part."""
        return self.is_complex and not self.view.is_complex

    def within(self, loop: Loop) -> "Site":
        """The site in the body of a `scan`."""
        of_view = [steps for steps in self.view.loops if steps.loop == loop]
        (steps,) = of_view or [Steps(loop, loop[1], is_sliced=False)]
        return dataclasses.replace(self, loops=(steps, *self.loops))

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
    def which_axes(self) -> Axes:
        return (*self._loop_axes(), *self.rule.which_axes)

    @property
    def w_axes(self) -> Axes:
        return (*self._loop_axes(only_sliced=True), *self.rule.w_axes)

    def _loop_axes(self, *, only_sliced: bool = False) -> Axes:
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

    def with_own(self, perturbation: int, operand: int, which: int) -> "Site":
        """The site with its own factors, for the steps that it has.

        `operand` and `which` are the new indices, if it has these.
        """
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
        if site.takes_real_part or other.takes_real_part:
            return False
        if has_few_directions(site) or has_few_directions(other):
            return not (site.is_complex or other.is_complex)
        if site.view.is_apart(other.view):
            return True
        have_axes = has_named_axes(site) and has_named_axes(other)
        return (have_axes or _same_isometry(site, other)) and not _cross(site, other)
    sites = (site, other)
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
    parts = tuple((steps.start, steps.length) for steps in view.loops)
    return (has_named_axes(site), view.key, parts, site.rule.splits, shape)


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


def find_rule(eqn: Any, index: int) -> Rule | None:
    """The rule for the input `index` of an equation; None if there is none."""
    name = eqn.primitive.name
    rule = _RULES[name](eqn, index) if name in _RULES else None
    if rule is None:
        return None
    avals = [str(atom.aval) for atom in (*eqn.invars, *eqn.outvars)]
    return dataclasses.replace(rule, key=f"{name}[{index}]({avals}, {eqn.params})")


def leaf_rule(shape: tuple[int, ...]) -> Rule:
    """The rule of a leaf that is perturbed itself: `d` is its gradient.

    Other rules for which `w` has the axes of `d` are changes of this one.
    """
    axes = _numbered("w", len(shape))
    return Rule("leaf", lambda _, w: w, None, (), axes, axes, _sizes(axes, shape))


def _numbered(name: str, num: int) -> Axes:
    return tuple(f"{name}{i}" for i in range(num))


def _sizes(axes: Axes, shape: tuple[int, ...]) -> dict[str, int]:
    return dict(safe_zip(axes, shape))


def _shapes(eqn: Any) -> list[tuple[int, ...]]:
    return [var.aval.shape for var in (*eqn.invars, *eqn.outvars)]


def _binary_op(eqn: Any, index: int) -> Callable[[Array, Array], Array]:
    def op(a: Array, w: Array) -> Array:
        ins = (w, a) if index == 0 else (a, w)
        return eqn.primitive.bind(*ins, **eqn.params)

    return op


def _dot_general(eqn: Any, index: int) -> Rule:
    contracted, batched = eqn.params["dimension_numbers"]
    left, right, _ = _shapes(eqn)
    names: list[Axes] = []
    for side, shape in enumerate((left, right)):
        known = {axis: f"b{i}" for i, axis in enumerate(batched[side])}
        known.update((axis, f"c{i}") for i, axis in enumerate(contracted[side]))
        axes = range(len(shape))
        names.append(tuple(known.get(axis, f"{'lr'[side]}{axis}") for axis in axes))
    free = (name for axes in names for name in axes if name[0] in "lr")
    return Rule(
        kind="dot_general",
        op=_binary_op(eqn, index),
        operand=lambda ins: ins[1 - index],
        a_axes=names[1 - index],
        d_axes=(*_numbered("b", len(batched[0])), *free),
        w_axes=names[index],
        sizes=_sizes(names[0], left) | _sizes(names[1], right),
    )


def _elementwise(eqn: Any, index: int) -> Rule | None:
    name = eqn.primitive.name
    shapes = _shapes(eqn)
    out = shapes[-1]
    sizes = _sizes(_numbered("m", len(out)), out)
    # An input may be a scalar, or have axes of size 1 that are broadcast.
    named = []
    for shape in shapes[:2]:
        axis = lambda i, size: f"m{i}" if size == out[i] else f"one{i}"
        named.append(tuple(axis(i, size) for i, size in enumerate(shape)))
        sizes |= _sizes(named[-1], shape)
    d_axes, w_axes, a_axes = _numbered("m", len(out)), named[index], named[1 - index]
    if name in SUMS:
        scale = -1.0 if name == "sub" and index == 1 else 1.0
        repeat = lambda _, w: jnp.broadcast_to(-w if scale < 0 else w, out)
        return Rule(name, repeat, None, (), d_axes, w_axes, sizes, scale=scale)
    op, operand = _binary_op(eqn, index), lambda ins: ins[1 - index]
    is_of_inverse = name == "div" and index == 1
    if is_of_inverse and is_complex(eqn.outvars[0].aval):
        return None
    if name == "div":
        op = lambda a, w: w * a
        operand = operand if is_of_inverse else lambda ins: 1 / ins[1]
    rule = Rule(name, op, operand, a_axes, d_axes, w_axes, sizes)
    return dataclasses.replace(rule, is_of_inverse=is_of_inverse)


def _in_place(eqn: Any, index: int) -> Rule | None:
    """Concatenation, where one of the parts is a parameter."""
    name = eqn.primitive.name
    starts = eqn.invars[2:] if name == "dynamic_update_slice" else []
    if not all(isinstance(atom, jex.Literal) for atom in starts):
        return None

    def put(w: Array) -> Array:
        ins = [
            literal(atom) if atom in starts else full_varying_as(atom.aval, 0)
            for atom in eqn.invars
        ]
        ins[index] = w
        return eqn.primitive.bind(*ins, **eqn.params)

    aval = eqn.invars[index].aval
    take = lambda d: jax.linear_transpose(put, full_varying_as(aval, 0))(d)[0]
    changes = {"op": lambda _, w: put(w), "arrange": take, "outputs": ()}
    return dataclasses.replace(leaf_rule(aval.shape), kind=name, **changes)


def _select(eqn: Any, index: int) -> Rule | None:
    """Elementwise selection that depends on the example."""
    if index == 0:
        return None
    which, out = eqn.invars[0].aval, eqn.outvars[0].aval
    rule = leaf_rule(out.shape)

    def operand(ins: list) -> Array:
        case = ins[0].astype(jnp.int32)
        return (case == index - 1).astype(out.dtype)

    return dataclasses.replace(
        rule,
        kind=eqn.primitive.name,
        op=lambda a, w: a * w,
        operand=operand,
        a_axes=rule.d_axes if which.shape else (),
    )


def _convolution(eqn: Any, index: int) -> Rule | None:
    params = eqn.params
    if index != 1 or params["batch_group_count"] != 1:
        return None
    lhs_shape, rhs_shape, out_shape = _shapes(eqn)
    numbers = params["dimension_numbers"]
    groups = params["feature_group_count"]
    lhs_spec, rhs_spec, out_spec = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    kernel = tuple(rhs_shape[axis] for axis in rhs_spec[2:])
    out = tuple(out_shape[axis] for axis in out_spec[2:])
    kernel_axes, out_axes = _numbered("k", len(kernel)), _numbered("t", len(out))
    grouped = ("g",) if groups > 1 else ()
    features = lhs_shape[lhs_spec[1]] // groups
    outputs = rhs_shape[rhs_spec[0]] // groups
    batch = lhs_shape[lhs_spec[0]]
    named = lambda spec, *names: [names[spec.index(axis)] for axis in range(len(spec))]
    of_w = named(rhs_spec, (*grouped, "o"), ("i",), *safe_zip(kernel_axes))
    of_y = named(out_spec, ("n",), (*grouped, "o"), *safe_zip(out_axes))
    lead = (batch, groups) if groups > 1 else (batch,)

    def expand(lhs: Array) -> Array:
        seen = patches(jnp.transpose(lhs, lhs_spec), kernel, out, params)
        return seen.reshape(*lead, features, *kernel, *out)

    def arrange(d: Array) -> Array:
        return jnp.transpose(d, out_spec).reshape(*lead, outputs, *out)

    sizes = {"n": batch, "g": groups, "i": features, "o": outputs}
    sizes |= _sizes(kernel_axes, kernel) | _sizes(out_axes, out)
    return Rule(
        kind="conv_general_dilated",
        op=_binary_op(eqn, index),
        operand=lambda ins: ins[0],
        a_axes=("n", *grouped, "i", *kernel_axes, *out_axes),
        d_axes=("n", *grouped, "o", *out_axes),
        w_axes=tuple(itertools.chain.from_iterable(of_w)),
        sizes=sizes,
        expand=expand,
        arrange=arrange,
        splits=groups > 1,
        outputs=tuple(of_y),
    )


def _gather(eqn: Any, index: int) -> Rule | None:
    """Rows of a table, selected along one of its axes, as in an embedding."""
    table, indices, _ = _shapes(eqn)
    params = eqn.params
    numbers = params["dimension_numbers"]
    # `jax.vmap` over tables gives batching dimensions.
    has_batch = numbers.operand_batching_dims or numbers.start_indices_batching_dims
    if index != 0 or has_batch:
        return None
    sizes = params["slice_sizes"]
    token = _axis_of_rows(params, table)
    if token is None:
        return None
    # If an index breaks the promise to be in bounds, JAX's gradient drops it, too.
    is_dropping = params["mode"] != lax.GatherScatterMode.CLIP
    column = numbers.start_index_map.index(token)
    token_size = table[token]

    def operand(ins: list) -> Integer[Array, "..."]:
        return _rows(ins[1][..., column], token_size, drops=is_dropping)

    def op(tokens: Array, w: Array) -> Array:
        # If only one axis is indexed, the others start at zero.
        columns = range(len(numbers.start_index_map))
        where = jnp.stack([tokens if i == column else 0 * tokens for i in columns], -1)
        dropping = lax.GatherScatterMode.FILL_OR_DROP
        return lax.gather(
            w,
            where,
            numbers,
            sizes,
            mode=dropping if is_dropping else lax.GatherScatterMode.CLIP,
            # What is dropped counts for nothing in products with a direction.
            fill_value=0,
        )

    rule = _row_rule("gather", op, operand, table, token)
    batch_axes = _numbered("t", len(indices) - 1)
    collapsed = numbers.collapsed_slice_dims
    offsets = iter(axis for axis in range(len(table)) if axis not in collapsed)
    batch = iter(batch_axes)
    d_axes = tuple(
        rule.d_axes[next(offsets)] if position in numbers.offset_dims else next(batch)
        for position in range(len(eqn.outvars[0].aval.shape))
    )
    return dataclasses.replace(
        rule,
        a_axes=batch_axes,
        d_axes=d_axes,
        sizes=rule.sizes | _sizes(batch_axes, indices[:-1]),
        drops=is_dropping,
    )


def _ragged_dot(eqn: Any, index: int) -> Rule | None:
    """The matrices of groups, as those of experts, each for the positions that meet it.

    No position meets more than one of them.
    """
    if index != 1:
        return None
    axes: RaggedAxes = eqn.params["axes"]
    left, right, _, _ = _shapes(eqn)
    names: list[Axes] = []
    for side, (shape, summed) in enumerate(safe_zip((left, right), axes.contracted)):
        known = {axis: f"c{i}" for i, axis in enumerate(summed)}
        known |= {axes.groups: "group"} if side == 1 else {}
        sides = range(len(shape))
        names.append(tuple(known.get(axis, f"{'lr'[side]}{axis}") for axis in sides))
    num, params = left[axes.rows], eqn.params

    def op(a: tuple[Array, Array], w: Array) -> Array:
        lhs, which = a
        return product_with_groups(lhs, w, which, **params)

    return Rule(
        kind="ragged_dot",
        op=op,
        operand=lambda ins: ins[0],
        a_axes=names[0],
        d_axes=tuple(name for side in names for name in side if name[0] in "lr"),
        w_axes=names[1],
        sizes=_sizes(names[0], left) | _sizes(names[1], right),
        group="group",
        which=lambda ins: groups_of_rows(ins[2], num),
        which_axes=(names[0][axes.rows],),
    )


def _axis_of_rows(params: dict[str, Any], table: tuple[int, ...]) -> int | None:
    """The axis of a table along which rows are selected; None if not exactly one."""
    index_map = params["dimension_numbers"].start_index_map
    sizes = params["slice_sizes"]
    chosen = [axis for axis, size in enumerate(sizes) if size != table[axis]]
    if not chosen:  # A table with one row: any axis of size 1 will do.
        chosen = [axis for axis in index_map if table[axis] == 1][:1]
    others = [axis for axis in index_map if axis not in chosen]
    mode, modes = params["mode"], lax.GatherScatterMode
    if mode not in (modes.FILL_OR_DROP, modes.CLIP, modes.PROMISE_IN_BOUNDS):
        return None
    if len(chosen) != 1 or sizes[chosen[0]] != 1:
        return None
    if others and mode == modes.FILL_OR_DROP:
        return None
    return chosen[0] if chosen[0] in index_map else None


def _rows(
    tokens: Integer[Array, "..."], num_rows: int, *, drops: bool
) -> Integer[Array, "..."]:
    """The rows that tokens of any dtype select; `num_rows` stands for no row.

    They are compared in their own dtype. It may be too small for the number of rows,
    and another dtype may be too small for the tokens.
    """
    last = min(num_rows - 1, jnp.iinfo(tokens.dtype).max)
    rows = jnp.clip(tokens, 0, last).astype(jnp.int32)
    if not drops:
        return rows
    is_in = (tokens >= 0) & (tokens <= last)
    return jnp.where(is_in, rows, num_rows)


def _row_rule(
    kind: str, op: Callable, operand: Callable, table: tuple[int, ...], token: int
) -> Rule:
    """The rule for one row of a table, which a token selects along an axis."""
    axes = _numbered("w", len(table))
    named = lambda name: (*axes[:token], name, *axes[token + 1 :])
    return Rule(
        kind=kind,
        op=op,
        operand=operand,
        a_axes=(),
        d_axes=named("one"),
        w_axes=named("v"),
        sizes={"one": 1, **_sizes(named("v"), table)},
        token="v",
    )


def _dynamic_slice(eqn: Any, index: int) -> Rule | None:
    """One row of a table, as in the embedding of a single token."""
    table = eqn.invars[0].aval.shape
    sizes = eqn.params["slice_sizes"]
    chosen = [axis for axis, size in enumerate(sizes) if size != table[axis]]
    if not chosen and 1 in table:
        chosen = [table.index(1)]
    if index != 0 or len(chosen) != 1 or sizes[chosen[0]] != 1:
        return None
    (token,) = chosen

    def operand(ins: list) -> Integer[Array, ""]:
        return _rows(ins[1 + token], table[token], drops=False)

    def op(row: Array, w: Array) -> Array:
        return lax.dynamic_slice_in_dim(w, row, 1, token)

    return _row_rule("dynamic_slice", op, operand, table, token)


_RULES: dict[str, Callable[[Any, int], Rule | None]] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "mul": _elementwise,
    "div": _elementwise,
    **dict.fromkeys(SUMS, _elementwise),
    "gather": _gather,
    "ragged_dot": _ragged_dot,
    "dynamic_slice": _dynamic_slice,
    "concatenate": _in_place,
    "stack": _in_place,
    "dynamic_update_slice": _in_place,
    "select_n": _select,
}
