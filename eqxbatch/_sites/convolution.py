"""Convolutions whose kernel is a parameter, as products with patches of images."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jaxtyping import Array

from .._base.cpu import patches
from .._base.jaxpr_types import Eqn, Params
from .._base.platforms import platform
from .._base.trees import safe_zip
from .site import AxisNames, Forming, numbered, Rule, sizes_by_name


def convolved_kernel(eqn: Eqn, index: int) -> Rule | None:
    """A convolution whose kernel is a parameter, as a product with patches.

    The axes are the `n` examples of the convolution itself, the groups `g`, inputs `i`
    and outputs `o` of each group, positions `t` of the output, and entries `k` of the
    kernel in space. The operand is the input; expanded, it has a patch for each `t`.

    For 3 inputs, 8 outputs and a kernel of 5 by 5 on images of 28 by 28, the patches
    have the axes `(n, i, k0, k1, t0, t1)` of the sizes `(1, 3, 5, 5, 24, 24)`, and the
    gradient is `einsum("niklst,nost->oikl", patches, d)`.
    """
    # As the first input, or in groups along the batch as in the derivative of a
    # convolution, a parameter is no kernel of patches.
    if index != 1 or eqn.params["batch_group_count"] != 1:
        return None
    window = _Window.of(eqn)
    factors = window.factors(eqn.params)
    rule = _rule(eqn, window, factors)
    # Norms, Kronecker factors and second derivatives need whole patches, with channels
    # first. A gradient is formed from what is cheapest.
    window = window.cheapest()
    fast = [x.with_fast_layout() for x in window.factors(eqn.params)]
    if fast == factors:
        return rule
    fast = [dataclasses.replace(x, is_moved=True) for x in fast]
    forming = Forming(_rule(eqn, window, fast), *(x.moved for x in fast))
    return dataclasses.replace(rule, forming=forming)


def _rule(eqn: Eqn, window: "_Window", factors: Sequence["_Images"]) -> Rule:
    a, d = factors
    _, rhs_spec, out_spec = eqn.params["dimension_numbers"]
    grouped = ("g",) if window.sizes["g"] > 1 else ()
    kernel_axes, out_axes = window.kernel_axes, window.out_axes
    # Of the kernel and the output, any axis may be that of features. With groups, it
    # has two names, because it is both.
    named = lambda spec, *names: [names[spec.index(axis)] for axis in range(len(spec))]
    of_w = named(rhs_spec, (*grouped, "o"), ("i",), *safe_zip(kernel_axes))
    of_y = named(out_spec, ("n",), (*grouped, "o"), *safe_zip(out_axes))
    sizes = {
        **window.sizes,
        **sizes_by_name(kernel_axes, window.kernel),
        **sizes_by_name(out_axes, window.positions),
    }
    return Rule(
        kind="conv_general_dilated",
        op=lambda a, w: eqn.primitive.bind(a, w, **eqn.params),
        operand=lambda ins: ins[0],
        a_axes=a.axes,
        d_axes=d.axes,
        w_axes=tuple(itertools.chain.from_iterable(of_w)),
        sizes=sizes,
        expand=lambda x: a.patches(x, sizes),
        arrange=lambda x: d.patches(x, sizes),
        splits=bool(grouped),
        outputs=tuple(of_y),
    )


# With fewer channels, there is more to gain from rows of pixels.
_FEW_CHANNELS = 8


@dataclasses.dataclass(frozen=True)
class _Images:
    """The images of one factor, and the patches of them that a contraction has.

    - `spec`: their axes of examples, features and space, in this order.
    - `features`: the name of the axis of features.
    - `kernel`: the entries of the kernel along each axis that a patch has.
    - `window`, `params`: where the patches are.
    - `is_last`: whether features are the last axis, of images and patches.
    - `is_moved`: whether images have been moved before patches are taken.
    """

    spec: tuple[int, ...]
    features: str
    kernel: tuple[range, ...]
    window: "_Window"
    params: Params
    is_last: bool = False
    is_moved: bool = False

    def with_fast_layout(self) -> "_Images":
        """The same images, with features last where they are so in memory."""
        window = self.window
        # A product whose axes of groups are not first would copy its factors.
        is_plain = window.sizes["g"] == 1
        is_wide = window.sizes[self.features] >= _FEW_CHANNELS
        is_last = platform().channels_last and is_plain and is_wide
        return dataclasses.replace(self, is_last=is_last)

    def moved(self, x: Array) -> Array:
        """With examples first, then features and space, or space and features."""
        batch, features, *space = self.spec
        order = (*space, features) if self.is_last else (features, *space)
        if not self._is_of_one:
            return jnp.transpose(x, (batch, *order))
        # A layer puts this axis there. Without it, XLA sees how `x` is in memory.
        x = jnp.squeeze(x, batch)
        return jnp.transpose(x, [axis - (axis > batch) for axis in order])

    @property
    def _is_of_one(self) -> bool:
        """Whether moved images have no axis of examples, because there is one."""
        return self.is_moved and self.window.sizes["n"] == 1

    @property
    def is_cotangent(self) -> bool:
        return self.features == "o"

    @property
    def axes(self) -> AxisNames:
        """The names of the axes of the patches."""
        window = self.window
        # Axes of size 1 would lead to slower products, so one group has no axis.
        grouped = ("g",) if window.sizes["g"] > 1 else ()
        kernel = window.only(window.kernel_axes, moved=self.is_cotangent)
        if self.is_last:
            return ("n", *window.out_axes, *kernel, self.features)
        return ("n", *grouped, self.features, *kernel, *window.out_axes)

    def patches(self, x: Array, sizes: Mapping[str, int]) -> Array:
        if not self.is_moved:
            x = self.moved(x)
        elif self._is_of_one:
            x = x[None]
        # A cotangent has a pixel for each position.
        if not self.is_cotangent or self.window.moved:
            out = self.window.positions
            x = patches(x, self.kernel, out, self.params, is_last=self.is_last)
        return x.reshape([sizes[name] for name in self.axes])


@dataclasses.dataclass(frozen=True)
class _Window:
    """The sizes of a convolution, and which axes of its kernel the cotangent has.

    A patch has the input at `t + k` for each position `t` of the output and each entry
    `k` of the kernel. The same products pair the input at `s` with the cotangent at
    `s - k`, which is zero where this is no position: that moves an axis of the kernel
    from the operand to the cotangent, and the axis `t` goes through all pixels `s`.
    (Zero times infinity is NaN: an infinite pixel makes more entries of a kernel's
    gradient NaN.)

    For 32 inputs and outputs and a kernel of 3 by 3 on images of 28 by 28, patches have
    9 times the entries of the input. With one axis moved, both factors have 3 times
    their own, and their product takes less than half the time on a CPU.

    - `sizes`: those of the axes `n`, `g`, `i` and `o`, by name.
    - `kernel`, `out`: the sizes in space of the kernel and of the output.
    - `strides`, `dilation`: those of the kernel.
    - `moved`: the axes in space that the cotangent has.
    """

    sizes: dict[str, int]
    kernel: tuple[int, ...]
    out: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    moved: tuple[int, ...] = ()

    @classmethod
    def of(cls, eqn: Eqn) -> "_Window":
        params = eqn.params
        numbers, groups = params["dimension_numbers"], params["feature_group_count"]
        lhs, rhs = (atom.aval.shape for atom in eqn.invars)
        out = eqn.outvars[0].aval.shape
        lhs_spec, rhs_spec, out_spec = numbers
        return cls(
            {
                "n": lhs[lhs_spec[0]],
                "g": groups,
                "i": lhs[lhs_spec[1]] // groups,
                "o": rhs[rhs_spec[0]] // groups,
            },
            # Sizes in space, in the order that the convolution has them in.
            tuple(rhs[axis] for axis in rhs_spec[2:]),
            tuple(out[axis] for axis in out_spec[2:]),
            params["window_strides"],
            params["rhs_dilation"],
        )

    @property
    def kernel_axes(self) -> AxisNames:
        return numbered("k", len(self.kernel))

    @property
    def out_axes(self) -> AxisNames:
        return numbered("t", len(self.out))

    @property
    def reach(self) -> tuple[int, ...]:
        """By how many pixels the first and the last entry of the kernel differ."""
        pairs = safe_zip(self.kernel, self.dilation)
        return tuple((size - 1) * step for size, step in pairs)

    @property
    def positions(self) -> tuple[int, ...]:
        """The sizes of the axes that are summed over."""
        sizes = enumerate(safe_zip(self.out, self.reach))
        return tuple(out + more * (i in self.moved) for i, (out, more) in sizes)

    def only(self, axes: Sequence, *, moved: bool) -> tuple:
        """What belongs to the axes in space that the cotangent has, or has not."""
        return tuple(x for i, x in enumerate(axes) if (i in self.moved) == moved)

    @property
    def cost(self) -> float:
        """The time of forming the gradient, in floating-point operations."""
        num = math.prod((self.sizes["n"], self.sizes["g"], *self.positions))
        of_a = self.sizes["i"] * math.prod(self.only(self.kernel, moved=False))
        of_d = self.sizes["o"] * math.prod(self.only(self.kernel, moved=True))
        # Factors are written and read, in float32.
        return num * (2.0 * of_a * of_d + platform().flops_per_byte * 8 * (of_a + of_d))

    def cheapest(self) -> "_Window":
        """The same convolution, with those axes moved that make it cheapest."""
        # With a stride, most of a moved cotangent would be zero.
        axes = [
            i
            for i, size in enumerate(self.kernel)
            if size > 1 and self.strides[i] == 1 and self.out[i]
        ]
        subsets = (itertools.combinations(axes, num) for num in range(len(axes) + 1))
        choices = itertools.chain.from_iterable(subsets)
        windows = (dataclasses.replace(self, moved=moved) for moved in choices)
        return min(windows, key=lambda window: window.cost)

    def factors(self, params: Params) -> list[_Images]:
        """The input and the cotangent, with the patches that each has."""
        lhs_spec, _, out_spec = params["dimension_numbers"]
        one = [range(1) for _ in self.kernel]
        every = [*map(range, self.kernel)]
        dims = range(len(self.kernel))
        of_a = tuple(one[i] if i in self.moved else every[i] for i in dims)
        # A pixel `s` meets the cotangent at `s - k`, with zeros around it.
        of_d = tuple(every[i][::-1] if i in self.moved else one[i] for i in dims)
        reach = [r if i in self.moved else 0 for i, r in enumerate(self.reach)]
        around = {
            "padding": [(r, r) for r in reach],
            "lhs_dilation": [1 for _ in dims],
            "window_strides": [1 for _ in dims],
            "rhs_dilation": self.dilation,
        }
        return [
            _Images(lhs_spec, "i", of_a, self, params),
            _Images(out_spec, "o", of_d, self, around),
        ]
