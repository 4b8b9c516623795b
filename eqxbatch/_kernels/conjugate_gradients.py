"""Preconditioned conjugate gradients for several right-hand sides, step by step."""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Inexact, Shaped


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

    def arrays(self) -> dict[str, np.ndarray]:
        """The fields as arrays, which can be saved."""
        return {name: np.asarray(x) for name, x in dataclasses.asdict(self).items()}

    @staticmethod
    def from_arrays(arrays: dict[str, np.ndarray]) -> "State":
        scalars = {
            "num_products": int(arrays["num_products"]),
            "is_exact": bool(arrays["is_exact"]),
        }
        return State(**{**arrays, **scalars})


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
        if not state.is_exact:
            return state
        residual, norms = self._exact(state)
        return dataclasses.replace(state, residual=residual, start=norms)

    def _exact(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        """The residual from a product in full precision, and its norms."""
        residual = self._right - self._product(state.solution, True)
        return residual, np.linalg.norm(residual, axis=0)

    def _anew(self, state: State) -> State:
        """The state with a residual in full precision."""
        residual, norms = self._exact(state)
        is_open = self._is_open(residual)
        _check_finite(norms)
        if np.any(is_open & ~(norms < _STAGNATION * state.start)):
            worst = np.max(relative_norms(residual, self._right))
            raise RuntimeError(
                f"The relative residual does not fall below {worst:.1e}, and `rtol` is "
                f"{self._rtol:.1e}: products with a kernel of its dtype are not "
                "exact enough. Pass a larger `rtol` or `ridge`, store the kernel "
                "(`store=HostStore()`), or use float64."
            )
        return State(
            state.solution,
            residual,
            state.direction,
            state.energy,
            norms,
            state.num_products + 1,
            True,
        )


def _check_finite(numbers: np.ndarray) -> None:
    if not np.all(np.isfinite(numbers)):
        raise RuntimeError(
            "The product with the kernel has NaNs or infinities. Look for them in the "
            "examples, and in the kernel with `progress=TqdmProgressMeter()`, which "
            "counts them."
        )


def _check_curvature(curvature: np.ndarray, is_open: np.ndarray) -> None:
    _check_finite(curvature[is_open])
    if np.any(is_open & (curvature <= 0)):
        raise RuntimeError(
            "The kernel plus `ridge` is not positive definite: a vector `v` was found "
            f"with `v @ (kernel + ridge) @ v` = {curvature[is_open].min():.3e}. Pass a "
            "larger `ridge`, or use `lineax.GMRES` for a kernel that is not positive."
        )
