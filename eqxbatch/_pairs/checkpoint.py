"""Saves the state of a solver on disk."""

import hashlib
import io
import json
import os
import pathlib
import time
from typing import Any, cast

import numpy as np


_FORMAT = 2


_PARTIAL = ".partial"


# The bytes of a SHA-256, at the end of a file of arrays.
_CHECKSUM = 32


# Saving takes at most about this fraction of the time.
_SHARE = 0.05


class Checkpoint:
    """A folder with the state of a solver and a description of its problem.

    Files are replaced as a whole, so a run can be killed at any time.
    """

    def __init__(self, path: str | os.PathLike, problem: dict[str, Any]):
        self._path = pathlib.Path(path)
        self._problem = {"format": _FORMAT, **problem}
        self._next = 0.0
        if self._path.exists() and not self._path.is_dir():
            raise ValueError(
                f"`checkpoint` must be a folder, or not exist; got the file {path}."
            )
        about = self._path / "problem.json"
        if about.exists():
            self._check(_read(about))
            return
        # A run that was killed may have left a part of a file.
        if self._path.exists() and any(
            file.name != about.name + _PARTIAL for file in self._path.iterdir()
        ):
            raise ValueError(
                f"`checkpoint` is a folder with something other than a checkpoint: "
                f"{path}. Give an empty folder, or one that does not exist."
            )
        text = json.dumps(self._problem).encode()
        self._path.mkdir(parents=True, exist_ok=True)
        self._replace(about, lambda file: file.write(text))

    def _check(self, found: dict[str, Any]) -> None:
        names = {*found, *self._problem}
        pairs = {name: (found.get(name), self._problem.get(name)) for name in names}
        different = [name for name, (old, new) in sorted(pairs.items()) if old != new]
        if different:
            shown = {name: tuple(map(_short, pairs[name])) for name in different}
            text = "; ".join(
                f"{name} is {old} there and {new} now"
                for name, (old, new) in shown.items()
            )
            raise ValueError(
                f"`checkpoint` is of another problem: {self._path}. {text}. Delete it, "
                "or give another path."
            )

    def load(self, name: str) -> dict[str, np.ndarray] | None:
        """The arrays that were saved under a name; None if there are none."""
        file = self._path / f"{name}.npz"
        if not file.exists():
            return None
        data = file.read_bytes()
        saved, checksum = data[:-_CHECKSUM], data[-_CHECKSUM:]
        if hashlib.sha256(saved).digest() != checksum:
            raise ValueError(
                f"`checkpoint` has a damaged file: {file}, whose checksum is wrong. "
                "The other files are kept. Delete this one, and the call computes what "
                "was in it anew."
            )
        with np.load(io.BytesIO(saved), allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}

    def save(
        self, name: str, arrays: dict[str, np.ndarray], *, even_if_slow: bool
    ) -> None:
        """Saves arrays, unless saving would take more than its share of the time.

        With `even_if_slow`, arrays are always saved.
        """
        begin = time.monotonic()
        if begin < self._next and not even_if_slow:
            return
        file = self._path / f"{name}.npz"
        data = io.BytesIO()
        np.savez(data, **cast(Any, arrays))
        saved = data.getbuffer()
        checksum = hashlib.sha256(saved).digest()
        self._replace(file, lambda out: out.writelines((saved, checksum)))
        end = time.monotonic()
        self._next = end + (end - begin) / _SHARE

    def _replace(self, file: pathlib.Path, write: Any) -> None:
        partial = file.with_name(file.name + _PARTIAL)
        with partial.open("wb") as out:
            write(out)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(file)


def _read(about: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(about.read_text())
        if not isinstance(found, dict):
            raise ValueError(f"got a {type(found).__name__}")
    except ValueError as e:
        raise ValueError(
            f"`checkpoint` has a damaged file: {about} must be a JSON object ({e}). "
            "The saved state is kept. Restore this file, or delete the folder to begin "
            "anew."
        ) from e
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text[:9]}...'" if len(text) > 60 else text
