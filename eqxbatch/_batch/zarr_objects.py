"""The objects of a zarr group, by key: in a folder, or in any store that zarr has."""

import abc
import asyncio
import contextlib
import dataclasses
import hashlib
import importlib
import itertools
import os
import pathlib
import re
import shutil
import time
import uuid
from collections.abc import Coroutine, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from .._base.trees import import_extra, log


METADATA = "zarr.json"


# Next to the chunks of an array: which values belong to which of its chunks.
_SEALS = "places"


# Which runs are about to make an object. No array can have this name. So long does one
# wait for another.
_CLAIMS, _PATIENCE = ".claims", 10.0


# How zarr names an unfinished file.
_PARTIAL = re.compile(r".+\.[0-9a-f]{32}\.partial")


@runtime_checkable
class KeyValueStore(Protocol):
    """A `zarr.abc.store.Store`, told without importing zarr."""

    @property
    def read_only(self) -> bool: ...

    @property
    def supports_writes(self) -> bool: ...

    @property
    def supports_deletes(self) -> bool: ...

    @property
    def supports_listing(self) -> bool: ...

    def list_prefix(self, prefix: str) -> Any: ...


class Listing(NamedTuple):
    """What there is of an array.

    - `sizes`: its objects by key, with their sizes in bytes, where these are known.
    - `seals`: the seals of chunks that were written, or of some that were not.
    """

    sizes: dict[str, int | None]
    seals: set[str]


class AbstractObjects(abc.ABC):
    """The objects of a zarr group.

    An object is written as a whole, or not at all. Only what is known not to be there
    is missing: whatever else hinders reading raises an error.
    """

    @abc.abstractmethod
    def shown(self, key: str = "") -> str:
        """What users call an object, or all of them."""

    @abc.abstractmethod
    def read(self, key: str) -> np.ndarray | None:
        """The bytes of an object; None if there is none."""

    @abc.abstractmethod
    def create(self, key: str, data: bytes) -> None:
        """Writes an object, unless there is one."""

    @abc.abstractmethod
    def write(self, key: str, data: np.ndarray, ending: np.ndarray, seal: str) -> None:
        """Writes the bytes of a chunk and those behind them, and its seal.

        Either may be there first, because each is worth nothing without the other.
        """

    @abc.abstractmethod
    def listing(self, array: str) -> Listing:
        """What there is of an array."""

    @abc.abstractmethod
    def array(self, name: str) -> Any:
        """An array, opened by zarr for reading."""

    @abc.abstractmethod
    def is_foreign(self) -> bool:
        """Whether there is anything, if there are no metadata of a group."""

    @abc.abstractmethod
    def num_free(self) -> int | None:
        """How many bytes can be written, if that is known."""

    @abc.abstractmethod
    def lock(self, arrays: list[str], *, clean: bool) -> None:
        """Tells other runs that this one writes, until it is closed or killed.

        If no other run does, `clean` deletes what killed runs have left unfinished.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the writing."""


class FolderObjects(AbstractObjects):
    """The files of a folder.

    Seals are lines, to which each run has a file of its own.
    """

    _lock: int | None = None

    def __init__(self, path: pathlib.Path):
        self.path, self.run = path, uuid.uuid4().hex

    def shown(self, key: str = "") -> str:
        return str(self.path / key)

    def read(self, key: str) -> np.ndarray | None:
        # Any other error says nothing about an object: the disk may fail.
        try:
            return np.frombuffer((self.path / key).read_bytes(), np.uint8)
        except FileNotFoundError:
            return None

    def create(self, key: str, data: bytes) -> None:
        if not (self.path / key).exists():
            self._write(key, data, is_new=True)

    def write(self, key: str, data: np.ndarray, ending: np.ndarray, seal: str) -> None:
        seals = self.path / key.partition("/")[0] / _SEALS
        seals.mkdir(parents=True, exist_ok=True)
        with (seals / self.run).open("a") as lines:
            lines.write(f"{seal}\n")
        # As zarr writes a chunk, but the bytes are written from where they are.
        self._write(key, data.data, ending.data)

    def _write(self, key: str, *parts: Any, is_new: bool = False) -> None:
        file = self.path / key
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{uuid.uuid4().hex}.partial")
        try:
            with partial.open("wb") as written:
                for part in parts:
                    written.write(part)
            # An object has its name only once it is whole. Of two new ones, the first
            # stays.
            _rename(partial, file, is_new=is_new)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def listing(self, array: str) -> Listing:
        sizes: dict[str, int | None] = {}
        for file in self._files(f"{array}/c", f"{array}/{METADATA}"):
            # Another process may have removed it.
            with contextlib.suppress(FileNotFoundError):
                sizes[file.relative_to(self.path).as_posix()] = file.stat().st_size
        seals = sorted((self.path / array / _SEALS).glob("*"))
        # A run that was killed may have left half a line, which then is no seal.
        lines = [file.read_text(errors="replace").split() for file in seals]
        return Listing(sizes, {line for words in lines for line in words})

    def _files(self, *keys: str) -> Iterator[pathlib.Path]:
        """The files of these names, and those in folders of these names."""
        for path in map(self.path.joinpath, keys):
            if not path.is_dir():
                yield path
                continue
            # Folders may be links to other disks.
            for folder, _, names in os.walk(path, onerror=_raised, followlinks=True):
                yield from (pathlib.Path(folder, name) for name in names)

    def array(self, name: str) -> Any:
        zarr = importlib.import_module("zarr")
        return zarr.open_array(str(self.path / name), mode="r")

    def is_foreign(self) -> bool:
        names = {x.name for x in self.path.iterdir()} if self.path.exists() else set()
        return any(not _PARTIAL.fullmatch(name) for name in names)

    def num_free(self) -> int:
        return shutil.disk_usage(self.path).free

    def lock(self, arrays: list[str], *, clean: bool) -> None:
        try:
            fcntl = importlib.import_module("fcntl")
            self._lock = os.open(self.path / METADATA, os.O_RDWR)
            if clean:
                with contextlib.suppress(BlockingIOError):
                    # If no other run has a lock, unfinished files belong to none.
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._clean(arrays)
            # Any number of runs can write, each with a lock that it shares.
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        except (ImportError, OSError) as e:
            # On Windows, and on file systems without locks.
            log.debug("ZarrStore: unfinished files are kept, without locks (%s).", e)

    def _clean(self, arrays: list[str]) -> None:
        folders = (self.path / name / "c" for name in arrays)
        files = [self.path.glob("*"), *(folder.rglob("*") for folder in folders)]
        for file in itertools.chain.from_iterable(files):
            if _PARTIAL.fullmatch(file.name):
                file.unlink(missing_ok=True)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


# Where machines of Amazon, Azure and Google have credentials for what runs there.
_OF_THE_MACHINE = re.compile(r"169\.254\.|/latest/api/token|metadata\.google")


def _rename(partial: pathlib.Path, file: pathlib.Path, *, is_new: bool) -> None:
    """Gives a file its name, unless it is new and the name is taken."""
    if not is_new:
        partial.replace(file)
        return
    try:
        os.link(partial, file)
    except FileExistsError:
        pass
    except OSError:  # Not all file systems have links.
        partial.replace(file)
    partial.unlink(missing_ok=True)


def _raised(error: OSError) -> None:
    # Another process may have removed a folder. If it cannot be read, nothing is known.
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


class StoreObjects(AbstractObjects):
    """The objects of a store of zarr, such as those below a prefix of a bucket.

    Putting an object is atomic, so there is nothing unfinished, and nothing to lock.
    A seal is the name of an empty object, so that one listing has all of them.
    """

    def __init__(self, store: Any):
        self.store = store

    def shown(self, key: str = "") -> str:
        return f"{self.store}/{key}".rstrip("/")

    def _wait(self, run: Coroutine, what: str, key: str = "") -> Any:
        """What a request returns; its error, with the name of its object."""
        sync = importlib.import_module("zarr.core.sync").sync
        try:
            # In the loop of zarr, to which connections of stores may belong.
            return sync(run)
        except MemoryError:
            raise
        # Each library has errors of its own, and some are bare exceptions.
        except Exception as e:
            # obstore says everything twice.
            said, _, _ = str(e).partition("\n\nDebug source")
            remedy = (
                "What is written stays: once this is resolved, call again, which goes "
                "on from there."
            )
            if _OF_THE_MACHINE.search(said):
                remedy = (
                    "There are no credentials, which it then asks the machine for. Set "
                    "those of the store, such as AWS_ACCESS_KEY_ID and "
                    "AWS_SECRET_ACCESS_KEY in the environment."
                )
            raise OSError(
                f"`path` could not {what} {self.shown(key)}: {type(e).__name__}: "
                f"{said}. {remedy}"
            ) from e

    def read(self, key: str) -> np.ndarray | None:
        prototype = _buffers().default_buffer_prototype()
        found = self._wait(self.store.get(key, prototype), "read", key)
        return None if found is None else found.as_numpy_array().view(np.uint8)

    def create(self, key: str, data: bytes) -> None:
        """Writes an object, unless there is one.

        Few stores can do so at once. So each run claims the key before it looks who
        else does: of two runs, the second one sees the claim of the first, or what that
        has written.
        """
        contents = hashlib.sha256(data).hexdigest()
        claims = f"{_CLAIMS}/{key}/"
        own = f"{claims}{contents}-{uuid.uuid4().hex}"
        end = time.monotonic() + _PATIENCE
        try:
            while self.read(key) is None:
                self._put(own, b"")
                found = self._keys(claims)
                others = [x for x in found if not x.startswith(f"{claims}{contents}")]
                if not others:
                    if self.read(key) is None:
                        self._put(key, data)
                    return
                # One gives way, and then sees what the other one has written.
                if min(others) < own:
                    self._delete(own)
                if time.monotonic() > end:
                    raise OSError(
                        f"`path` is claimed by another run for {_PATIENCE:.0f} s: "
                        f"{self.shown(others[0])}. If that run was killed, delete this "
                        "object."
                    )
                time.sleep(0.05)
        finally:
            # If it stays, only other kernels wait for it.
            with contextlib.suppress(OSError):
                self._delete(own)

    def _put(self, key: str, data: bytes) -> None:
        buffer = _buffers().cpu.Buffer.from_bytes(data)
        self._wait(self.store.set(key, buffer), "write", key)

    def _delete(self, key: str) -> None:
        self._wait(self.store.delete(key), "delete", key)

    def _keys(self, prefix: str) -> list[str]:
        async def keys() -> list[str]:
            return [key async for key in self.store.list_prefix(prefix)]

        return self._wait(keys(), "list", prefix)

    def write(self, key: str, data: np.ndarray, ending: np.ndarray, seal: str) -> None:
        as_buffer = _buffers().cpu.Buffer.from_array_like
        whole = as_buffer(np.concatenate([data, ending.view(np.uint8)]))
        name = f"{key.partition('/')[0]}/{_SEALS}/{seal}"
        empty = as_buffer(np.zeros(0, np.uint8))

        async def both() -> None:
            puts = self.store.set(name, empty), self.store.set(key, whole)
            # None of them goes on once the call has ended.
            for x in await asyncio.gather(*puts, return_exceptions=True):
                if isinstance(x, BaseException):
                    raise x

        self._wait(both(), "write", key)

    def listing(self, array: str) -> Listing:
        found = self._keys(f"{array}/")
        if any(not key.startswith(f"{array}/") for key in found):
            raise ValueError(
                f"`path` is a store that lists {found[0]!r} for what is below "
                f"{array!r}: {self.store}. Open it with the path that its file system "
                "returns."
            )
        prefix = f"{array}/{_SEALS}/"
        seals = {key.removeprefix(prefix) for key in found if key.startswith(prefix)}
        # Listings of zarr have no sizes.
        return Listing(dict.fromkeys(found), seals)

    def array(self, name: str) -> Any:
        zarr = importlib.import_module("zarr")

        async def opened() -> Any:
            api = importlib.import_module("zarr.api.asynchronous")
            return await api.open_array(store=self.store, path=name, mode="r")

        return zarr.Array(self._wait(opened(), "open", name))

    def is_foreign(self) -> bool:
        async def is_any() -> bool:
            async for key in self.store.list_prefix(""):
                # A run that was killed may have left its claim, and nothing else.
                if not key.startswith(f"{_CLAIMS}/"):
                    return True
            return False

        return self._wait(is_any(), "list")

    def num_free(self) -> None:
        return None

    def lock(self, arrays: list[str], *, clean: bool) -> None:
        del arrays, clean

    def close(self) -> None:
        pass


def _buffers() -> Any:
    return importlib.import_module("zarr.buffer")


@dataclasses.dataclass(frozen=True, eq=False)
class Given:
    """A store of zarr that a user has opened. Another one has other contents."""

    store: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Given) and self.store is other.store

    def __hash__(self) -> int:
        # Those of zarr have none.
        return id(self.store)


# Where obstore finds buckets.
_SCHEMES = ("s3", "gs", "az")
_URL = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]+)://(?P<rest>.*)", re.DOTALL)


def is_url(path: str) -> bool:
    """Whether a path is that of a bucket. Raises `ValueError` for any other URL."""
    url = _URL.fullmatch(path)
    if url is None:
        return False
    scheme, rest = url["scheme"], url["rest"]
    remedy = "open another one by zarr, and pass the store"
    if scheme not in _SCHEMES:
        raise ValueError(
            f"`path` must be a folder, or a URL that begins with {_shown(_SCHEMES)}; "
            f"got {path!r}. Pass such a URL, or {remedy}."
        )
    if not rest.partition("/")[0] or any(x in rest for x in "?#"):
        raise ValueError(
            f"`path` must be a bucket and a prefix, as in '{scheme}://bucket/kernel', "
            f"without a query; got {path!r}. Settings of obstore are variables of the "
            f"environment, or {remedy}."
        )
    return True


def _shown(schemes: tuple[str, ...]) -> str:
    return ", ".join(f"'{x}://'" for x in schemes)


def of_url(url: str) -> Any:
    """The store of zarr for a URL, by obstore."""
    zarr = import_extra("zarr", "ZarrStore", "store")
    obstore = import_extra("obstore.store", f"ZarrStore({url!r})", "cloud")
    return zarr.storage.ObjectStore(obstore.from_url(url))


# What a store must be able to do, by the name that zarr gives it.
_ABILITIES = ("supports_writes", "supports_deletes", "supports_listing")


def check_given(store: Any) -> None:
    """Raises `ValueError` for a store of zarr in which no run can be resumed."""
    if store.read_only:
        raise ValueError(
            f"`path` must be a store that can be written; got {store}, which is "
            "read-only. Open it with `read_only=False`."
        )
    lacking = [f"{name} is False" for name in _ABILITIES if not getattr(store, name)]
    try:
        # What is stored is opened for reading alone.
        store.with_read_only(True)
    except NotImplementedError:
        lacking.append("with_read_only is not implemented")
    if lacking:
        raise ValueError(
            "`path` must be a store of zarr that writes, deletes and lists objects; "
            f"got {store}, for which {', '.join(lacking)}. Pass a path, an "
            "`ObjectStore` or an `FsspecStore`."
        )
