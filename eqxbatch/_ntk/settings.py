"""The settings of all kernels of models."""

import abc
import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args, Literal

import equinox as eqx
from jaxtyping import PyTree

from .._batch.parameters import as_where
from .._kernels.grid import BlockSize, check_block_size
from .output_axes import check_axes, Mirror


KernelMethod = Literal["auto", "jacobian_contraction", "ntk_vector_products", "sites"]


def check_method(method: str | int) -> KernelMethod:
    """The name of a method; numbers are those of `neural_tangents`."""
    names: tuple[KernelMethod, ...] = get_args(KernelMethod)
    # A bool equals 0 or 1, but names no method.
    for number, name in enumerate(names):
        is_number = method == number and not isinstance(method, bool)
        if is_number or str(method).lower() == name:
            return name
    raise ValueError(
        f"`method` must be one of {names}, or 0, 1, 2 or 3 for them; got {method!r}."
    )


def _check_trace_axes(axes: int | tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if axes is None else check_axes("trace_axes", axes)


def _check_diagonal_axes(axes: int | tuple[int, ...]) -> tuple[int, ...]:
    return check_axes("diagonal_axes", axes)


class AbstractKernelSettings(eqx.Module):
    """How the kernel of a model is computed; see `EmpiricalNTK`."""

    _: dataclasses.KW_ONLY
    trace_axes: tuple[int, ...] | None = eqx.field(
        static=True, converter=_check_trace_axes, default=None
    )
    diagonal_axes: tuple[int, ...] = eqx.field(
        static=True, converter=_check_diagonal_axes, default=()
    )
    in_axes: PyTree = 0
    out_axes: PyTree = 0
    kwargs_axes: dict[str, PyTree] = eqx.field(default_factory=dict)
    block_size: BlockSize = eqx.field(
        static=True, converter=check_block_size, default=None
    )

    def __check_init__(self) -> None:
        if self.block_size is not None:
            self.check_is_batched()
        if self.in_axes is None and (self.out_axes != 0 or self.kwargs_axes):
            raise ValueError(
                "`out_axes` and `kwargs_axes` are for a model of one example, but with "
                "`in_axes=None` it takes a whole batch. Leave them out."
            )

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The kernel."""

    def check_is_batched(self) -> None:
        """Raises for a model of a whole batch, whose kernel has no blocks."""
        if self.in_axes is None:
            raise ValueError(
                "With `in_axes=None`, a kernel cannot go to a `store` or a `mesh`, be "
                "reduced, be computed by columns or in blocks of a `block_size`, or "
                "show its `progress`: a model of a whole batch cannot be evaluated for "
                "blocks of it. Use `in_axes=0` if examples do not interact."
            )

    @property
    def traces_last(self) -> bool:
        """Whether the last axis is traced if an output has one besides the batch."""
        return self.trace_axes is None

    @property
    def traced_axes(self) -> tuple[int, ...]:
        # Whether there is a last axis besides the batch, outputs say later.
        return (-1,) if self.trace_axes is None else self.trace_axes

    @property
    def symmetric(self) -> "Mirror":
        """A function that exchanges the two sides of a kernel, for symmetry."""
        return Mirror(self.traced_axes, self.diagonal_axes)


class AbstractParameterKernel(AbstractKernelSettings):
    """A kernel of derivatives with respect to parameters of a model."""

    _: dataclasses.KW_ONLY
    where: Callable[[Any], Any] | None = eqx.field(default=None, converter=as_where)
    filter_spec: PyTree = eqx.is_inexact_array


class AbstractJacobianKernel(AbstractParameterKernel):
    """A kernel of Jacobians, which can be multiplied in several ways."""

    _: dataclasses.KW_ONLY
    method: KernelMethod = eqx.field(
        static=True, converter=check_method, default="auto"
    )


class AbstractMetricKernel(AbstractJacobianKernel):
    """A kernel of Jacobians in a metric of the parameters."""

    _: dataclasses.KW_ONLY
    metric: Any = None

    def __check_init__(self) -> None:
        if self.metric is not None and self.method == "ntk_vector_products":
            raise ValueError(
                "`method='ntk_vector_products'` has no `metric`, as it pushes "
                "Jacobians through the model. Use 'auto' or 'sites'."
            )


# The requested kernels, as users name them: in any case, and None for both.
Get = str | Sequence[str] | None


_KINDS = ("nngp", "ntk")


def names_of(get: object) -> tuple[str, ...]:
    """The kinds of kernels to compute."""
    names = _KINDS if get is None else (get,) if isinstance(get, str) else get
    if isinstance(names, (tuple, list)) and all(isinstance(n, str) for n in names):
        names = tuple(name.lower() for name in names)
        if names and len({*names}) == len(names) and {*names} <= {*_KINDS}:
            return names
    raise ValueError(
        "`get` must be 'nngp', 'ntk', a tuple with one or both of them, each once, or "
        f"None for both; got {get!r}."
    )


def check_get(get: Get) -> str | tuple[str, ...] | None:
    names_of(get)
    return get if get is None or isinstance(get, str) else tuple(get)


def named(get: Get, results: list[Any]) -> Any:
    """The kernel itself if it was requested by name, and otherwise a named tuple."""
    if isinstance(get, str):
        return results[0]
    return _named_tuple("Kernel", names_of(get))(*results)


# One class for each tuple of names, so that results of two calls have one structure.
_named_tuple = functools.cache(collections.namedtuple)
