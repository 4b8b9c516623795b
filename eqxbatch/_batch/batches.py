"""Batches of a loader: how they are read, put on devices, joined and written."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, PyTree

from .._base.checks import check_equal
from .._base.mesh import names_of
from .._base.structs import is_struct
from .._base.trees import described, shown
from .._base.versions import partitions
from .fingerprint import digest_of_rows
from .reading import as_numpy, copied, has_rows, read_rows
from .store import (
    AbstractWriter,
    Chunk,
)


def arguments_of(batch: PyTree) -> tuple:
    """The arguments that a batch is.

    A tuple or list is several. What JAX knows as a structure of another kind is one: a
    NamedTuple, or a class that is registered as a PyTree.
    """
    if not isinstance(batch, (tuple, list)):
        return (batch,)
    # A subclass that JAX does not know is a leaf: it is several arguments, too.
    is_plain = type(batch) in (tuple, list) or jtu.all_leaves([batch])
    return tuple(batch) if is_plain else (batch,)


def iterate(batches: PyTree) -> Iterator[Any]:
    """Iterates over batches, so that no error of a reader is taken for their end.

    Python takes an `IndexError` for the end of what has no `__iter__`, and of each
    subclass of `Sequence`.
    """
    if getattr(type(batches), "__iter__", None) not in (None, Sequence.__iter__):
        return iter(batches)
    # Without a length, an `IndexError` is the only end that there is.
    num = length_of(batches)
    return iter(batches) if num is None else (batches[i] for i in range(num))


def length_of(batches: PyTree) -> int | None:
    try:
        return len(batches)
    except TypeError:
        return None


def moved(
    batch: PyTree,
    sharding: Sharding | None,
    of_host: Callable[[Any], np.ndarray] = copied,
) -> tuple:
    """A batch as arguments, with its arrays on the device.

    A loader may use its memory for the next batch, which `of_host` copies.
    """
    leaves, treedef = jtu.tree_flatten(arguments_of(batch))
    on_host = {
        i: of_host(as_numpy(x))
        for i, x in enumerate(leaves)
        if hasattr(x, "__array__") and not isinstance(x, jax.Array)
    }
    if sharding is None:
        # A single call for all arrays: for small ones, each takes as long as a program.
        put = jax.device_put([*on_host.values()])
    else:
        # Arrays of JAX stay on their devices, unless a sharding says where they belong.
        leaves = [_put_array(sharding, x) for x in leaves]
        put = [_put_own_rows(sharding, x) for x in on_host.values()]
    for i, x in zip(on_host, put, strict=True):
        leaves[i] = x
    return treedef.unflatten(leaves)


def _put_array(sharding: Sharding, x: PyTree) -> Any:
    is_array = isinstance(x, jax.Array)
    return jax.device_put(x, fitting_sharding(sharding, x)) if is_array else x


def _put_own_rows(sharding: Sharding, x: np.ndarray) -> Array:
    # With several processes, each has its own rows of one array.
    whole = fitting_sharding(sharding, x)
    return jax.make_array_from_process_local_data(whole, x)


@contextlib.contextmanager
def naming_batch(number: int) -> Iterator[None]:
    """Names a batch in errors."""
    try:
        yield
    except Exception as e:
        e.add_note(f"This is about batch {number}, counted from 0.")
        raise


def fitting_sharding(sharding: Sharding, x: Array | np.ndarray) -> Sharding:
    """A sharding, or all rows on each device if they cannot be shared equally."""
    # With several processes, `x` has the rows of one of them, and not all.
    if isinstance(sharding, NamedSharding) and sharding.is_fully_addressable:
        # A specification may have no entries; the first one is for the rows.
        names = names_of([*partitions(sharding.spec), None][0])
        if x.shape[0] % math.prod(sharding.mesh.shape[name] for name in names):
            return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding


def _is_on_device(x: Array) -> bool:
    """Whether NumPy has no such array."""
    return isinstance(x, Tracer) or jnp.issubdtype(x.dtype, jax.dtypes.extended)


def concatenated(parts: Sequence[Any]) -> Any:
    is_numpy = all(isinstance(x, np.ndarray) for x in parts)
    return (np if is_numpy else jnp).concatenate(parts)


def fetched_rows(rows: list[Array]) -> list[Any]:
    """Rows of all processes, in host memory."""
    # Keys have no values in NumPy, and traced arrays have none yet: these stay.
    if any(map(_is_on_device, rows)):
        return [x if _is_on_device(x) else fetched_rows([x])[0] for x in rows]
    if all(x.is_fully_addressable for x in rows):
        return jax.device_get(rows)
    # No process has all rows: each sends its own to all others, joined along axis 0.
    return multihost_utils.process_allgather(rows, tiled=True)


def iterates_only(x: object) -> bool:
    """Whether something has batches, such as a generator or a loader, but no slices."""
    if isinstance(x, Iterator):
        return True
    return hasattr(x, "__iter__") and not hasattr(x, "shape") and jtu.all_leaves([x])


class Slices:
    """The rows of all examples, so many at a time; one batch if there are none."""

    def __init__(self, examples: PyTree, size: int, *, is_stored: bool = False):
        # What only yields batches has no rows to read again, as another pass would.
        if iterates_only(examples):
            remedy = "Leave `batch_size` out, because it yields batches already"
            if is_stored:
                remedy = (
                    "A `store` is resumed by reading rows again: pass arrays, or what "
                    "is indexed like them, such as `numpy.memmap`. Or leave `store` "
                    "and `batch_size` out, and write what `update` returns for each "
                    "batch yourself"
                )
            raise TypeError(
                "With a `batch_size`, rows of `batches` are read by slices; got "
                f"{described(examples)}, which can only be iterated. {remedy}."
            )
        self._leaves, self._treedef = jtu.tree_flatten(examples)
        # The first axis of each leaf is that of the examples, and all have as many.
        without_rows = [x for x in self._leaves if not has_rows(x)]
        if without_rows or not self._leaves:
            got = described([*without_rows, examples][0])
            message = "`batches` must be arrays of rows, because `batch_size` is given"
            raise TypeError(f"{message}; got {got}.")
        # A reader is only asked for rows that it says it has, so that none is lost.
        self.total, self._size = self._leaves[0].shape[0], size
        for x in self._leaves:
            check_equal("The number of rows of each array", x.shape[0], self.total)

    def __len__(self) -> int:
        # An empty batch stands for no examples: it says their types.
        return max(1, -(-self.total // self._size))

    def __getitem__(self, index: int) -> PyTree:
        start = index * self._size
        # Some readers refuse slices beyond the end.
        stop = min(start + self._size, self.total)
        rows = [read_rows(x, start, stop) for x in self._leaves]
        for x, part in zip(self._leaves, rows, strict=True):
            what = "The shape of the rows of a slice, as `shape` says,"
            check_equal(what, part.shape[1:], tuple(x.shape[1:]))
        return self._treedef.unflatten(rows)


def write_rows(
    writer: AbstractWriter, number: int, rows: list[Array], batch: PyTree
) -> None:
    """Writes the rows of a batch, and a digest of it, unless it is None."""
    source = "" if batch is None else digest_of_rows(batch)
    for i, x in enumerate(rows):
        x = np.asarray(x)
        # A chunk has all entries of its rows: it is the first one along other axes.
        writer.write(Chunk(i, (number, *[0] * (x.ndim - 1))), x, source)


def type_of_leaf(x: PyTree) -> Any:
    if not eqx.is_array(x):
        return x
    # A weak type counts, because the dtypes of results depend on it.
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=jax.typeof(x).weak_type)


class Kind(NamedTuple):
    """What all batches have in common in an array."""

    dtype: Any
    ndim: int
    is_weak: bool

    def __str__(self) -> str:
        return f"{'weak ' * self.is_weak}{self.dtype} with {self.ndim} axes"


def kind_of(x: PyTree) -> Kind | str:
    """What all batches have in common in a leaf."""
    if not eqx.is_array(x) and not is_struct(x):
        return shown(x)
    return Kind(x.dtype, x.ndim, getattr(x, "weak_type", False))
