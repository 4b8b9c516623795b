"""Kernels on disk; runs can be resumed."""

import contextlib
import errno
import hashlib
import importlib
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
import jax.numpy as jnp
import numpy as np

from .._base.checks import check_types, checked
from .._base.trees import import_extra, log, safe_zip, shown
from .kernel import AbstractBlockKernel, flattened, Grid, KernelLeaf, TileMirror
from .on_host import (
    AbstractStore,
    AbstractWriter,
    add_array,
    check_record,
    Fingerprint,
    FORMAT,
    Patch,
    patches,
    read_json,
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
    - `upper_only`: whether to omit the blocks below the diagonal of a symmetric kernel,
        which halves the space on disk. The result is then an
        [`eqxbatch.results.SymmetricArray`][], which reads the omitted blocks as mirror
        images.
    - `version`: a name for what the fingerprint cannot contain: the functions that a
        kernel calls on the host, by `jax.pure_callback` for instance, and what they
        read. Such kernels need one. Pass another name when these functions change.

    **Raises:**

    When used:

    - `ValueError` for a folder that contains another kernel or anything else, for
        metadata that are damaged or edited, for `upper_only` if the kernel is not
        symmetric, and for a kernel with callbacks without `version`.
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
    upper_only: bool = eqx.field(static=True)
    version: str | None = eqx.field(static=True)

    @checked
    def __init__(
        self,
        path: str | os.PathLike,
        *,
        upper_only: bool = False,
        version: str | None = None,
    ):
        self.path = os.fspath(path)
        self.upper_only = upper_only
        self.version = version

    @property
    def is_shared(self) -> bool:
        return True

    def begin(
        self, kernel: AbstractBlockKernel, fingerprint: Fingerprint, is_first: bool
    ) -> AbstractWriter:
        zarr = import_extra("zarr", "ZarrStore", "store")
        leaves, grid = kernel.leaves, kernel.grid
        for leaf in leaves:
            if np.dtype(leaf.dtype).kind not in "biufc":
                raise TypeError(
                    f"zarr has no arrays of dtype {leaf.dtype}, which `kernel_fn` "
                    f"returns in output{leaf.path}. Cast it, to float32 for instance."
                )
            if self.upper_only and leaf.is_pairwise and leaf.axes != (0, 1):
                raise ValueError(
                    "`upper_only` needs rows and columns along axes 0 and 1; got "
                    f"{leaf.axes} for output{leaf.path}."
                )
        settings = {"upper_only": self.upper_only, "version": self.version}
        expected = {**fingerprint(), **settings}
        if expected["callbacks"] and self.version is None:
            raise ValueError(
                f"The kernel calls functions on the host, by {expected['callbacks']}, "
                "whose results a fingerprint cannot contain. Pass "
                "`ZarrStore(..., version='1')`, and another `version` when they change."
            )
        path = pathlib.Path(self.path)
        if is_first:
            _make_group(zarr, path, expected)
        what = "has another kernel than this one"
        check_record("path", path, _read_record(path), expected, what)
        names = _names(leaves)
        if is_first:
            group = _opened(zarr.open_group, path, mode="r+")
            for name, leaf in safe_zip(names, leaves):
                if not (path / name / _METADATA).exists():
                    with contextlib.suppress(zarr.errors.ContainsArrayError):
                        _make_array(group, name, leaf, grid)
        mirror = kernel.mirror if self.upper_only else None
        writer = _ZarrWriter(zarr, path, names, leaves, grid, mirror)
        writer.lock(clean=is_first)
        return writer


def open_kernel(path: str | os.PathLike) -> Any:
    """Opens a kernel that a [`eqxbatch.ZarrStore`][] has written, in any process.

    The kernel function and the examples are not needed. `zarr.open` alone would read
    zeros below the diagonal of a kernel with `upper_only`, and in blocks that a stopped
    run has not written.

    Needs the extra `store`: `pip install "equinox-batch[store]"`.

    **Arguments:**

    - `path`: the folder that the kernel was stored in.

    **Returns:**

    A zarr array that is open for reading or, with `upper_only`, an
    [`eqxbatch.results.SymmetricArray`][]. If the kernel function returns several
    arrays, a dict of them by the names of their folders.

    **Raises:**

    - `FileNotFoundError` if there is no kernel.
    - `ValueError` for an unfinished or damaged kernel, for other zarr arrays, for a
        kernel that another version of this package stored in another format, and with
        `upper_only` and a function as `symmetric`, which is not stored.
    - `ImportError` if zarr is not installed.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> kernel = eqxbatch.filter_batch_kernel(
        ...     lambda x, y: x @ y.T, block_size=2, store=folder.name
        ... )
        >>> stored = kernel(jnp.ones((3, 4)), jnp.ones((2, 4)))
        >>> eqxbatch.open_kernel(folder.name)[2:]
        array([[4., 4.]], dtype=float32)
        >>> folder.cleanup()

        ```
    """
    check_types({"path": path}, {"path": str | os.PathLike}, always=True)
    zarr, folder = import_extra("zarr", "open_kernel", "store"), pathlib.Path(path)
    record = _read_record(folder)
    if record.get("format") != FORMAT:
        raise ValueError(
            f"`path` has a kernel in the format {record.get('format')}, and this "
            f"version of eqxbatch reads {FORMAT}: {folder}. Open it with "
            f"{record.get('package')}, which has stored it."
        )
    numbers = record["grid"]
    totals, sizes = (tuple(numbers.pop(name)) for name in ("totals", "sizes"))
    grid = Grid(totals, sizes, **numbers)
    leaves = tuple(
        KernelLeaf(x["path"], tuple(x["axes"]), tuple(x["shape"]), np.dtype(x["dtype"]))
        for x in record["arrays"]
    )
    mirror = None
    if record["upper_only"]:
        if record["symmetric"] != "transpose":
            raise ValueError(
                f"`path` has a kernel without the blocks below its diagonal: {folder}. "
                "The function that exchanges its sides, `symmetric`, is not stored. "
                "Call the kernel with its store, which returns the arrays."
            )
        mirror = TileMirror(True, leaves, flattened(leaves))
    names = _names(leaves)
    writer = _ZarrWriter(zarr, folder, names, leaves, grid, mirror, mode="r")
    missing = writer.missing()
    if missing:
        raise ValueError(
            f"`path` has an unfinished or damaged kernel: {len(missing)} of its files "
            f"are missing or have a wrong size, such as {missing[0]}. Call the kernel "
            "with its store again, which computes what is missing."
        )
    arrays = writer.results()
    return arrays[0] if len(arrays) == 1 else dict(safe_zip(names, arrays))


def _names(leaves: Sequence[KernelLeaf]) -> list[str]:
    """The names of the arrays, which are names of folders."""
    if len(leaves) == 1:
        return ["kernel"]
    names: list[str] = []
    for leaf in leaves:
        name = re.sub(r"\W+", "_", leaf.path).strip("_") or "kernel"
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
        saved = node["attributes"][_ATTRIBUTE]
    except (KeyError, TypeError):
        saved = None
    if not isinstance(saved, dict):
        raise ValueError(
            f"`path` has zarr arrays that are not a kernel of eqxbatch: {path}. Pass a "
            "folder that is empty or does not exist."
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


def _make_array(group: Any, name: str, leaf: KernelLeaf, grid: Grid) -> Any:
    codecs = importlib.import_module("zarr.codecs")
    return group.create_array(
        name,
        shape=leaf.struct(grid.totals).shape,
        chunks=tuple(max(1, size) for size in leaf.struct(grid.sizes).shape),
        dtype=np.dtype(leaf.dtype),
        # Entries of a kernel are nearly random, so compression is slow and saves
        # little. The checksum tells whether a chunk is intact.
        compressors=[codecs.Crc32cCodec()],
        filters=None,
        fill_value=0,
    )


def _seal(patch: Patch, values: np.ndarray) -> str:
    """A digest of the entries of a chunk and of its place."""
    seal = hashlib.blake2b(f"{patch.chunk}".encode(), digest_size=16)
    add_array(seal, values)
    return seal.hexdigest()


class _ZarrWriter(AbstractWriter):
    """Writes chunks, and before each a line that says which values belong there.

    Each writer has files of its own for these lines. A chunk without its line is
    computed again, so nothing depends on them.

    - `mirror`: exchanges the sides, if chunks below the diagonal are omitted.
    """

    _lock: int | None = None

    def __init__(
        self,
        zarr: Any,
        path: pathlib.Path,
        names: list[str],
        leaves: Sequence[KernelLeaf],
        grid: Grid,
        mirror: TileMirror | None,
        mode: Literal["r", "r+"] = "r+",
    ):
        self.zarr, self.path, self.names = zarr, path, names
        self.leaves, self.grid, self.mirror = leaves, grid, mirror
        # Chunks of zeros are written, too, so that they are not missing.
        self.arrays = [
            zarr.Array(
                zarr.AsyncArray(
                    metadata=array.metadata,
                    store_path=array.store_path,
                    config={"write_empty_chunks": True},
                )
            )
            for array in self._open(mode)
        ]
        self.own = uuid.uuid4().hex
        self.seals: list[set[str]] = []
        for name in names:
            files = sorted((path / name / _PLACES).glob("*"))
            lines = [file.read_text(errors="replace").split() for file in files]
            self.seals.append({line for words in lines for line in words})

    def lock(self, *, clean: bool) -> None:
        """Tells other runs that this one writes, until it is closed or killed.

        If no other run does, `clean` deletes the files that killed runs have left.
        """
        try:
            fcntl = importlib.import_module("fcntl")
            self._lock = os.open(self.path / _METADATA, os.O_RDWR)
            if clean:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._clean()
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

    def _open(self, mode: str) -> list:
        """The arrays, after their metadata have been compared with the kernel."""
        memory = self.zarr.create_group(self.zarr.storage.MemoryStore(), zarr_format=3)
        arrays = []
        for name, leaf in safe_zip(self.names, self.leaves):
            expected = _make_array(memory, name, leaf, self.grid).metadata.to_dict()
            place = self.path / name
            array = _opened(self.zarr.open_array, place, mode=mode)
            saved = array.metadata.to_dict()
            # Users may add attributes.
            different = [
                part
                for part in sorted({*expected, *saved} - {"attributes"})
                if saved.get(part) != expected.get(part)
            ]
            if different:
                raise ValueError(
                    f"`path` has metadata that are not those of its kernel: in "
                    f"{place / _METADATA}, {different} differ. {_KEPT}"
                )
            arrays.append(array)
        return arrays

    def _file(self, patch: Patch) -> pathlib.Path:
        name = self.names[patch.leaf]
        return self.path.joinpath(name, "c", *map(str, patch.chunk))

    def _has_size(self, patch: Patch) -> bool | None:
        """Whether a chunk has the right size; None if there is none."""
        try:
            size = self._file(patch).stat().st_size
        except FileNotFoundError:
            return None
        return size == self._bytes(patch) + _CHECKSUM

    def has(self, patch: Patch) -> bool:
        has_size = self._has_size(patch)
        values = self._read(patch) if has_size else None
        if values is not None:
            return _seal(patch, values) in self.seals[patch.leaf]
        if has_size is not None:
            self._file(patch).unlink(missing_ok=True)
        return False

    def _read(self, patch: Patch) -> np.ndarray | None:
        """The entries of a chunk; None if its checksum is wrong.

        Other errors say nothing about the chunk: the disk may fail, or memory may run
        out.
        """
        try:
            return np.asarray(self.arrays[patch.leaf][patch.place])
        except ValueError as e:
            if "checksum" not in str(e):
                raise
            return None

    def _bytes(self, patch: Patch) -> int:
        """The size in bytes of the entries of a chunk."""
        array = self.arrays[patch.leaf]
        return math.prod(array.chunks) * array.dtype.itemsize

    def prepare(self, missing: list[Patch]) -> None:
        needed = sum(map(self._bytes, missing))
        free = shutil.disk_usage(self.path).free
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"The disk of `path` has {free:,} bytes left, and the kernel needs "
                f"{needed:,}",
                str(self.path),
            )

    def write(self, patch: Patch, values: np.ndarray) -> None:
        places = self.path / self.names[patch.leaf] / _PLACES
        places.mkdir(parents=True, exist_ok=True)
        with (places / self.own).open("a") as file:
            file.write(f"{_seal(patch, values)}\n")
        self.arrays[patch.leaf][patch.place] = values

    def missing(self) -> list[pathlib.Path]:
        """The files that are not there, or have a wrong size."""
        nodes = [self.path, *(self.path / name for name in self.names)]
        files = [node / _METADATA for node in nodes if not (node / _METADATA).exists()]
        for tile in (*self.grid.pairs(), *self.grid.diagonal()):
            for patch in patches(self.leaves, self.grid, tile):
                if self.mirror is not None and patch.is_mirror:
                    continue
                if not self._has_size(patch):
                    files.append(self._file(patch))
        return files

    def finish(self) -> list[Any]:
        missing = self.missing()
        if missing:
            raise OSError(
                errno.ENOENT,
                f"{len(missing)} files of `path` were deleted or damaged while the "
                "kernel was computed. Call again, which computes what is missing. The "
                "first",
                str(missing[0]),
            )
        return self.results()

    def results(self) -> list[Any]:
        """The arrays, open for reading."""
        arrays = self._open("r")
        if self.mirror is None:
            return arrays
        return [
            SymmetricArray(arrays, i, self.grid.sizes[0], self.mirror)
            if leaf.is_pairwise
            else arrays[i]
            for i, leaf in enumerate(self.leaves)
        ]


class SymmetricArray:
    """A symmetric array on disk, without the blocks below its diagonal.

    Entries below the diagonal are read from above it, and the two sides are exchanged
    as `symmetric` of the kernel specifies: complex entries are conjugated, and output
    axes, if any, are transposed. `array[rows, columns]`, with ints and slices, reads
    only what it needs; `numpy.asarray` reads everything.

    - `shape`, `dtype`, `ndim`: as for NumPy arrays.
    - `stored`: the underlying zarr array, with zeros in the omitted blocks.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> kernel = eqxbatch.filter_batch_kernel(
        ...     lambda x, y: x @ y.T,
        ...     block_size=2,
        ...     symmetric=True,
        ...     store=eqxbatch.ZarrStore(folder.name, upper_only=True),
        ... )
        >>> stored = kernel(jnp.arange(4.0)[:, None])
        >>> stored[2:, :3]
        array([[0., 2., 4.],
               [0., 3., 6.]], dtype=float32)
        >>> folder.cleanup()

        ```
    """

    def __init__(self, arrays: list, index: int, block: int, mirror: TileMirror):
        self.stored = arrays[index]
        self._arrays, self._index = arrays, index
        self._block, self._mirror = block, mirror

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> Any:
        return self.stored.dtype

    @property
    def ndim(self) -> int:
        return self.stored.ndim

    @property
    def is_transpose(self) -> bool:
        """Whether blocks below the diagonal are conjugate transposes of those above."""
        return self._mirror.is_transpose

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"SymmetricArray({self.stored!r})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("The array is on disk: reading it takes a copy.")
        return np.asarray(self[:, :], dtype)

    def __getitem__(self, key: Any) -> np.ndarray:
        key = key if isinstance(key, tuple) else (key,)
        # By identity: arrays do not compare to a truth value.
        dots = [i for i, index in enumerate(key) if index is Ellipsis]
        if dots:
            i, missing = dots[0], self.ndim - len(key) + 1
            key = (*key[:i], *[slice(None)] * missing, *key[i + 1 :])
        if len(key) > self.ndim:
            raise IndexError(
                f"There are {len(key)} indices for the {self.ndim} axes of an array of "
                f"shape {self.shape}. Pass at most one for each axis."
            )
        key = (*key, *[slice(None)] * (2 - len(key)))
        ranges = [
            _range(name, index, size)
            for name, index, size in safe_zip(
                ("row", "column"), key[:2], self.shape[:2]
            )
        ]
        bounds = [(min(x), max(x) + 1) if len(x) else (0, 0) for x in ranges]
        entries = self._read(*bounds)
        for axis, (wanted, (low, _)) in enumerate(safe_zip(ranges, bounds)):
            entries = np.take(entries, [x - low for x in wanted], axis)
        drop = [0 if not isinstance(i, slice) else slice(None) for i in key[:2]]
        return entries[(*drop, *key[2:])]

    def _read(self, rows: tuple[int, int], columns: tuple[int, int]) -> np.ndarray:
        """Reads a rectangle, block by block."""
        shape = (rows[1] - rows[0], columns[1] - columns[0], *self.shape[2:])
        result = np.empty(shape, self.dtype)
        for top, bottom in _pieces(*rows, self._block):
            for left, right in _pieces(*columns, self._block):
                if top // self._block <= left // self._block:
                    part = self.stored[top:bottom, left:right]
                else:
                    part = self._mirrored(slice(left, right), slice(top, bottom))
                place = (
                    slice(top - rows[0], bottom - rows[0]),
                    slice(left - columns[0], right - columns[0]),
                )
                result[place] = part
        return result

    def _mirrored(self, rows: slice, columns: slice) -> np.ndarray:
        """Reads the mirror image of a rectangle above the diagonal."""
        if self.is_transpose:
            return np.conj(np.swapaxes(self.stored[rows, columns], 0, 1))
        tile = []
        for leaf, x in safe_zip(self._mirror.leaves, self._arrays):
            key = [slice(None)] * x.ndim
            for axis, part in safe_zip(leaf.axes, (rows, columns)):
                if axis is not None:
                    key[axis] = part
            tile.append(jnp.asarray(x[tuple(key)]))
        part = self._mirror(tile)[self._index]
        if part.dtype != self.dtype:
            raise ValueError(
                f"The mirror image of blocks of dtype {self.dtype} has dtype "
                f"{part.dtype}. If 64-bit mode is off, set "
                "`jax.config.update('jax_enable_x64', True)`, or read `stored`."
            )
        return np.asarray(part)


def _range(name: str, index: Any, size: int) -> range:
    if isinstance(index, slice):
        return range(size)[index]
    if isinstance(index, bool) or not isinstance(index, int | np.integer):
        raise IndexError(
            f"Rows and columns are named by ints and slices; got {shown(index)}. Read "
            "a slice, and index that."
        )
    if not -size <= index < size:
        raise IndexError(
            f"The {name} {index} is out of range: there are {size} {name}s."
        )
    start = range(size)[int(index)]
    return range(start, start + 1)


def _pieces(start: int, stop: int, block: int) -> list[tuple[int, int]]:
    """Splits a range at the boundaries of blocks."""
    firsts = range(start // block * block, stop, block)
    return [(max(start, x), min(stop, x + block)) for x in firsts]
