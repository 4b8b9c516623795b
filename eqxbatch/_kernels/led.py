"""Solves that several processes compute together, of which the first one leads."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from .._base.types import AnyArray
from .conjugate_gradients import standard_promotion
from .kernel_matrices import AbstractKernelMatrix
from .team import Team


# What the first process asks all for, and how it ends.
_PRODUCT, _DIAGONAL, _COLUMN, _END, _FAILED = range(5)


# The dtypes that vectors have.
_DTYPES = (np.float32, np.float64, np.complex64, np.complex128, np.int64)


class _Order(NamedTuple):
    """What the first process tells all others.

    - `kind`: what to do.
    - `array`: what with.
    """

    kind: int
    array: np.ndarray = np.zeros((0, 0))


_NONE = _Order(_FAILED)


class _Orders:
    """The orders of the first process, which all others hear.

    Each message has room for as many bytes as any array that came before, because what
    processes send each other costs more than the bytes do.
    """

    def __init__(self, team: Team):
        self.team = team
        self.room = 0

    def told(self, order: _Order = _NONE) -> _Order:
        """The order of the first process; what others give does not matter."""
        array = np.ascontiguousarray(order.array)
        sizes = (*array.shape, _DTYPES.index(array.dtype.type))
        head = np.array([order.kind, *sizes], np.int64).tobytes()
        fits = array.nbytes <= self.room
        body = (array.tobytes() if fits else b"").ljust(self.room, b"\0")
        heard = self.team.from_first(np.frombuffer(head + body, np.uint32)).tobytes()
        kind, rows, columns, number = np.frombuffer(heard[: len(head)], np.int64)
        dtype = np.dtype(_DTYPES[number])
        size = int(rows * columns * dtype.itemsize)
        if size <= self.room:
            found = np.frombuffer(heard[len(head) :][:size], dtype)
        else:
            # Now that all know how much will come.
            self.room = size
            is_first = self.team.rank == 0
            sent = array.reshape(-1) if is_first else np.zeros(rows * columns, dtype)
            found = self.team.from_first(sent)
        return _Order(int(kind), found.reshape(rows, columns))


class LedMatrix(AbstractKernelMatrix):
    """A matrix of which all processes compute a part when the first one asks for it."""

    original: AbstractKernelMatrix
    orders: _Orders = eqx.field(static=True)

    @property
    def team(self) -> Team:
        return self.orders.team

    def product(self, vectors: AnyArray, *, is_transposed: bool = False) -> Any:
        assert not is_transposed
        return self._ordered(_Order(_PRODUCT, np.asarray(vectors)))

    def whole(self) -> Array:
        return self.original.whole()

    def diagonal(self) -> Array:
        return jnp.asarray(self._ordered(_Order(_DIAGONAL)))

    def column(self, index: Int[Array, ""]) -> Array:
        number = np.full((1, 1), index, np.int64)
        return jnp.asarray(self._ordered(_Order(_COLUMN, number)))

    def columns(self) -> Callable[[Int[Array, ""]], Shaped[Array, " n1"]]:
        return self.column

    def _ordered(self, order: _Order) -> np.ndarray:
        return _obeyed(self.original, self.team, self.orders.told(order))


def _obeyed(matrix: AbstractKernelMatrix, team: Team, order: _Order) -> np.ndarray:
    def run() -> np.ndarray:
        if order.kind == _PRODUCT:
            # As in the first process, which would compile another program otherwise.
            with standard_promotion():
                return matrix.product(order.array)
        if order.kind == _DIAGONAL:
            return np.asarray(matrix.diagonal())
        return np.asarray(matrix.column(jnp.asarray(order.array[0, 0], jnp.int32)))

    return team.together(run)


def led(
    matrix: AbstractKernelMatrix,
    solve: Callable[[AbstractKernelMatrix], list[np.ndarray]],
) -> list[np.ndarray]:
    """The arrays that `solve` returns in the first process, in all of them.

    Only the first one decides anything: processors of other kinds may round otherwise,
    and processes that decide otherwise would wait for each other.
    """
    team = matrix.team
    if team.num == 1:
        return solve(matrix)
    orders = _Orders(team)
    if team.rank > 0:
        return _followed(matrix, orders)
    try:
        results = solve(LedMatrix(matrix.struct, matrix.is_hermitian, matrix, orders))
    except BaseException:
        # If a process has ended, nothing can be told any more.
        with contextlib.suppress(Exception):
            orders.told(_NONE)
        raise
    orders.told(_Order(_END, np.full((1, 1), len(results), np.int64)))
    return [orders.told(_Order(_END, x)).array for x in results]


def _followed(matrix: AbstractKernelMatrix, orders: _Orders) -> list[np.ndarray]:
    """What the first process finds, which asks this one for its parts."""
    error = None
    while True:
        order = orders.told()
        if order.kind == _FAILED:
            raise error or RuntimeError(
                "The first process has failed, which leads the solve. See what it "
                "raised."
            )
        if order.kind == _END:
            num = int(order.array[0, 0])
            return [orders.told().array for _ in range(num)]
        try:
            _obeyed(matrix, orders.team, order)
        except BaseException as e:
            # The first one fails, too, and says that this is the end.
            error = e
