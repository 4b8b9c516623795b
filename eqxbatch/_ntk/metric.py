"""Metrics of kernels: `J1 M J2^T` is a product of coordinates in which `M` is 1.

A metric is `R R^T`, and the coordinates of a gradient `g` are `R^T g`. Each part of a
metric has its own leaves.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jax.core import Tracer
from jaxtyping import Array, Inexact, Integer, Key, PyTree, UInt32

from .._base.checks import check_at_least
from .._base.dtypes import common_dtype, is_complex, widened
from .._base.platforms import exact_products
from .._base.trees import difference, safe_zip, shown
from .._base.types import as_jax, check_fields
from .._batch.parameters import UNRAVEL
from .._curvature.kronecker_factors import KroneckerFactors
from .._curvature.kronecker_sums import flat_use, product_in_basis, rotated, VECTOR
from .._curvature.pytree import joined, Unravel
from .._curvature.spectrum import DampedProduct
from .._sites.factors import Factors
from .._sites.formed import gradients
from .._sites.inner_product import AbstractInnerProduct, PlainProduct
from .._sites.kronecker import AxisRoles, Layout, Part, parts_of, uses_of
from .._sites.program import Program
from .._sites.site import AxisNames, leaf_site, Rule, Site
from .._sites.table import SiteTable
from .._sites.views import leaf_view
from .separable import scales_of, SeparableProduct


# The largest number of parameters of a metric that is a dense matrix.
_LARGEST = 8192


_KINDS = (
    "`metric` must be a PyTree of non-negative arrays like the parameters, a "
    "`KroneckerOperator`, a `Projection`, a matrix over all parameters, or another "
    "lineax operator over them"
)


class ProductBasis(eqx.Module):
    """Coordinates of outer products, from those of operands and cotangents.

    - `part`: the axes of the weight, and its bias if there is one.
    - `outputs`, `inputs`: a matrix for each, whose columns are directions. For an
        embedding, `inputs` is a factor for each token.
    - `values`: factors of the coordinates of the product; None for one.
    - `damped`: what their squares are made of, if no product needs to be formed.
    - `times`: how often coordinates are taken; the second time, by the transpose.
    """

    part: Part = eqx.field(static=True)
    outputs: Inexact[Array, "batch outputs rows"]
    inputs: Inexact[Array, "batch inputs *columns"]
    values: Inexact[Array, "batch rows columns"] | None = None
    damped: DampedProduct | None = None
    times: int = eqx.field(static=True, default=1)

    def pairs(
        self, uses: list[AxisRoles], factors: Factors
    ) -> Sequence[tuple[Array | None, Array]]:
        """Operand and cotangent in the coordinates, for each use or for their sum."""
        layout, bases = self.part.layout, (self.outputs, self.inputs)
        assert layout is not None
        flat = [flat_use(use, factors, layout) for use in uses]
        if self.inputs.ndim == 2:
            return [self._of_tokens(use.tokens, use.d) for use in flat]
        if self.values is None or self.damped is not None:
            steps = bases if self.times else (None, None)
            pairs = [rotated(use, layout, steps) for use in flat]
            if self.times < 2:
                return pairs
            both = safe_zip(pairs, flat)
            return [self._back(*pair, use.is_swapped) for pair, use in both]
        products = (product_in_basis(use, layout, bases) for use in flat)
        total = functools.reduce(jnp.add, products)
        return [(None, total * self.values.astype(total.dtype)[None, None])]

    def _of_tokens(self, tokens: Any, d: Array) -> tuple[Array, Array]:
        # Inputs are one-hot, so that their coordinates only scale the cotangents.
        scale = jnp.take(self.inputs[0], tokens, mode="fill", fill_value=0)
        turned = self.outputs
        for _ in range(self.times):
            d = jnp.einsum("nvpbo,boq->nvpbq", d, turned.astype(d.dtype))
            d = d * scale.astype(d.dtype)[:, None, :, None, None]
            turned = jnp.swapaxes(turned, 1, 2)
        return tokens, d

    def _back(self, a: Array, d: Array, is_swapped: bool) -> tuple[Array, Array]:
        # One step after the other: in the product of a matrix with its transpose, small
        # eigenvalues have the rounding of the largest.
        sides = self.inputs, self.outputs
        of_a, of_d = sides[::-1] if is_swapped else sides
        a = jnp.einsum("npbj,bij->npbi", a, of_a.astype(a.dtype))
        return a, jnp.einsum("nvpbq,boq->nvpbo", d, of_d.astype(d.dtype))


class MetricPart(eqx.Module):
    """A block of a metric.

    - `leaves`: the indices of its parameters.
    - `coordinates`: a linear function of their gradients for one output.
    - `basis`: the same for outer products of operands and cotangents, if it is known.
    """

    leaves: tuple[int, ...] = eqx.field(static=True)
    coordinates: Callable[[list[Array]], Inexact[Array, "..."]]
    basis: "ProductBasis | Projection | None" = None

    @property
    def is_factored(self) -> bool:
        return isinstance(self.basis, ProductBasis) and self.basis.values is None

    def taken(self, times: int) -> "MetricPart":
        """The same part, whose root and its transpose are taken this often."""
        if not self.is_factored:
            return self
        assert isinstance(self.basis, ProductBasis)
        basis = dataclasses.replace(self.basis, times=times)
        return dataclasses.replace(self, basis=basis)


class Projection(eqx.Module):
    """A random projection of gradients, as a `metric` of [`eqxbatch.EmpiricalNTK`][].

    Each gradient becomes `dim` numbers, whose inner products estimate those of the
    gradients without bias. An entry of a matrix is multiplied by a random sign for its
    row and one for its column, so that for layers, the projection is one of inputs and
    one of gradients of outputs: no gradient is formed, and no large random matrix. The
    other axes of a weight count as one. The variance falls as `1 / dim`.

    **Arguments:**

    - `dim`: the number of random directions, at least 1.
    - `key`: the random key. The same key has the same directions for all examples.

    Raises `ValueError` for a `dim` below 1.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, "scalar", 32, 2, key=jax.random.key(0))
        >>> sketch = eqxbatch.Projection(256, jax.random.key(1))
        >>> eqxbatch.EmpiricalNTK(model, metric=sketch)(jnp.ones((5, 2))).shape
        (5, 5)

        ```

    ??? cite

        Projected gradients as features of examples are those of Park et al., "TRAK:
        attributing model behavior at scale",
        [arXiv:2303.14186](https://arxiv.org/abs/2303.14186), and projections of the
        two factors of a layer those of Choe et al., "What is your data worth to GPT?",
        [arXiv:2405.13954](https://arxiv.org/abs/2405.13954). Random directions that
        are products are due to Rakhshan and Rabusseau, "Tensorized random
        projections", [arXiv:2003.05101](https://arxiv.org/abs/2003.05101).
    """

    dim: int = eqx.field(static=True)
    key: Key[Array, ""] | UInt32[Array, "2"]

    def __check_init__(self) -> None:
        check_fields(self)
        check_at_least("dim", self.dim, 1)

    def signs(self, leaf: int, struct: Any) -> list[Array]:
        """Random signs for the first axis of a leaf, and for all others together.

        The latter are missing for a vector.
        """
        first, *rest = struct.shape or (1,)
        sizes = [first, math.prod(rest)] if rest else [first]
        keys = jr.split(jr.fold_in(self.key, leaf), 2)
        dtype = widened(jnp.zeros((), struct.dtype)).dtype
        pairs = zip(keys, sizes, strict=False)
        return [self._random_signs(key, size).astype(dtype) for key, size in pairs]

    def _random_signs(self, key: Array, size: int) -> Integer[Array, "size dim"]:
        # One for each random bit, as every batch of examples draws them again.
        numbers = jr.bits(key, (size, -(-self.dim // 8)), jnp.uint8)
        bits = jnp.unpackbits(numbers, axis=1, count=self.dim)
        return 2 * bits.astype(jnp.int8) - 1

    def coordinates(self, gradients: list[Array]) -> Inexact[Array, " dim"]:
        """The coordinates of the gradients for one output."""
        parts = (self.of_gradient(i, x[None])[0] for i, x in enumerate(gradients))
        return functools.reduce(jnp.add, parts) / math.sqrt(self.dim)

    def of_gradient(
        self, leaf: int, x: Inexact[Array, "vectors ..."]
    ) -> Inexact[Array, "vectors dim"]:
        """What a leaf adds, before scaling, from its gradients for several outputs."""
        signs = self.signs(leaf, jax.ShapeDtypeStruct(x.shape[1:], x.dtype))
        wide = widened(x).reshape(x.shape[0], *(y.shape[0] for y in signs))
        if len(signs) == 1:
            return wide @ signs[0]
        return jnp.einsum("vab,aj,bj->vj", wide, *signs)

    def of_product(
        self, part: Part, uses: list[AxisRoles], factors: Factors, like: Any
    ) -> Inexact[Array, "vectors dim"] | None:
        """The same from the factors of one example, for a leaf of the type of `like`.

        None if rows and columns of the leaf are not those of the factors.
        """
        if part.layout is None:
            return None
        sides = _signs_of_sides(part.layout, self.signs(part.leaves[0], like))
        if sides is None:
            return None
        total: Any = 0
        for use in uses:
            flat = flat_use(use, factors, part.layout)
            a, d = rotated(flat, part.layout, sides)
            total += jnp.einsum("npbj,nvpbj->vj", a.astype(d.dtype), d)
        return total


def _signs_of_sides(layout: Layout, signs: list[Array]) -> tuple[Array, Array] | None:
    """Signs of shape `(batch, entries, dim)` for outputs and inputs.

    None if one of them is not a product of signs for its entries.
    """
    # The pieces of the first axis of the leaf.
    num = next(
        num
        for num in range(1, len(layout.shape) + 1)
        if math.prod(layout.shape[:num]) == layout.leaf_shape[0]
    )
    axes = range(num), range(num, len(layout.shape))
    size = layout.size
    sides: list[Array] = []
    taken: list[int] = []
    for group in (layout.outputs, layout.inputs):
        which = [i for i in (0, 1) if all(axis in axes[i] for axis in group)]
        if len(which) != 1 or len(signs) != 2 or which[0] in taken:
            return None
        taken += which
        pieces = axes[which[0]]
        batch = tuple(axis for axis in layout.batch if axis in pieces)
        if size(batch) not in (1, size(layout.batch)):
            return None
        rest = tuple(axis for axis in pieces if axis not in (*batch, *group))
        x = signs[which[0]]
        x = x.reshape(*(layout.shape[axis] for axis in pieces), x.shape[-1])
        order = [pieces.index(axis) for axis in (*rest, *batch, *group)]
        x = jnp.transpose(x, (*order, len(order)))
        x = x.reshape(size(batch), size(group), x.shape[-1])
        sides.append(jnp.broadcast_to(x, (size(layout.batch), *x.shape[1:])))
    return sides[0], sides[1]


class Metric(eqx.Module):
    """A positive semidefinite matrix over the parameters of a model."""

    parts: tuple[MetricPart, ...]
    unravel: Unravel

    def on_sides(self, num: tuple[int, int]) -> "list[Metric]":
        """Metrics of two sides with these numbers of examples, for the same kernel.

        Factors of the smaller side are multiplied by the whole metric, and those of the
        other by nothing.
        """
        if not any(part.is_factored for part in self.parts):
            return [self, self]
        is_first = num[0] <= num[1]
        return [
            Metric(tuple(part.taken(times) for part in self.parts), self.unravel)
            for times in (2 * is_first, 2 * (not is_first))
        ]

    def product(self, leaves: Sequence[Array]) -> list[Array]:
        """The matrix times a vector of parameters."""
        results = [*leaves]
        for part in self.parts:
            chosen = [leaves[i] for i in part.leaves]
            coordinates, pullback = jax.vjp(part.coordinates, chosen)
            (products,) = pullback(coordinates)
            for i, x in safe_zip(part.leaves, products):
                results[i] = x
        return results


class InMetric:
    """The factors of a program in the coordinates of a metric.

    - `table`: the leaves and sites that they belong to.
    """

    def __init__(self, program: Program, metric: Metric):
        self._original, self._metric = program, metric
        # Once for all: each looks at all leaves. A projection has its own parts.
        chosen = [part.leaves for part in metric.parts]
        self._projects = any(isinstance(x.basis, Projection) for x in metric.parts)
        if self._projects:
            chosen = [(leaf,) for leaf, _ in enumerate(program.leaves)]
        self._parts = parts_of(program.table, chosen)
        self._uses = [
            uses_of(program.table, part) if part.layout is not None else []
            for part in self._parts
        ]
        if not self._projects:
            both = safe_zip(metric.parts, self._parts, self._uses)
            self._uses = [
                uses if _has_products(part, other, uses) else []
                for part, other, uses in both
            ]
        self.table = self._in_coordinates()

    def inners(self) -> list[AbstractInnerProduct]:
        """The inner product of the factors of each leaf of the table."""
        inners: list[AbstractInnerProduct] = [PlainProduct()] * len(self.table.leaves)
        if self._projects:
            return inners
        bases = [part.basis for part in self._metric.parts]
        chosen = {
            leaf: (basis.damped, basis.values)
            for leaf, (basis, uses) in enumerate(safe_zip(bases, self._uses))
            if uses and isinstance(basis, ProductBasis) and basis.damped is not None
        }
        every = scales_of([damped for damped, _ in chosen.values()])
        for scales, (leaf, (damped, root)) in safe_zip(every, chosen.items()):
            assert root is not None
            inners[leaf] = SeparableProduct(damped, scales, root)
        return inners

    def pairs(
        self,
        operands: list[Array],
        cotangents: list[Array],
        lead: tuple[int, ...],
        values: list,
    ) -> list[list[tuple[Array | None, Array]]]:
        """Operand and cotangent of one example, for each site of each part.

        Cotangents have axes of the sizes `lead` first, those of outputs.
        """
        num, vectors = len(lead), math.prod(lead)
        flat = [x.reshape(1, vectors, *x.shape[num:]) for x in cotangents]
        one = [x[None] for x in operands]
        factors = Factors(one, flat, (VECTOR,), 1, values)
        if self._projects:
            (part,) = self._metric.parts
            assert isinstance(part.basis, Projection)
            total = self._projected(part.basis, factors, vectors)
            return [[(None, total.reshape(*lead, part.basis.dim))]]
        results = []
        for part, uses in safe_zip(self._metric.parts, self._uses):
            if not uses:
                jacobians = [self._jacobian(x, factors, vectors) for x in part.leaves]
                with exact_products():
                    coordinates = jax.vmap(part.coordinates)(jacobians)
                pairs = [(None, coordinates[None])]
            else:
                assert isinstance(part.basis, ProductBasis)
                with exact_products():
                    pairs = part.basis.pairs(uses, factors)
            results.append(
                [
                    (None if a is None else a[0], d.reshape(*lead, *d.shape[2:]))
                    for a, d in pairs
                ]
            )
        return results

    def _jacobian(
        self, leaf: int, factors: Factors, vectors: int
    ) -> Inexact[Array, "vectors ..."]:
        table = self._original.table
        sites, struct = table.of(leaf), table.leaves[leaf]
        if sites:
            return gradients(sites, factors, struct)[0]
        return jnp.zeros((vectors, *struct.shape), struct.dtype)

    def _projected(
        self, projection: Projection, factors: Factors, vectors: int
    ) -> Inexact[Array, "vectors dim"]:
        """The coordinates of the gradients, which are not formed if possible."""
        results = []
        for part, uses in safe_zip(self._parts, self._uses):
            (leaf,) = part.leaves
            like = self._original.leaves[leaf]
            product = projection.of_product(part, uses, factors, like)
            if product is None:
                jacobian = self._jacobian(leaf, factors, vectors)
                product = projection.of_gradient(leaf, jacobian)
            results.append(product)
        dtype = common_dtype(*(x.dtype for x in results))
        total = functools.reduce(jnp.add, (x.astype(dtype) for x in results))
        return total / math.sqrt(projection.dim)

    def _in_coordinates(self) -> SiteTable:
        """The leaves and sites of the coordinates."""
        leaves: list = []
        sites: list[Site] = []
        operands: list = []
        cotangents: list = []
        table, values = self._original.table, self._original.value_structs()
        structs = table.operands, table.perturbations, values
        run = lambda operands, cotangents, values: self.pairs(
            operands, cotangents, (), values
        )
        for number, pairs in enumerate(jax.eval_shape(run, *structs)):
            a, d = pairs[0]
            if a is None:
                leaves.append(d)
                sites.append(leaf_site(number, d, len(cotangents)))
                cotangents.append(d)
                continue
            layout = self._parts[number].layout
            assert layout is not None
            leaves.append(jax.ShapeDtypeStruct(layout.sizes, d.dtype))
            for use, (a, d) in safe_zip(self._uses[number], pairs):
                rule = _rule(a.shape[0], layout.sizes, use)
                view = leaf_view(number, leaves[-1])
                sites.append(Site(view, rule, len(cotangents), len(operands), False))
                operands.append(a)
                cotangents.append(d)
        return SiteTable(leaves, sites, cotangents, operands)


def _has_products(part: MetricPart, other: Part, uses: list[AxisRoles]) -> bool:
    """Whether gradients are outer products for the basis of a part of the metric.

    `other` is the part of the same leaves in the program.
    """
    if not isinstance(part.basis, ProductBasis) or part.basis.part != other:
        return False
    is_counted = part.basis.inputs.ndim == 2
    is_lookup = lambda use: use.site.rule.token is not None and not use.is_swapped
    return all(is_lookup(use) is is_counted for use in uses)


def _rule(num: int, shape: tuple[int, ...], use: AxisRoles) -> Rule:
    """A batch of matrices that meets operands, or tokens, at several positions."""
    axes, token = ("batch", "rows", "columns"), None
    of_a: AxisNames = ("position", "batch", "columns")
    of_d: AxisNames = ("position", "batch", "rows")
    if use.is_swapped:
        of_a, of_d = of_d, of_a
    sizes = {"position": num, **dict(safe_zip(axes, shape))}
    letters = lambda axes: "".join(axis[0] for axis in axes)
    equation = f"{letters(of_a)},{letters(axes)}->{letters(of_d)}"
    op: Callable[[Any, Array], Array] = functools.partial(jnp.einsum, equation)
    if use.site.rule.token is not None:
        op = lambda tokens, w: jnp.moveaxis(jnp.take(w, tokens, axis=2), 2, 0)
        of_a, token = ("position",), "columns"
    key = f"{sizes}{token}{use.is_swapped}"
    return Rule("metric", op, None, of_a, of_d, axes, sizes, token=token, key=key)


def metric_of(metric: Any, parameters: PyTree) -> Metric:
    """The metric of the parameters of a model, from what the user gives."""
    unravel = Unravel(parameters)
    structs = unravel.structs
    if any(map(is_complex, structs)):
        raise ValueError(
            "`metric` is for real parameters, but some are complex. Leave them out "
            "with `where` or `filter_spec`."
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
            if isinstance(metric, KroneckerOperator):
                parts = map(_of_spectrum, metric.sqrt().spectra)
                return Metric(tuple(parts), unravel)
            _check_size(unravel)
            metric = metric.as_matrix()
    if isinstance(metric, Metric):
        unravel = metric.unravel
        like = jtu.tree_unflatten(unravel.treedef, unravel.structs)
        _check_like(like, parameters)
        return metric
    if isinstance(metric, Projection):
        every = tuple(range(len(structs)))
        coordinates = eqx.Partial(Projection.coordinates, metric)
        return Metric((MetricPart(every, coordinates, metric),), unravel)
    num = sum(unravel.sizes)
    metric = jtu.tree_map(as_jax, metric)
    if any(map(is_complex, jtu.tree_leaves(eqx.filter(metric, eqx.is_array)))):
        raise ValueError("`metric` must be real, but it has complex entries.")
    is_array = eqx.is_array(metric) and jnp.issubdtype(metric.dtype, jnp.inexact)
    is_matrix = is_array and metric.shape == (num, num)
    if is_matrix:
        _check_size(unravel)
        every = tuple(range(len(structs)))
        return Metric((MetricPart(every, _of_matrix(metric)),), unravel)
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
    paths, others = map(_paths_and_shapes, (metric, parameters))
    if len(paths) == len(others):
        (path, _), (other, _) = [*paths, ("", ())][0], [*others, ("", ())][0]
        prefix = other.removesuffix(path)
        if [(prefix + path, shape) for path, shape in paths] == others:
            return
    where = difference(parameters, metric)
    if len(paths) == 1 and not paths[0][0]:  # An array, or an operator on vectors.
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


def _scaled(root: Array, gradients: list[Array]) -> Array:
    (gradient,) = gradients
    wide = widened(gradient)
    return wide * root.astype(wide.dtype)


def _of_matrix(matrix: Inexact[Array, "n n"]) -> Callable[[list[Array]], Array]:
    """The coordinates of all parameters in a metric that is a dense matrix."""
    wide = widened(matrix)
    error = jnp.max(jnp.abs(wide - wide.T), initial=0)
    limit = 100 * float(jnp.finfo(matrix.dtype).eps) * jnp.max(jnp.abs(wide), initial=0)
    is_wrong = ~(error <= limit)
    _check_values("symmetric, without NaN", is_wrong, "Pass `(m + m.T) / 2`.")
    with exact_products():
        root = jnp.where(is_wrong, jnp.nan, jnp.linalg.cholesky(wide))
    remedy = "Add a multiple of the identity to a matrix that is singular."
    is_wrong = ~jnp.all(jnp.isfinite(root))
    _check_values("positive definite if it is a dense matrix", is_wrong, remedy)
    return eqx.Partial(_times_root, root)


def _of_spectrum(spectrum: Any) -> MetricPart:
    """The coordinates of a block in a metric whose root has this spectrum."""
    part, coordinates = spectrum.part, eqx.Partial(type(spectrum).product, spectrum)
    basis = None
    if spectrum.outputs is not None and spectrum.factors is not None:
        outputs, inputs = (x[:, None] for x in spectrum.factors)
        inputs = (
            spectrum.factors[1] if spectrum.inputs is None else spectrum.inputs * inputs
        )
        basis = ProductBasis(part, spectrum.outputs * outputs, inputs)
    elif spectrum.outputs is not None and spectrum.damped is not None:
        damped = spectrum.damped.to_the(2)
        inputs = spectrum.inputs
        inputs = jnp.ones_like(damped.inputs) if inputs is None else inputs
        bases = spectrum.outputs, inputs
        if abs(damped.power) == 1:
            basis = ProductBasis(part, *bases, spectrum.values, damped)
        elif spectrum.inputs is not None:
            basis = ProductBasis(part, *bases, spectrum.values)
    elif spectrum.outputs is not None and spectrum.inputs is not None:
        bases = spectrum.outputs, spectrum.inputs
        basis = ProductBasis(part, *bases, spectrum.values)
    return MetricPart(part.leaves, coordinates, basis)


def _times_root(root: Array, gradients: list[Array]) -> Array:
    with exact_products():
        return joined(gradients, root.dtype) @ root
