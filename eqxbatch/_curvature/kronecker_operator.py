"""Kronecker factors as a lineax operator, which multiplies by their eigenvectors."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Inexact, PyTree, Real

from .._base.checks import check_at_least
from .._base.dtypes import common_dtype
from .._base.run_time_checks import error_if, on_devices_of
from .._base.trees import difference, safe_zip, shown
from .._base.types import checked
from .kronecker_blocks import AbstractKroneckerFactors
from .operators import AbstractSymmetricOperator
from .pytree import form_of, hessian_to_pytree, joined, Unravel
from .spectrum import DampedProduct, Spectrum, spectrum_of, with_damping


_ASKEW = (
    "The eigenvectors of `KroneckerFactors` are not orthogonal: factors with "
    "`corrected=True` cannot be averaged, as their eigenvectors differ. Average "
    "factors without it, or compute them again."
)


def _is_askew(basis: Inexact[Array, "batch k k"]) -> Bool[Array, ""]:
    """Whether eigenvectors are not orthogonal, as averages of them are not."""
    size = basis.shape[-1]
    whole = lax.Precision.HIGHEST
    product = jnp.einsum("bki,bkj->bij", basis, basis, precision=whole)
    error = jnp.abs(product - jnp.eye(size, dtype=basis.dtype)[None])
    limit = 100 * max(size, 10) * float(jnp.finfo(basis.dtype).eps)
    return jnp.max(error, initial=0) > limit


class KroneckerOperator(AbstractSymmetricOperator):
    """Kronecker factors plus damping, as a `lineax.AbstractLinearOperator`.

    This is what [`eqxbatch.results.KroneckerFactors`][]`.operator` returns. Vectors are
    PyTrees of parameters. All methods work on the eigenvalues and eigenvectors of the
    blocks; only `as_matrix` materialises a matrix over all parameters. The eigenvalues
    of a Kronecker product are the products of the eigenvalues of its factors or, with
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

    - `factors`: the [`eqxbatch.results.KroneckerFactors`][].
    - `damping`: a number that is added to the diagonal, at least 0.
    - `relative`: whether `damping` is a multiple of the mean eigenvalue of each block.
        0.1 is usual for influence functions (Grosse et al.,
        [arXiv:2308.03296](https://arxiv.org/abs/2308.03296)).
    - `factored`: whether the damping is added to both factors of a Kronecker product
        instead, so that it stays one: its root, times a ratio of their mean
        eigenvalues (Martens and Grosse,
        [arXiv:1503.05671](https://arxiv.org/abs/1503.05671)). An
        [`eqxbatch.EmpiricalNTK`][] in such a metric keeps the factors of layers.

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
        >>> factors = eqxbatch.filter_kfac(model, loss)(w, x, y)
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
    spectra: tuple[Spectrum, ...]
    _is_damped: Bool[Array, ""]

    @checked
    def __init__(
        self,
        factors: AbstractKroneckerFactors,
        damping: Real[Array, ""] | float = 0.0,
        *,
        relative: bool = False,
        factored: bool = False,
    ):
        is_traced = isinstance(damping, Tracer)
        # A comparison of an array would be traced, too, inside `jax.jit`.
        if not is_traced:
            of_what = "the eigenvalues of a matrix that is positive semidefinite"
            remedy = f"It is added to {of_what}."
            check_at_least("damping", float(damping), 0, remedy)
        # What is known only at run time is checked there, in one place.
        added = jnp.asarray(damping)
        checks = [
            (_is_askew(basis), _ASKEW)
            for block in factors.blocks
            for basis in (block.output_basis, block.input_basis)
            if basis is not None
        ]
        if is_traced:
            message = "`damping` must be at least 0, and no NaN."
            checks.append((~(added >= 0), message))
        # All eigenvalues depend on it, on the devices of the factors.
        with on_devices_of(factors):
            added = error_if(added, *checks)
        self.tags = frozenset({lineax.symmetric_tag})
        # Of a weak type, it would differ from the one in the state of an optimiser.
        self.unravel, self._is_damped = factors.unravel, jnp.asarray(added > 0, bool)
        spectra = map(spectrum_of, factors.blocks)
        # A damping of zero leaves all blocks as they are, without a word about
        # `factored`.
        if is_traced or float(damping) != 0:
            if factored and any(x.moments is not None for x in factors.blocks):
                raise ValueError(
                    "`factored=True` adds damping to two factors, but the eigenvalues "
                    "of factors with `corrected=True` are no products. Leave out one "
                    "of both."
                )
            settings = {"relative": relative, "factored": factored}
            spectra = (with_damping(x, added, **settings) for x in spectra)
        # Damping of at least 0 keeps this.
        known = {"is_semidefinite": factors.is_semidefinite}
        self.spectra = tuple(dataclasses.replace(x, **known) for x in spectra)

    def _with(
        self,
        change: Callable[[Array], Array],
        of_damped: Callable[[DampedProduct], DampedProduct],
        of_factor: Callable[[Array], Array] | None = None,
    ) -> "KroneckerOperator":
        """An operator with the same eigenvectors and eigenvalues that are checked.

        Those of factors change by `of_factor`, which is the same if it is None, and
        products plus damping by `of_damped`.
        """
        changed = lambda spectrum: dataclasses.replace(
            spectrum,
            values=change(spectrum.values),
            factors=jax.tree.map(of_factor or change, spectrum.factors),
            damped=None if spectrum.damped is None else of_damped(spectrum.damped),
            is_semidefinite=True,
        )
        spectra = tuple(map(changed, self.spectra))
        return eqx.tree_at(lambda x: x.spectra, self, spectra)

    def _unless(
        self, is_wrong: Callable[[Spectrum], Array], message: str
    ) -> "KroneckerOperator":
        """The same; raises an error if an eigenvalue is wrong."""
        checks = ((is_wrong(spectrum), message) for spectrum in self.spectra)
        # The check must be in the way of all results: a number that nothing needs is
        # removed.
        zero = error_if(jnp.zeros((), jnp.float32), *checks)
        plus_zero = lambda values: values + zero.astype(values.dtype)
        return self._with(plus_zero, lambda damped: damped.changed(plus_zero))

    def mv(self, vector: PyTree) -> PyTree:
        leaves = jax.tree.leaves(vector)
        if form_of(vector) != form_of(self.in_structure()):
            raise ValueError(
                "`vector` must have the structure and shapes of the parameters that "
                f"the factors belong to, {shown(self.in_structure())}; got "
                f"{shown(vector)}. {difference(self.in_structure(), vector)} Take the "
                "parameters of the same model, such as with "
                "`equinox.filter(model, equinox.is_inexact_array)`."
            )

        def product(spectrum: Spectrum) -> list[Array]:
            parameters = [leaves[leaf] for leaf in spectrum.part.leaves]
            return spectrum.leaves(spectrum.product(parameters))

        return self._tree(product)

    def _tree(self, of_block: Callable[[Spectrum], list[Array]]) -> PyTree:
        """A PyTree like the parameters, from the leaves of each block."""
        values: dict[int, Array] = {}
        for spectrum in self.spectra:
            values.update(safe_zip(spectrum.part.leaves, of_block(spectrum)))
        structs = self.unravel.structs
        leaves = [values[i].astype(struct.dtype) for i, struct in enumerate(structs)]
        return jax.tree.unflatten(self.unravel.treedef, leaves)

    def inverse(self) -> "KroneckerOperator":
        of_damped = lambda damped: damped.to_the(-1)
        return self._positive()._with(lambda values: 1 / values, of_damped)

    def sqrt(self) -> "KroneckerOperator":
        checked = self
        # The host checks, which would wait for it in each kernel in such a metric.
        if not lineax.is_positive_semidefinite(self):
            checked = self._unless(
                lambda spectrum: spectrum.values < -spectrum.rounding,
                "`sqrt` needs a positive semidefinite matrix, but an eigenvalue is "
                "negative: the loss is not convex in what the model returns. Give "
                "`damping` that exceeds it.",
            )
        # Two negative eigenvalues of factors have a positive product.
        return checked._with(
            lambda values: jnp.sqrt(jnp.maximum(values, 0)),
            lambda damped: damped.to_the(0.5),
            lambda values: jnp.sqrt(jnp.abs(values)),
        )

    def logdet(self) -> Real[Array, ""]:
        log_of = lambda spectrum: jnp.sum(jnp.log(spectrum.values))
        return self._positive()._sum(log_of)

    def trace(self) -> Real[Array, ""]:
        return self._sum(lambda spectrum: jnp.sum(spectrum.values))

    def diagonal(self) -> Inexact[Array, " n"]:
        leaves = jax.tree.leaves(self._tree(Spectrum.diagonal))
        return joined(leaves, self.unravel.dtype)

    def eigh(self) -> tuple[Inexact[Array, " n"], lineax.AbstractLinearOperator]:
        of_blocks = [spectrum.values for spectrum in self.spectra]
        unravel = Unravel(of_blocks)
        values = joined(of_blocks, unravel.dtype)

        def vectors(coordinates: Inexact[Array, " n"]) -> PyTree:
            # Blocks are asked for in order, so each takes its own piece.
            pieces = iter(unravel.split(coordinates))
            return self._tree(lambda spectrum: spectrum.leaves(next(pieces)))

        struct = jax.ShapeDtypeStruct(values.shape, values.dtype)
        return values, lineax.FunctionLinearOperator(vectors, struct)

    def as_matrix(self) -> Inexact[Array, "n n"]:
        every = jnp.eye(sum(self.unravel.sizes), dtype=self.unravel.dtype)
        flat = lambda tree: joined(jax.tree.leaves(tree), every.dtype)
        matrix = jax.vmap(lambda x: flat(self.mv(self.unravel(x))))(every)
        # Products are symmetric up to rounding.
        return (matrix + matrix.T) / 2

    def as_pytree(self) -> PyTree:
        zeros = self.unravel(jnp.zeros(sum(self.unravel.sizes), self.unravel.dtype))
        return hessian_to_pytree(self.as_matrix(), zeros)

    def in_structure(self) -> PyTree:
        return jax.tree.unflatten(self.unravel.treedef, self.unravel.structs)

    def _sum(self, fun: Callable[[Spectrum], Array]) -> Array:
        terms = [fun(spectrum) for spectrum in self.spectra]
        dtype = common_dtype(*(x.dtype for x in terms))
        return sum((x.astype(dtype) for x in terms), jnp.zeros((), dtype))

    def _positive(self) -> "KroneckerOperator":
        def is_wrong(spectrum: Spectrum) -> Array:
            # With damping, an eigenvalue of zero up to rounding is no longer zero.
            rounding = jnp.where(self._is_damped, 0, spectrum.rounding)
            return spectrum.values <= rounding

        return self._unless(
            is_wrong,
            "`inverse` and `logdet` need a positive definite matrix, but an eigenvalue "
            "is not positive: the factors are singular, or the loss is not convex in "
            "what the model returns. Give `operator(damping=...)` more damping.",
        )


@lineax.is_positive_semidefinite.register(KroneckerOperator)
def _is_positive_semidefinite(operator: KroneckerOperator) -> bool:
    return all(spectrum.is_semidefinite for spectrum in operator.spectra)
