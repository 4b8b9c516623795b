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

from .._base.trees import as_int, described, safe_zip
from .._sites.einsum import contract, EXAMPLE, Labels, OTHER_EXAMPLE, Term
from .._sites.site import Label


Role = Literal["full", "diagonal", "trace"]


# How often the kernel has an axis.
_TIMES: dict[Role, int] = {"full": 2, "diagonal": 1, "trace": 0}


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
    - `probes`: the directions that traced axes are projected on, along its first axis;
        None for no projection.
    """

    index: int
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: Any
    batch: int | None
    roles: tuple[Role, ...]
    probes: Inexact[Array, "probes ..."] | None = None

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
        return jnp.zeros(self._shape(self.out, num), self.dtype)

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
            traced = self.axes_with("trace")
            kept = (label for i, label in enumerate(labels) if i not in traced)
            labels = (_PROBE, *kept)
        return (_PARTS[side], *labels) if self.is_complex else labels

    def cotangents(self, side: int) -> Inexact[Array, "..."]:
        """The directions to pull back, along new first axes.

        These are the identity or, along traced axes, the `probes`. The real and the
        imaginary part of a complex output are pulled back separately, because each has
        a real derivative.
        """
        labels, traced = self.values(side), self.axes_with("trace")
        entries: list[Label] = [("entry", axis) for axis, _ in enumerate(labels)]
        terms: list[Term] = [
            (jnp.eye(size, dtype=self.dtype), (labels[axis], entries[axis]))
            for axis, size in enumerate(self.shapes[side])
            if self.probes is None or axis not in traced
        ]
        if self.probes is not None:
            labels_of_probes = (entries[axis] for axis in traced)
            terms.append((self.probes.astype(self.dtype), (_PROBE, *labels_of_probes)))
        if self.is_complex:
            terms.append((jnp.array([1.0, -1.0j], self.dtype), (_PARTS[side],)))
        terms = terms or [(jnp.ones((), self.dtype), ())]
        return contract(terms, (*self.directions(side), *entries))

    @property
    def out(self) -> Labels:
        """The labels of a kernel before its axes are arranged."""
        labels = [*self.examples, *([_PROBE] if self.probes is not None else [])]
        for axis, role in enumerate(self._own_roles):
            labels += (("output", axis), ("other", axis))[: _TIMES[role]]
        return tuple(labels)

    @property
    def sizes(self) -> dict[Label, int]:
        """The sizes of the axes of a kernel, except those of the examples."""
        sizes: dict[Label, int] = dict.fromkeys(_PARTS, 2)
        if self.probes is not None:
            sizes[_PROBE] = self.probes.shape[0]
        for axis, (size, other) in enumerate(safe_zip(*self.shapes)):
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

    @property
    def _arranged_labels(self) -> list[Label]:
        pairs = [(("output", i), ("other", i)) for i, _ in enumerate(self._own_roles)]
        if self.batch is not None:
            pairs.insert(self.batch, (EXAMPLE, OTHER_EXAMPLE))
        both = safe_zip(pairs, self.roles)
        return [label for pair, role in both for label in pair[: _TIMES[role]]]

    @property
    def example_axes(self) -> tuple[int, int]:
        """The batch axes of an arranged kernel."""
        labels = self._arranged_labels
        return labels.index(EXAMPLE), labels.index(OTHER_EXAMPLE)

    def arranged_shape(self, num: tuple[int, int]) -> tuple[int, ...]:
        """The shape of an arranged kernel, given the numbers of examples."""
        return self._shape(self._arranged_labels, num)

    def _shape(self, labels: Sequence[Label], num: tuple[int, int]) -> tuple[int, ...]:
        sizes = {**self.sizes, EXAMPLE: num[0], OTHER_EXAMPLE: num[1]}
        return tuple(sizes[label] for label in labels)

    def arranged(self, kernel: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
        """The kernel with its axes in their final order, in the dtype that it has.

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
        return kernel if size == 1 else kernel / size


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
) -> list[Role]:
    """The role of each axis of an output with `ndim` axes, including `batch`."""
    roles: list[Role] = ["full"] * ndim
    with_roles: dict[Role, tuple[int, ...]] = {
        "trace": trace_axes,
        "diagonal": diagonal_axes,
    }
    for role, axes in with_roles.items():
        name = f"{role}_axes"
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
    return roles
