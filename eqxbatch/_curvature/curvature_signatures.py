"""Signatures of Jacobians, Hessians and their products, for type checkers.

Results that are like a gradient have the type of the model. A matrix of second
derivatives is a PyTree of PyTrees, which has no type of its own. With `flat`, it is an
array.
"""

from collections.abc import Callable
from typing import (
    Any,
    Concatenate,
    Literal,
    overload,
    Protocol,
    runtime_checkable,
    TypedDict,
    Unpack,
)

from jax.typing import ArrayLike
from jaxtyping import Array

from .._batch.memory import MemoryBudget
from .._batch.moments import Mean, Sum
from .._batch.signatures import (
    Aux,
    HasAux,
    Loss,
    LossWithAux,
    Model,
    NoAux,
    OfModel,
    Out,
    P,
)
from .by_products import Mode
from .methods import CurvatureMethod
from .pytree import Unravel


class Selected(TypedDict, total=False):
    where: Callable[[Any], Any] | None
    filter_spec: Any


class _Parameters(Selected, total=False):
    checkpoint: bool


class _Columns(_Parameters, total=False):
    block_size: int | MemoryBudget | None
    num_blocks: int | None


class OverExamples(TypedDict, total=False):
    in_axes: Any
    microbatch_size: int | MemoryBudget | None
    accumulator: Sum | Mean


class NotFlat(TypedDict, total=False):
    flat: Literal[False]


class IsFlat(TypedDict):
    flat: Literal[True]


class _JacobianSettings(_Columns, total=False):
    mode: Mode
    holomorphic: bool


class _Jacobian(_JacobianSettings, NotFlat, NoAux):
    pass


class _JacobianAux(_JacobianSettings, NotFlat, HasAux):
    pass


class _JacobianFlat(_JacobianSettings, IsFlat, NoAux):
    pass


class _JacobianFlatAux(_JacobianSettings, IsFlat, HasAux):
    pass


class MatrixSettings(_Columns, OverExamples, total=False):
    method: CurvatureMethod


class _HessianSettings(MatrixSettings, total=False):
    mode: Mode
    holomorphic: bool


class _Hessian(_HessianSettings, NotFlat, NoAux):
    pass


class _HessianAux(_HessianSettings, NotFlat, HasAux):
    pass


class _HessianFlat(_HessianSettings, IsFlat, NoAux):
    pass


class _HessianFlatAux(_HessianSettings, IsFlat, HasAux):
    pass


class _BlocksSettings(_HessianSettings, total=False):
    is_block: Callable[[Any], bool] | None
    flat: bool


class _Blocks(_BlocksSettings, NoAux):
    pass


class _BlocksAux(_BlocksSettings, HasAux):
    pass


class _GGNProduct(_Parameters, OverExamples):
    pass


class _ProductSettings(_Parameters, OverExamples, total=False):
    mode: Mode


class _Product(_ProductSettings, NoAux):
    pass


class _ProductAux(_ProductSettings, HasAux):
    pass


# The loss takes the output in place of the model; its other arguments are the same.
LossOfOutputs = Callable[Concatenate[Out, ...], ArrayLike]


# A product takes the model, and then a vector with the same structure.
_Products = Callable[Concatenate[Model, Model, P], Out]


@runtime_checkable
class _JacobianMaker(Protocol):
    @overload
    def __call__(
        self, fun: OfModel[Model, P, Array], /
    ) -> OfModel[Model, P, Model]: ...
    @overload
    def __call__(self, fun: OfModel[Model, P, Any], /) -> OfModel[Model, P, Any]: ...


@runtime_checkable
class _JacobianAuxMaker(Protocol):
    @overload
    def __call__(
        self, fun: OfModel[Model, P, tuple[Array, Aux]], /
    ) -> OfModel[Model, P, tuple[Model, Aux]]: ...
    @overload
    def __call__(
        self, fun: OfModel[Model, P, tuple[Any, Aux]], /
    ) -> OfModel[Model, P, tuple[Any, Aux]]: ...


@runtime_checkable
class _JacobianFlatMaker(Protocol):
    def __call__(
        self, fun: OfModel[Model, P, Out], /
    ) -> OfModel[Model, P, tuple[Out, Unravel[Model]]]: ...


@runtime_checkable
class _JacobianFlatAuxMaker(Protocol):
    def __call__(
        self, fun: OfModel[Model, P, tuple[Out, Aux]], /
    ) -> OfModel[Model, P, tuple[tuple[Out, Unravel[Model]], Aux]]: ...


@runtime_checkable
class JacobianSignature(Protocol):
    """The signature of `filter_jacobian`."""

    @overload
    def __call__(
        self, fun: OfModel[Model, P, Array], **settings: Unpack[_Jacobian]
    ) -> OfModel[Model, P, Model]: ...
    @overload
    def __call__(
        self, fun: OfModel[Model, P, Any], **settings: Unpack[_Jacobian]
    ) -> OfModel[Model, P, Any]: ...
    @overload
    def __call__(
        self,
        fun: OfModel[Model, P, tuple[Array, Aux]],
        **settings: Unpack[_JacobianAux],
    ) -> OfModel[Model, P, tuple[Model, Aux]]: ...
    @overload
    def __call__(
        self, fun: OfModel[Model, P, tuple[Any, Aux]], **settings: Unpack[_JacobianAux]
    ) -> OfModel[Model, P, tuple[Any, Aux]]: ...
    @overload
    def __call__(
        self, fun: OfModel[Model, P, Out], **settings: Unpack[_JacobianFlat]
    ) -> OfModel[Model, P, tuple[Out, Unravel[Model]]]: ...
    @overload
    def __call__(
        self,
        fun: OfModel[Model, P, tuple[Out, Aux]],
        **settings: Unpack[_JacobianFlatAux],
    ) -> OfModel[Model, P, tuple[tuple[Out, Unravel[Model]], Aux]]: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_Jacobian]
    ) -> _JacobianMaker: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_JacobianAux]
    ) -> _JacobianAuxMaker: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_JacobianFlat]
    ) -> _JacobianFlatMaker: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_JacobianFlatAux]
    ) -> _JacobianFlatAuxMaker: ...


@runtime_checkable
class _PyTreeMaker(Protocol):
    def __call__(self, fun: Loss[Model, P], /) -> OfModel[Model, P, Any]: ...


@runtime_checkable
class _PyTreeAuxMaker(Protocol):
    def __call__(
        self, fun: LossWithAux[Model, P, Aux], /
    ) -> OfModel[Model, P, tuple[Any, Aux]]: ...


@runtime_checkable
class _LikeModelMaker(Protocol):
    def __call__(self, fun: Loss[Model, P], /) -> OfModel[Model, P, Model]: ...


@runtime_checkable
class _LikeModelAuxMaker(Protocol):
    def __call__(
        self, fun: LossWithAux[Model, P, Aux], /
    ) -> OfModel[Model, P, tuple[Model, Aux]]: ...


@runtime_checkable
class _FlatMaker(Protocol):
    def __call__(
        self, fun: Loss[Model, P], /
    ) -> OfModel[Model, P, tuple[Array, Unravel[Model]]]: ...


@runtime_checkable
class _FlatAuxMaker(Protocol):
    def __call__(
        self, fun: LossWithAux[Model, P, Aux], /
    ) -> OfModel[Model, P, tuple[tuple[Array, Unravel[Model]], Aux]]: ...


@runtime_checkable
class HessianSignature(Protocol):
    """The signature of `filter_hessian`."""

    @overload
    def __call__(
        self, fun: Loss[Model, P], **settings: Unpack[_Hessian]
    ) -> OfModel[Model, P, Any]: ...
    @overload
    def __call__(
        self, fun: LossWithAux[Model, P, Aux], **settings: Unpack[_HessianAux]
    ) -> OfModel[Model, P, tuple[Any, Aux]]: ...
    @overload
    def __call__(
        self, fun: Loss[Model, P], **settings: Unpack[_HessianFlat]
    ) -> OfModel[Model, P, tuple[Array, Unravel[Model]]]: ...
    @overload
    def __call__(
        self, fun: LossWithAux[Model, P, Aux], **settings: Unpack[_HessianFlatAux]
    ) -> OfModel[Model, P, tuple[tuple[Array, Unravel[Model]], Aux]]: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_Hessian]
    ) -> _PyTreeMaker: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_HessianAux]
    ) -> _PyTreeAuxMaker: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_HessianFlat]
    ) -> _FlatMaker: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_HessianFlatAux]
    ) -> _FlatAuxMaker: ...


@runtime_checkable
class DiagonalSignature(Protocol):
    """The signature of `filter_hessian_diagonal`."""

    @overload
    def __call__(
        self, fun: Loss[Model, P], **settings: Unpack[_Hessian]
    ) -> OfModel[Model, P, Model]: ...
    @overload
    def __call__(
        self, fun: LossWithAux[Model, P, Aux], **settings: Unpack[_HessianAux]
    ) -> OfModel[Model, P, tuple[Model, Aux]]: ...
    @overload
    def __call__(
        self, fun: Loss[Model, P], **settings: Unpack[_HessianFlat]
    ) -> OfModel[Model, P, tuple[Array, Unravel[Model]]]: ...
    @overload
    def __call__(
        self, fun: LossWithAux[Model, P, Aux], **settings: Unpack[_HessianFlatAux]
    ) -> OfModel[Model, P, tuple[tuple[Array, Unravel[Model]], Aux]]: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_Hessian]
    ) -> _LikeModelMaker: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_HessianAux]
    ) -> _LikeModelAuxMaker: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_HessianFlat]
    ) -> _FlatMaker: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_HessianFlatAux]
    ) -> _FlatAuxMaker: ...


@runtime_checkable
class HessianBlocksSignature(Protocol):
    """The signature of `filter_hessian_blocks`."""

    @overload
    def __call__(
        self, fun: Loss[Model, P], **settings: Unpack[_Blocks]
    ) -> OfModel[Model, P, Any]: ...
    @overload
    def __call__(
        self, fun: LossWithAux[Model, P, Aux], **settings: Unpack[_BlocksAux]
    ) -> OfModel[Model, P, tuple[Any, Aux]]: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_Blocks]
    ) -> _PyTreeMaker: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_BlocksAux]
    ) -> _PyTreeAuxMaker: ...


@runtime_checkable
class _ProductMaker(Protocol):
    def __call__(self, fun: Loss[Model, P], /) -> _Products[Model, P, Model]: ...


@runtime_checkable
class _ProductAuxMaker(Protocol):
    def __call__(
        self, fun: LossWithAux[Model, P, Aux], /
    ) -> _Products[Model, P, tuple[Model, Aux]]: ...


@runtime_checkable
class _GGNProductMaker(Protocol):
    def __call__(
        self, fun: OfModel[Model, P, Any], /
    ) -> _Products[Model, P, Model]: ...


@runtime_checkable
class ProductSignature(Protocol):
    """The signature of `filter_hvp`."""

    @overload
    def __call__(
        self, fun: Loss[Model, P], **settings: Unpack[_Product]
    ) -> _Products[Model, P, Model]: ...
    @overload
    def __call__(
        self, fun: LossWithAux[Model, P, Aux], **settings: Unpack[_ProductAux]
    ) -> _Products[Model, P, tuple[Model, Aux]]: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_Product]
    ) -> _ProductMaker: ...
    @overload
    def __call__(
        self, fun: None = None, **settings: Unpack[_ProductAux]
    ) -> _ProductAuxMaker: ...


@runtime_checkable
class GGNProductSignature(Protocol):
    """The signature of `filter_ggnvp`."""

    @overload
    def __call__(
        self,
        fun: OfModel[Model, P, Out],
        loss: LossOfOutputs[Out],
        **settings: Unpack[_GGNProduct],
    ) -> _Products[Model, P, Model]: ...
    @overload
    def __call__(
        self,
        fun: None = None,
        *,
        loss: Callable[..., ArrayLike],
        **settings: Unpack[_GGNProduct],
    ) -> _GGNProductMaker: ...
