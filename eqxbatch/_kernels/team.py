"""The processes that compute something together, and fail together."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from .on_devices import MeshAxis


class Team:
    """The devices and processes of a mesh axis, or of the whole mesh.

    - `devices`: the devices of this process.
    - `rank`, `num`: the index of this process and the number of processes.
    """

    def __init__(self, mesh_axis: MeshAxis | None, *, is_whole: bool = False):
        self.devices: list = []
        self.rank, self.num = 0, 1
        # Without a mesh, this process works alone, on the default device.
        if mesh_axis is None:
            return
        mesh = mesh_axis.mesh
        axis = mesh.axis_names.index(mesh_axis.name)
        # Devices along other axes would repeat the same work.
        line = np.moveaxis(mesh.devices, axis, 0).reshape(mesh_axis.num, -1)[:, 0]
        # A program runs on all of them.
        line = mesh.devices.reshape(-1) if is_whole else line
        processes = sorted({device.process_index for device in line})
        this = jax.process_index()
        self.devices = [device for device in line if device.process_index == this]
        self.num = len(processes)
        # All processes meet whenever there are several, so they must fail together.
        if this not in processes or self.num not in (1, jax.process_count()):
            raise ValueError(
                f"The `mesh` has devices of {self.num} of {jax.process_count()} "
                "processes. Use one with devices of all processes, or only of the one "
                "that calls."
            )
        self.rank = processes.index(this)

    def together(self, run: Callable[[], Any] = lambda: None) -> Any:
        """The result of a function, once all processes have called theirs.

        Raises in all of them if one has failed.
        """
        error = result = None
        try:
            result = run()
        # An interrupt, too, must not leave the others waiting.
        except BaseException as e:
            error = e
        if self.num > 1:
            # One that failed takes part, too: all others would wait for it forever.
            flags = multihost_utils.process_allgather(np.array(error is not None))
            if error is None and np.any(flags):
                failed = np.flatnonzero(flags).tolist()
                error = RuntimeError(
                    f"A kernel is computed by {self.num} processes together, of which "
                    f"{failed} failed. See what they raised."
                )
        if error is not None:
            raise error
        return result

    def begin(self, make: Callable[[bool], Any]) -> Any:
        """Runs a function in the first process before all others."""
        # The first process makes the store, which the others then find and open.
        if self.rank > 0:
            self.together()
        made = self.together(lambda: make(self.rank == 0))
        if self.rank == 0 and self.num > 1:
            self.together()
        return made

    def from_first(self, x: np.ndarray) -> np.ndarray:
        """The array of the first process. Others give one of its shape and dtype."""
        return _of_words(multihost_utils.broadcast_one_to_all(_words(x)), x)

    def total(self, x: np.ndarray) -> np.ndarray:
        """The sum of the arrays of all processes, with the same bits in each.

        JAX may have no type for them, and then sends their halves.
        """
        if self.num == 1:
            return x
        parts = multihost_utils.process_allgather(_words(x))
        total = _of_words(parts[0], x)
        for part in parts[1:]:
            total = total + _of_words(part, x)
        return total


def _words(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint32)


def _of_words(words: Any, like: np.ndarray) -> np.ndarray:
    return np.array(words, np.uint32).view(like.dtype).reshape(like.shape)
