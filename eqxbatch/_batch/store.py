"""Arrays that are stored in chunks, in host memory or elsewhere."""

import abc
import collections
import concurrent.futures
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import numpy as np

from .._base.trees import safe_zip


# The entries of an array that a chunk has, as an index.
Place = tuple[slice, ...]


class Chunk(NamedTuple):
    """A chunk of one of several arrays, by its position in chunks."""

    array: int
    index: tuple[int, ...]


class StoredArray(NamedTuple):
    """An array that is stored in chunks.

    - `path`: where it is in the output of the function.
    - `sizes`: the shape of a chunk; the last ones may be smaller.
    - `kind`: what the arrays are called.
    """

    path: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: Any
    kind: str = "kernel"

    def indices(self) -> list[tuple[int, ...]]:
        """The positions of all chunks."""
        pairs = safe_zip(self.shape, self.sizes)
        numbers = [range(math.ceil(total / size)) for total, size in pairs]
        return [*itertools.product(*numbers)]

    def place(self, index: tuple[int, ...]) -> Place:
        """The part of the array that a chunk is."""
        starts = [number * size for number, size in safe_zip(index, self.sizes)]
        pairs = safe_zip(starts, self.sizes, self.shape)
        # The last chunk along an axis ends where the array does.
        return tuple(slice(x, min(x + size, total)) for x, size, total in pairs)


# A digest of what a chunk is made of, if that is not part of the fingerprint.
Source = Callable[[Chunk], str]


class AbstractWriter(abc.ABC):
    """Writes the chunks of some arrays."""

    @abc.abstractmethod
    def missing(
        self, chunks: list[Chunk], source: Source = lambda _: ""
    ) -> list[Chunk]:
        """Those of some chunks that are not stored, not intact, or of another source.

        Raises `OSError` if there is not enough space for them.
        """

    @abc.abstractmethod
    def write(self, chunk: Chunk, values: np.ndarray, source: str = "") -> None:
        """Writes a chunk. Several threads may call it for different chunks."""

    @abc.abstractmethod
    def finish(self) -> list[Any]:
        """The arrays, once all chunks are written."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the writing, also after an error."""


# Makes what identifies the arrays, as JSON data.
Fingerprint = Callable[[], dict[str, Any]]


class AbstractStore(eqx.Module):
    """Where arrays are stored in chunks."""

    # Whether several processes can write to it.
    is_shared: eqx.AbstractVar[bool]

    # Whether it outlives a run, and compares what chunks are made of in the next one.
    is_resumed: eqx.AbstractVar[bool]

    @abc.abstractmethod
    def begin(
        self, arrays: Sequence[StoredArray], fingerprint: Fingerprint, is_first: bool
    ) -> AbstractWriter:
        """The writer for the chunks of some arrays.

        `fingerprint` identifies the arrays, and `is_first` says whether this is the
        first of the processes that compute them.
        """


# While one block is computed, one is copied to the host and one is written.
IN_FLIGHT = 2


class HostStore(AbstractStore):
    """Stores a kernel in host memory, as NumPy arrays.

    `store="host"` of [`eqxbatch.filter_batch_kernel`][] stands for it. Each block is
    copied while the next one is computed, so the kernel can be larger than device
    memory.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> kernel = eqxbatch.filter_batch_kernel(
        ...     lambda x, y: x @ y.T, block_size=2, store="host"
        ... )
        >>> kernel(jnp.ones((3, 4)), jnp.ones((2, 4)))
        array([[4., 4.],
               [4., 4.],
               [4., 4.]], dtype=float32)

        ```
    """

    is_shared: bool = eqx.field(static=True, default=False, init=False, repr=False)
    is_resumed: bool = eqx.field(static=True, default=False, init=False, repr=False)

    def begin(
        self, arrays: Sequence[StoredArray], fingerprint: Fingerprint, is_first: bool
    ) -> AbstractWriter:
        del fingerprint, is_first
        return _HostWriter(arrays)


class _HostWriter(AbstractWriter):
    def __init__(self, arrays: Sequence[StoredArray]):
        self.stored = arrays
        # Most systems give memory to zeros only as they are written.
        self.arrays = [np.zeros(x.shape, x.dtype) for x in arrays]

    def missing(
        self, chunks: list[Chunk], source: Source = lambda _: ""
    ) -> list[Chunk]:
        # Host memory outlives no run, so nothing is there before.
        del source
        return chunks

    def write(self, chunk: Chunk, values: np.ndarray, source: str = "") -> None:
        del source
        place = self.stored[chunk.array].place(chunk.index)
        self.arrays[chunk.array][place] = values

    def finish(self) -> list[np.ndarray]:
        return self.arrays

    def close(self) -> None:
        pass


def in_threads(
    run: Callable[..., Any], arguments: Iterable[tuple], most: int
) -> Generator[Any, None, None]:
    """The results of `run(*args)` in order, of which at most `most` are pending.

    Close it after an error: calls that have begun are then finished.
    """
    pool = concurrent.futures.ThreadPoolExecutor(most)
    pending: collections.deque = collections.deque()
    try:
        for args in arguments:
            pending.append(pool.submit(run, *args))
            # The caller waits for the oldest result: few arguments are in memory.
            if len(pending) > most:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        # After an error, what has not begun never does.
        pool.shutdown(wait=True, cancel_futures=True)
