"""What functions of this package return: for annotations and `isinstance`."""

from ._batch.stream_state import StreamState as StreamState
from ._batch.sums import MeanAndVariance as MeanAndVariance
from ._curvature.curvature_solve import CurvatureSolution as CurvatureSolution
from ._curvature.directional import TaylorExpansion as TaylorExpansion
from ._curvature.kronecker_factors import KroneckerFactors as KroneckerFactors
from ._curvature.pytree import Unravel as Unravel
from ._gradients.gradient import (
    GradientMoments as GradientMoments,
    GradientStatistics as GradientStatistics,
)
from ._kernels.solve import KernelSolution as KernelSolution
from ._kernels.top_k import Neighbours as Neighbours
from ._ntk.empirical import KernelEstimate as KernelEstimate
from ._ntk.monte_carlo import MonteCarloEstimate as MonteCarloEstimate
from ._ntk.parameterise import NTKLayer as NTKLayer
from ._sites.report import (
    LeafReport as LeafReport,
    SitesReport as SitesReport,
)
