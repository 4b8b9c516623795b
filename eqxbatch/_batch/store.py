"""Arrays that are stored in chunks, in host memory or on disk; runs can be resumed."""

import abc
import collections
import concurrent.futures
import contextlib
import errno
import hashlib
import importlib
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._base.checks import check_types, checked
from .._base.jaxprs import constants, inner_programs, parameters, programs_in
from .._base.trees import import_extra, log, safe_zip


class Chunk(NamedTuple):
    """A chunk of one of several arrays, by its position in chunks."""

    array: int
    index: tuple[int, ...]


class StoredArray(NamedTuple):
    """An array that is stored in chunks.

    - `path`: where it is in the output of the function.
    - `sizes`: the shape of a chunk; the last ones may be smaller.
    - `upper_only`: whether chunks below the diagonal of the first two axes are omitted.
    - `kind`: what the arrays are called.
    """

    path: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: Any
    upper_only: bool = False
    kind: str = "kernel"

    def indices(self) -> list[tuple[int, ...]]:
        """The positions of all chunks."""
        pairs = safe_zip(self.shape, self.sizes)
        numbers = [range(math.ceil(total / size)) for total, size in pairs]
        indices = itertools.product(*numbers)
        return [i for i in indices if not self.upper_only or i[0] <= i[1]]

    def place(self, index: tuple[int, ...]) -> tuple[slice, ...]:
        """The part of the array that a chunk is."""
        starts = [number * size for number, size in safe_zip(index, self.sizes)]
        pairs = safe_zip(starts, self.sizes, self.shape)
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

    # Whether to omit chunks that are mirror images.
    upper_only: eqx.AbstractVar[bool]
    # Whether several processes can write to it.
    is_shared: eqx.AbstractVar[bool]

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

    upper_only: bool = eqx.field(static=True, default=False, init=False)
    is_shared: bool = eqx.field(static=True, default=False, init=False, repr=False)

    def begin(
        self, arrays: Sequence[StoredArray], fingerprint: Fingerprint, is_first: bool
    ) -> AbstractWriter:
        del fingerprint, is_first
        return _HostWriter(arrays)


class _HostWriter(AbstractWriter):
    def __init__(self, arrays: Sequence[StoredArray]):
        self.stored = arrays
        self.arrays = [np.zeros(x.shape, x.dtype) for x in arrays]

    def missing(
        self, chunks: list[Chunk], source: Source = lambda _: ""
    ) -> list[Chunk]:
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
            if len(pending) > most:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


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
    is_shared: bool = eqx.field(static=True, default=True, init=False, repr=False)

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

    def begin(
        self, arrays: Sequence[StoredArray], fingerprint: Fingerprint, is_first: bool
    ) -> AbstractWriter:
        zarr = import_extra("zarr", "ZarrStore", "store")
        for x in arrays:
            is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
            if is_key or np.dtype(x.dtype).kind not in "biufc":
                raise TypeError(
                    f"zarr has no arrays of dtype {x.dtype}, which the function of the "
                    f"{x.kind} returns in output{x.path}. Cast it, to float32 for "
                    "instance."
                )
        settings = {"upper_only": self.upper_only, "version": self.version}
        expected = {**fingerprint(), **settings}
        if expected["callbacks"] and self.version is None:
            raise ValueError(
                f"The {arrays[0].kind} calls functions on the host, by "
                f"{expected['callbacks']}, "
                "whose results a fingerprint cannot contain. Pass "
                "`ZarrStore(..., version='1')`, and another `version` when they change."
            )
        path = pathlib.Path(self.path)
        if is_first:
            _make_group(zarr, path, expected)
        what = f"has another {arrays[0].kind} than this one"
        check_record("path", path, read_record(path), expected, what)
        if is_first:
            group = _opened(zarr.open_group, path, mode="r+")
            for name, x in safe_zip(names_of(arrays), arrays):
                if not (path / name / _METADATA).exists():
                    with contextlib.suppress(zarr.errors.ContainsArrayError):
                        _make_array(group, name, x)
        writer = ZarrWriter(zarr, path, arrays)
        writer.lock(clean=is_first)
        return writer


def names_of(arrays: Sequence[StoredArray]) -> list[str]:
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


def read_record(path: pathlib.Path) -> dict[str, Any]:
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


def _seal(chunk: Chunk, values: np.ndarray, source: str) -> str:
    """A digest of the entries of a chunk, of its place, and of its source."""
    seal = hashlib.blake2b(f"{chunk.index}{source}".encode(), digest_size=16)
    add_array(seal, values)
    return seal.hexdigest()


class ZarrWriter(AbstractWriter):
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
        mode: Literal["r", "r+"] = "r+",
    ):
        self.zarr, self.path, self.stored = zarr, path, arrays
        self.names = names_of(arrays)
        # Chunks of zeros are written, too, so that they are not missing.
        self.arrays = [
            zarr.Array(
                zarr.AsyncArray(
                    metadata=array.metadata,
                    store_path=array.store_path,
                    config={"write_empty_chunks": True},
                )
            )
            for array in self.open(mode)
        ]
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

    def open(self, mode: str) -> list:
        """The arrays, after their metadata have been compared with what is stored."""
        memory = self.zarr.create_group(self.zarr.storage.MemoryStore(), zarr_format=3)
        arrays = []
        for name, stored in safe_zip(self.names, self.stored):
            expected = _make_array(memory, name, stored).metadata.to_dict()
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
        has_size = self._has_size(chunk)
        values = self._read(chunk) if has_size else None
        if values is not None:
            seal = _seal(chunk, values, source(chunk))
            return seal in self.seals[chunk.array]
        if has_size is not None:
            self._file(chunk).unlink(missing_ok=True)
        return False

    def _read(self, chunk: Chunk) -> np.ndarray | None:
        """The entries of a chunk; None if its checksum is wrong.

        Other errors say nothing about the chunk: the disk may fail, or memory may run
        out.
        """
        try:
            return np.asarray(self.arrays[chunk.array][self._place(chunk)])
        except ValueError as e:
            if "checksum" not in str(e):
                raise
            return None

    def _place(self, chunk: Chunk) -> tuple[slice, ...]:
        return self.stored[chunk.array].place(chunk.index)

    def _bytes(self, chunk: Chunk) -> int:
        """The size in bytes of the entries of a chunk."""
        array = self.arrays[chunk.array]
        return math.prod(array.chunks) * array.dtype.itemsize

    def missing(
        self, chunks: list[Chunk], source: Source = lambda _: ""
    ) -> list[Chunk]:
        self.seals = []
        for name in self.names:
            files = sorted((self.path / name / _PLACES).glob("*"))
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
        places = self.path / self.names[chunk.array] / _PLACES
        places.mkdir(parents=True, exist_ok=True)
        with (places / self.run).open("a") as file:
            file.write(f"{_seal(chunk, values, source)}\n")
        self.arrays[chunk.array][self._place(chunk)] = values

    def damaged(self) -> list[pathlib.Path]:
        """The files that are not there, or have a wrong size."""
        nodes = [self.path, *(self.path / name for name in self.names)]
        files = [node / _METADATA for node in nodes if not (node / _METADATA).exists()]
        chunks = (
            Chunk(i, index) for i, x in enumerate(self.stored) for index in x.indices()
        )
        return [*files, *(self._file(x) for x in chunks if not self._has_size(x))]

    def finish(self) -> list[Any]:
        damaged = self.damaged()
        if damaged:
            raise OSError(
                errno.ENOENT,
                f"{len(damaged)} files of `path` were deleted or damaged while the "
                "kernel was computed. Call again, which computes what is missing. The "
                "first",
                str(damaged[0]),
            )
        return self.open("r")


# What users pass for a store.
Store = AbstractStore | str | os.PathLike


# What is a mistake rather than the name of a folder.
_NO_PATHS = ("", "cpu", "gpu", "tpu", "disk", "memory", "zarr")


def as_store(store: Store) -> AbstractStore | Literal["device"]:
    """The store that `store` stands for; a path is that of a `ZarrStore`."""
    check_types({"store": store}, {"store": Store}, always=True)
    if isinstance(store, AbstractStore):
        return store
    if store == "device":
        return "device"
    if store in _NO_PATHS:
        raise ValueError(
            f"`store` must be 'device', 'host', a path on disk, or a store; got "
            f"{store!r}. Write './{store}' for a folder of this name."
        )
    return HostStore() if store == "host" else ZarrStore(store)


# The version of the format, so that later versions recognise earlier ones.
FORMAT = 2


# What changes numbers, random ones above all, without changing a program's text.
_SETTINGS = (
    "jax_enable_x64",
    "jax_threefry_partitionable",
    "jax_default_prng_impl",
    "jax_random_seed_offset",
    "jax_default_matmul_precision",
)


def fingerprint(parts: dict[str, PyTree], programs: list) -> dict[str, Any]:
    """What identifies the results of some programs for some arrays, as JSON data."""
    return {
        "format": FORMAT,
        "package": f"eqxbatch {importlib.metadata.version('equinox-batch')}",
        # Only a record: results of another backend have other rounding errors and must
        # not be mixed with these. It does not change any computation.
        "compiler": f"jax {jax.__version__} {jax.default_backend()}",
        **{name: digest(part) for name, part in parts.items()},
        "settings": {name: getattr(jax.config, name, None) for name in _SETTINGS},
        "program": [digest_of_program(x) for x in programs],
        "callbacks": sorted(_callbacks(programs)),
    }


def digest(tree: PyTree) -> str:
    """A digest of all arrays of a PyTree."""
    sha = hashlib.sha256()
    for path, leaf in jtu.tree_leaves_with_path(eqx.filter(tree, eqx.is_array)):
        sha.update(jtu.keystr(path).encode())
        add_array(sha, leaf)
    return sha.hexdigest()


def add_array(sha: Any, x: Any) -> None:
    """Adds an array to a digest, without a copy if it is contiguous."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        sha.update(str(x.dtype).encode())
        x = jr.key_data(x)
    x = np.asarray(x)
    sha.update(f"{x.dtype}{x.shape}".encode())
    # As bytes: Python has no buffers of dtypes such as bfloat16.
    sha.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)


def digest_of_program(closed: Any) -> str:
    """A digest of a program, and of what it closes over."""
    sha = hashlib.sha256()
    # Some equations are printed without the programs that they run.
    texts = (str(x) for part in programs_in(closed) for x in _programs_of_objects(part))
    for text in (str(closed), *texts):
        # Functions are printed with their addresses, which change in every run.
        sha.update(re.sub(r"0x[0-9a-f]+", "", text).encode())
    # These include the arrays of the kernel function, which are digested again.
    for x in constants(closed):
        add_array(sha, x)
    return sha.hexdigest()


def _programs_of_objects(closed: Any) -> Iterator[Any]:
    """The programs that objects among the parameters of equations have."""
    for eqn in closed.jaxpr.eqns:
        if parameters(eqn) is not eqn.params:
            yield from inner_programs(eqn)


def _callbacks(programs: list) -> set[str]:
    """What programs call on the host, whose results are not part of their text."""
    return {
        eqn.primitive.name
        for program in programs
        for closed in programs_in(program)
        for eqn in closed.jaxpr.eqns
        if "callback" in eqn.primitive.name and not _has_no_result(eqn)
    }


def _has_no_result(eqn: Any) -> bool:
    """Whether a callback prints, or raises an error of `equinox.error_if`."""
    if eqn.primitive.name.startswith("debug"):
        return True
    fun = getattr(eqn.params.get("callback"), "callback_func", None)
    return getattr(fun, "__module__", None) == "equinox._errors"


def read_json(name: str, file: pathlib.Path, remedy: str) -> dict[str, Any]:
    """The object in a file. Raises `ValueError` if the file is damaged."""
    try:
        record = json.loads(file.read_text())
        if not isinstance(record, dict):
            raise ValueError(f"got a {type(record).__name__}")
    except ValueError as e:
        raise ValueError(
            f"`{name}` has a damaged file: {file} is not a JSON object ({e}). {remedy}"
        ) from e
    return record


def check_record(
    name: str, path: pathlib.Path, saved: dict, expected: dict, what: str
) -> None:
    """Raises `ValueError` if a folder belongs to something else than expected."""
    parts = [
        _difference(part, saved.get(part), expected.get(part))
        for part in {**expected, **saved}
        if saved.get(part) != expected.get(part)
    ]
    if parts:
        raise ValueError(
            f"`{name}` {what}: {path}. {'; '.join(parts)}. Delete it, or pass another "
            "path."
        )


def _difference(part: str, there: Any, now: Any) -> str:
    # Digits of a digest say nothing to users.
    if re.search("[0-9a-f]{64}", f"{there}{now}"):
        return f"the contents of {part} differ"
    return f"{part} is {there!r} there and {now!r} now"
