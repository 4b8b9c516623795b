"""Equinox transforms that stay within a memory bound."""

import importlib as _importlib
import importlib.util as _util
import typing as _typing

from . import results as results
from ._base.installed import installed_version as _installed_version
from ._base.trees import import_extra as _import_extra
from ._batch.accumulators import (
    AbstractAccumulator as AbstractAccumulator,
    Concat as Concat,
    Last as Last,
    Max as Max,
    Min as Min,
)
from ._batch.blocks import Block as Block, Blocks as Blocks
from ._batch.log_sum_exp import LogSumExp as LogSumExp
from ._batch.memory import MemoryBudget as MemoryBudget
from ._batch.parameters import parameters as parameters
from ._batch.progress import (
    AbstractProgressMeter as AbstractProgressMeter,
    TqdmProgressMeter as TqdmProgressMeter,
)
from ._batch.store import HostStore as HostStore
from ._batch.stream import over_batches as over_batches
from ._batch.sums import Mean as Mean, Sum as Sum, Variance as Variance
from ._batch.zarr_store import ZarrStore as ZarrStore
from ._check.explain import explain_sites as explain_sites
from ._curvature.curvature_solve import curvature_solve as curvature_solve
from ._curvature.directional import (
    filter_ggnvp as filter_ggnvp,
    filter_hvp as filter_hvp,
    filter_linearize as filter_linearize,
    filter_taylor_expand as filter_taylor_expand,
)
from ._curvature.jacobian import filter_jacobian as filter_jacobian
from ._curvature.kfac import filter_kfac as filter_kfac
from ._curvature.matrices import (
    filter_ggn as filter_ggn,
    filter_ggn_blocks as filter_ggn_blocks,
    filter_ggn_diagonal as filter_ggn_diagonal,
    filter_hessian as filter_hessian,
    filter_hessian_blocks as filter_hessian_blocks,
    filter_hessian_diagonal as filter_hessian_diagonal,
)
from ._curvature.pytree import hessian_to_pytree as hessian_to_pytree
from ._gradients.micro_grad import (
    filter_micro_grad as filter_micro_grad,
    filter_micro_value_and_grad as filter_micro_value_and_grad,
)
from ._kernels.batch_kernel import filter_batch_kernel as filter_batch_kernel
from ._kernels.reductions import (
    AbstractReduction as AbstractReduction,
    FrobeniusNorm as FrobeniusNorm,
    KernelProduct as KernelProduct,
)
from ._kernels.solve import kernel_solve as kernel_solve
from ._kernels.top_k import TopK as TopK
from ._maps.grid_vmap import filter_grid_vmap as filter_grid_vmap, grid as grid
from ._maps.micro_vmap import filter_micro_vmap as filter_micro_vmap
from ._maps.microbatch import filter_microbatch as filter_microbatch
from ._ntk.empirical import (
    EmpiricalKernel as EmpiricalKernel,
    EmpiricalNNGP as EmpiricalNNGP,
    EmpiricalNTK as EmpiricalNTK,
    ProbedNTK as ProbedNTK,
    PseudoNTK as PseudoNTK,
)
from ._ntk.monte_carlo import MonteCarloKernel as MonteCarloKernel
from ._ntk.parameterise import ntk_parameterise as ntk_parameterise
from ._ntk.projection import Projection as Projection
from ._steps.gauss_newton_step import (
    filter_gauss_newton_step as filter_gauss_newton_step,
)
from ._steps.scale_by_kfac import scale_by_kfac as scale_by_kfac


__version__ = _installed_version(__file__)

# These are lineax operators, and lineax is optional. Without it they are not listed, so
# that `from eqxbatch import *` works.
_OPERATORS = {
    "GGNOperator": "eqxbatch._curvature.operators",
    "HessianOperator": "eqxbatch._curvature.operators",
    "KernelOperator": "eqxbatch._kernels.operator",
    "KroneckerOperator": "eqxbatch._curvature.kronecker_operator",
}


if _typing.TYPE_CHECKING:
    from ._curvature.kronecker_operator import KroneckerOperator as KroneckerOperator
    from ._curvature.operators import (
        GGNOperator as GGNOperator,
        HessianOperator as HessianOperator,
    )
    from ._kernels.operator import KernelOperator as KernelOperator


_public = [name for name, x in [*vars().items()] if hasattr(x, "__module__")]
__all__ = [name for name in _public if name[0] != "_"]  # pyright: ignore[reportUnsupportedDunderAll]
if _util.find_spec("lineax") is not None:
    __all__ += _OPERATORS  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    special = (name for name in globals() if name[:2] == "__")
    return sorted({*__all__, "results", *special})


def __getattr__(name: str) -> _typing.Any:
    if name in _OPERATORS:
        _import_extra("lineax", name, "linalg")
        return getattr(_importlib.import_module(_OPERATORS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
