"""The alignment of a kernel with labels, from its blocks."""

import dataclasses
import math
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Inexact, Shaped

from .._base.dtypes import common_dtype, power_of_two, widened
from .._base.shapes import as_jax, check_fields, checked
from .._batch.cut import Block
from .._batch.long_sums import complete, nothing_lost, plus
from .reductions import (
    AbstractReduction,
    KernelStruct,
    MatrixTile,
    most_blocks,
    Norm,
    sum_dtype,
)


class _Alignment(eqx.Module):
    """Sums in a wide dtype, and the dtype of the result.

    - `inner`: the inner product with the kernel of the labels, divided by the scales of
        both kernels.
    - `lost`: what rounding took from it, if there may be many tiles.
    - `norm`: the norm of the kernel.
    - `labels`: the norm of the kernel of the labels, divided by its scale.
    - `scales`: the largest label of the rows and that of the columns, as powers of two.
    """

    checked_as: ClassVar[dict[str, Any]] = {
        "inner": Inexact[Array, ""],
        "labels": Inexact[Array, ""],
        "scales": Inexact[Array, "2"],
    }
    inner: Array
    lost: Array | None
    norm: Norm
    labels: Array
    scales: Array
    dtype: Any = eqx.field(static=True)

    def plus(self, inner: Array, norm: Norm) -> "_Alignment":
        """The sums with one more inner product, at the scale of another norm."""
        shrinkage = self.norm.shrinkage(norm)
        shrink = lambda x: x * shrinkage
        old, lost = jtu.tree_map(shrink, (self.inner, self.lost))
        inner, lost = plus(old, lost, inner)
        return dataclasses.replace(self, inner=inner, lost=lost, norm=norm)


class KernelAlignment(AbstractReduction[_Alignment]):
    """The alignment of the kernel `K` with the kernel `T` of the labels: at most 1.

    The alignment is the cosine similarity of the two kernels,
    `sum(K * T) / (norm(K) * norm(T))`, where `T` is `labels @ other_labels.T`. It is 1
    if one kernel is a positive multiple of the other.

    **Arguments:**

    - `labels`: the labels of the rows, of shape `(n1,)` or `(n1, k)`.
    - `other_labels`: the labels of the columns, of shape `(n2,)` or `(n2, k)`. The
        default is `labels`.

    Raises `ValueError` for labels of other shapes and for a kernel with more than two
    axes. Raises `TypeError` for complex labels, and unless the kernel has a real
    floating-point dtype.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> labels = jnp.array([1.0, 1.0, -1.0, -1.0])
        >>> kernel = eqxbatch.filter_batch_kernel(
        ...     lambda x, y: x @ y.T,
        ...     block_size=2,
        ...     reduce=eqxbatch.KernelAlignment(labels),
        ... )
        >>> x = jnp.array([2.0, 2.0, -2.0, -2.0])[:, None]
        >>> print(kernel(x, x))
        1.0

        ```

    ??? cite

        [Cristianini et al., 2001](https://papers.nips.cc/paper/1946-on-kernel-target-alignment).
    """

    labels: Shaped[Array, "n1 *k"] = eqx.field(converter=as_jax)
    other_labels: Shaped[Array, "n2 *l"] | None = eqx.field(
        converter=as_jax, default=None
    )

    def __check_init__(self) -> None:
        check_fields(self)
        for name, y in zip(("labels", "other_labels"), self._sides, strict=True):
            if jnp.issubdtype(y.dtype, jnp.complexfloating):
                raise TypeError(
                    f"`{name}` must be real numbers; got dtype {y.dtype}. Give their "
                    "real and imaginary parts as columns."
                )

    @property
    def neutral(self) -> float:
        return 0.0

    @property
    def _sides(self) -> list[Array]:
        other = self.labels if self.other_labels is None else self.other_labels
        return [self.labels, other]

    @checked
    def init(self, kernel: KernelStruct) -> _Alignment:
        sides = self._sides
        if len(kernel.shape) != 2 or [y.shape[:1] for y in sides] != [
            kernel.shape[:1],
            kernel.shape[1:],
        ]:
            raise ValueError(
                "KernelAlignment needs a kernel of shape `(n1, n2)` and labels for "
                f"its rows and columns; got {kernel.shape} and labels of shapes "
                f"{sides[0].shape} and {sides[1].shape}."
            )
        sizes = [math.prod(y.shape[1:]) for y in sides]
        if sizes[0] != sizes[1]:
            raise ValueError(
                "KernelAlignment needs labels with as many columns for the columns of "
                f"the kernel as for its rows; got shapes {sides[0].shape} and "
                f"{sides[1].shape}."
            )
        if not jnp.issubdtype(kernel.dtype, jnp.floating):
            raise TypeError(
                "KernelAlignment needs a kernel of real numbers; got dtype "
                f"{kernel.dtype}. Cast what `kernel_fn` returns."
            )
        zero = jnp.zeros((), sum_dtype(kernel))
        wide = [y.astype(common_dtype(y.dtype, zero.dtype)) for y in sides]
        tops = [jnp.max(jnp.abs(lax.stop_gradient(y)), initial=0) for y in wide]
        scales = [power_of_two(top).astype(zero.dtype) for top in tops]
        # The norm of y1 y2^T, from matrices that are only as large as a label.
        flat = [_columns(y, scale) for y, scale in zip(wide, scales, strict=True)]
        gram = [y.T @ y for y in flat]
        labels = jnp.sqrt(jnp.sum(gram[0] * gram[1]))
        lost, norm = nothing_lost(zero, most_blocks(kernel)), Norm.begun(kernel)
        return _Alignment(zero, lost, norm, labels, jnp.stack(scales), kernel.dtype)

    @checked
    def update(
        self, state: _Alignment, tile: MatrixTile, rows: Block, columns: Block
    ) -> _Alignment:
        wide = widened(tile)
        norm = state.norm.including(wide)
        # Half of the scale for each side, so that no label underflows. A tile need not
        # be copied to be divided.
        root = power_of_two(jnp.sqrt(norm.scale))
        first, second = (
            _columns(block.take(y), scale)
            for y, block, scale in zip(
                self._sides, (rows, columns), state.scales, strict=True
            )
        )
        inner = jnp.sum((wide @ (second / root)) * (first / (norm.scale / root)))
        return state.plus(inner, norm)

    @checked
    def merge(self, first: _Alignment, second: _Alignment) -> _Alignment:
        norm = first.norm.merged(second.norm)
        inner = complete(second.inner, second.lost) * second.norm.shrinkage(norm)
        return first.plus(inner, norm)

    @checked
    def finalize(self, state: _Alignment) -> Inexact[Array, ""]:
        norms = jnp.sqrt(state.norm.total) * state.labels
        return (complete(state.inner, state.lost) / norms).astype(state.dtype)


def _columns(labels: Array, scale: Inexact[Array, ""]) -> Inexact[Array, "n k"]:
    """Labels as columns, divided by `scale`, in its dtype."""
    flat = labels.reshape(labels.shape[0], -1 if labels.size else 1)
    dtype = common_dtype(labels.dtype, scale.dtype)
    divided = (flat.astype(dtype) / scale.astype(dtype)).astype(scale.dtype)
    # Without it, XLA divides by the product with the next divisor, which overflows.
    return lax.optimization_barrier(divided)
