"""Writes the chunks of zarr arrays, each sealed with what it was made of."""

import contextlib
import errno
import hashlib
import importlib
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._base.trees import safe_zip
from .checksums import checksums
from .fingerprint import bytes_of
from .store import AbstractWriter, Chunk, in_threads, Source, StoredArray
from .zarr_objects import AbstractObjects, METADATA


_CHECKSUM = 4  # The bytes of a CRC32C, at the end of a chunk.


# Chunks that are read at the same time have at most so many bytes, if not one has more.
_MOST_BYTES, _MOST_READS = 2**26, 16


KEPT = (
    "Chunks are kept. Delete the file of an array, and the call writes it again; "
    "restore that of the group."
)


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


def metadata_of(
    zarr: Any, arrays: Sequence[StoredArray], attributes: dict[str, Any]
) -> dict[str, bytes]:
    """The metadata of a group and of its arrays by key, as zarr writes them."""
    written: dict[str, Any] = {}
    memory = zarr.storage.MemoryStore(written)
    group = zarr.create_group(memory, attributes=attributes, zarr_format=3)
    codecs = importlib.import_module("zarr.codecs")
    for name, array in safe_zip(names_of(arrays), arrays):
        group.create_array(
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
    return {key: buffer.to_bytes() for key, buffer in written.items()}


def _parsed(zarr: Any, data: bytes) -> dict[str, Any]:
    """The metadata of an array, with what zarr adds to them."""
    buffer = importlib.import_module("zarr.buffer").cpu.Buffer.from_bytes(data)
    memory = zarr.storage.MemoryStore({METADATA: buffer})
    return zarr.open_array(memory, mode="r").metadata.to_dict()


class ZarrWriter(AbstractWriter):
    """Writes chunks, and beside each a seal that says which values belong there.

    A chunk without its seal is computed again, so nothing depends on seals.

    - `record`: what identifies the arrays, which is part of each seal.
    - `metadata`: those of the group and of the arrays by key, as they must be.
    - `check`: raises an error if the group is another one by now.
    """

    def __init__(
        self,
        zarr: Any,
        objects: AbstractObjects,
        arrays: Sequence[StoredArray],
        record: dict[str, Any],
        metadata: dict[str, bytes],
        check: Callable[[], None],
    ):
        self.zarr, self.objects, self.stored = zarr, objects, arrays
        self.metadata, self.check = metadata, check
        self.names, self._is_checked = names_of(arrays), False
        # A run of another kernel may begin at the same time. Its seals are not ours.
        words = json.dumps(record, sort_keys=True)
        self.record = hashlib.sha256(words.encode()).hexdigest()
        self._check_arrays()

    def close(self) -> None:
        self.objects.close()

    def _check_arrays(self) -> None:
        """Raises `ValueError` if the metadata of arrays are not what they must be."""
        for name in self.names:
            key = f"{name}/{METADATA}"
            data = self.objects.read(key)
            # Whoever removes it gets to know in the end.
            if data is None:
                continue
            expected = _parsed(self.zarr, self.metadata[key])
            try:
                saved = _parsed(self.zarr, data.tobytes())
            except Exception as e:
                raise ValueError(
                    "`path` has damaged metadata: zarr cannot read "
                    f"{self.objects.shown(key)} ({type(e).__name__}: {e}). {KEPT}"
                ) from e
            # Users may add attributes.
            different = [
                part
                for part in sorted({*expected, *saved} - {"attributes"})
                if saved.get(part) != expected.get(part)
            ]
            if different:
                raise ValueError(
                    "`path` has metadata of other arrays: in "
                    f"{self.objects.shown(key)}, {different} differ. {KEPT}"
                )

    def _key(self, chunk: Chunk) -> str:
        return "/".join([self.names[chunk.array], "c", *map(str, chunk.index)])

    def _seal(self, chunk: Chunk, sums: np.ndarray, source: str) -> str:
        """A digest of a chunk's checksums, place and source, and of the record."""
        made_of = f"{chunk.index}{self.record} {source}".encode()
        seal = hashlib.blake2b(made_of, digest_size=16)
        seal.update(sums.data)
        return seal.hexdigest()

    def _has_size(self, chunk: Chunk, sizes: dict[str, int | None]) -> bool:
        """Whether a chunk is there, with the right size if that is known."""
        expected = self._bytes(chunk) + _CHECKSUM
        return sizes.get(self._key(chunk), 0) in (expected, None)

    def _sums(self, chunk: Chunk) -> np.ndarray | None:
        """The checksums of a chunk that is stored; None unless it is intact."""
        data = self.objects.read(self._key(chunk))
        # Another process may have removed it, and sizes may not be known before.
        if data is None or len(data) != self._bytes(chunk) + _CHECKSUM:
            return None
        sums = checksums(data[:-_CHECKSUM])
        return sums if sums[-1:].tobytes() == data[-_CHECKSUM:].tobytes() else None

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
        listings = [self.objects.listing(name) for name in self.names]
        stored = [x for x in chunks if self._has_size(x, listings[x.array].sizes)]
        # A request takes long, but not longer beside others. Damaged chunks, and
        # those of other rows, are written over.
        most = _MOST_BYTES // max([1, *map(self._bytes, stored)])
        most = min(max(most, 1), _MOST_READS)
        arguments = ((x,) for x in stored)
        with contextlib.closing(in_threads(self._sums, arguments, most)) as reads:
            intact = {
                x
                for x, sums in safe_zip(stored, reads)
                if sums is not None
                and self._seal(x, sums, source(x)) in listings[x.array].seals
            }
        missing = [x for x in chunks if x not in intact]
        # What is written over has its space already.
        there = (listings[x.array].sizes.get(self._key(x)) or 0 for x in missing)
        needed = sum(map(self._bytes, missing)) - sum(there)
        free = self.objects.num_free()
        if free is not None and needed > free:
            raise OSError(
                errno.ENOSPC,
                f"The disk of `path` has {free:,} bytes left, and the "
                f"{self.stored[0].kind} needs "
                f"{needed:,}",
                self.objects.shown(),
            )
        return missing

    def write(self, chunk: Chunk, values: np.ndarray, source: str = "") -> None:
        # Of two kernels that begin at one place, one loses: before it writes anything.
        if not self._is_checked:
            self.check()
            self._is_checked = True
        data = self._encoded(chunk, values)
        # The bytes are read once for both checksums.
        sums = checksums(data)
        seal = self._seal(chunk, sums, source)
        self.objects.write(self._key(chunk), data, sums[-1:], seal)

    def _damaged(self) -> list[str]:
        """The keys of what is not there, or has a wrong size."""
        damaged = [] if self.objects.read(METADATA) is not None else [METADATA]
        for i, (name, array) in enumerate(safe_zip(self.names, self.stored)):
            sizes = self.objects.listing(name).sizes
            chunks = (Chunk(i, index) for index in array.indices())
            damaged += [
                *({f"{name}/{METADATA}"} - sizes.keys()),
                *(self._key(x) for x in chunks if not self._has_size(x, sizes)),
            ]
        return damaged

    def finish(self) -> list[Any]:
        damaged = self._damaged()
        if damaged:
            raise OSError(
                errno.ENOENT,
                f"{len(damaged)} files of `path` were deleted or damaged while the "
                "kernel was computed. Call again, which computes what is missing. The "
                "first",
                self.objects.shown(damaged[0]),
            )
        self.check()
        self._check_arrays()
        return [self._without_gaps(self.objects.array(name)) for name in self.names]

    def _without_gaps(self, array: Any) -> Any:
        """An array whose chunks, if they are removed later, do not read as zeros."""
        # zarr has had this setting since some version after 3.1.3.
        if "read_missing_chunks" not in self.zarr.config.get("array"):
            return array
        return array.with_config({"read_missing_chunks": False})
