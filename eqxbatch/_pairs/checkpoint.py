"""Saves the state of a solver on disk."""

import json
import os
import pathlib
import time
import zipfile
from typing import Any, cast

import numpy as np


_FORMAT = 2


_PARTIAL = ".partial"


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
            self._check(json.loads(about.read_text()))
            return
        # A run that was killed may have left a part of a file.
        if self._path.exists() and any(
            not file.name.endswith(_PARTIAL) for file in self._path.iterdir()
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
        try:
            with np.load(file, allow_pickle=False) as arrays:
                return {key: arrays[key] for key in arrays.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as e:
            raise ValueError(
                f"`checkpoint` has a damaged file: {file}. Delete the folder to begin "
                "anew."
            ) from e

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
        self._replace(file, lambda out: np.savez(out, **cast(Any, arrays)))
        end = time.monotonic()
        self._next = end + (end - begin) / _SHARE

    def _replace(self, file: pathlib.Path, write: Any) -> None:
        partial = file.with_name(file.name + _PARTIAL)
        with partial.open("wb") as out:
            write(out)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(file)


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text[:9]}...'" if len(text) > 60 else text
