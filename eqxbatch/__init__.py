"""Equinox transforms that stay within a memory bound."""

import importlib.metadata

from ._blocks.accumulators import (
    AbstractAccumulator as AbstractAccumulator,
    Concat as Concat,
    Last as Last,
    LogSumExp as LogSumExp,
    Max as Max,
    Min as Min,
)
from ._blocks.block import Block as Block, Blocks as Blocks
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
from ._kernels.reductions import (
    AbstractReduction as AbstractReduction,
    FrobeniusNorm as FrobeniusNorm,
    KernelAlignment as KernelAlignment,
    KernelProduct as KernelProduct,
    Neighbours as Neighbours,
    RowSums as RowSums,
    TopK as TopK,
)
from ._kernels.stores import HostStore as HostStore
from ._kernels.symmetric_array import SymmetricArray as SymmetricArray
from ._kernels.zarr_store import ZarrStore as ZarrStore
from ._sites.explain import (
    explain_sites as explain_sites,
    LeafReport as LeafReport,
    SitesReport as SitesReport,
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
