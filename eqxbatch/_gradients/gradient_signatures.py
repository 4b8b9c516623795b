"""Signatures of `filter_micro_grad` and `filter_micro_value_and_grad`, for checkers."""
# If settings fit two overloads, the first one is meant.
# pyright: reportOverlappingOverload=false

from collections.abc import Callable
from typing import (
    Any,
    Literal,
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
    Aux,
    HasAux,
    Loss,
    LossWithAux,
    Model,
    NoAux,
    OfModel,
    OtherResult,
    P,
)
from .._sites.cost import Method
from .ways import GradientStatistics


class _Settings(TypedDict, total=False):
    where: Callable[[Any], Any] | None
    filter_spec: Any
    in_axes: Any
    batched: bool
    microbatch_size: int | MemoryBudget | None
    accumulator: Any
    clip_norm: Any
    nan_safe: bool
    method: Method
    num_real_microbatches: int | Array | None


class _Arrays(_Settings, total=False):
    """Values, gradients and aux have the types that they have for one example."""

    value_accumulator: ArrayAccumulator | None
    aux_accumulator: ArrayAccumulator
    transform: None


class _Plain(_Arrays, total=False):
    return_norms: Literal[False]
    moments: Literal[False]
    metrics: None


# Statistics are returned if one of three settings asks for them.
class _Norms(_Arrays, total=False):
    return_norms: Required[Literal[True]]
    moments: bool
    metrics: Callable[[Any], Any] | None


class _Moments(_Arrays, total=False):
    return_norms: Literal[False]
    moments: Required[Literal[True]]
    metrics: Callable[[Any], Any] | None


class _Metrics(_Arrays, total=False):
    return_norms: Literal[False]
    moments: Literal[False]
    metrics: Required[Callable[[Any], Any]]


class _Other(_Settings, total=False):
    """Values, gradients or aux have other types."""

    value_accumulator: Any
    aux_accumulator: Any
    transform: Callable[[Any], Any] | None
    return_norms: bool
    moments: bool
    metrics: Callable[[Any], Any] | None


class _PlainNoAux(_Plain, NoAux):
    pass


class _NormsNoAux(_Norms, NoAux):
    pass


class _MomentsNoAux(_Moments, NoAux):
    pass


class _MetricsNoAux(_Metrics, NoAux):
    pass


class _OtherNoAux(_Other, NoAux):
    pass


class _PlainAux(_Plain, HasAux):
    pass


class _NormsAux(_Norms, HasAux):
    pass


class _MomentsAux(_Moments, HasAux):
    pass


class _MetricsAux(_Metrics, HasAux):
    pass


class _OtherAux(_Other, HasAux):
    pass


class _OtherAnyAux(_Other, total=False):
    has_aux: bool


@runtime_checkable
class _Grad(Protocol):
    def __call__(self, fun: Loss[Model, P], /) -> OfModel[Model, P, Model]: ...


@runtime_checkable
class _WatchedGrad(Protocol):
    def __call__(
        self, fun: Loss[Model, P], /
    ) -> OfModel[Model, P, tuple[Model, GradientStatistics]]: ...


@runtime_checkable
class _GradAux(Protocol):
    def __call__(
        self, fun: LossWithAux[Model, P, Aux], /
    ) -> OfModel[Model, P, tuple[Model, Aux]]: ...


@runtime_checkable
class _WatchedGradAux(Protocol):
    def __call__(
        self, fun: LossWithAux[Model, P, Aux], /
    ) -> OfModel[Model, P, tuple[Model, Aux, GradientStatistics]]: ...


@runtime_checkable
class MicroGradSignature(Protocol):
    """The signature of `filter_micro_grad`."""

    @overload
    def __call__(
        self, fun: Loss[Model, P], **settings: Unpack[_PlainNoAux]
    ) -> OfModel[Model, P, Model]: ...
    @overload
    def __call__(
        self, fun: Loss[Model, P], **settings: Unpack[_NormsNoAux]
    ) -> OfModel[Model, P, tuple[Model, GradientStatistics]]: ...
    @overload
    def __call__(
        self, fun: Loss[Model, P], **settings: Unpack[_MomentsNoAux]
    ) -> OfModel[Model, P, tuple[Model, GradientStatistics]]: ...
    @overload
    def __call__(
        self, fun: Loss[Model, P], **settings: Unpack[_MetricsNoAux]
    ) -> OfModel[Model, P, tuple[Model, GradientStatistics]]: ...
    @overload
    def __call__(
        self, fun: Loss[Model, P], **settings: Unpack[_OtherNoAux]
    ) -> OfModel[Model, P, Any]: ...
    @overload
    def __call__(
        self, fun: LossWithAux[Model, P, Aux], **settings: Unpack[_PlainAux]
    ) -> OfModel[Model, P, tuple[Model, Aux]]: ...
    @overload
    def __call__(
        self, fun: LossWithAux[Model, P, Aux], **settings: Unpack[_NormsAux]
    ) -> OfModel[Model, P, tuple[Model, Aux, GradientStatistics]]: ...
    @overload
    def __call__(
        self, fun: LossWithAux[Model, P, Aux], **settings: Unpack[_MomentsAux]
    ) -> OfModel[Model, P, tuple[Model, Aux, GradientStatistics]]: ...
    @overload
    def __call__(
        self, fun: LossWithAux[Model, P, Aux], **settings: Unpack[_MetricsAux]
    ) -> OfModel[Model, P, tuple[Model, Aux, GradientStatistics]]: ...
    @overload
    def __call__(
        self, fun: LossWithAux[Model, P, Any], **settings: Unpack[_OtherAux]
    ) -> OfModel[Model, P, Any]: ...
    @overload
    def __call__(self, fun: None = None, **settings: Unpack[_PlainNoAux]) -> _Grad: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_NormsNoAux]
    ) -> _WatchedGrad: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_MomentsNoAux]
    ) -> _WatchedGrad: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_MetricsNoAux]
    ) -> _WatchedGrad: ...
    @overload
    def __call__(self, fun: None = None, **settings: Unpack[_PlainAux]) -> _GradAux: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_NormsAux]
    ) -> _WatchedGradAux: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_MomentsAux]
    ) -> _WatchedGradAux: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_MetricsAux]
    ) -> _WatchedGradAux: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_OtherAnyAux]
    ) -> OtherResult: ...


@runtime_checkable
class _ValueAndGrad(Protocol):
    def __call__(
        self, fun: Loss[Model, P], /
    ) -> OfModel[Model, P, tuple[Array, Model]]: ...


@runtime_checkable
class _WatchedValueAndGrad(Protocol):
    def __call__(
        self, fun: Loss[Model, P], /
    ) -> OfModel[Model, P, tuple[Array, Model, GradientStatistics]]: ...


@runtime_checkable
class _ValueAndGradAux(Protocol):
    def __call__(
        self, fun: LossWithAux[Model, P, Aux], /
    ) -> OfModel[Model, P, tuple[tuple[Array, Aux], Model]]: ...


@runtime_checkable
class _WatchedValueAndGradAux(Protocol):
    def __call__(
        self, fun: LossWithAux[Model, P, Aux], /
    ) -> OfModel[Model, P, tuple[tuple[Array, Aux], Model, GradientStatistics]]: ...


@runtime_checkable
class MicroValueAndGradSignature(Protocol):
    """The signature of `filter_micro_value_and_grad`."""

    @overload
    def __call__(
        self, fun: Loss[Model, P], **settings: Unpack[_PlainNoAux]
    ) -> OfModel[Model, P, tuple[Array, Model]]: ...
    @overload
    def __call__(
        self, fun: Loss[Model, P], **settings: Unpack[_NormsNoAux]
    ) -> OfModel[Model, P, tuple[Array, Model, GradientStatistics]]: ...
    @overload
    def __call__(
        self, fun: Loss[Model, P], **settings: Unpack[_MomentsNoAux]
    ) -> OfModel[Model, P, tuple[Array, Model, GradientStatistics]]: ...
    @overload
    def __call__(
        self, fun: Loss[Model, P], **settings: Unpack[_MetricsNoAux]
    ) -> OfModel[Model, P, tuple[Array, Model, GradientStatistics]]: ...
    @overload
    def __call__(
        self, fun: Loss[Model, P], **settings: Unpack[_OtherNoAux]
    ) -> OfModel[Model, P, Any]: ...
    @overload
    def __call__(
        self, fun: LossWithAux[Model, P, Aux], **settings: Unpack[_PlainAux]
    ) -> OfModel[Model, P, tuple[tuple[Array, Aux], Model]]: ...
    @overload
    def __call__(
        self, fun: LossWithAux[Model, P, Aux], **settings: Unpack[_NormsAux]
    ) -> OfModel[Model, P, tuple[tuple[Array, Aux], Model, GradientStatistics]]: ...
    @overload
    def __call__(
        self, fun: LossWithAux[Model, P, Aux], **settings: Unpack[_MomentsAux]
    ) -> OfModel[Model, P, tuple[tuple[Array, Aux], Model, GradientStatistics]]: ...
    @overload
    def __call__(
        self, fun: LossWithAux[Model, P, Aux], **settings: Unpack[_MetricsAux]
    ) -> OfModel[Model, P, tuple[tuple[Array, Aux], Model, GradientStatistics]]: ...
    @overload
    def __call__(
        self, fun: LossWithAux[Model, P, Any], **settings: Unpack[_OtherAux]
    ) -> OfModel[Model, P, Any]: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_PlainNoAux]
    ) -> _ValueAndGrad: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_NormsNoAux]
    ) -> _WatchedValueAndGrad: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_MomentsNoAux]
    ) -> _WatchedValueAndGrad: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_MetricsNoAux]
    ) -> _WatchedValueAndGrad: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_PlainAux]
    ) -> _ValueAndGradAux: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_NormsAux]
    ) -> _WatchedValueAndGradAux: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_MomentsAux]
    ) -> _WatchedValueAndGradAux: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_MetricsAux]
    ) -> _WatchedValueAndGradAux: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_OtherAnyAux]
    ) -> OtherResult: ...
