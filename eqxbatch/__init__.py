"""Equinox transforms that stay within a memory bound."""

import importlib
import importlib.metadata
import typing as _typing

from ._blocks.accumulators import (
    AbstractAccumulator as AbstractAccumulator,
    Concat as Concat,
    Last as Last,
    LogSumExp as LogSumExp,
    Max as Max,
    Min as Min,
)
from ._blocks.block import Block as Block, Blocks as Blocks
from ._blocks.extras import import_extra as _import_extra
from ._blocks.memory import MemoryBudget as MemoryBudget
from ._blocks.moments import (
    Mean as Mean,
    MeanAndVariance as MeanAndVariance,
    RunningMean as RunningMean,
    Sum as Sum,
    Variance as Variance,
)
from ._blocks.progress import (
    AbstractProgressMeter as AbstractProgressMeter,
    NoProgressMeter as NoProgressMeter,
    TqdmProgressMeter as TqdmProgressMeter,
)
from ._check.explain import explain_sites as explain_sites
from ._kernels.approximate import (
    KernelEstimate as KernelEstimate,
    ProbedNTK as ProbedNTK,
    PseudoNTK as PseudoNTK,
)
from ._kernels.batch import filter_batch_kernel as filter_batch_kernel
from ._kernels.empirical import (
    EmpiricalKernel as EmpiricalKernel,
    EmpiricalNNGP as EmpiricalNNGP,
    EmpiricalNTK as EmpiricalNTK,
)
from ._kernels.monte_carlo import (
    MonteCarloEstimate as MonteCarloEstimate,
    MonteCarloKernel as MonteCarloKernel,
)
from ._kernels.ntk_parameterise import (
    ntk_parameterise as ntk_parameterise,
    NTKLayer as NTKLayer,
)
from ._kernels.reductions import (
    AbstractReduction as AbstractReduction,
    FrobeniusNorm as FrobeniusNorm,
    KernelAlignment as KernelAlignment,
    KernelProduct as KernelProduct,
    RowSums as RowSums,
)
from ._kernels.stores import HostStore as HostStore
from ._kernels.symmetric_array import SymmetricArray as SymmetricArray
from ._kernels.top_k import Neighbours as Neighbours, TopK as TopK
from ._kernels.zarr_store import ZarrStore as ZarrStore
from ._sites.explain import (
    LeafCheck as LeafCheck,
    LeafReport as LeafReport,
    SitesCheck as SitesCheck,
    SitesReport as SitesReport,
)
from ._transforms.grid import (
    filter_grid_vmap as filter_grid_vmap,
    grid as grid,
    GridAxis as GridAxis,
)
from ._transforms.hessian import (
    filter_ggn as filter_ggn,
    filter_hessian as filter_hessian,
    filter_hessian_blocks as filter_hessian_blocks,
    filter_hessian_diagonal as filter_hessian_diagonal,
)
from ._transforms.hvp import filter_ggnvp as filter_ggnvp, filter_hvp as filter_hvp
from ._transforms.jacobian import filter_jacobian as filter_jacobian
from ._transforms.matrix import (
    hessian_to_pytree as hessian_to_pytree,
    Unravel as Unravel,
)
from ._transforms.micro_grad import (
    filter_micro_grad as filter_micro_grad,
    filter_micro_value_and_grad as filter_micro_value_and_grad,
    GradientMoments as GradientMoments,
    GradientStatistics as GradientStatistics,
)
from ._transforms.micro_vmap import filter_micro_vmap as filter_micro_vmap
from ._transforms.microbatch import filter_microbatch as filter_microbatch
from ._transforms.taylor import (
    filter_linearize as filter_linearize,
    filter_taylor_expand as filter_taylor_expand,
    TaylorExpansion as TaylorExpansion,
)


__version__ = importlib.metadata.version("eqxbatch")

if _typing.TYPE_CHECKING:
    from ._transforms.operators import (
        GGNOperator as GGNOperator,
        HessianOperator as HessianOperator,
    )


def __getattr__(name: str) -> _typing.Any:
    # These are lineax operators, and lineax is an extra.
    if name in ("GGNOperator", "HessianOperator"):
        _import_extra("lineax", name, "linalg")
        operators = importlib.import_module("eqxbatch._transforms.operators")
        return getattr(operators, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
