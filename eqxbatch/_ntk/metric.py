"""Metrics of kernels: `J1 M J2^T` is a product of coordinates in which `M` is 1.

A metric is `R R^T`, and the coordinates of a gradient `g` are `R^T g`. Each part of a
metric has its own leaves.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer
from jaxtyping import Array, Inexact, PyTree

from .._base.dtypes import is_complex, widened
from .._base.platforms import exact_products
from .._base.trees import difference, safe_zip, shown
from .._base.types import as_jax
from .._batch.parameters import UNRAVEL
from .._curvature.kronecker_factors import KroneckerFactors
from .._curvature.pytree import joined, Unravel
from .metric_part import MetricPart, PlainBasis
from .product_basis import ProductBasis
from .projected import projected, ProjectedGradients
from .projection import Projection


# The largest number of parameters of a metric that is a dense matrix.
_LARGEST = 8192


_KINDS = (
    "`metric` must be a PyTree of non-negative arrays like the parameters, a "
    "`KroneckerOperator`, a `Projection`, a matrix over all parameters, or another "
    "lineax operator over them"
)


class Metric(eqx.Module):
    """A positive semidefinite matrix over the parameters of a model.

    - `parts`: its blocks.
    - `projection`: a projection of the coordinates of all blocks to a few numbers,
        without its metric.
    """

    parts: tuple[MetricPart, ...]
    unravel: Unravel
    projection: Projection | None = None

    def on_sides(self, num: tuple[int, int]) -> "list[Metric]":
        """Metrics of two sides with these numbers of examples, for the same kernel.

        Factors of the smaller side are multiplied by the whole metric, and those of the
        other by nothing.
        """
        is_factored = any(part.is_factored for part in self.parts)
        if not is_factored or self.projection is not None:
            return [self, self]
        # `(M g1) . g2 = g1 . (M g2)`, where each multiplication takes its time.
        is_first = num[0] <= num[1]
        return [
            Metric(tuple(part.taken(times) for part in self.parts), self.unravel)
            for times in (2 * is_first, 2 * (not is_first))
        ]

    @property
    def projected(self) -> ProjectedGradients | None:
        """The projection of the gradients, whose directions are drawn now."""
        if self.projection is None:
            return None
        return projected(self.parts, self.unravel.structs, self.projection)

    def product(self, leaves: Sequence[Array]) -> list[Array]:
        """The matrix times a vector of parameters."""
        project = self.projected
        if project is not None:
            of_one = lambda leaves: project.of_gradients([x[None] for x in leaves])
            coordinates, pullback = jax.vjp(of_one, [*leaves])
            (products,) = pullback(coordinates)
            return products
        results = [*leaves]
        for part in self.parts:
            # Coordinates `R^T v` are linear, so that their pullback multiplies by `R`.
            vector = [leaves[i] for i in part.leaves]
            coordinates, pullback = jax.vjp(part.coordinates, vector)
            (products,) = pullback(coordinates)
            for i, x in safe_zip(part.leaves, products):
                results[i] = x
        return results


def metric_of(metric: Any, parameters: PyTree) -> Metric:
    """The metric of the parameters of a model, from what the user gives."""
    unravel = Unravel(parameters)
    structs = unravel.structs
    # What no metric can be of, and what users pass in place of an operator.
    if any(map(is_complex, structs)):
        raise ValueError(
            "`metric` and projections are for real parameters, but some are complex. "
            "Leave them out with `where` or `filter_spec`."
        )
    if isinstance(metric, KroneckerFactors):
        raise ValueError(
            "`metric` must be an operator; got `KroneckerFactors`. Pass "
            "`factors.operator(damping=...)`, or `.inverse()` of it for influence "
            "functions and covariances."
        )
    # Whoever has such an operator has imported lineax.
    if "lineax" in sys.modules:
        import lineax

        from .._curvature.kronecker_operator import KroneckerOperator

        if isinstance(metric, lineax.AbstractLinearOperator):
            _check_like(metric.in_structure(), parameters)
            # Its root has the factors of its blocks. Others are dense matrices.
            if isinstance(metric, KroneckerOperator):
                parts = map(_of_spectrum, metric.sqrt().spectra)
                return Metric(tuple(parts), unravel)
            _check_size(unravel)
            metric = metric.as_matrix()
    # `dataclasses.replace` of an estimator passes the metric that it has.
    if isinstance(metric, Metric):
        unravel = metric.unravel
        like = jtu.tree_unflatten(unravel.treedef, unravel.structs)
        _check_like(like, parameters)
        return metric
    if isinstance(metric, Projection):
        projection = dataclasses.replace(metric, metric=None)
        parts = tuple(
            MetricPart((i,), _itself, PlainBasis()) for i, _ in enumerate(structs)
        )
        if metric.metric is not None:
            parts = metric_of(metric.metric, parameters).parts
        return Metric(parts, unravel, projection)
    num = sum(unravel.sizes)
    # Copies, as the owner of an array of NumPy may change it later.
    metric = jtu.tree_map(as_jax, metric)
    if any(map(is_complex, jtu.tree_leaves(eqx.filter(metric, eqx.is_array)))):
        raise ValueError("`metric` must be real, but it has complex entries.")
    # One parameter of shape `(num, num)` would have `num**2` entries, so that no
    # diagonal looks like a matrix.
    is_array = eqx.is_array(metric) and jnp.issubdtype(metric.dtype, jnp.inexact)
    is_matrix = is_array and metric.shape == (num, num)
    if is_matrix:
        _check_size(unravel)
        every = tuple(range(len(structs)))
        return Metric((MetricPart(every, _of_matrix(metric)),), unravel)
    # A diagonal, with a part for each parameter.
    _check_like(metric, parameters)
    paths = [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(parameters)]
    parts = [
        MetricPart((i,), eqx.Partial(_scaled, _root_of_entries(path, x)))
        for i, (path, x) in enumerate(safe_zip(paths, jtu.tree_leaves(metric)))
    ]
    return Metric(tuple(parts), unravel)


def _check_like(metric: PyTree, parameters: PyTree) -> None:
    """Raises unless a metric has the structure of the parameters, or of their part.

    A model may be a field of another that adds a loss.
    """
    got, expected = map(_paths_and_shapes, (metric, parameters))
    if len(got) == len(expected):
        # The first leaf gives the path of the metric's model in the other.
        (path, _), (whole, _) = [*got, ("", ())][0], [*expected, ("", ())][0]
        prefix = whole.removesuffix(path)
        if [(prefix + path, shape) for path, shape in got] == expected:
            return
    where = difference(parameters, metric)
    if len(got) == 1 and not got[0][0]:  # An array, or an operator on vectors.
        num = sum(x.size for x in jtu.tree_leaves(parameters))
        where = (
            f"There are {num} parameters: a matrix has the shape ({num}, {num}), and "
            f"operators act on PyTrees like them. {UNRAVEL}"
        )
    raise ValueError(
        f"{_KINDS}; got {shown(metric)} for the parameters {shown(parameters)}. "
        f"{where} Select the same parameters with `where` and `filter_spec`, and take "
        "those of the same model."
    )


def _paths_and_shapes(tree: PyTree) -> list[tuple[str, Any]]:
    """The paths of the leaves, and their shapes; None for no array."""
    return [
        (jtu.keystr(path), getattr(x, "shape", None))
        for path, x in jtu.tree_leaves_with_path(tree)
    ]


def _check_size(unravel: Unravel) -> None:
    num = sum(unravel.sizes)
    if num > _LARGEST:
        raise ValueError(
            f"A `metric` that is a dense matrix can have {_LARGEST} rows at most, as "
            f"it is factorised; got {num}. Use Kronecker factors, or the diagonal."
        )


def _check_values(what: str, is_wrong: Array, remedy: str) -> None:
    """Raises for values that are known; others give NaN."""
    if not isinstance(is_wrong, Tracer) and bool(is_wrong):
        raise ValueError(f"`metric` must be {what}. {remedy}")


def _root_of_entries(path: str, entries: Array) -> Array:
    wide = widened(jnp.asarray(entries))
    remedy = f"See `{path}`. Only such matrices have an inner product."
    what = "non-negative and finite"
    _check_values(what, ~jnp.all((wide >= 0) & jnp.isfinite(wide)), remedy)
    return jnp.sqrt(wide)


def _itself(gradients: list[Array]) -> Array:
    (gradient,) = gradients
    return gradient


def _scaled(root: Array, gradients: list[Array]) -> Array:
    (gradient,) = gradients
    wide = widened(gradient)
    return wide * root.astype(wide.dtype)


def _of_matrix(matrix: Inexact[Array, "n n"]) -> Callable[[list[Array]], Array]:
    """The coordinates of all parameters in a metric that is a dense matrix."""
    wide = widened(matrix)
    # With a NaN, no comparison holds.
    error = jnp.max(jnp.abs(wide - wide.T), initial=0)
    limit = 100 * float(jnp.finfo(matrix.dtype).eps) * jnp.max(jnp.abs(wide), initial=0)
    is_wrong = ~(error <= limit)
    _check_values("symmetric, without NaN", is_wrong, "Pass `(m + m.T) / 2`.")
    # Traced values cannot raise: NaN in the root makes all kernels NaN.
    with exact_products():
        root = jnp.where(is_wrong, jnp.nan, jnp.linalg.cholesky(wide))
    # JAX's Cholesky factor of a matrix that is not positive definite is NaN.
    remedy = "Add a multiple of the identity to a matrix that is singular."
    is_wrong = ~jnp.all(jnp.isfinite(root))
    _check_values("positive definite if it is a dense matrix", is_wrong, remedy)
    return eqx.Partial(_times_root, root)


def _of_spectrum(spectrum: Any) -> MetricPart:
    """The coordinates of a block in a metric whose root has this spectrum."""
    coordinates = eqx.Partial(type(spectrum).product, spectrum)
    return MetricPart(spectrum.part.leaves, coordinates, _basis_of(spectrum))


def _basis_of(spectrum: Any) -> ProductBasis | None:
    """The coordinates of outer products; None if gradients must be formed."""
    part, outputs, inputs = spectrum.part, spectrum.outputs, spectrum.inputs
    if outputs is None:
        return None
    # The eigenvalues of a Kronecker product are products: each basis takes its factor.
    if spectrum.factors is not None:
        of_outputs, of_inputs = spectrum.factors
        inputs = of_inputs if inputs is None else inputs * of_inputs[:, None]
        return ProductBasis(part, outputs * of_outputs[:, None], inputs)
    # Any other eigenvalues scale coordinates of products. They are those of the metric
    # in `damped`, and the spectrum is that of its root.
    damped = None if spectrum.damped is None else spectrum.damped.to_the(2)
    return ProductBasis(part, outputs, inputs, spectrum.values, damped)


def _times_root(root: Array, gradients: list[Array]) -> Array:
    with exact_products():
        return joined(gradients, root.dtype) @ root
