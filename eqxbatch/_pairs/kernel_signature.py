"""The signature of `filter_batch_kernel`, for type checkers."""

from collections.abc import Callable
from typing import (
    Any,
    Concatenate,
    Literal,
    overload,
    ParamSpec,
    Protocol,
    Required,
    runtime_checkable,
    TYPE_CHECKING,
    TypedDict,
    TypeVar,
    Unpack,
)

from jax.sharding import Mesh

from .calls import BlockSize
from .progress import AbstractProgressMeter
from .stores import AbstractStore


_P = ParamSpec("_P")


_X1 = TypeVar("_X1", bound=Any, contravariant=True)


_X2 = TypeVar("_X2", bound=Any, contravariant=True)


_Out = TypeVar("_Out", covariant=True)


class _Settings(TypedDict, total=False):
    block_size: Required[BlockSize]
    in_axes: Any
    out_axes: Any
    symmetric: bool | Callable[[Any], Any] | None
    pairwise: bool
    mesh: Mesh | None
    mesh_axis: str | None
    progress: AbstractProgressMeter | None


class _OnDevice(_Settings, total=False):
    """The kernel is returned as the arrays that the kernel function returns."""

    reduce: None
    store: Literal["device"]


class _Elsewhere(_Settings, total=False):
    reduce: Any
    store: AbstractStore | Literal["device"]


_KernelFunction = Callable[Concatenate[_X1, _X2, _P], _Out]


if TYPE_CHECKING:

    class _InBlocks(Protocol[_X1, _X2, _P, _Out]):
        """The same, but the second argument is optional."""

        def __call__(
            self, x1: _X1, x2: _X2 | None = None, /, *args: _P.args, **kwargs: _P.kwargs
        ) -> _Out: ...
else:
    # Generic classes of a `ParamSpec` cannot be checked at run time.
    _InBlocks = _KernelFunction


@runtime_checkable
class _Maker(Protocol):
    def __call__(
        self, kernel_fn: _KernelFunction[_X1, _X2, _P, _Out], /
    ) -> _InBlocks[_X1, _X2, _P, _Out]: ...


@runtime_checkable
class _OtherMaker(Protocol):
    def __call__(
        self, kernel_fn: _KernelFunction[_X1, _X2, _P, Any], /
    ) -> _InBlocks[_X1, _X2, _P, Any]: ...


@runtime_checkable
class BatchKernelSignature(Protocol):
    """The signature of `filter_batch_kernel`."""

    @overload
    def __call__(
        self,
        kernel_fn: _KernelFunction[_X1, _X2, _P, _Out],
        **settings: Unpack[_OnDevice],
    ) -> _InBlocks[_X1, _X2, _P, _Out]: ...
    @overload
    def __call__(
        self,
        kernel_fn: _KernelFunction[_X1, _X2, _P, Any],
        **settings: Unpack[_Elsewhere],
    ) -> _InBlocks[_X1, _X2, _P, Any]: ...
    @overload
    def __call__(
        self, kernel_fn: None = None, **settings: Unpack[_OnDevice]
    ) -> _Maker: ...
    @overload
    def __call__(
        self, kernel_fn: None = None, **settings: Unpack[_Elsewhere]
    ) -> _OtherMaker: ...
