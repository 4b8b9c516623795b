"""Conjugate gradients for some right-hand sides, which a file resumes."""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

import jax
import numpy as np
from jaxtyping import Inexact, Shaped

from .._batch.fingerprint import check_record, read_json


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
        # A folder that describes a problem must describe this one.
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
        # The description is there before any state, which is then never without one.
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
        # After `t` seconds of saving, at least `t / _SHARE` are for solving.
        self._next = end + (end - begin) / _SHARE

    def _replace(self, file: pathlib.Path, write: Callable[[BinaryIO], Any]) -> None:
        partial = file.with_name(file.name + _PARTIAL)
        with partial.open("wb") as out:
            write(out)
            out.flush()
            os.fsync(out.fileno())
        # The bytes are on the disk before the name is theirs, so that it always names a
        # whole file: the old or the new one.
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
            # Where the recurrence says that all is solved, the true residual has the
            # last word.
            is_open = self._is_open(state.residual)
            state = self._step(state, is_open) if np.any(is_open) else self._anew(state)
            yield state

    def _step(self, state: State, is_open: np.ndarray) -> State:
        # The method needs a positive energy in each column that is not solved yet.
        conditioned = self._preconditioner(state.residual)
        energy = _inner(state.residual, conditioned)
        if np.any(is_open & ~(energy > 0)):
            raise RuntimeError(
                "The preconditioner is not positive definite for this residual, or "
                "there are NaNs: its product with the residual is "
                f"{energy[is_open].min()}. Pass a smaller `preconditioner_rank`, or a "
                "larger `ridge`."
            )
        # After a restart, the recurrence knows nothing of earlier directions.
        share = np.zeros_like(energy)
        if not state.is_exact:
            np.divide(energy, state.energy, out=share, where=is_open)
        direction = conditioned + share * state.direction
        # Columns that are solved keep their solution: their steps have length 0.
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


@contextlib.contextmanager
def standard_promotion() -> Iterator[None]:
    """Promotes dtypes and ranks by the standard rules, whatever the user's settings.

    Kernels in single precision can then be multiplied with vectors in double precision.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
