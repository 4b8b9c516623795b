"""Kernels on disk; runs can be resumed."""

import errno
import importlib
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import equinox as eqx
import numpy as np

from .._base.shapes import checked
from .._base.trees import import_extra
from .grid import Grid
from .kernel import KernelLeaf, TileMirror
from .stores import AbstractStore, AbstractWriter, Patch
from .symmetric_array import SymmetricArray


_ATTRIBUTE = "eqxbatch"


_CHECKSUM = 4  # The bytes of a CRC32C, at the end of a chunk.


_PARTIAL = ".partial"  # How zarr names an unfinished file.


class ZarrStore(AbstractStore):
    """Stores a kernel on disk, as zarr arrays whose chunks are the blocks.

    Pass it as `store` to [`eqxbatch.filter_batch_kernel`][], which then returns zarr
    arrays that are open for reading. Entries are read from disk only when they are
    accessed. `path` becomes a zarr group (format version 3) with one array for each
    array that the kernel function returns. A single array is named `kernel`; several
    are named by their position in the output.

    **To resume a run that was stopped or killed, call it again.** Each chunk has a
    checksum. Intact chunks are kept; chunks that are missing, or have a wrong size or
    checksum, are computed. The kernel is bit for bit that of an uninterrupted run on
    the same machine. The group stores a fingerprint of the inputs, the kernel function
    (its arrays and its program), the blocks and the package versions, so that different
    kernels are never mixed.

    Several processes can share the work: see `mesh` of
    [`eqxbatch.filter_batch_kernel`][].

    Needs the extra `store`: `pip install "equinox-batch[store]"`.

    **Arguments:**

    - `path`: a folder, which is created if it does not exist.
    - `upper_only`: whether to omit the blocks below the diagonal of a symmetric kernel,
        which halves the space on disk. The result is then an
        [`eqxbatch.SymmetricArray`][], which reads the omitted blocks as mirror images.

    **Raises:**

    When used:

    - `ValueError` for a folder that contains another kernel or anything else, and for
        `upper_only` if the kernel is not symmetric.
    - `TypeError` for a dtype that zarr does not support, such as bfloat16.
    - `OSError` before anything is computed, if the folder cannot be written or the disk
        has too little space; or later, if the disk becomes full. Everything written
        before stays intact.
    - `ImportError` if zarr is not installed.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> kernel = eqxbatch.filter_batch_kernel(
        ...     lambda x, y: x @ y.T,
        ...     block_size=2,
        ...     store=eqxbatch.ZarrStore(folder.name + "/linear.zarr"),
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

    @checked
    def __init__(self, path: str | os.PathLike, *, upper_only: bool = False):
        self.path = os.fspath(path)
        self.upper_only = upper_only

    @property
    def is_shared(self) -> bool:
        return True

    def begin(
        self,
        leaves: list[KernelLeaf],
        grid: Grid,
        fingerprint: Callable[[], dict[str, Any]],
        *,
        mirror: TileMirror,
        is_first: bool,
    ) -> AbstractWriter:
        zarr = import_extra("zarr", "ZarrStore", "store")
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
        expected = {**fingerprint(), "upper_only": self.upper_only}
        path = pathlib.Path(self.path)
        if is_first:
            _make_group(zarr, path, expected)
        _check_same(path, expected)
        group = zarr.open_group(str(path), mode="r+" if is_first else "r")
        names = _names(leaves)
        for name, leaf in zip(names, leaves, strict=True):
            if is_first and not (path / name / "zarr.json").exists():
                _make_array(group, name, leaf, grid)
        if is_first:
            for leftover in path.rglob(f"*{_PARTIAL}"):
                leftover.unlink(missing_ok=True)
        # Chunks of zeros are written, too, so that they are not missing.
        with zarr.config.set({"array.write_empty_chunks": True}):
            arrays = [zarr.open_array(str(path / name), mode="r+") for name in names]
        half = mirror if self.upper_only else None
        return _ZarrWriter(zarr, path, names, arrays, half, grid.sizes[0])


def _names(leaves: list[KernelLeaf]) -> list[str]:
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
    if (path / "zarr.json").exists():
        return
    if path.exists() and any(not x.name.endswith(_PARTIAL) for x in path.iterdir()):
        raise ValueError(
            f"`path` is a folder that contains something other than a kernel: {path}. "
            "Give one that is empty or does not exist."
        )
    # Metadata are written together with the group, so no group lacks them.
    zarr.create_group(str(path), attributes={_ATTRIBUTE: expected}, zarr_format=3)


def _check_same(path: pathlib.Path, expected: dict[str, Any]) -> None:
    try:
        node = json.loads((path / "zarr.json").read_text())
        found = node["attributes"][_ATTRIBUTE]
    except (KeyError, TypeError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(
            f"`path` has zarr arrays that are not a kernel of eqxbatch: {path}. Give a "
            "folder that is empty or does not exist."
        )
    different = [
        name for name in {**expected, **found} if expected.get(name) != found.get(name)
    ]
    if different:
        parts = "; ".join(
            f"{name} is {_shown(found.get(name))} there and "
            f"{_shown(expected.get(name))} now"
            for name in different
        )
        raise ValueError(
            f"`path` has another kernel than this one: {path}. {parts}. Delete it, or "
            "give another path."
        )


def _shown(value: Any) -> str:
    """A part of a fingerprint, in readable form."""
    text = repr(value)
    return re.sub(r"([0-9a-f]{8})[0-9a-f]{56}", r"\1...", text)


def _make_array(group: Any, name: str, leaf: KernelLeaf, grid: Grid) -> None:
    codecs = importlib.import_module("zarr.codecs")
    shape = leaf.shape(grid.totals)
    chunks = leaf.shape(grid.sizes)
    group.create_array(
        name,
        shape=shape,
        chunks=tuple(max(1, size) for size in chunks),
        dtype=np.dtype(leaf.dtype),
        # Entries of a kernel are nearly random, so compression is slow and saves
        # little. The checksum tells whether a chunk is intact.
        compressors=[codecs.Crc32cCodec()],
        filters=None,
        fill_value=0,
    )


class _ZarrWriter(AbstractWriter):
    def __init__(
        self,
        zarr: Any,
        path: pathlib.Path,
        names: list[str],
        arrays: list,
        mirror: TileMirror | None,
        block: int,
    ):
        self.zarr, self.path, self.names = zarr, path, names
        self.arrays, self.mirror, self.block = arrays, mirror, block

    def _file(self, patch: Patch) -> pathlib.Path:
        name = self.names[patch.leaf]
        return self.path.joinpath(name, "c", *map(str, patch.chunk))

    def has(self, patch: Patch) -> bool:
        file = self._file(patch)
        try:
            size = file.stat().st_size
        except FileNotFoundError:
            return False
        if size == self._bytes(patch) + _CHECKSUM and self._is_whole(patch):
            return True
        file.unlink(missing_ok=True)
        return False

    def _is_whole(self, patch: Patch) -> bool:
        """Whether the checksum of the chunk is correct.

        Other errors say nothing about the chunk: the disk may fail, or memory may run
        out.
        """
        try:
            self.arrays[patch.leaf][patch.place]
        except ValueError as e:
            if "checksum" not in str(e):
                raise
            return False
        return True

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
        self.arrays[patch.leaf][patch.place] = values

    def finish(self) -> list[Any]:
        arrays = [
            self.zarr.open_array(str(self.path / name), mode="r") for name in self.names
        ]
        if self.mirror is None:
            return arrays
        return [
            SymmetricArray(arrays, i, self.block, self.mirror)
            if leaf.is_pairwise
            else arrays[i]
            for i, leaf in enumerate(self.mirror.leaves)
        ]
