"""Signatures of empirical kernels, for type checkers.

A kernel has the structure of the model's output, and therefore its type, unless it goes
to a store or is reduced.
"""

from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, TypedDict, TypeVar

import equinox as eqx
from jax.sharding import Mesh

from .._pairs.calls import BlockSize
from .._pairs.progress import AbstractProgressMeter
from .._pairs.stores import AbstractStore


Out = TypeVar("Out")


# A model, or a model with its state, whose first result is used.
ModelOf = (
    Callable[..., Out] | tuple[Callable[..., tuple[Out, eqx.nn.State]], eqx.nn.State]
)


class BothKernels(NamedTuple, Generic[Out]):
    """The result of an `EmpiricalKernel`; at run time, names are those requested."""

    nngp: Out
    ntk: Out


class _Settings(TypedDict, total=False):
    trace_axes: int | tuple[int, ...] | None
    diagonal_axes: int | tuple[int, ...]
    vmap_axes: Any
    block_size: BlockSize
    mesh: Mesh | None
    mesh_axis: str | None
    progress: AbstractProgressMeter | None


class _ParameterSettings(_Settings, total=False):
    implementation: str | int
    where: Callable[[Any], Any] | None
    filter_spec: Any


class _OnDevice(TypedDict, total=False):
    store: Literal["device"]
    reduce: None


class _Elsewhere(TypedDict, total=False):
    store: AbstractStore | Literal["device"]
    reduce: Any


class NNGPOnDevice(_Settings, _OnDevice):
    """Of an `EmpiricalNNGP`."""


class NNGPElsewhere(_Settings, _Elsewhere):
    """Of an `EmpiricalNNGP`."""


class NTKOnDevice(_ParameterSettings, _OnDevice):
    """Of an `EmpiricalNTK` and an `EmpiricalKernel`."""


class NTKElsewhere(_ParameterSettings, _Elsewhere):
    """Of an `EmpiricalNTK` and an `EmpiricalKernel`."""
