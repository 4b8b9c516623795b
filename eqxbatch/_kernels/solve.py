"""`kernel_solve`: systems with a kernel that need not fit in memory."""

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, PyTree

from .._base.checks import check_at_least
from .._base.dtypes import is_complex, reachable_rtol
from .._base.trees import described, import_extra, log
from .._base.types import AnyArray, check_types, checked
from .._batch.fingerprint import digest
from .._batch.progress import (
    AbstractProgressMeter,
    as_meter,
    check_takes_residual,
    metered,
    Progress,
)
from .._batch.reading import as_numpy
from .kernel_matrices import AbstractKernelMatrix
from .led import led
from .on_host import check_solve
from .stored_matrix import StoredMatrix
from .team import Team


if TYPE_CHECKING:
    from .operator import KernelOperator
from .conjugate_gradients import (
    Checkpoint,
    ConjugateGradients,
    initial,
    Product,
    standard_promotion,
    State,
)


class KernelSolution(eqx.Module):
    """What [`eqxbatch.kernel_solve`][] returns.

    - `weights`: the solution, in the shape of `y`.
    - `residuals`: the norm of the residual of each right-hand side, relative to the
        norm of the right-hand side; shape `()` or `(k,)`.
    - `num_products`: the number of products with the kernel. Each product is with all
        right-hand sides at once.
    """

    weights: Array
    residuals: Array
    num_products: int = eqx.field(static=True)


_Right = Inexact[AnyArray, " n"] | Inexact[AnyArray, "n k"]


@checked
def kernel_solve(
    operator: Any,
    x: PyTree = None,
    y: PyTree = None,
    *,
    ridge: float | Inexact[AnyArray, ""],
    preconditioner_rank: int | None = None,
    rtol: float | None = None,
    max_steps: int = 1_000,
    checkpoint: str | os.PathLike | None = None,
    progress: Progress = None,
    **settings: Any,
) -> KernelSolution:
    """Solves a kernel system, as in kernel ridge regression and Gaussian processes.

    Solves `(kernel + ridge * identity) @ weights = y` for one or many right-hand sides
    by preconditioned conjugate gradients. These need only products with the kernel, so
    it need not fit in memory. All right-hand sides share the products.

    Vectors are kept on the host in float64. The recursively updated residual of
    conjugate gradients drifts away from the true one. Once it is small enough, the true
    residual is computed (in float64 if the kernel is stored), and the iteration
    continues if that is too large. NumPy multiplies a kernel on disk while the next
    blocks are read; with few cores, this is faster if the environment variable
    `OPENBLAS_NUM_THREADS` is 1.

    With a `mesh` of several processes, all of them call it with the same arguments, and
    share each product. The first one does everything else, and the others return what
    it finds.

    **Arguments:**

    - `operator`: a symmetric kernel of examples with themselves: an estimator, such as
        [`eqxbatch.EmpiricalNTK`][], or a kernel function, followed by the examples. Or,
        without `x`, an [`eqxbatch.KernelOperator`][] or a stored kernel:
        `kernel_solve(operator, y, ridge=...)`.
    - `x`: the examples, with the batch along axis 0.
    - `y`: right-hand sides of shape `(n,)` or `(n, k)`.
    - `ridge`: a non-negative number that is added to the diagonal, such as the variance
        of the noise.
    - `preconditioner_rank`: the rank of a partial Cholesky decomposition of the kernel
        that preconditions the system; 0 for none. It takes one column of the kernel for
        each rank. The larger the rank, the fewer products are needed. It requires a
        positive `ridge` and a real kernel. The default is 100 there, or the size of a
        smaller kernel, and 0 otherwise.
    - `rtol`: the norm to reach for each residual, relative to the norm of its
        right-hand side; between 0 and 1. The default is 1e-6 if products are in
        float64: for a stored kernel, or with 64-bit types enabled. Otherwise it is
        1,000 times the rounding error of the kernel's dtype (1.2e-4 in float32), and at
        most 0.01.
    - `max_steps`: the largest number of products with the kernel.
    - `checkpoint`: a folder to save the state in. If the run is stopped or killed, the
        same call continues it and returns bit for bit the result of an uninterrupted
        run, where products have the same bits, or else one within `rtol`. The kernel
        is checked by a product with a random vector, and the residual of a finished
        run is computed anew. Saving takes at most about a twentieth of the time. Of
        several processes, the first one writes it.
    - `progress`: True for a progress bar, or an [`eqxbatch.AbstractProgressMeter`][],
        which receives the largest relative residual after each product.
    - `**settings`: those of [`eqxbatch.KernelOperator`][] for a kernel with examples,
        such as `block_size`, `symmetric` and `store`. A kernel function needs
        `symmetric=True`.

    **Returns:**

    An [`eqxbatch.results.KernelSolution`][] with the weights, the residuals and the
    number of products.

    **Raises:**

    - `ValueError` for a kernel that is not symmetric, for a `y` with another number of
        rows or with NaNs or infinities, for a `ridge`, rank, `rtol` or `max_steps` out
        of range, for a rank without `ridge` or with a complex kernel, and for a
        checkpoint of another problem.
    - `TypeError` for settings of an operator that is one already, for arguments of
        another type, and inside `jax.jit` and other transforms; use
        `lineax.linear_solve` there.
    - `RuntimeError` if the kernel plus `ridge` is not positive definite, if a product
        has NaNs, if the residual stops decreasing, or if it is still too large after
        `max_steps`.
    - `RuntimeError` if another process fails with which it is computed.
    - `ImportError` if lineax is not installed.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> rbf = lambda x, y: jnp.exp(-jnp.sum((x - y) ** 2))
        >>> x = jnp.linspace(0.0, 3.0, 50)[:, None]
        >>> solution = eqxbatch.kernel_solve(
        ...     rbf, x, jnp.sin(x[:, 0]), ridge=0.1, pairwise=True, symmetric=True
        ... )
        >>> solution.weights.shape, bool(solution.residuals < 1.2e-4)
        ((50,), True)

        ```

    ??? cite

        Wang et al., "Exact Gaussian processes on a million data points",
        [arXiv:1903.08114](https://arxiv.org/abs/1903.08114).
    """
    # An operator has its examples, so that `y` comes second.
    x, y = (None, x) if y is None else (x, y)
    check_types({"y": y}, {"y": _Right})
    check_solve((operator, x, y, ridge))
    operator = _as_operator(operator, x, settings)
    struct = operator.matrix.struct
    ridge = _checked_ridge(ridge)
    rank = _checked_rank(preconditioner_rank, ridge, struct)
    rtol = _default_rtol(operator.matrix) if rtol is None else float(rtol)
    right, dtype = _checked_right(operator, y)
    if not 0 < rtol < 1:
        raise ValueError(f"`rtol` must be between 0 and 1; got {rtol}.")
    check_at_least("max_steps", max_steps, 1)
    _check_same(operator.matrix.team, right)
    # Single precision has a narrow range, so that columns are scaled to about 1.
    sizes = _column_scales(right)
    scaled = right / sizes

    def solve(matrix: AbstractKernelMatrix) -> list[np.ndarray]:
        # Only one of several processes may have a progress bar.
        meter = as_meter(progress)
        if meter is not None:
            check_takes_residual(meter, "kernel_solve")
        # A folder may be of another system, whose state would not be a start.
        saved = None
        if checkpoint is not None:
            problem = {
                "shape": list(right.shape),
                "y": digest(right),
                "ridge": ridge,
                "preconditioner_rank": rank,
                "rtol": rtol,
                "kernel": f"{matrix.struct.dtype}",
            }
            saved = Checkpoint(checkpoint, problem)
        factor = _factor(matrix, rank, saved)
        method = ConjugateGradients(
            _ridged_product(matrix, ridge),
            _preconditioner(factor, ridge),
            scaled,
            rtol,
        )
        probe = lambda: _probe(matrix)
        state = _solved(method, initial(scaled), max_steps, meter, saved, probe)
        residuals, num = method.residuals(state), np.int64(state.num_products)
        return [state.solution * sizes, residuals[None], num[None, None]]

    solution, residuals, num = led(operator.matrix, solve)
    # Weights have the dtype that kernel and right-hand sides promote to.
    weights = jnp.asarray(solution.astype(dtype)).reshape(y.shape)
    residuals = jnp.asarray(residuals.astype(weights.real.dtype))
    return KernelSolution(weights, residuals.reshape(y.shape[1:]), int(num[0, 0]))


def _check_same(team: Team, right: np.ndarray) -> None:
    """Raises `ValueError` if the processes have other right-hand sides."""
    if team.num == 1:
        return
    own = np.frombuffer(bytes.fromhex(digest(right)), np.uint32)
    first = team.from_first(own)

    def check() -> None:
        if not np.array_equal(first, own):
            raise ValueError("`y` must be the same in all processes, with all rows.")

    team.together(check)


def _as_operator(
    kernel: object, x: PyTree, settings: dict[str, Any]
) -> "KernelOperator":
    """The operator of a kernel, which may be one already."""
    # Its class is one of lineax, which is optional.
    import_extra("lineax", "kernel_solve", "linalg")
    from .operator import KernelOperator

    if isinstance(kernel, KernelOperator):
        if x is not None or settings:
            names = [*(["x"] if x is not None else []), *settings]
            raise TypeError(
                f"`operator` is a `KernelOperator`, which has its examples and "
                f"settings already; got `{'`, `'.join(names)}`. Call "
                "`kernel_solve(operator, y, ridge=...)`."
            )
        return kernel
    if x is None and callable(kernel):
        raise TypeError(
            f"`operator` is a kernel without its examples: {described(kernel)}. Call "
            "`kernel_solve(kernel, x, y, ridge=...)`."
        )
    return KernelOperator(kernel, x, **settings)


# The default rank of the preconditioner.
_RANK = 100


def _solved(
    method: ConjugateGradients,
    state: State,
    max_steps: int,
    meter: AbstractProgressMeter | None,
    saved: Checkpoint | None,
    probe: Callable[[], "_Probe"],
) -> State:
    """The final state; the iteration starts from a saved state, if there is one.

    `probe` computes a product that tells kernels apart, which is saved with the state,
    and its rounding.
    """
    # A saved state is a start only for the same kernel.
    image = np.zeros(0)
    if saved is not None:
        (image, tolerance), arrays = probe(), saved.load("state")
        if arrays is not None:
            _check_same_kernel(arrays.pop("probe"), image, tolerance)
            state = method.verified(State.from_arrays(arrays))
    # The last state is saved in any case, so that a finished run is not run again.
    steps = method.steps(state)
    texts = "kernel solve", "product"
    with metered(meter, max_steps, state.num_products, *texts) as step:
        for state in steps:
            step(0, float(np.max(method.residuals(state))))
            is_last = state.num_products >= max_steps or method.is_done(state)
            if saved is not None:
                arrays = {**vars(state), "probe": image}
                saved.save("state", arrays, even_if_slow=is_last)
            if is_last:
                break
    # Out of steps: what is not a solution must not look like one.
    if not method.is_done(state):
        raise RuntimeError(
            f"After {max_steps} products, the largest relative residual is "
            f"{np.max(method.residuals(state)):.1e}. Pass a larger "
            "`preconditioner_rank`, `ridge`, `rtol` or `max_steps`."
        )
    return state


class _Probe(NamedTuple):
    """The product of a kernel with a random vector, and how much rounding changes it.

    Every entry has a part in it, unlike in products with sparse right-hand sides.
    """

    image: np.ndarray
    tolerance: float


def _probe(matrix: AbstractKernelMatrix) -> _Probe:
    struct = matrix.struct
    # The same vector in every run, so that products of two runs can be compared.
    vector = np.random.default_rng(0).standard_normal((struct.shape[0], 1))
    short = np.result_type(struct.dtype, np.float32)
    with standard_promotion():
        image = matrix.product(vector.astype(short))
    # Half of the digits are left to roundings, for long sums and steep kernels.
    size = float(np.max(np.abs(image), initial=0))
    return _Probe(image, math.sqrt(_eps(matrix)) * size)


def _check_same_kernel(saved: np.ndarray, image: np.ndarray, tolerance: float) -> None:
    """Raises if a probe of the kernel is not the saved one, up to rounding.

    Bits differ with the number of threads and between devices. The residual that is
    computed at the end is that of this kernel in any case.
    """
    if not np.max(np.abs(image - saved), initial=0) <= tolerance:
        raise ValueError(
            "`checkpoint` belongs to another kernel: its product with a random vector "
            "differs by more than rounding. Delete it, or pass another path."
        )


def _default_rtol(matrix: AbstractKernelMatrix) -> float:
    """What the residuals of products with a kernel can reach, for most kernels."""
    # Products are in float64 there; otherwise, they have the digits of the kernel.
    if isinstance(matrix, StoredMatrix) or jnp.zeros(()).dtype == jnp.float64:
        return reachable_rtol(np.float64)
    return reachable_rtol(matrix.struct.dtype)


def _checked_ridge(ridge: float | AnyArray) -> float:
    value = float(ridge)
    if not 0 <= value < math.inf:
        raise ValueError(f"`ridge` must not be negative, NaN or infinite; got {value}.")
    return value


def _checked_rank(rank: int | None, ridge: float, struct: jax.ShapeDtypeStruct) -> int:
    """The rank of the preconditioner, by default where there can be one."""
    if rank is None:
        return min(_RANK, struct.shape[0]) if ridge and not is_complex(struct) else 0
    rank = int(rank)
    if not 0 <= rank <= struct.shape[0]:
        raise ValueError(
            f"`preconditioner_rank` must be between 0 and {struct.shape[0]}, the size "
            f"of the kernel; got {rank}."
        )
    if rank and ridge == 0:
        raise ValueError(
            "A preconditioner needs a `ridge` above 0, as a matrix of low rank has no "
            "inverse. Pass one, or leave `preconditioner_rank` out."
        )
    if rank and is_complex(struct):
        raise ValueError(
            f"`preconditioner_rank` is for real kernels; got dtype {struct.dtype}. "
            "Leave it out."
        )
    return rank


class _RightSides(NamedTuple):
    """Right-hand sides as columns in double precision, and the dtype of weights."""

    columns: np.ndarray
    dtype: Any


def _checked_right(operator: "KernelOperator", y: Array | np.ndarray) -> _RightSides:
    struct = operator.matrix.struct
    if not operator.matrix.is_hermitian:
        raise ValueError(
            "`operator` must be of a symmetric kernel of examples with themselves. "
            "Pass `symmetric=True` and leave out `x2`; for other kernels, use "
            "`lineax.linear_solve(operator, y, lineax.GMRES(rtol, atol))`."
        )
    if y.shape[0] != struct.shape[0]:
        raise ValueError(
            f"`y` must have {struct.shape[0]} rows, as the kernel has; got shape "
            f"{y.shape}."
        )
    # [n, k], in double precision, as are all vectors of the solver.
    right = as_numpy(y).reshape(struct.shape[0], math.prod(y.shape[1:]))
    right = right.astype(np.result_type(right.dtype, np.float64))
    if is_complex(struct):
        right = right.astype(np.complex128)
    if not np.all(np.isfinite(right)):
        raise ValueError("`y` must be finite; got NaNs or infinities.")
    with jax.numpy_dtype_promotion("standard"):
        return _RightSides(right, jnp.result_type(struct.dtype, y.dtype))


def _column_scales(columns: Inexact[np.ndarray, "n k"]) -> Inexact[np.ndarray, " k"]:
    """The largest entry of each column, rounded down to a power of two.

    Divided by them, columns neither vanish nor overflow in single precision, nor when
    they are squared, and no entry is rounded.
    """
    largest = np.max(np.abs(columns), axis=0, initial=0)
    # `x = m 2^e` with `0.5 <= m < 1`, so that `2^(e - 1)` is at most `x`.
    _, exponents = np.frexp(np.where(largest > 0, largest, 1))
    return np.ldexp(1.0, exponents - 1)


def _ridged_product(matrix: AbstractKernelMatrix, ridge: float) -> Product:
    short = np.result_type(matrix.struct.dtype, np.float32)

    def product(vectors: np.ndarray, is_exact: bool) -> np.ndarray:
        fast = np.result_type(short, np.complex64) if is_complex(vectors) else short
        # A residual that decides needs all digits; the recurrence does without.
        dtype = vectors.dtype if is_exact else fast
        with standard_promotion():
            image = matrix.product(vectors.astype(dtype))
        return image.astype(vectors.dtype) + ridge * vectors

    return product


def _preconditioner(
    factor: np.ndarray | None, ridge: float
) -> Callable[[np.ndarray], np.ndarray]:
    """Applies the inverse of `factor @ factor.T + ridge`."""
    if factor is None:
        return lambda residual: residual
    # Woodbury: (F F^T + r)^-1 = (1 - F (F^T F + r)^-1 F^T) / r, with a matrix of the
    # size of the rank.
    gram = factor.T @ factor
    # What is subtracted must not be 1 up to rounding.
    ridge = max(ridge, _LEAST_RIDGE * np.trace(gram))
    root = np.linalg.cholesky(gram + ridge * np.eye(len(gram)))
    half = np.linalg.solve(root, factor.T)
    return lambda residual: (residual - half.T @ (half @ residual)) / ridge


# The smallest ridge of a preconditioner, relative to the sum of its eigenvalues.
_LEAST_RIDGE = 1e-12


def _factor(
    matrix: AbstractKernelMatrix, rank: int, saved: Checkpoint | None
) -> np.ndarray | None:
    """A partial Cholesky decomposition, of shape (n, rank) or less."""
    if rank == 0 or matrix.struct.shape[0] == 0:
        return None
    arrays = None if saved is None else saved.load("preconditioner")
    if arrays is None:
        # It takes a column of the kernel for each rank, and so it is saved at once.
        arrays = {"factor": _partial_cholesky(matrix, rank)}
        if saved is not None:
            saved.save("preconditioner", arrays, even_if_slow=True)
    factor = arrays["factor"]
    num = factor.shape[1]
    if num < rank:
        log.debug("kernel_solve: %d of %d ranks of the preconditioner.", num, rank)
    return factor if num else None


def _partial_cholesky(
    matrix: AbstractKernelMatrix, rank: int
) -> Float[np.ndarray, "n num"]:
    """A partial Cholesky decomposition, by the largest entries left on the diagonal."""
    diagonal = matrix.diagonal()
    check_solve(diagonal)  # A kernel function may close over traced arrays.
    # The diagonal of what the factor does not explain so far.
    left = np.array(diagonal, np.float64)
    factor = np.zeros((len(left), rank))
    # Smaller entries are rounding errors, beyond the numerical rank.
    least, column_of = _eps(matrix) * np.max(left), matrix.columns()
    for i in range(rank):
        pivot = int(np.argmax(left))
        column = np.asarray(column_of(jnp.asarray(pivot, jnp.int32)), np.float64)
        if not left[pivot] > least or not np.all(np.isfinite(column)):
            return factor[:, :i]
        # The same column of what is left, so that the factor explains it exactly.
        factor[:, i] = (column - factor @ factor[pivot]) / np.sqrt(left[pivot])
        left -= factor[:, i] ** 2
    return factor


def _eps(matrix: AbstractKernelMatrix) -> float:
    """The relative rounding error of the entries of a kernel."""
    dtype = matrix.struct.dtype
    is_inexact = jnp.issubdtype(dtype, jnp.inexact)
    dtype = dtype if is_inexact else np.result_type(dtype, np.float32)
    return float(jnp.finfo(dtype).eps)
