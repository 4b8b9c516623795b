"""`ZarrStore`: arrays in chunks of zarr, on disk or elsewhere; runs can be resumed."""

import errno
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._base.trees import import_extra
from .._base.types import check_types, checked
from .fingerprint import check_record, parsed_json
from .store import AbstractStore, AbstractWriter, Fingerprint, HostStore, StoredArray
from .zarr_objects import (
    AbstractObjects,
    check_given,
    FolderObjects,
    Given,
    is_url,
    KeyValueStore,
    METADATA,
    of_url,
    StoreObjects,
)
from .zarr_writer import metadata_of, ZarrWriter


_ATTRIBUTE = "eqxbatch"


class ZarrStore(AbstractStore):
    """Stores a kernel on disk or in a bucket, as zarr arrays with blocks as chunks.

    A path, a URL or a store of zarr as `store` of [`eqxbatch.filter_batch_kernel`][]
    stands for it; pass this one for other settings. The result is then zarr arrays that
    are open for reading. Entries are read only when they are accessed. `path` becomes a
    zarr group (format version 3) with one array for each array that the kernel function
    returns. A single array is named `kernel`; several are named by their position in
    the output.

    **To resume a run that was stopped or killed, call it again.** Each chunk has a
    checksum. Intact chunks are kept; chunks that are missing, have a wrong size or
    checksum, or are those of another place, are computed. The kernel is bit for bit
    that of an uninterrupted run on the same machine. The group stores a fingerprint of
    the inputs, the kernel function (its arrays and its program), the blocks, JAX's
    settings for random numbers and precision, and the package versions, so that
    different kernels are never mixed.

    Several processes can share the work: see `mesh` of
    [`eqxbatch.filter_batch_kernel`][].

    **In a bucket**, an object is put as a whole or not at all. A request that fails is
    no missing chunk: obstore or fsspec repeat it, by their own settings, and then the
    run ends with an error that names the chunk. What is written stays.

    Needs the extra `store`: `pip install "equinox-batch[store]"`; for URLs, the extra
    `cloud`.

    **Arguments:**

    - `path`: a folder, which is created if it does not exist. Or a bucket that exists
        and a prefix, as a URL: `"s3://bucket/prefix"`, `"gs://..."` or `"az://..."`,
        with the settings of obstore in the environment, such as `AWS_REGION` and
        `AWS_ACCESS_KEY_ID`. Or any store of zarr that can list and delete, such as
        `zarr.storage.ObjectStore`, `FsspecStore` or `MemoryStore`: it is all of the
        group.
    - `version`: a name for what the fingerprint cannot contain: the functions that a
        kernel calls on the host, by `jax.pure_callback` for instance, and what they
        read. Such kernels need one. Pass another name when these functions change.

    **Raises:**

    - `ValueError` for a URL with a query or of another kind, and for a store that is
        read-only.

    When used:

    - `ValueError` for a folder that contains another kernel or anything else, for
        metadata that are damaged or edited, for half of a kernel, as earlier versions
        could store it, and for a kernel with callbacks without `version`.
    - `TypeError` for a dtype that zarr does not support, such as bfloat16.
    - `OSError` before anything is computed, if the folder cannot be written, the disk
        has too little space, or the bucket cannot be reached, read and written; or
        later, if the disk becomes full, if requests fail for longer than they are
        repeated, or if files are deleted while the kernel is computed. Everything
        written before stays intact.
    - `ImportError` if zarr is not installed, or, for a URL, obstore.

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
    store: Given | None = eqx.field(static=True, repr=False)
    version: str | None = eqx.field(static=True)
    is_shared: bool = eqx.field(static=True, init=False, repr=False)
    is_resumed: bool = eqx.field(static=True, default=True, init=False, repr=False)

    @checked
    def __init__(
        self,
        path: str | os.PathLike | KeyValueStore,
        *,
        version: str | None = None,
    ):
        self.store, self.version, self.is_shared = None, version, True
        if isinstance(path, str | os.PathLike):
            self.path = os.fspath(path)
            # A path has lost one of the slashes, and would be a folder.
            if not isinstance(path, str) and re.match(r"(s3|gs|az):[/\\]", self.path):
                raise ValueError(f"`path` must be a string for a URL; got {path!r}.")
            is_url(self.path)
            return
        storage: Any = import_extra("zarr.storage", "ZarrStore", "store")
        check_given(path)
        # A folder has locks, and files that are unfinished.
        if type(path) is storage.LocalStore:
            root: Any = path
            self.path = str(root.root)
            return
        self.path, self.store = str(path), Given(path)
        # Each process has a memory of its own.
        self.is_shared = not isinstance(path, storage.MemoryStore)

    def begin(
        self, arrays: Sequence[StoredArray], fingerprint: Fingerprint, is_first: bool
    ) -> AbstractWriter:
        zarr = import_extra("zarr", "ZarrStore", "store")
        _check_dtypes(arrays)
        expected = {**fingerprint(), "version": self.version}
        # Only the user knows when the results of a callback change.
        if expected["callbacks"] and self.version is None:
            raise ValueError(
                f"The {arrays[0].kind} calls functions on the host, by "
                f"{expected['callbacks']}, "
                "whose results a fingerprint cannot contain. Pass "
                "`ZarrStore(..., version='1')`, and another `version` when they change."
            )
        objects = self._objects()
        metadata = metadata_of(zarr, arrays, {_ATTRIBUTE: expected})
        # The first process makes what is missing, and all compare what is there.
        if is_first:
            _make_group(objects, metadata[METADATA])
        what = f"has another {arrays[0].kind} than this one"
        remedy = (
            "Delete it, or pass another path. `zarr.open_group` still reads what is "
            "finished there."
        )

        def check() -> None:
            saved = _read_record(objects)
            check_record("path", objects.shown(), saved, expected, what, remedy)

        check()
        if is_first:
            # A killed run may have made only some; another may be making them.
            for key, data in metadata.items():
                if key != METADATA and objects.read(key) is None:
                    objects.create(key, data)
        writer = ZarrWriter(zarr, objects, arrays, expected, metadata, check)
        # Only now: unfinished files in the folder of another kernel are not ours.
        objects.lock(writer.names, clean=is_first)
        return writer

    def _objects(self) -> AbstractObjects:
        if self.store is not None:
            return StoreObjects(self.store.store)
        if is_url(self.path):
            return StoreObjects(of_url(self.path))
        return FolderObjects(pathlib.Path(self.path))


def _check_dtypes(arrays: Sequence[StoredArray]) -> None:
    """Raises `TypeError` for dtypes that zarr lacks, before there is anything."""
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


def _make_group(objects: AbstractObjects, metadata: bytes) -> None:
    if objects.read(METADATA) is not None:
        return
    # Another run may have made the group in between.
    if objects.is_foreign() and objects.read(METADATA) is None:
        raise ValueError(
            "`path` is a folder that contains something other than a kernel: "
            f"{objects.shown()}. Pass one that is empty or does not exist."
        )
    # The record is written together with the group, so no group lacks it.
    # Another run of the same kernel may have been faster.
    objects.create(METADATA, metadata)


def _read_record(objects: AbstractObjects) -> dict[str, Any]:
    """What a group says about its kernel."""
    data = objects.read(METADATA)
    if data is None:
        raise FileNotFoundError(
            errno.ENOENT,
            "`path` lacks what the first process has written. All processes must see "
            "the same disk or bucket",
            objects.shown(METADATA),
        )
    node = parsed_json(
        "path",
        objects.shown(METADATA),
        data.tobytes(),
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
            "`path` has zarr arrays that are not a kernel of eqxbatch: "
            f"{objects.shown()}. Pass a folder that is empty or does not exist."
        )
    # Earlier versions could leave out the blocks below the diagonal.
    if saved.pop("upper_only", False):
        raise ValueError(
            f"`path` has half of a kernel, stored by {saved.get('package')} with "
            f"`upper_only=True`: {objects.shown()}. Kernels are stored as a whole now. "
            "Pass another path, or read this one by `KernelOperator(zarr.open_group("
            "path)['kernel'], symmetric=True)`."
        )
    return saved


# What users pass for a store.
Store = AbstractStore | str | os.PathLike | KeyValueStore


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
            "`store` must be 'device', 'host', a path on disk, the URL of a bucket, or "
            f"a store; got {store!r}. Write './{store}' for a folder of this name."
        )
    return HostStore() if store == "host" else ZarrStore(store)
