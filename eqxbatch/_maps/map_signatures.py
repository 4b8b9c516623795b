"""Signatures of `filter_micro_vmap` and related transforms, for type checkers."""

from collections.abc import Callable, Hashable, Sequence
from typing import (
    Any,
    overload,
    Protocol,
    Required,
    runtime_checkable,
    TypedDict,
    Unpack,
)

from jaxtyping import Array

from .._batch.memory import MemoryBudget
from .._batch.signatures import (
    ArrayAccumulator,
    ArrayAccumulators,
    OtherResult,
    Out,
    P,
    SameResult,
)


class _Settings(TypedDict, total=False):
    in_axes: Any
    microbatch_size: int | MemoryBudget | None
    num_real_microbatches: int | Array | None
    checkpoint: bool


class _Microbatch(_Settings):
    accumulator: ArrayAccumulator


class _OtherMicrobatch(_Settings):
    accumulator: Any


class _VmapSettings(_Settings, total=False):
    out_axes: Any
    axis_name: Hashable | None
    axis_size: int | None
    vmap_fn: Callable[..., Callable[..., Any]]


class _Vmap(_VmapSettings, total=False):
    accumulator: ArrayAccumulator


class _OtherVmap(_VmapSettings):
    accumulator: Any


class _GridSettings(TypedDict, total=False):
    in_axes: Required[Any]
    out_axes: int | str | Sequence[str] | dict[str, int] | None
    block_size: int | MemoryBudget | None
    checkpoint: bool


class _Grid(_GridSettings, total=False):
    accumulator: ArrayAccumulators | None


class _OtherGrid(_GridSettings):
    accumulator: dict[str, Any]


@runtime_checkable
class MicroVmapSignature(Protocol):
    """The signature of `filter_micro_vmap`."""

    @overload
    def __call__(
        self, fun: Callable[P, Out], **settings: Unpack[_Vmap]
    ) -> Callable[P, Out]: ...
    @overload
    def __call__(
        self, fun: Callable[P, Any], **settings: Unpack[_OtherVmap]
    ) -> Callable[P, Any]: ...
    @overload
    def __call__(self, fun: None = None, **settings: Unpack[_Vmap]) -> SameResult: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_OtherVmap]
    ) -> OtherResult: ...


@runtime_checkable
class MicrobatchSignature(Protocol):
    """The signature of `filter_microbatch`."""

    @overload
    def __call__(
        self, fun: Callable[P, Out], **settings: Unpack[_Microbatch]
    ) -> Callable[P, Out]: ...
    @overload
    def __call__(
        self, fun: Callable[P, Any], **settings: Unpack[_OtherMicrobatch]
    ) -> Callable[P, Any]: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_Microbatch]
    ) -> SameResult: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_OtherMicrobatch]
    ) -> OtherResult: ...


@runtime_checkable
class GridVmapSignature(Protocol):
    """The signature of `filter_grid_vmap`."""

    @overload
    def __call__(
        self, fun: Callable[P, Out], **settings: Unpack[_Grid]
    ) -> Callable[P, Out]: ...
    @overload
    def __call__(
        self, fun: Callable[P, Any], **settings: Unpack[_OtherGrid]
    ) -> Callable[P, Any]: ...
    @overload
    def __call__(self, fun: None = None, **settings: Unpack[_Grid]) -> SameResult: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_OtherGrid]
    ) -> OtherResult: ...
