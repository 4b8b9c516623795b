"""Kronecker factors as a lineax linear operator, in terms of their eigenvectors."""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Inexact, PyTree, Real

from .._base.checks import checked
from .._base.dtypes import common_dtype
from .._base.mesh import error_if
from .._sites.kronecker import Layout, Part
from .kronecker_factors import (
    check_vector,
    DenseBlock,
    DiagonalBlock,
    FactorBlock,
    KroneckerBlock,
    KroneckerFactors,
    of_part,
)
from .operators import AbstractSymmetricOperator
from .pytree import hessian_to_pytree, Unravel


class _AbstractSpectrum(eqx.Module):
    """The eigenvalues and eigenvectors of a block.

    Coordinates along the eigenvectors are arrays of the shape of `values`.
    `is_semidefinite` says whether no eigenvalue is known to be negative.
    """

    part: eqx.AbstractVar[Part]
    values: eqx.AbstractVar[Array]
    is_semidefinite: eqx.AbstractVar[bool]

    @property
    @abc.abstractmethod
    def rounding(self) -> Array:
        """The size below which an eigenvalue is zero up to rounding."""

    @abc.abstractmethod
    def coordinates(self, leaves: list[Array]) -> Array:
        """The coordinates of the parameters of the block."""

    @abc.abstractmethod
    def leaves(self, coordinates: Array) -> list[Array]:
        """The parameters with these coordinates."""

    @abc.abstractmethod
    def diagonal(self) -> list[Array]:
        """The diagonal of the block, in the shapes of its parameters."""


class _KroneckerSpectrum(_AbstractSpectrum):
    part: Part = eqx.field(static=True)
    values: Inexact[Array, "batch outputs inputs"]
    outputs: Inexact[Array, "batch outputs outputs"]
    inputs: Inexact[Array, "batch inputs inputs"] | None
    is_semidefinite: bool = eqx.field(static=True, default=False)

    @property
    def _layout(self) -> Layout:
        assert self.part.layout is not None
        return self.part.layout

    @property
    def rounding(self) -> Inexact[Array, "batch 1 columns"]:
        rows, columns = self.values.shape[1:]
        if self.inputs is None:
            return _rounding(self.values, rows, (1,))
        return _rounding(self.values, rows + columns, (1, 2))

    def coordinates(self, leaves: list[Array]) -> Array:
        return self._rotated(self._layout.matrices(leaves), back=False)

    def leaves(self, coordinates: Array) -> list[Array]:
        return self._layout.leaves(self._rotated(coordinates, back=True))

    def _rotated(self, matrices: Array, *, back: bool) -> Array:
        turned = lambda basis: jnp.swapaxes(basis, -1, -2) if back else basis
        outputs = turned(self.outputs)
        matrices = jnp.einsum("boq,boi->bqi", outputs, matrices.astype(outputs.dtype))
        if self.inputs is None:
            return matrices
        inputs = turned(self.inputs)
        return jnp.einsum("bqi,bij->bqj", matrices, inputs)

    def diagonal(self) -> list[Array]:
        product = jnp.einsum("boq,bqi->boi", self.outputs**2, self.values)
        if self.inputs is not None:
            product = jnp.einsum("boj,bij->boi", product, self.inputs**2)
        return self._layout.leaves(product)


class _DenseSpectrum(_AbstractSpectrum):
    part: Part = eqx.field(static=True)
    values: Inexact[Array, " k"]
    vectors: Inexact[Array, "k k"]
    is_semidefinite: bool = eqx.field(static=True, default=False)

    @property
    def rounding(self) -> Inexact[Array, " 1"]:
        return _rounding(self.values, self.values.size)

    def coordinates(self, leaves: list[Array]) -> Array:
        return self.vectors.T @ _joined(leaves, self.vectors.dtype)

    def leaves(self, coordinates: Array) -> list[Array]:
        return _split(self.vectors @ coordinates, self.part)

    def diagonal(self) -> list[Array]:
        return _split(jnp.sum(self.vectors**2 * self.values[None], 1), self.part)


class _DiagonalSpectrum(_AbstractSpectrum):
    part: Part = eqx.field(static=True)
    values: Inexact[Array, " k"]
    is_semidefinite: bool = eqx.field(static=True, default=False)

    @property
    def rounding(self) -> Inexact[Array, ""]:
        return jnp.zeros((), self.values.dtype)

    def coordinates(self, leaves: list[Array]) -> Array:
        return _joined(leaves, self.values.dtype)

    def leaves(self, coordinates: Array) -> list[Array]:
        return _split(coordinates, self.part)

    def diagonal(self) -> list[Array]:
        return _split(self.values, self.part)


def _joined(leaves: list[Array], dtype: Any) -> Array:
    return jnp.concatenate([x.ravel().astype(dtype) for x in leaves])


def _split(vector: Array, part: Part) -> list[Array]:
    ends = np.cumsum([math.prod(shape) for shape in part.shapes])
    pieces = jnp.split(vector, ends[:-1])
    return [x.reshape(shape) for x, shape in zip(pieces, part.shapes, strict=True)]


def _spectrum(block: FactorBlock) -> _AbstractSpectrum:
    """Eigenvalues and eigenvectors of a block."""
    if isinstance(block, DenseBlock):
        values, vectors = jnp.linalg.eigh(block.matrix)
        values = _without_rounding(values, values.size)
        return _DenseSpectrum(block.part, values, vectors=vectors)
    if isinstance(block, DiagonalBlock):
        # Each entry is computed by itself.
        return _DiagonalSpectrum(block.part, _without_rounding(block.diagonal, 8))
    assert isinstance(block, KroneckerBlock)
    if block.moments is None:
        of_outputs, outputs, of_inputs, inputs = block.eigenvectors()
        of_outputs, of_inputs = (
            _without_rounding(x, x.shape[-1]) for x in (of_outputs, of_inputs)
        )
        values = of_outputs[:, :, None] * of_inputs[:, None, :]
        return _KroneckerSpectrum(block.part, values, outputs=outputs, inputs=inputs)
    outputs, inputs = block.output_basis, block.input_basis
    assert outputs is not None
    bases = [outputs] if inputs is None else [outputs, inputs]
    moments = error_if(
        block.moments,
        jnp.stack([_is_askew(basis) for basis in bases]),
        "The eigenvectors of `KroneckerFactors` are not orthogonal: factors with "
        "`corrected=True` cannot be averaged, as their eigenvectors differ. Average "
        "factors without it, or compute them again.",
    )
    return _KroneckerSpectrum(block.part, moments, outputs=outputs, inputs=inputs)


def _changed(
    spectra: Sequence[_AbstractSpectrum],
    change: Callable[[_AbstractSpectrum], Array],
    is_semidefinite: bool,
) -> tuple[_AbstractSpectrum, ...]:
    """The spectra, with other eigenvalues."""
    known = {"is_semidefinite": is_semidefinite}
    return tuple(
        dataclasses.replace(spectrum, values=change(spectrum), **known)
        for spectrum in spectra
    )


def _rounding(values: Array, size: int, axes: tuple[int, ...] = (-1,)) -> Array:
    """The rounding errors of eigenvalues of matrices, or of products of some.

    - `size`: the number of rows of a matrix, or the sum of these.
    """
    largest = jnp.max(jnp.abs(values), axis=axes, keepdims=True, initial=0)
    return size * float(jnp.finfo(values.dtype).eps) * largest


def _without_rounding(
    values: Inexact[Array, "*batch k"], size: int
) -> Inexact[Array, "*batch k"]:
    """Replaces values that are negative because of rounding by zero."""
    is_zero = (values < 0) & (values >= -_rounding(values, size))
    return jnp.where(is_zero, 0, values)


def _is_askew(basis: Inexact[Array, "batch k k"]) -> Bool[Array, ""]:
    """Whether eigenvectors are not orthogonal, as averages of them are not."""
    size = basis.shape[-1]
    product = jnp.einsum("bki,bkj->bij", basis, basis)
    error = jnp.abs(product - jnp.eye(size, dtype=basis.dtype)[None])
    limit = 100 * max(size, 10) * float(jnp.finfo(basis.dtype).eps)
    return jnp.max(error, initial=0) > limit


class KroneckerOperator(AbstractSymmetricOperator):
    """Kronecker factors plus damping, as a `lineax.AbstractLinearOperator`.

    This is what [`eqxbatch.KroneckerFactors`][]`.operator` returns. Vectors are PyTrees
    of parameters. All methods work on the eigenvalues and eigenvectors of the blocks;
    only `as_matrix` materialises a matrix over all parameters. The eigenvalues of a
    Kronecker product are the products of the eigenvalues of its factors or, with
    `corrected=True`, the second moments along its eigenvectors. `damping` is added to
    each eigenvalue.

    - `mv(vector)`: the product with a vector.
    - `inverse()`: the inverse, as another `KroneckerOperator`.
    - `sqrt()`: the symmetric square root. `inverse().sqrt().mv(noise)` samples from a
        Gaussian whose precision is this operator.
    - `logdet()`, `trace()`: scalars.
    - `diagonal()`: a vector of shape `(n,)`, in the order of
        `jax.flatten_util.ravel_pytree`.
    - `eigh()`: all `n` eigenvalues, and a lineax operator whose columns are the
        eigenvectors: it takes vectors of shape `(n,)` to PyTrees of parameters. They
        are in the order of the blocks, not sorted.
    - `as_matrix()`: the matrix, of shape `(n, n)`.
    - `as_pytree()`: the matrix as a PyTree of PyTrees, as for
        [`eqxbatch.hessian_to_pytree`][].

    It is known to lineax as positive semidefinite, which `lineax.CG` requires, if
    `factors` are known to be. So are `inverse()` and `sqrt()`, whose eigenvalues are
    checked. If you know that the loss is convex, wrap it in a
    `lineax.TaggedLinearOperator`.

    **Arguments:**

    - `factors`: the [`eqxbatch.KroneckerFactors`][].
    - `damping`: a number that is added to the diagonal, at least 0.

    Raises `ValueError` for negative damping, and for vectors that do not have the
    structure of the parameters. At run time, `inverse` and `logdet` raise a
    `RuntimeError` if an eigenvalue is not positive, up to rounding; without damping,
    factors computed from fewer examples than they have columns are singular. `sqrt`
    raises one if an eigenvalue is negative. Inside `jax.shard_map`, with factors that
    differ between devices, the result is NaN instead.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> model = lambda w, x, y: w["weight"] @ x
        >>> loss = lambda out, x, y: jnp.sum((out - y) ** 2) / 2
        >>> w = {"weight": jnp.zeros((1, 2))}
        >>> x, y = jnp.array([[1.0, 0.0], [0.0, 2.0]]), jnp.ones((2, 1))
        >>> factors = eqxbatch.filter_kfac(model, loss, in_axes=0)(w, x, y)
        >>> operator = factors.operator(damping=1.0)
        >>> step = operator.inverse().mv({"weight": jnp.ones((1, 2))})
        >>> [f"{x:.3f}" for x in step["weight"][0]]
        ['0.667', '0.333']
        >>> f"{operator.logdet():.3f}", f"{operator.trace():.3f}"
        ('1.504', '4.500')

        ```
    """

    tags: frozenset = eqx.field(static=True)
    unravel: Unravel
    _spectra: tuple[_AbstractSpectrum, ...]
    _is_damped: Bool[Array, ""]

    @checked
    def __init__(
        self, factors: KroneckerFactors, damping: Real[Array, ""] | float = 0.0
    ):
        if not isinstance(damping, Tracer) and not damping >= 0:
            raise ValueError(
                f"`damping` must be at least 0; got {damping}. It is added to the "
                "eigenvalues of a matrix that is positive semidefinite."
            )
        added = jnp.asarray(damping)
        added = error_if(
            added, ~(added >= 0), "`damping` must be at least 0, and no NaN."
        )
        self.tags = frozenset()
        self.unravel, self._is_damped = factors.unravel, added > 0
        damped = lambda spectrum: spectrum.values + added.astype(spectrum.values.dtype)
        spectra = [*map(_spectrum, factors.blocks)]
        self._spectra = _changed(spectra, damped, factors.is_semidefinite)

    def _with(
        self, change: Callable[[_AbstractSpectrum], Array]
    ) -> "KroneckerOperator":
        """An operator with the same eigenvectors and eigenvalues that are checked."""
        spectra = _changed(self._spectra, change, True)
        return eqx.tree_at(lambda x: x._spectra, self, spectra)

    def mv(self, vector: PyTree) -> PyTree:
        leaves = check_vector(self.unravel, vector, "vector")
        products: dict[int, Array] = {}
        for spectrum in self._spectra:
            coordinates = spectrum.coordinates(of_part(spectrum.part, leaves))
            product = spectrum.leaves(spectrum.values * coordinates)
            products.update(zip(spectrum.part.leaves, product, strict=True))
        return self._tree(products)

    def _tree(self, values: dict[int, Array]) -> PyTree:
        structs = self.unravel.structs
        leaves = [values[i].astype(struct.dtype) for i, struct in enumerate(structs)]
        return jax.tree.unflatten(self.unravel.treedef, leaves)

    def inverse(self) -> "KroneckerOperator":
        return self._with(lambda spectrum: 1 / self._positive(spectrum))

    def sqrt(self) -> "KroneckerOperator":
        def root(spectrum: _AbstractSpectrum) -> Array:
            values = error_if(
                spectrum.values,
                spectrum.values < -spectrum.rounding,
                "`sqrt` needs a positive semidefinite matrix, but an eigenvalue is "
                "negative: the loss is not convex in what the model returns. Give "
                "`damping` that exceeds it.",
            )
            return jnp.sqrt(jnp.maximum(values, 0))

        return self._with(root)

    def logdet(self) -> Real[Array, ""]:
        return self._sum(lambda spectrum: jnp.sum(jnp.log(self._positive(spectrum))))

    def trace(self) -> Real[Array, ""]:
        return self._sum(lambda spectrum: jnp.sum(spectrum.values))

    def diagonal(self) -> Inexact[Array, " n"]:
        diagonals: dict[int, Array] = {}
        for spectrum in self._spectra:
            of_part = zip(spectrum.part.leaves, spectrum.diagonal(), strict=True)
            diagonals.update(of_part)
        leaves = jax.tree.leaves(self._tree(diagonals))
        return _joined(leaves, self.unravel.dtype)

    def eigh(self) -> tuple[Inexact[Array, " n"], lineax.AbstractLinearOperator]:
        dtype = common_dtype(*(spectrum.values.dtype for spectrum in self._spectra))
        values = _joined([spectrum.values for spectrum in self._spectra], dtype)

        def vectors(coordinates: Inexact[Array, " n"]) -> PyTree:
            values: dict[int, Array] = {}
            start = 0
            for spectrum in self._spectra:
                piece = coordinates[start : start + spectrum.values.size]
                start += spectrum.values.size
                leaves = spectrum.leaves(piece.reshape(spectrum.values.shape))
                values.update(zip(spectrum.part.leaves, leaves, strict=True))
            return self._tree(values)

        struct = jax.ShapeDtypeStruct(values.shape, dtype)
        return values, lineax.FunctionLinearOperator(vectors, struct)

    def as_matrix(self) -> Inexact[Array, "n n"]:
        every = jnp.eye(sum(self.unravel.sizes), dtype=self.unravel.dtype)
        columns = jax.vmap(lambda x: self.mv(self.unravel(x)))(every)
        columns = jax.tree.leaves(columns)
        flat = [x.reshape(x.shape[0], -1).astype(every.dtype) for x in columns]
        matrix = jnp.concatenate(flat, axis=1)
        return (matrix + matrix.T) / 2

    def as_pytree(self) -> PyTree:
        zeros = self.unravel(jnp.zeros(sum(self.unravel.sizes), self.unravel.dtype))
        return hessian_to_pytree(self.as_matrix(), zeros)

    def transpose(self) -> "KroneckerOperator":
        return self

    def in_structure(self) -> PyTree:
        return jax.tree.unflatten(self.unravel.treedef, self.unravel.structs)

    def out_structure(self) -> PyTree:
        return self.in_structure()

    def _sum(self, fun: Callable[[_AbstractSpectrum], Array]) -> Array:
        terms = [fun(spectrum) for spectrum in self._spectra]
        dtype = common_dtype(*(x.dtype for x in terms))
        return sum((x.astype(dtype) for x in terms), jnp.zeros((), dtype))

    def _positive(self, spectrum: _AbstractSpectrum) -> Array:
        # With damping, an eigenvalue of zero up to rounding is no longer zero.
        rounding = jnp.where(self._is_damped, 0, spectrum.rounding)
        return error_if(
            spectrum.values,
            spectrum.values <= rounding,
            "`inverse` and `logdet` need a positive definite matrix, but an eigenvalue "
            "is not positive: the factors are singular, or the loss is not convex in "
            "what the model returns. Give `operator(damping=...)` more damping.",
        )


@lineax.is_positive_semidefinite.register(KroneckerOperator)
def _is_positive_semidefinite(operator: KroneckerOperator) -> bool:
    return all(spectrum.is_semidefinite for spectrum in operator._spectra)
