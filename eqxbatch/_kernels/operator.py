"""`KernelOperator`: a kernel as a linear operator, computed or read in blocks."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int, PyTree, Shaped

from .._base.dtypes import is_complex
from .._base.linear_operator import AbstractTaggedOperator, as_tags
from .._base.run_time_checks import error_if, on_devices_of
from .._base.types import AnyArray, checked
from .._batch.progress import as_meter, Progress
from .._batch.store import AbstractStore
from .._batch.zarr_store import as_store, Store
from .batch_kernel import BatchKernel
from .kernel_matrices import AbstractKernelMatrix, ComputedMatrix, MatrixView
from .on_devices import check_mesh
from .stored_matrix import check_stored, Reader, StoredMatrix
from .team import Team


# The settings of `filter_batch_kernel` that an operator takes, too.
_SETTINGS = ("block_size", "pairwise", "in_axes", "mesh", "mesh_axis")


class KernelOperator(AbstractTaggedOperator):
    """A kernel as a `lineax.AbstractLinearOperator`; it need not fit in memory.

    Products with vectors are computed in blocks. Each product computes the blocks anew,
    or reads them from a store: while one block is multiplied, the next ones are read.
    By symmetry, only half of the blocks of a symmetric kernel are computed or read.

    It works with iterative solvers such as `lineax.CG` and `lineax.GMRES`, with
    matfree's estimates of traces and log-determinants, and with
    [`eqxbatch.kernel_solve`][].

    - `mv(vector)`: the product with a vector of shape `(n2,)`, or with `k` vectors in
        an array of shape `(n2, k)`. With a `mesh` of several processes, all of them
        call it, also for a stored kernel.
    - `transpose()`: the transpose, as another such operator.
    - `diagonal()`: the diagonal, computed from the blocks that contain it.
    - `column(index)`: one column, of shape `(n1,)`.
    - `as_matrix()`: the whole kernel, of shape `(n1, n2)`.

    **Arguments:**

    - `kernel`: a kernel function, as for [`eqxbatch.filter_batch_kernel`][], or an
        estimator such as [`eqxbatch.EmpiricalNTK`][], that returns one array of shape
        `(n1, n2)`. Or, without `x1`, a stored kernel: a NumPy array or a zarr array,
        which must not change later; a zarr array of up to 64 MB is read once.
    - `x1`, `x2`: the examples of rows and columns. Without `x2`, both are `x1`. NumPy
        arrays are copied. With a `store`, they can be on disk, as for
        [`eqxbatch.filter_batch_kernel`][].
    - `block_size`, `pairwise`, `in_axes`, `mesh`, `mesh_axis`: as for
        [`eqxbatch.filter_batch_kernel`][]. Of these, a stored kernel takes a mesh: each
        of its processes reads and multiplies a share of the blocks.
    - `symmetric`: a bool or None, as for [`eqxbatch.filter_batch_kernel`][]. With
        `True`, only half of a stored kernel is read.
    - `store`: `"host"`, a path or a store, as for [`eqxbatch.filter_batch_kernel`][].
        The kernel is computed once, right away, and read for each product; a kernel of
        up to 64 MB is read once.
    - `progress`: True or an [`eqxbatch.AbstractProgressMeter`][], for computing the
        kernel into the `store`.
    - `tags`: lineax tags that state properties of the kernel, such as
        `lineax.positive_semidefinite_tag`, which `lineax.CG` requires. A symmetric
        kernel need not be tagged as such.
    - `**kwargs`: further arguments of the kernel function, including `key`.

    Operators without a store work inside `jax.jit`, `jax.vmap` and `jax.grad`, also
    for derivatives with respect to the arrays of `kernel`. With a stored kernel, the
    host computes products, which are differentiable with respect to the vectors.

    Raises `ValueError` for a kernel without exactly two axes, for vectors with another
    number of rows, for an index out of range, for settings that a stored kernel does
    not take, for `progress` or examples on disk without a `store`, and for triangular
    `tags`. Raises `TypeError` for arguments of the wrong type, and `ImportError`
    without lineax, which the extra `linalg` installs.

    !!! example

        Kernel ridge regression:

        ```python
        >>> import eqxbatch, jax.numpy as jnp, lineax
        >>> rbf = lambda x, y: jnp.exp(-jnp.sum((x - y) ** 2))
        >>> x = jnp.linspace(0.0, 3.0, 7)[:, None]
        >>> kernel = eqxbatch.KernelOperator(
        ...     rbf, x, block_size=4, pairwise=True, symmetric=True
        ... )
        >>> ridge = 0.1 * lineax.IdentityLinearOperator(kernel.in_structure())
        >>> ridged = lineax.TaggedLinearOperator(
        ...     kernel + ridge, lineax.positive_semidefinite_tag
        ... )
        >>> solver = lineax.CG(rtol=1e-5, atol=1e-5)
        >>> solution = lineax.linear_solve(ridged, jnp.sin(x[:, 0]), solver)
        >>> solution.value.shape
        (7,)

        ```
    """

    tags: frozenset = eqx.field(static=True)
    matrix: AbstractKernelMatrix

    @checked
    def __init__(
        self,
        kernel: Any,
        x1: PyTree = None,
        x2: PyTree = None,
        *,
        symmetric: bool | None = None,
        store: Store = "device",
        progress: Progress = None,
        tags: Any = (),
        **kwargs: Any,
    ):
        store, meter = as_store(store), as_meter(progress)
        is_stored = isinstance(store, AbstractStore)
        if meter is not None and not is_stored:
            raise ValueError(
                "`progress` is for computing a kernel into a `store`, and there is "
                "none. Leave it out, or pass `store='host'`."
            )
        # All other keyword arguments are those of the kernel function.
        settings = {name: kwargs.pop(name) for name in _SETTINGS if name in kwargs}
        # Without examples there is nothing to compute: the kernel is numbers already.
        if x1 is None:
            more = {**settings, "x2": x2, "store": is_stored, **kwargs}
            self.matrix = _stored_matrix(kernel, symmetric, more)
        else:
            settings = {"block_size": None, **settings}
            transform = BatchKernel(kernel, symmetric=symmetric, **settings)
            computed = ComputedMatrix(transform, x1, x2, kwargs)
            reads = computed.call.has_stored
            if reads and not is_stored:
                raise ValueError(
                    "Examples that are not in memory are read once, to compute the "
                    "kernel into a `store`. Pass `store='host'`, or a path."
                )
            self.matrix = computed
            # Products read the stored kernel. A column is computed where examples can
            # be had again, because reading it takes all tiles that it passes.
            if is_stored:
                reader = Reader(
                    computed.stored(store, meter),
                    computed.is_hermitian,
                    team=computed.team,
                )
                self.matrix = StoredMatrix(reader, None if reads else computed)
        # What is known of the kernel is said to lineax, for its solvers to choose by.
        self.tags = as_tags(tags)
        triangular = {lineax.lower_triangular_tag, lineax.upper_triangular_tag}
        if self.tags & triangular:
            raise ValueError("`tags` must not be triangular: a kernel is not.")
        if self.matrix.is_hermitian and not is_complex(self.matrix.struct):
            self.tags |= {lineax.symmetric_tag}

    @checked
    def mv(
        self, vector: Shaped[AnyArray, " n2"] | Shaped[AnyArray, "n2 k"]
    ) -> Shaped[Array, "n1 ..."]:
        vectors: Array = jnp.asarray(vector)
        num = self.matrix.struct.shape[1]
        if vectors.shape[0] != num:
            raise ValueError(
                f"`vector` must have {num} rows, as the kernel has {num} columns; got "
                f"shape {vectors.shape}."
            )
        # A matrix multiplies columns, [n2, k].
        if vectors.ndim == 1:
            return self.matrix.product(vectors[:, None])[:, 0]
        return self.matrix.product(vectors)

    @checked
    def as_matrix(self) -> Shaped[Array, "n1 n2"]:
        return self.matrix.whole()

    @checked
    def diagonal(self) -> Shaped[Array, " n"]:
        return self.matrix.diagonal()

    @checked
    def column(self, index: int | Int[Array, ""]) -> Shaped[Array, " n1"]:
        num = self.matrix.struct.shape[1]
        if not isinstance(index, Tracer) and not 0 <= index < num:
            raise ValueError(
                f"`index` must be the index of one of the {num} columns; got {index}."
            )
        # A traced index is known at run time only.
        index = jnp.asarray(index, jnp.int32)
        is_outside = (index < 0) | (index >= num)
        column = self.matrix.column(jnp.clip(index, 0, num - 1))
        message = f"`index` must be the index of one of the {num} columns."
        with on_devices_of(self.matrix):
            return error_if(column, (is_outside, message))

    def transpose(self) -> "KernelOperator":
        if lineax.is_symmetric(self):
            return self
        # A view: its products come from the same tiles.
        transposed = MatrixView.of(self.matrix, "is_transposed")
        return eqx.tree_at(lambda x: x.matrix, self, transposed)

    def in_structure(self) -> jax.ShapeDtypeStruct:
        struct = self.matrix.struct
        return jax.ShapeDtypeStruct(struct.shape[1:], struct.dtype)

    def out_structure(self) -> jax.ShapeDtypeStruct:
        struct = self.matrix.struct
        return jax.ShapeDtypeStruct(struct.shape[:1], struct.dtype)


def _stored_matrix(
    array: Any, symmetric: bool | None, settings: dict[str, Any]
) -> StoredMatrix:
    """The matrix of a kernel that is stored already."""
    check_stored(array)
    settings = dict(settings)
    mesh_axis = check_mesh(settings.pop("mesh", None), settings.pop("mesh_axis", None))
    # None and False are what arguments are that nobody passed.
    names = [name for name, x in settings.items() if x is not None and x is not False]
    if names:
        raise ValueError(
            "A kernel that is stored takes no other settings than `symmetric`, `tags` "
            f"and `mesh`; got `{'`, `'.join(names)}`. Pass `x1` with a kernel function."
        )
    is_hermitian = symmetric is True
    if is_hermitian and array.shape[0] != array.shape[1]:
        raise ValueError(
            f"A kernel with `symmetric=True` must be square; got shape {array.shape}."
        )
    # The host multiplies what is stored.
    array = np.asarray(array) if isinstance(array, jax.Array) else array
    team = Team(mesh_axis, is_whole=True)
    reader = Reader(array, is_hermitian, is_checked=is_hermitian, team=team)
    return StoredMatrix(reader)


# lineax finds by type what it cannot do by products.
@lineax.materialise.register(KernelOperator)
def _whole_kernel(operator: KernelOperator) -> lineax.AbstractLinearOperator:
    return lineax.MatrixLinearOperator(operator.as_matrix(), operator.tags)


@lineax.conj.register(KernelOperator)
def _conjugate(operator: KernelOperator) -> lineax.AbstractLinearOperator:
    if not is_complex(operator.matrix.struct):
        return operator
    conjugated = MatrixView.of(operator.matrix, "is_conjugate")
    return eqx.tree_at(lambda x: x.matrix, operator, conjugated)
