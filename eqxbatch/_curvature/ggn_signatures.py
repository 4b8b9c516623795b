"""Signatures of Gauss-Newton matrices for type checkers, like those of Hessians."""

from collections.abc import Callable
from typing import Any, overload, Protocol, runtime_checkable, Unpack

from jax.typing import ArrayLike
from jaxtyping import Array, PRNGKeyArray, UInt32

from .._batch.signatures import Model, OfModel, Out, P
from .curvature_signatures import (
    IsFlat,
    LossOfOutputs,
    MatrixSettings,
    NotFlat,
    OverExamples,
    Selected,
)
from .fisher import Kind
from .kronecker_factors import KroneckerFactors
from .kronecker_sums import WeightSharing
from .pytree import Unravel


class _Settings(MatrixSettings, total=False):
    fisher: Kind
    key: PRNGKeyArray | UInt32[Array, "2"] | None
    num_samples: int
    sampler: Callable[..., Any] | None


class _GGN(_Settings, NotFlat):
    pass


class _GGNFlat(_Settings, IsFlat):
    pass


class _GGNBlocks(_Settings, total=False):
    is_block: Callable[[Any], bool] | None
    flat: bool


@runtime_checkable
class _Maker(Protocol):
    def __call__(self, fun: OfModel[Model, P, Any], /) -> OfModel[Model, P, Any]: ...


@runtime_checkable
class _LikeModelMaker(Protocol):
    def __call__(self, fun: OfModel[Model, P, Any], /) -> OfModel[Model, P, Model]: ...


@runtime_checkable
class _FlatMaker(Protocol):
    def __call__(
        self, fun: OfModel[Model, P, Any], /
    ) -> OfModel[Model, P, tuple[Array, Unravel[Model]]]: ...


@runtime_checkable
class GGNSignature(Protocol):
    """The signature of `filter_ggn`."""

    @overload
    def __call__(
        self,
        fun: OfModel[Model, P, Out],
        loss: LossOfOutputs[Out],
        **settings: Unpack[_GGN],
    ) -> OfModel[Model, P, Any]: ...
    @overload
    def __call__(
        self,
        fun: OfModel[Model, P, Out],
        loss: LossOfOutputs[Out],
        **settings: Unpack[_GGNFlat],
    ) -> OfModel[Model, P, tuple[Array, Unravel[Model]]]: ...
    @overload
    def __call__(
        self,
        fun: None = None,
        *,
        loss: Callable[..., ArrayLike],
        **settings: Unpack[_GGN],
    ) -> _Maker: ...
    @overload
    def __call__(
        self,
        fun: None = None,
        *,
        loss: Callable[..., ArrayLike],
        **settings: Unpack[_GGNFlat],
    ) -> _FlatMaker: ...


@runtime_checkable
class GGNDiagonalSignature(Protocol):
    """The signature of `filter_ggn_diagonal`."""

    @overload
    def __call__(
        self,
        fun: OfModel[Model, P, Out],
        loss: LossOfOutputs[Out],
        **settings: Unpack[_GGN],
    ) -> OfModel[Model, P, Model]: ...
    @overload
    def __call__(
        self,
        fun: OfModel[Model, P, Out],
        loss: LossOfOutputs[Out],
        **settings: Unpack[_GGNFlat],
    ) -> OfModel[Model, P, tuple[Array, Unravel[Model]]]: ...
    @overload
    def __call__(
        self,
        fun: None = None,
        *,
        loss: Callable[..., ArrayLike],
        **settings: Unpack[_GGN],
    ) -> _LikeModelMaker: ...
    @overload
    def __call__(
        self,
        fun: None = None,
        *,
        loss: Callable[..., ArrayLike],
        **settings: Unpack[_GGNFlat],
    ) -> _FlatMaker: ...


@runtime_checkable
class GGNBlocksSignature(Protocol):
    """The signature of `filter_ggn_blocks`."""

    @overload
    def __call__(
        self,
        fun: OfModel[Model, P, Out],
        loss: LossOfOutputs[Out],
        **settings: Unpack[_GGNBlocks],
    ) -> OfModel[Model, P, Any]: ...
    @overload
    def __call__(
        self,
        fun: None = None,
        *,
        loss: Callable[..., ArrayLike],
        **settings: Unpack[_GGNBlocks],
    ) -> _Maker: ...


class _KFAC(OverExamples, Selected, total=False):
    fisher: Kind
    key: PRNGKeyArray | UInt32[Array, "2"] | None
    num_samples: int
    sampler: Callable[..., Any] | None
    weight_sharing: WeightSharing
    corrected: bool
    is_block: Callable[[Any], bool] | None


@runtime_checkable
class _FactorsMaker(Protocol):
    def __call__(
        self, fun: OfModel[Model, P, Any], /
    ) -> OfModel[Model, P, KroneckerFactors]: ...


@runtime_checkable
class KFACSignature(Protocol):
    """The signature of `filter_kfac`."""

    @overload
    def __call__(
        self,
        fun: OfModel[Model, P, Out],
        loss: LossOfOutputs[Out],
        **settings: Unpack[_KFAC],
    ) -> OfModel[Model, P, KroneckerFactors]: ...
    @overload
    def __call__(
        self,
        fun: None = None,
        *,
        loss: Callable[..., ArrayLike],
        **settings: Unpack[_KFAC],
    ) -> _FactorsMaker: ...
