"""How the axes of a model's output appear in a kernel."""

import dataclasses
import itertools
import math
from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Inexact, PyTree

from .._base.trees import as_int, described
from .._sites.einsum import EXAMPLE, Labels, OTHER_EXAMPLE
from .._sites.site import Label


Role = Literal["full", "diagonal", "trace"]


_PROBE: Label = ("probe", 0)


_PARTS: Labels = (("part", 0), ("part", 1))


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
    - `probes`: the number of directions that traced axes are projected on; None for no
        projection.
    """

    index: int
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: Any
    batch: int | None
    roles: tuple[Role, ...]
    probes: int | None = None

    @property
    def is_complex(self) -> bool:
        return jnp.issubdtype(self.dtype, jnp.complexfloating)

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
        sizes = {**self.sizes, EXAMPLE: num[0], OTHER_EXAMPLE: num[1]}
        return jnp.zeros([sizes[label] for label in self.out], self.dtype)

    @property
    def examples(self) -> Labels:
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

    def axes_with(self, role: Role) -> list[int]:
        """The axes of one example's output that have a role."""
        return [axis for axis, x in enumerate(self._own_roles) if x == role]

    @property
    def _own_roles(self) -> list[Role]:
        return [role for axis, role in enumerate(self.roles) if axis != self.batch]

    def values(self, side: int) -> Labels:
        """The labels of the output's own axes."""
        return tuple(
            ("output", axis) if side == 0 or role != "full" else ("other", axis)
            for axis, role in enumerate(self._own_roles)
        )

    def directions(self, side: int) -> Labels:
        """The labels of the first axes of `cotangents`."""
        labels = self.values(side)
        if self.probes is not None:
            kept = (labels[i] for i in range(len(labels)) if not self._is_traced(i))
            labels = (_PROBE, *kept)
        return (_PARTS[side], *labels) if self.is_complex else labels

    def _is_traced(self, axis: int) -> bool:
        return self._own_roles[axis] == "trace"

    def cotangents(
        self, probes: Inexact[Array, "probes ..."] | None, side: int
    ) -> Inexact[Array, "..."]:
        """The directions to pull back, along new first axes.

        These are the identity or, along traced axes, the `probes`. The real and the
        imaginary part of a complex output are pulled back separately, because each has
        a real derivative.
        """
        ndim = len(self.shape)
        sizes = self.shapes[side]
        lead: list[int] = []
        result: Array = jnp.ones((), self.dtype)
        if probes is not None:
            traced = self.axes_with("trace")
            lead.append(probes.shape[0])
            shape = [self.shape[i] if i in traced else 1 for i in range(ndim)]
            result = probes.astype(self.dtype).reshape(lead[0], *shape)
        for axis, size in enumerate(sizes):
            if probes is not None and self._is_traced(axis):
                continue
            shape = [size if i == axis else 1 for i in range(ndim)]
            eye = jnp.eye(size, dtype=self.dtype)
            eye = eye.reshape(*(1 for _ in lead), size, *shape)
            result = jnp.expand_dims(result, len(lead)) if result.ndim else result
            result = result * eye
            lead.append(size)
        if not self.is_complex:
            return result
        parts = jnp.array([1.0, -1.0j], self.dtype)
        return parts.reshape(2, *(1 for _ in range(result.ndim))) * result[None]

    @property
    def out(self) -> Labels:
        """The labels of a kernel before its axes are arranged."""
        labels = [*self.examples, *([_PROBE] if self.probes is not None else [])]
        for axis, role in enumerate(self._own_roles):
            if role != "trace":
                labels.append(("output", axis))
            if role == "full":
                labels.append(("other", axis))
        return tuple(labels)

    @property
    def sizes(self) -> dict[Label, int]:
        """The sizes of the axes of a kernel, except those of the examples."""
        sizes: dict[Label, int] = dict.fromkeys(_PARTS, 2)
        if self.probes is not None:
            sizes[_PROBE] = self.probes
        for axis, (size, other) in enumerate(zip(*self.shapes, strict=True)):
            sizes |= {("output", axis): size, ("other", axis): other}
        return sizes

    @property
    def parts(self) -> Labels:
        """The labels of the last axes, for real and imaginary parts."""
        return _PARTS if self.is_complex else ()

    def join(self, kernel: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
        """The complex kernel, from real and imaginary parts along the last two axes."""
        if not self.is_complex:
            return kernel
        real = kernel[..., 0, 0] + kernel[..., 1, 1]
        return lax.complex(real, kernel[..., 1, 0] - kernel[..., 0, 1])

    def mirrored(self, kernel: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
        """The kernel with its two sides exchanged, before its axes are arranged."""
        other = {EXAMPLE: OTHER_EXAMPLE, OTHER_EXAMPLE: EXAMPLE}
        for axis in self.axes_with("full"):
            pair: Labels = (("output", axis), ("other", axis))
            other |= {pair[0]: pair[1], pair[1]: pair[0]}
        if not self.pairs_examples:
            del other[EXAMPLE]
        order = [self.out.index(other.get(label, label)) for label in self.out]
        return jnp.conj(jnp.transpose(kernel, order))

    @property
    def _arranged_labels(self) -> list[Label]:
        numbers = itertools.count()
        labels: list[Label] = [_PROBE] if self.probes is not None else []
        for axis, role in enumerate(self.roles):
            if axis == self.batch:
                pair: Labels = (EXAMPLE, OTHER_EXAMPLE)
            else:
                i = next(numbers)
                pair = (("output", i), ("other", i))
            labels += {"full": pair, "diagonal": pair[:1], "trace": ()}[role]
        return labels

    @property
    def example_axes(self) -> tuple[int, int]:
        """The batch axes of an arranged kernel."""
        labels = self._arranged_labels
        return labels.index(EXAMPLE), labels.index(OTHER_EXAMPLE)

    def arranged_shape(self, num: tuple[int, int]) -> tuple[int, ...]:
        """The shape of an arranged kernel, given the numbers of examples."""
        sizes = {**self.sizes, EXAMPLE: num[0], OTHER_EXAMPLE: num[1]}
        return tuple(sizes[label] for label in self._arranged_labels)

    def arranged(self, kernel: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
        """The kernel with its axes in their final order, in the dtype of the output.

        It is divided by the sizes of the traced axes.
        """
        labels = list(self.out)
        if self.averages_examples:
            kernel, labels = jnp.mean(kernel, axis=0), labels[1:]
        if self.batch is None:
            kernel, labels = kernel[0, 0], labels[2:]
        order = [labels.index(label) for label in self._arranged_labels]
        kernel = jnp.transpose(kernel, order)
        size = math.prod(self.shape[axis] for axis in self.axes_with("trace"))
        if size != 1:
            kernel = kernel / size
        return kernel.astype(self.dtype)


class Mirror(eqx.Module):
    """Exchanges the two sides of kernels of whole outputs."""

    trace_axes: tuple[int, ...] = eqx.field(static=True)
    diagonal_axes: tuple[int, ...] = eqx.field(static=True)

    def __call__(self, kernels: PyTree[Inexact[Array, "..."]]) -> PyTree:
        return jtu.tree_map(self._mirrored, kernels)

    def _mirrored(self, kernel: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
        single = len(self.diagonal_axes)
        num_full = (kernel.ndim - single) // 2
        ndim = num_full + single + len(self.trace_axes)
        diagonal, trace = (
            {axis % ndim for axis in axes}
            for axes in (self.diagonal_axes, self.trace_axes)
        )
        order: list[int] = []
        for axis in range(ndim):
            first = len(order)
            if axis in diagonal:
                order.append(first)
            elif axis not in trace:
                order += [first + 1, first]
        return jnp.conj(jnp.transpose(kernel, order))


def check_axes(name: str, axes: Any) -> tuple[int, ...]:
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


def axis_roles(
    path: str,
    ndim: int,
    batch: int | None,
    trace_axes: tuple[int, ...],
    diagonal_axes: tuple[int, ...],
) -> tuple[Role, ...]:
    """The role of each axis of an output with `ndim` axes, including `batch`."""
    roles: list[Role] = ["full"] * ndim
    named: tuple[tuple[str, Role, tuple[int, ...]], ...] = (
        ("trace_axes", "trace", trace_axes),
        ("diagonal_axes", "diagonal", diagonal_axes),
    )
    for name, role, axes in named:
        for axis in axes:
            if not -ndim <= axis < ndim:
                raise ValueError(
                    f"`{name}` has the axis {axis}, which is out of range for "
                    f"output{path}: it has {ndim} axes, including the batch axis. "
                    f"Use `{name}=()` if it has no such axis."
                )
            if roles[axis] == role:
                raise ValueError(
                    f"`{name}` has axis {axis % ndim} of output{path} twice; got "
                    f"{axes}. Name each axis once."
                )
            if roles[axis] != "full":
                raise ValueError(
                    f"Axis {axis % ndim} of output{path} is both in `trace_axes` "
                    f"({trace_axes}) and in `diagonal_axes` ({diagonal_axes}). It can "
                    "be in one of them only."
                )
            # The default axis is counted from the end.
            if role == "trace" and axis < 0 and axis % ndim == batch:
                raise ValueError(
                    f"`trace_axes` has the axis {axis}, which is the batch axis "
                    f"of output{path}. Use `trace_axes=()` for a model that returns a "
                    f"scalar for each example, or `trace_axes={batch}` for the mean "
                    "over the examples."
                )
            roles[axis] = role
    return tuple(roles)
