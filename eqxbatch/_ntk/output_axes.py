"""How the axes of a model's output appear in a kernel."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Inexact, PyTree

from .._base.checks import as_int
from .._base.dtypes import is_complex
from .._base.trees import described, safe_zip
from .._sites.axes import Axes, Axis, EXAMPLE, Named, OTHER_EXAMPLE, Role
from .._sites.contract import contract
from .._sites.program import Directions, Seeds


OutputRole = Literal["full", "diagonal", "trace"]


# How often the kernel has an axis.
_TIMES: dict[OutputRole, int] = {"full": 2, "diagonal": 1, "trace": 0}


# The directions that traced axes are projected on. Both sides have the same.
_PROBE = Axis(Role.PROBE)


# The real and the imaginary part of the output of each side.
_PARTS: Axes = (Axis(Role.COMPLEX, side=0), Axis(Role.COMPLEX, side=1))


def _of_output(number: int) -> tuple[Axis, Axis]:
    """An axis of the output of the first side, and that of the second if apart."""
    return Axis(Role.OUTPUT, number), Axis(Role.OUTPUT, number, side=1)


@dataclasses.dataclass(frozen=True)
class OutputAxes:
    """One array that a model returns, and the axes of its kernel.

    - `index`: its index among all arrays that the model returns.
    - `shapes`: the shapes for one example on the two sides. They can differ along
        `"full"` axes.
    - `dtype`: the dtype on both sides.
    - `batch`: the batch axis of the whole output; None if examples are not treated
        separately.
    - `roles`: the role of each axis of the whole output. In the kernel, a `"full"` axis
        appears twice, a `"diagonal"` axis once, and a `"trace"` axis not at all.
    - `probes`: the directions that traced axes are projected on, along its first axis;
        None for no projection.
    """

    index: int
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: Any
    batch: int | None
    roles: tuple[OutputRole, ...]
    probes: Inexact[Array, "probes ..."] | None = None

    @property
    def is_complex(self) -> bool:
        return is_complex(self)

    @property
    def pairs_examples(self) -> bool:
        """Whether the kernel has all pairs of examples."""
        return self.batch is None or self.roles[self.batch] == "full"

    @property
    def averages_examples(self) -> bool:
        """Whether the kernel is a mean over the examples, each paired with itself."""
        return self.batch is not None and self.roles[self.batch] == "trace"

    @property
    def is_empty(self) -> bool:
        """Whether one of the sides has no entries."""
        return any(0 in shape for shape in self.shapes)

    def nothing(self, num: tuple[int, int]) -> Inexact[Array, "..."]:
        """The kernel of outputs without entries, before its axes are arranged."""
        return jnp.zeros(self._shape(self.out, num), self.dtype)

    @property
    def examples(self) -> Axes:
        return (EXAMPLE, OTHER_EXAMPLE) if self.pairs_examples else (EXAMPLE,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shapes[0]

    def whole_shape(self, num: int) -> tuple[int, ...]:
        """The shape of the whole output for `num` examples, on the second side."""
        shape = list(self.shapes[1])
        if self.batch is not None:
            shape.insert(self.batch, num)
        return tuple(shape)

    def axes_with(self, role: OutputRole) -> list[int]:
        """The axes of one example's output that have a role."""
        return [axis for axis, x in enumerate(self._own_roles) if x == role]

    @property
    def _own_roles(self) -> list[OutputRole]:
        return [role for axis, role in enumerate(self.roles) if axis != self.batch]

    def values(self, side: int) -> Axes:
        """The output's own axes."""
        # An axis that is not apart is one axis of the kernel, or is summed over.
        return tuple(
            _of_output(number)[side if role == "full" else 0]
            for number, role in enumerate(self._own_roles)
        )

    def directions(self, side: int) -> Axes:
        """The first axes of `cotangents`."""
        axes = self.values(side)
        if self.probes is not None:
            # One direction stands for an entry of all traced axes.
            traced = self.axes_with("trace")
            untraced = (axis for i, axis in enumerate(axes) if i not in traced)
            axes = (_PROBE, *untraced)
        return (_PARTS[side], *axes) if self.is_complex else axes

    def cotangents(self, side: int) -> Inexact[Array, "..."]:
        """The directions to pull back, along new first axes.

        These are the identity or, along traced axes, the `probes`. The real and the
        imaginary part of a complex output are pulled back separately, because each has
        a real derivative.
        """
        axes, traced = self.values(side), self.axes_with("trace")
        # An identity for each axis, of directions and entries; their outer product is
        # one of the whole output.
        entries = [Axis(Role.ENTRY, number) for number, _ in enumerate(axes)]
        terms = [
            Named(jnp.eye(size, dtype=self.dtype), (axes[number], entries[number]))
            for number, size in enumerate(self.shapes[side])
            if self.probes is None or number not in traced
        ]
        if self.probes is not None:
            of_probes = (_PROBE, *(entries[number] for number in traced))
            terms.append(Named(self.probes.astype(self.dtype), of_probes))
        # `1` pulls back the derivative of the real part, and `-1j` that of the
        # imaginary.
        if self.is_complex:
            parts = jnp.array([1.0, -1.0j], self.dtype)
            terms.append(Named(parts, (_PARTS[side],)))
        # A real scalar has one direction, and no axis for it.
        terms = terms or [Named(jnp.ones((), self.dtype), ())]
        return contract(terms, (*self.directions(side), *entries))

    def directions_of(
        self, cotangents: Inexact[Array, "..."], num_outputs: int, side: int
    ) -> Directions:
        """The `cotangents`, among zeros for all other outputs."""
        seeds = [cotangents if i == self.index else None for i in range(num_outputs)]
        return Directions(lambda *_: Seeds(seeds), self.directions(side))

    @property
    def out(self) -> Axes:
        """The axes of a kernel before they are arranged."""
        # Probes have an axis until their mean is taken: an error needs each of them.
        axes = [*self.examples, *([_PROBE] if self.probes is not None else [])]
        for number, role in enumerate(self._own_roles):
            axes += _of_output(number)[: _TIMES[role]]
        return tuple(axes)

    @property
    def sizes(self) -> dict[Axis, int]:
        """The sizes of the axes of a kernel, except those of the examples."""
        sizes: dict[Axis, int] = dict.fromkeys(_PARTS, 2)
        if self.probes is not None:
            sizes[_PROBE] = self.probes.shape[0]
        for number, both in enumerate(safe_zip(*self.shapes)):
            sizes |= dict(safe_zip(_of_output(number), both))
        return sizes

    @property
    def parts(self) -> Axes:
        """The last axes, for real and imaginary parts."""
        return _PARTS if self.is_complex else ()

    def join(self, kernel: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
        """The complex kernel, from real and imaginary parts along the last two axes."""
        if not self.is_complex:
            return kernel
        # `(r1 + i s1) (r2 - i s2)`, whose four products are along the last two axes.
        real = kernel[..., 0, 0] + kernel[..., 1, 1]
        return lax.complex(real, kernel[..., 1, 0] - kernel[..., 0, 1])

    @property
    def _arranged_axes(self) -> list[Axis]:
        # Each axis of the whole output becomes two, one or none.
        pairs = [_of_output(number) for number, _ in enumerate(self._own_roles)]
        if self.batch is not None:
            pairs.insert(self.batch, (EXAMPLE, OTHER_EXAMPLE))
        both = safe_zip(pairs, self.roles)
        return [axis for pair, role in both for axis in pair[: _TIMES[role]]]

    @property
    def example_axes(self) -> tuple[int, int]:
        """The batch axes of an arranged kernel."""
        axes = self._arranged_axes
        return axes.index(EXAMPLE), axes.index(OTHER_EXAMPLE)

    def arranged_shape(self, num: tuple[int, int]) -> tuple[int, ...]:
        """The shape of an arranged kernel, given the numbers of examples."""
        return self._shape(self._arranged_axes, num)

    def _shape(self, axes: Sequence[Axis], num: tuple[int, int]) -> tuple[int, ...]:
        sizes = {**self.sizes, EXAMPLE: num[0], OTHER_EXAMPLE: num[1]}
        return tuple(sizes[axis] for axis in axes)

    def arranged(self, kernel: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
        """The kernel with its axes in their final order, in the dtype that it has.

        It is divided by the sizes of the traced axes.
        """
        axes = list(self.out)
        # A traced batch axis, and a model of a whole batch, which is one example.
        if self.averages_examples:
            kernel, axes = jnp.mean(kernel, axis=0), axes[1:]
        if self.batch is None:
            kernel, axes = kernel[0, 0], axes[2:]
        order = [axes.index(axis) for axis in self._arranged_axes]
        kernel = jnp.transpose(kernel, order)
        # A trace is a mean, not a sum.
        size = math.prod(self.shape[axis] for axis in self.axes_with("trace"))
        return kernel if size == 1 else kernel / size


class Mirror(eqx.Module):
    """Exchanges the two sides of kernels of whole outputs."""

    trace_axes: tuple[int, ...] = eqx.field(static=True)
    diagonal_axes: tuple[int, ...] = eqx.field(static=True)

    def __call__(self, kernels: PyTree[Inexact[Array, "..."]]) -> PyTree:
        return jtu.tree_map(self._mirrored, kernels)

    def _mirrored(self, kernel: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
        # A kernel has full axes twice and diagonal ones once. Negative axes are those
        # of the whole output, whose number of axes follows from that.
        single = len(self.diagonal_axes)
        num_full = (kernel.ndim - single) // 2
        ndim = num_full + single + len(self.trace_axes)
        diagonal, trace = (
            {axis % ndim for axis in axes}
            for axes in (self.diagonal_axes, self.trace_axes)
        )
        # Two neighbouring axes of the kernel take each other's place.
        order: list[int] = []
        for axis in range(ndim):
            first = len(order)
            if axis in diagonal:
                order.append(first)
            elif axis not in trace:
                order += [first + 1, first]
        return jnp.conj(jnp.transpose(kernel, order))


def check_axes(name: str, axes: object) -> tuple[int, ...]:
    """Axes as a tuple of ints."""
    if not isinstance(axes, (tuple, list)):
        axes = (axes,)
    checked = []
    for axis in axes:
        number = as_int(axis)
        if number is None:
            raise TypeError(
                f"`{name}` must be an int or a tuple of ints; got "
                f"{described(axis)}. They are axes of what the model returns for a "
                "batch."
            )
        checked.append(number)
    return tuple(checked)
