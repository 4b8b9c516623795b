"""Arrays of a folder on disk, in chunks of zarr; runs can be resumed."""

import contextlib
import errno
import hashlib
import importlib
import importlib.metadata
import itertools
import math
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._base.trees import import_extra, log, safe_zip
from .._base.types import check_types, checked
from .checksums import checksums
from .fingerprint import bytes_of, check_record, read_json
from .store import (
    AbstractStore,
    AbstractWriter,
    Chunk,
    Fingerprint,
    HostStore,
    Source,
    StoredArray,
)


_ATTRIBUTE = "eqxbatch"


_METADATA = "zarr.json"


# Next to the chunks of an array: which values belong to which of its chunks.
_PLACES = "places"


_CHECKSUM = 4  # The bytes of a CRC32C, at the end of a chunk.


# How zarr names an unfinished file.
_PARTIAL = re.compile(r".+\.[0-9a-f]{32}\.partial")


class ZarrStore(AbstractStore):
    """Stores a kernel on disk, as zarr arrays whose chunks are the blocks.

    A path as `store` of [`eqxbatch.filter_batch_kernel`][] stands for it; pass a store
    for other settings. The result is then zarr arrays that are open for reading.
    Entries are read from disk only when they are accessed. `path` becomes a zarr group
    (format version 3) with one array for each array that the kernel function returns. A
    single array is named `kernel`; several are named by their position in the output.

    **To resume a run that was stopped or killed, call it again.** Each chunk has a
    checksum. Intact chunks are kept; chunks that are missing, have a wrong size or
    checksum, or are those of another place, are computed. The kernel is bit for bit
    that of an uninterrupted run on the same machine. The group stores a fingerprint of
    the inputs, the kernel function (its arrays and its program), the blocks, JAX's
    settings for random numbers and precision, and the package versions, so that
    different kernels are never mixed.

    Several processes can share the work: see `mesh` of
    [`eqxbatch.filter_batch_kernel`][].

    Needs the extra `store`: `pip install "equinox-batch[store]"`.

    **Arguments:**

    - `path`: a folder, which is created if it does not exist.
    - `version`: a name for what the fingerprint cannot contain: the functions that a
        kernel calls on the host, by `jax.pure_callback` for instance, and what they
        read. Such kernels need one. Pass another name when these functions change.

    **Raises:**

    When used:

    - `ValueError` for a folder that contains another kernel or anything else, for
        metadata that are damaged or edited, for half of a kernel, as earlier versions
        could store it, and for a kernel with callbacks without `version`.
    - `TypeError` for a dtype that zarr does not support, such as bfloat16.
    - `OSError` before anything is computed, if the folder cannot be written or the disk
        has too little space; or later, if the disk becomes full, or if files are
        deleted while the kernel is computed. Everything written before stays intact.
    - `ImportError` if zarr is not installed.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> kernel = eqxbatch.filter_batch_kernel(
        ...     lambda x, y: x @ y.T,
        ...     block_size=2,
        ...     store=folder.name + "/linear.zarr",
        ... )
        >>> stored = kernel(jnp.ones((3, 4)), jnp.ones((2, 4)))
        >>> stored.shape, stored.chunks
        ((3, 2), (2, 2))
        >>> stored[1:]
        array([[4., 4.],
               [4., 4.]], dtype=float32)
        >>> folder.cleanup()

        ```
    """

    path: str = eqx.field(static=True)
    version: str | None = eqx.field(static=True)
    is_shared: bool = eqx.field(static=True, default=True, init=False, repr=False)
    is_resumed: bool = eqx.field(static=True, default=True, init=False, repr=False)

    @checked
    def __init__(
        self,
        path: str | os.PathLike,
        *,
        version: str | None = None,
    ):
        self.path = os.fspath(path)
        self.version = version

    def begin(
        self, arrays: Sequence[StoredArray], fingerprint: Fingerprint, is_first: bool
    ) -> AbstractWriter:
        zarr = import_extra("zarr", "ZarrStore", "store")
        # Whatever can be wrong with the arrays is said before there is a folder.
        for x in arrays:
            is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
            # What other libraries add to NumPy may have the kind of floats, too.
            is_known = not is_key and np.dtype(x.dtype).type.__module__ == "numpy"
            if not is_known or np.dtype(x.dtype).kind not in "biufc":
                raise TypeError(
                    f"zarr has no arrays of dtype {x.dtype}, which the function of the "
                    f"{x.kind} returns in output{x.path}. Cast it, to float32 for "
                    "instance."
                )
        expected = {**fingerprint(), "version": self.version}
        # Only the user knows when the results of a callback change.
        if expected["callbacks"] and self.version is None:
            raise ValueError(
                f"The {arrays[0].kind} calls functions on the host, by "
                f"{expected['callbacks']}, "
                "whose results a fingerprint cannot contain. Pass "
                "`ZarrStore(..., version='1')`, and another `version` when they change."
            )
        path = pathlib.Path(self.path)
        # The first process makes what is missing, and all compare what is there.
        if is_first:
            _make_group(zarr, path, expected)
        what = f"has another {arrays[0].kind} than this one"
        remedy = (
            "Delete it, or pass another path. `zarr.open_group` still reads what is "
            "finished there."
        )
        check_record("path", path, _read_record(path), expected, what, remedy)
        if is_first:
            group = _opened(zarr.open_group, path, mode="r+")
            for name, x in safe_zip(_names_of(arrays), arrays):
                # A killed run may have made only some; another may be making them.
                if not (path / name / _METADATA).exists():
                    with contextlib.suppress(zarr.errors.ContainsArrayError):
                        _make_array(group, name, x)
        writer = _ZarrWriter(zarr, path, arrays)
        # Only now: unfinished files in the folder of another kernel are not ours.
        writer.lock(clean=is_first)
        return writer


def _names_of(arrays: Sequence[StoredArray]) -> list[str]:
    """The names of the arrays, which are names of folders."""
    if len(arrays) == 1:
        return [arrays[0].kind]
    names: list[str] = []
    for x in arrays:
        name = re.sub(r"\W+", "_", x.path).strip("_") or "kernel"
        while name in names:
            name += "_"
        names.append(name)
    return names


def _make_group(zarr: Any, path: pathlib.Path, expected: dict[str, Any]) -> None:
    names = {x.name for x in path.iterdir()} if path.exists() else set()
    if _METADATA in names:
        return
    if any(not _PARTIAL.fullmatch(name) for name in names):
        raise ValueError(
            f"`path` is a folder that contains something other than a kernel: {path}. "
            "Pass one that is empty or does not exist."
        )
    # Metadata are written together with the group, so no group lacks them.
    # Another run of the same kernel may have been faster.
    with contextlib.suppress(zarr.errors.ContainsGroupError):
        zarr.create_group(str(path), attributes={_ATTRIBUTE: expected}, zarr_format=3)


def _read_record(path: pathlib.Path) -> dict[str, Any]:
    """What a folder says about its kernel."""
    node = read_json(
        "path",
        path / _METADATA,
        "Nothing is deleted. Restore this file, or pass another path.",
    )
    try:
        # Each group of zarr has such a file, but only ours this attribute.
        saved = node["attributes"][_ATTRIBUTE]
    except (KeyError, TypeError):
        saved = None
    # Nothing in a folder that is not ours is read or written.
    if not isinstance(saved, dict):
        raise ValueError(
            f"`path` has zarr arrays that are not a kernel of eqxbatch: {path}. Pass a "
            "folder that is empty or does not exist."
        )
    # Earlier versions could leave out the blocks below the diagonal.
    if saved.pop("upper_only", False):
        raise ValueError(
            f"`path` has half of a kernel, stored by {saved.get('package')} with "
            f"`upper_only=True`: {path}. Kernels are stored as a whole now. Pass "
            "another path, or read this one by `KernelOperator(zarr.open_group(path)"
            "['kernel'], symmetric=True)`."
        )
    return saved


def _opened(open_node: Callable[..., Any], path: pathlib.Path, **settings: Any) -> Any:
    """What zarr opens. Raises `ValueError` for metadata that it cannot read."""
    try:
        return open_node(str(path), **settings)
    except Exception as e:
        is_of_system = isinstance(e, (OSError, MemoryError))
        # This is what zarr raises for a file that is not of an array or a group.
        if is_of_system and not isinstance(e, FileNotFoundError):
            raise
        raise ValueError(
            f"`path` has damaged metadata: zarr cannot read {path / _METADATA} "
            f"({type(e).__name__}: {e}). {_KEPT}"
        ) from e


_KEPT = (
    "Chunks are kept. Delete the file of an array, and the call writes it again; "
    "restore that of the group."
)


def _make_array(group: Any, name: str, array: StoredArray) -> Any:
    codecs = importlib.import_module("zarr.codecs")
    return group.create_array(
        name,
        shape=array.shape,
        chunks=array.sizes,
        dtype=np.dtype(array.dtype),
        # Entries of a kernel are nearly random, so compression is slow and saves
        # little. The checksum tells whether a chunk is intact.
        compressors=[codecs.Crc32cCodec()],
        filters=None,
        fill_value=0,
    )


def _seal(chunk: Chunk, sums: np.ndarray, source: str) -> str:
    """A digest of the checksums of a chunk, of its place, and of its source."""
    seal = hashlib.blake2b(f"{chunk.index}{source}".encode(), digest_size=16)
    seal.update(sums.data)
    return seal.hexdigest()


class _ZarrWriter(AbstractWriter):
    """Writes chunks, and before each a line that says which values belong there.

    Each writer has files of its own for these lines. A chunk without its line is
    computed again, so nothing depends on them.
    """

    _lock: int | None = None

    def __init__(
        self,
        zarr: Any,
        path: pathlib.Path,
        arrays: Sequence[StoredArray],
    ):
        self.zarr, self.path, self.stored = zarr, path, arrays
        self.names = _names_of(arrays)
        self._open()
        self.run = uuid.uuid4().hex
        self.seals: list[set[str]] = []

    def lock(self, *, clean: bool) -> None:
        """Tells other runs that this one writes, until it is closed or killed.

        If no other run does, `clean` deletes the files that killed runs have left.
        """
        try:
            fcntl = importlib.import_module("fcntl")
            self._lock = os.open(self.path / _METADATA, os.O_RDWR)
            if clean:
                with contextlib.suppress(BlockingIOError):
                    # If no other run has a lock, unfinished files belong to none.
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._clean()
            # Any number of runs can write, each with a lock that it shares.
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        except (ImportError, OSError) as e:
            # On Windows, and on file systems without locks.
            log.debug("ZarrStore: unfinished files are kept, without locks (%s).", e)

    def _clean(self) -> None:
        folders = [self.path / name / "c" for name in self.names]
        files = [self.path.glob("*"), *(folder.rglob("*") for folder in folders)]
        for file in itertools.chain.from_iterable(files):
            if _PARTIAL.fullmatch(file.name):
                file.unlink(missing_ok=True)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _open(self) -> list:
        """The arrays, after their metadata have been compared with what is stored."""
        # What zarr makes of the same settings now is what must be stored.
        memory = self.zarr.create_group(self.zarr.storage.MemoryStore(), zarr_format=3)
        arrays = []
        for name, stored in safe_zip(self.names, self.stored):
            expected = _make_array(memory, name, stored).metadata.to_dict()
            place = self.path / name
            array = _opened(self.zarr.open_array, place, mode="r")
            saved = array.metadata.to_dict()
            # Users may add attributes.
            different = [
                part
                for part in sorted({*expected, *saved} - {"attributes"})
                if saved.get(part) != expected.get(part)
            ]
            if different:
                raise ValueError(
                    f"`path` has metadata of other arrays: in "
                    f"{place / _METADATA}, {different} differ. {_KEPT}"
                )
            arrays.append(array)
        return arrays

    def _file(self, chunk: Chunk) -> pathlib.Path:
        return self.path.joinpath(self.names[chunk.array], "c", *map(str, chunk.index))

    def _has_size(self, chunk: Chunk) -> bool | None:
        """Whether a chunk has the right size; None if there is none."""
        try:
            size = self._file(chunk).stat().st_size
        except FileNotFoundError:
            return None
        return size == self._bytes(chunk) + _CHECKSUM

    def _has(self, chunk: Chunk, source: Source) -> bool:
        """Whether a chunk is intact. One that is damaged is removed."""
        file, has_size = self._file(chunk), self._has_size(chunk)
        if has_size:
            # An error here says nothing about the chunk: the disk may fail. But another
            # process may have found it damaged, and removed it.
            try:
                data = np.frombuffer(file.read_bytes(), np.uint8)
            except FileNotFoundError:
                return False
            sums = checksums(data[:-_CHECKSUM])
            if sums[-1:].tobytes() == data[-_CHECKSUM:].tobytes():
                return _seal(chunk, sums, source(chunk)) in self.seals[chunk.array]
        # A damaged chunk has no use. An intact one of other rows is written over.
        if has_size is not None:
            file.unlink(missing_ok=True)
        return False

    def _encoded(self, chunk: Chunk, values: np.ndarray) -> np.ndarray:
        """The bytes of a chunk, before its checksum."""
        array = self.stored[chunk.array]
        # zarr stores chunks at the edges as if they were full.
        if values.shape != array.sizes:
            full = np.zeros(array.sizes, values.dtype)
            full[tuple(map(slice, values.shape))] = values
            values = full
        # Bytes of another dtype would be other numbers. The metadata of zarr name the
        # byte order of the machine, its default.
        dtype = np.dtype(array.dtype).newbyteorder("=")
        return bytes_of(values.astype(dtype, copy=False))

    def _bytes(self, chunk: Chunk) -> int:
        """The size in bytes of the entries of a chunk."""
        array = self.stored[chunk.array]
        return math.prod(array.sizes) * np.dtype(array.dtype).itemsize

    def missing(
        self, chunks: list[Chunk], source: Source = lambda _: ""
    ) -> list[Chunk]:
        self.seals = []
        for name in self.names:
            files = sorted((self.path / name / _PLACES).glob("*"))
            # A run that was killed may have left half a line, which then is no seal.
            lines = [file.read_text(errors="replace").split() for file in files]
            self.seals.append({line for words in lines for line in words})
        missing = [chunk for chunk in chunks if not self._has(chunk, source)]
        needed = sum(map(self._bytes, missing))
        free = shutil.disk_usage(self.path).free
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"The disk of `path` has {free:,} bytes left, and the "
                f"{self.stored[0].kind} needs "
                f"{needed:,}",
                str(self.path),
            )
        return missing

    def write(self, chunk: Chunk, values: np.ndarray, source: str = "") -> None:
        data = self._encoded(chunk, values)
        sums = checksums(data)
        # The line comes first: without its chunk, it does no harm.
        places = self.path / self.names[chunk.array] / _PLACES
        places.mkdir(parents=True, exist_ok=True)
        with (places / self.run).open("a") as lines:
            lines.write(f"{_seal(chunk, sums, source)}\n")
        # As zarr writes a chunk, but the bytes are read once for both checksums, and
        # written from where they are.
        file = self._file(chunk)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{uuid.uuid4().hex}.partial")
        try:
            with partial.open("wb") as chunk_file:
                chunk_file.write(data.data)
                chunk_file.write(sums[-1:].data)
            # A chunk has its name only once it is whole.
            partial.replace(file)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _damaged(self) -> list[pathlib.Path]:
        """The files that are not there, or have a wrong size."""
        nodes = [self.path, *(self.path / name for name in self.names)]
        files = [node / _METADATA for node in nodes if not (node / _METADATA).exists()]
        chunks = (
            Chunk(i, index) for i, x in enumerate(self.stored) for index in x.indices()
        )
        return [*files, *(self._file(x) for x in chunks if not self._has_size(x))]

    def finish(self) -> list[Any]:
        damaged = self._damaged()
        if damaged:
            raise OSError(
                errno.ENOENT,
                f"{len(damaged)} files of `path` were deleted or damaged while the "
                "kernel was computed. Call again, which computes what is missing. The "
                "first",
                str(damaged[0]),
            )
        return self._open()


# What users pass for a store.
Store = AbstractStore | str | os.PathLike


# What is a mistake rather than the name of a folder.
_NO_PATHS = ("", "cpu", "gpu", "tpu", "disk", "memory", "zarr")


def as_store(store: Store) -> AbstractStore | Literal["device"]:
    """The store that `store` stands for; a path is that of a `ZarrStore`."""
    if isinstance(store, str) and store == "device":
        return "device"
    check_types({"store": store}, {"store": Store}, always=True)
    if isinstance(store, AbstractStore):
        return store
    if store in _NO_PATHS:
        raise ValueError(
            f"`store` must be 'device', 'host', a path on disk, or a store; got "
            f"{store!r}. Write './{store}' for a folder of this name."
        )
    return HostStore() if store == "host" else ZarrStore(store)
