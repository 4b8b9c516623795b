"""`kernel_solve`: systems with a kernel that need not fit in memory."""

import contextlib
import dataclasses
import hashlib
import inspect
import io
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, cast, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, PyTree, Shaped

from .._base.checks import AnyArray, check_at_least, check_types, checked
from .._base.dtypes import is_complex
from .._base.trees import described, log
from .._batch.batch import as_numpy
from .._batch.progress import AbstractProgressMeter, as_meter, metered, Progress
from .._batch.store import check_record, digest, read_json
from .on_host import check_solve


if TYPE_CHECKING:
    from .operator import AbstractMatrix, KernelOperator


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
        run is computed anew. Saving takes at most about a twentieth of the time.
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
    meter = as_meter(progress)
    if meter is not None:
        _check_meter(meter)
    saved = None
    if checkpoint is not None:
        problem = {
            "shape": list(right.shape),
            "y": digest(right),
            "ridge": ridge,
            "preconditioner_rank": rank,
            "rtol": rtol,
            "kernel": f"{operator.matrix.struct.dtype}",
        }
        saved = Checkpoint(checkpoint, problem)
    factor = _factor(operator, rank, saved)
    sizes = _sizes(right)
    right = right / sizes
    method = ConjugateGradients(
        _product(operator, ridge), _preconditioner(factor, ridge), right, rtol
    )
    probe = lambda: _probe(operator.matrix)
    state = _solved(method, initial(right), max_steps, meter, saved, probe)
    solution = state.solution * sizes
    weights = jnp.asarray(solution.astype(dtype)).reshape(y.shape)
    residuals = method.residuals(state).astype(weights.real.dtype)
    return KernelSolution(
        weights, jnp.asarray(residuals).reshape(y.shape[1:]), state.num_products
    )


def _as_operator(kernel: Any, x: PyTree, settings: dict[str, Any]) -> "KernelOperator":
    """The operator of a kernel, which may be one already."""
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


_FORMAT = 3


_PARTIAL = ".partial"


# The bytes of a SHA-256, at the end of a file of arrays.
_CHECKSUM = 32


_KEPT = (
    "The saved state is kept. Restore this file, or delete the folder to begin anew."
)


# Saving takes at most about this fraction of the time.
_SHARE = 0.05


class Checkpoint:
    """A folder with the state of a solver and a description of its problem.

    Files are replaced as a whole, so a run can be killed at any time.
    """

    def __init__(self, path: str | os.PathLike, problem: dict[str, Any]):
        self._path = pathlib.Path(path)
        self._problem = {"format": _FORMAT, **problem}
        self._next = 0.0
        if self._path.exists() and not self._path.is_dir():
            raise ValueError(
                f"`checkpoint` must be a folder, or not exist; got the file {path}."
            )
        about = self._path / "problem.json"
        if about.exists():
            saved = read_json("checkpoint", about, _KEPT)
            what = "belongs to another problem"
            check_record("checkpoint", self._path, saved, self._problem, what)
            return
        # A run that was killed may have left a part of a file.
        if self._path.exists() and any(
            file.name != about.name + _PARTIAL for file in self._path.iterdir()
        ):
            raise ValueError(
                f"`checkpoint` is a folder with something other than a checkpoint: "
                f"{path}. Pass an empty folder, or one that does not exist."
            )
        text = json.dumps(self._problem).encode()
        self._path.mkdir(parents=True, exist_ok=True)
        self._replace(about, lambda file: file.write(text))

    def load(self, name: str) -> dict[str, np.ndarray] | None:
        """The arrays that were saved under a name; None if there are none."""
        file = self._path / f"{name}.npz"
        if not file.exists():
            return None
        data = file.read_bytes()
        saved, checksum = data[:-_CHECKSUM], data[-_CHECKSUM:]
        if hashlib.sha256(saved).digest() != checksum:
            raise ValueError(
                f"`checkpoint` has a damaged file: {file}, whose checksum is wrong. "
                "The other files are kept. Delete this one, and the call computes what "
                "was in it anew."
            )
        with np.load(io.BytesIO(saved), allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}

    def save(
        self, name: str, arrays: dict[str, np.ndarray], *, even_if_slow: bool
    ) -> None:
        """Saves arrays, unless saving would take more than its share of the time.

        With `even_if_slow`, arrays are always saved.
        """
        begin = time.monotonic()
        if begin < self._next and not even_if_slow:
            return
        file = self._path / f"{name}.npz"
        data = io.BytesIO()
        np.savez(data, **cast(Any, arrays))
        saved = data.getbuffer()
        checksum = hashlib.sha256(saved).digest()
        self._replace(file, lambda out: out.writelines((saved, checksum)))
        end = time.monotonic()
        self._next = end + (end - begin) / _SHARE

    def _replace(self, file: pathlib.Path, write: Any) -> None:
        partial = file.with_name(file.name + _PARTIAL)
        with partial.open("wb") as out:
            write(out)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(file)


_Matrix = Shaped[np.ndarray, "n k"]


# A product with vectors. It also takes whether the product must be exact: in the dtype
# of the vectors, and not in a shorter one.
Product = Callable[[_Matrix, bool], _Matrix]


# If a recomputed residual is not below this fraction of the previous one, it will not
# decrease any further.
_STAGNATION = 0.5


@dataclasses.dataclass
class State:
    """Everything that the next step depends on.

    - `solution`, `residual`, `direction`: one column for each right-hand side.
    - `energy`: the product of the residual with the preconditioned residual.
    - `start`: the norms of the residuals at the last restart, from products in full
        precision.
    - `num_products`: the number of products with the matrix so far.
    - `is_exact`: whether the residual is from a product in full precision instead of
        the recurrence. The next step is then the first one after a restart.
    """

    solution: np.ndarray
    residual: np.ndarray
    direction: np.ndarray
    energy: np.ndarray
    start: np.ndarray
    num_products: int
    is_exact: bool

    @staticmethod
    def from_arrays(arrays: dict[str, np.ndarray]) -> "State":
        num, is_exact = int(arrays["num_products"]), bool(arrays["is_exact"])
        return State(**{**arrays, "num_products": num, "is_exact": is_exact})


def initial(right: Inexact[np.ndarray, "n k"]) -> State:
    """The state of a solution of zeros, whose residual is the right-hand side."""
    zeros = np.zeros_like(right)
    norms = np.linalg.norm(right, axis=0)
    return State(zeros, right.copy(), zeros, np.zeros_like(norms), norms, 0, True)


def _inner(x: np.ndarray, y: np.ndarray) -> Inexact[np.ndarray, " k"]:
    return np.real(np.sum(np.conj(x) * y, axis=0))


def relative_norms(x: np.ndarray, right: np.ndarray) -> Inexact[np.ndarray, " k"]:
    """The norms of columns, relative to those of the right-hand sides."""
    norms, wholes = np.linalg.norm(x, axis=0), np.linalg.norm(right, axis=0)
    return norms / np.where(wholes > 0, wholes, 1)


class ConjugateGradients:
    """Solves `matrix @ solution = right` for a positive definite matrix.

    The residual from the recurrence drifts away from the true one. Once it is small
    enough, the true residual is computed in full precision. If that is still too large,
    the method restarts from there.
    """

    def __init__(
        self,
        product: Product,
        preconditioner: Callable[[_Matrix], _Matrix],
        right: Inexact[np.ndarray, "n k"],
        rtol: float,
    ):
        self._product, self._preconditioner = product, preconditioner
        self._right, self._rtol = right, rtol

    def residuals(self, state: State) -> Inexact[np.ndarray, " k"]:
        """The norms of the residuals, relative to the right-hand sides."""
        return relative_norms(state.residual, self._right)

    def is_done(self, state: State) -> bool:
        """Whether the solution is found, and its residual exact."""
        return state.is_exact and not np.any(self._is_open(state.residual))

    def _is_open(self, residual: np.ndarray) -> np.ndarray:
        """Which columns are not solved yet, including those with NaNs."""
        return ~(relative_norms(residual, self._right) <= self._rtol)

    def steps(self, state: State) -> Iterator[State]:
        """The states after each product, up to one whose exact residual is small.

        Raises `RuntimeError` if there is no progress.
        """
        while not self.is_done(state):
            is_open = self._is_open(state.residual)
            state = self._step(state, is_open) if np.any(is_open) else self._anew(state)
            yield state

    def _step(self, state: State, is_open: np.ndarray) -> State:
        conditioned = self._preconditioner(state.residual)
        energy = _inner(state.residual, conditioned)
        if np.any(is_open & ~(energy > 0)):
            raise RuntimeError(
                "The preconditioner is not positive definite for this residual, or "
                "there are NaNs: its product with the residual is "
                f"{energy[is_open].min()}. Pass a smaller `preconditioner_rank`, or a "
                "larger `ridge`."
            )
        share = np.zeros_like(energy)
        if not state.is_exact:
            np.divide(energy, state.energy, out=share, where=is_open)
        direction = conditioned + share * state.direction
        image = self._product(direction, False)
        curvature = _inner(direction, image)
        _check_curvature(curvature, is_open)
        length = np.zeros_like(energy)
        np.divide(energy, curvature, out=length, where=is_open)
        return State(
            state.solution + length * direction,
            state.residual - length * image,
            direction,
            energy,
            state.start,
            state.num_products + 1,
            False,
        )

    def verified(self, state: State) -> State:
        """A saved state whose residual, if it is said to be exact, is computed anew."""
        return self._exact(state) if state.is_exact else state

    def _exact(self, state: State) -> State:
        """The state with a residual from a product in full precision."""
        residual = self._right - self._product(state.solution, True)
        norms = np.linalg.norm(residual, axis=0)
        return dataclasses.replace(state, residual=residual, start=norms, is_exact=True)

    def _anew(self, state: State) -> State:
        """The exact state, from which the iteration restarts."""
        new = self._exact(state)
        _check_finite(new.start)
        is_stuck = ~(new.start < _STAGNATION * state.start)
        if np.any(self._is_open(new.residual) & is_stuck):
            worst = np.max(self.residuals(new))
            raise RuntimeError(
                f"The relative residual does not fall below {worst:.1e}, and `rtol` is "
                f"{self._rtol:.1e}: products with a kernel of its dtype are not "
                "exact enough. Pass a larger `rtol` or `ridge`, store the kernel "
                "(`store='host'`), or use float64."
            )
        return dataclasses.replace(new, num_products=state.num_products + 1)


def _check_finite(numbers: np.ndarray) -> None:
    if not np.all(np.isfinite(numbers)):
        raise RuntimeError(
            "The product with the kernel has NaNs or infinities. Look for them in the "
            "examples, and in the kernel with `progress=True`, which counts them."
        )


def _check_curvature(curvature: np.ndarray, is_open: np.ndarray) -> None:
    _check_finite(curvature[is_open])
    if np.any(is_open & (curvature <= 0)):
        raise RuntimeError(
            "The kernel plus `ridge` is not positive definite: a vector `v` was found "
            f"with `v @ (kernel + ridge) @ v` = {curvature[is_open].min():.3e}. Pass a "
            "larger `ridge`, or use `lineax.GMRES` for a kernel that is not positive."
        )


def _solved(
    method: ConjugateGradients,
    state: State,
    max_steps: int,
    meter: AbstractProgressMeter | None,
    saved: Checkpoint | None,
    probe: Callable[[], tuple[np.ndarray, float]],
) -> State:
    """The final state; the iteration starts from a saved state, if there is one.

    `probe` computes a product that tells kernels apart, which is saved with the state,
    and its rounding.
    """
    image = np.zeros(0)
    if saved is not None:
        (image, tolerance), arrays = probe(), saved.load("state")
        if arrays is not None:
            _check_same(arrays.pop("probe"), image, tolerance)
            state = method.verified(State.from_arrays(arrays))
    steps = method.steps(state)
    with metered(meter, max_steps, state.num_products) as step:
        for state in steps:
            step(0, float(np.max(method.residuals(state))))
            is_last = state.num_products >= max_steps or method.is_done(state)
            if saved is not None:
                arrays = {**vars(state), "probe": image}
                saved.save("state", arrays, even_if_slow=is_last)
            if is_last:
                break
    if not method.is_done(state):
        raise RuntimeError(
            f"After {max_steps} products, the largest relative residual is "
            f"{np.max(method.residuals(state)):.1e}. Pass a larger "
            "`preconditioner_rank`, `ridge`, `rtol` or `max_steps`."
        )
    return state


def _probe(matrix: "AbstractMatrix") -> tuple[np.ndarray, float]:
    """The product of a kernel with a random vector, and how much rounding changes it.

    Every entry has a part in it, unlike in products with sparse right-hand sides.
    """
    struct = matrix.struct
    vector = np.random.default_rng(0).standard_normal((struct.shape[0], 1))
    short = np.result_type(struct.dtype, np.float32)
    with standard_promotion():
        image = matrix.product(vector.astype(short))
    # Half of the digits are left to roundings, for long sums and steep kernels.
    return image, math.sqrt(_eps(matrix)) * float(np.max(np.abs(image), initial=0))


def _check_same(saved: np.ndarray, image: np.ndarray, tolerance: float) -> None:
    """Raises if a probe of the kernel is not the saved one, up to rounding.

    Bits differ with the number of threads and between devices. The residual that is
    computed at the end is that of this kernel in any case.
    """
    if not np.max(np.abs(image - saved), initial=0) <= tolerance:
        raise ValueError(
            "`checkpoint` belongs to another kernel: its product with a random vector "
            "differs by more than rounding. Delete it, or pass another path."
        )


def _default_rtol(matrix: "AbstractMatrix") -> float:
    """What the residuals of products with a kernel can reach, for most kernels."""
    from .operator import StoredMatrix

    if isinstance(matrix, StoredMatrix) or jnp.zeros(()).dtype == jnp.float64:
        return 1e-6
    return min(1_000 * float(jnp.finfo(matrix.struct.dtype).eps), 0.01)


def _checked_ridge(ridge: Any) -> float:
    value = float(ridge)
    if not 0 <= value < math.inf:
        raise ValueError(f"`ridge` must not be negative, NaN or infinite; got {value}.")
    return value


def _checked_rank(rank: int | None, ridge: float, struct: Any) -> int:
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


def _checked_right(operator: "KernelOperator", y: Any) -> tuple[np.ndarray, Any]:
    """The right-hand sides as columns in double precision, and their own dtype."""
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
    right = as_numpy(y).reshape(struct.shape[0], math.prod(y.shape[1:]))
    right = right.astype(np.result_type(right.dtype, np.float64))
    if is_complex(struct):
        right = right.astype(np.complex128)
    if not np.all(np.isfinite(right)):
        raise ValueError("`y` must be finite; got NaNs or infinities.")
    with jax.numpy_dtype_promotion("standard"):
        return right, jnp.result_type(struct.dtype, y.dtype)


def _sizes(columns: Inexact[np.ndarray, "n k"]) -> Inexact[np.ndarray, " k"]:
    """The largest entry of each column, rounded down to a power of two.

    Divided by them, columns neither vanish nor overflow in single precision, nor when
    they are squared, and no entry is rounded.
    """
    largest = np.max(np.abs(columns), axis=0, initial=0)
    _, exponents = np.frexp(np.where(largest > 0, largest, 1))
    return np.ldexp(1.0, exponents - 1)


def _check_meter(meter: AbstractProgressMeter) -> None:
    try:
        inspect.signature(meter.step).bind(None, 0, 1.0)
    except TypeError:
        raise TypeError(
            f"`step` of `{type(meter).__name__}` must take a third argument, the "
            "residual, to be used by `kernel_solve`."
        ) from None


def _product(operator: "KernelOperator", ridge: float) -> Product:
    matrix = operator.matrix
    short = np.result_type(matrix.struct.dtype, np.float32)

    def product(vectors: np.ndarray, is_exact: bool) -> np.ndarray:
        fast = np.result_type(short, np.complex64) if is_complex(vectors) else short
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
    gram = factor.T @ factor
    # What is subtracted must not be 1 up to rounding.
    ridge = max(ridge, _LEAST_RIDGE * np.trace(gram))
    root = np.linalg.cholesky(gram + ridge * np.eye(len(gram)))
    half = np.linalg.solve(root, factor.T)
    return lambda residual: (residual - half.T @ (half @ residual)) / ridge


# The smallest ridge of a preconditioner, relative to the sum of its eigenvalues.
_LEAST_RIDGE = 1e-12


def _factor(
    operator: "KernelOperator", rank: int, saved: Checkpoint | None
) -> np.ndarray | None:
    """A partial Cholesky decomposition, of shape (n, rank) or less."""
    if rank == 0 or operator.matrix.struct.shape[0] == 0:
        return None
    arrays = None if saved is None else saved.load("preconditioner")
    if arrays is None:
        arrays = {"factor": _partial_cholesky(operator.matrix, rank)}
        if saved is not None:
            saved.save("preconditioner", arrays, even_if_slow=True)
    factor = arrays["factor"]
    num = factor.shape[1]
    if num < rank:
        log.debug("kernel_solve: %d of %d ranks of the preconditioner.", num, rank)
    return factor if num else None


def _partial_cholesky(
    matrix: "AbstractMatrix", rank: int
) -> Float[np.ndarray, "n num"]:
    """A partial Cholesky decomposition, by the largest entries left on the diagonal."""
    diagonal = matrix.diagonal()
    check_solve(diagonal)  # A kernel function may close over traced arrays.
    left = np.array(diagonal, np.float64)
    factor = np.zeros((len(left), rank))
    # Smaller entries are rounding errors, beyond the numerical rank.
    least = _eps(matrix) * np.max(left)
    for i in range(rank):
        pivot = int(np.argmax(left))
        column = np.asarray(matrix.column(jnp.asarray(pivot, jnp.int32)), np.float64)
        if not left[pivot] > least or not np.all(np.isfinite(column)):
            return factor[:, :i]
        factor[:, i] = (column - factor @ factor[pivot]) / np.sqrt(left[pivot])
        left -= factor[:, i] ** 2
    return factor


def _eps(matrix: "AbstractMatrix") -> float:
    """The relative rounding error of the entries of a kernel."""
    dtype = matrix.struct.dtype
    is_inexact = jnp.issubdtype(dtype, jnp.inexact)
    dtype = dtype if is_inexact else np.result_type(dtype, np.float32)
    return float(jnp.finfo(dtype).eps)


@contextlib.contextmanager
def standard_promotion() -> Iterator[None]:
    """Promotes dtypes and ranks by the standard rules, whatever the user's settings.

    Kernels in single precision can then be multiplied with vectors in double precision.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
