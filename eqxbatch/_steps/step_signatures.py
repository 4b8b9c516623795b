"""The signature of Gauss-Newton steps, for type checkers."""

from collections.abc import Callable, Sequence
from typing import (
    Any,
    Concatenate,
    overload,
    Protocol,
    Required,
    runtime_checkable,
    TypedDict,
    Unpack,
)

from jaxtyping import PyTree

from .._batch.moments import Mean, Sum
from .._batch.signatures import Model, OfModel, P
from .gauss_newton_step import Number, Space


class _Settings(TypedDict, total=False):
    damping: Required[Number]
    space: Space
    centre: bool
    has_residual: bool
    weights: Number | Sequence[Number]
    accumulator: Sum | Mean | Sequence[Sum | Mean]
    solver: Any
    where: Callable[[Any], Any] | None
    filter_spec: PyTree
    in_axes: PyTree
    block_size: int | None
    microbatch_size: int | None


class _WithoutMomentum(_Settings, total=False):
    momentum: None


class _WithMomentum(_Settings, total=False):
    momentum: Required[Number]


class _OfTerms(_Settings, total=False):
    momentum: Number | None


# A step is like the model, with None for everything that is not a parameter.
_WithPrevious = Callable[Concatenate[Model, Any, P], Model]


@runtime_checkable
class _Maker(Protocol):
    def __call__(
        self, residual: OfModel[Model, P, Any], /
    ) -> OfModel[Model, P, Model]: ...


@runtime_checkable
class _MakerWithMomentum(Protocol):
    def __call__(
        self, residual: OfModel[Model, P, Any], /
    ) -> _WithPrevious[Model, P]: ...


@runtime_checkable
class StepSignature(Protocol):
    """The signature of `filter_gauss_newton_step`."""

    @overload
    def __call__(
        self,
        residual: OfModel[Model, P, Any],
        **settings: Unpack[_WithoutMomentum],
    ) -> OfModel[Model, P, Model]: ...
    @overload
    def __call__(
        self,
        residual: OfModel[Model, P, Any],
        **settings: Unpack[_WithMomentum],
    ) -> _WithPrevious[Model, P]: ...
    @overload
    def __call__(
        self,
        residual: Sequence[Callable[[Any, Any], Any]],
        **settings: Unpack[_OfTerms],
    ) -> Callable[..., Any]: ...
    @overload
    def __call__(
        self, residual: None = None, **settings: Unpack[_WithoutMomentum]
    ) -> _Maker: ...
    @overload
    def __call__(
        self, residual: None = None, **settings: Unpack[_WithMomentum]
    ) -> _MakerWithMomentum: ...
