"""What a stored result was computed from, as a digest that resumed runs compare."""

import hashlib
import importlib
import importlib.metadata
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._base.jaxpr_types import Eqn, JaxprAndConsts
from .._base.jaxprs import constants, inner_programs, programs_in
from .._base.primitives import parameters
from .checksums import checksums


# The version of the format, so that later versions recognise earlier ones.
FORMAT = 3


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
    return _digest(tree, _unchanged)


def digest_of_rows(tree: PyTree) -> str:
    """A digest of the checksums of all arrays of a PyTree, as fast as reading them.

    It is for rows of examples, which are many, and may have been edited since.
    """
    return _digest(tree, checksums)


def _unchanged(data: np.ndarray) -> np.ndarray:
    return data


def _digest(tree: PyTree, of_bytes: Callable[[np.ndarray], np.ndarray]) -> str:
    sha = hashlib.sha256()
    for path, leaf in jtu.tree_leaves_with_path(eqx.filter(tree, eqx.is_array)):
        # Equal arrays at other places make other results.
        sha.update(jtu.keystr(path).encode())
        _add_array(sha, leaf, of_bytes)
    return sha.hexdigest()


def _add_array(
    sha: Any, x: Any, of_bytes: Callable[[np.ndarray], np.ndarray] = _unchanged
) -> None:
    """Adds what `of_bytes` makes of the bytes of an array to a digest."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        sha.update(str(x.dtype).encode())
        x = jr.key_data(x)
    x = np.asarray(x)
    sha.update(f"{x.dtype}{x.shape}".encode())
    sha.update(of_bytes(bytes_of(x)).data)


def bytes_of(x: np.ndarray) -> np.ndarray:
    """The bytes of an array, without a copy if it is contiguous."""
    # Python has no buffers of dtypes such as bfloat16.
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def digest_of_program(closed: JaxprAndConsts) -> str:
    """A digest of a program, and of what it closes over."""
    sha = hashlib.sha256()
    # Some equations are printed without the programs that they run.
    texts = (str(x) for part in programs_in(closed) for x in _programs_of_objects(part))
    for text in (str(closed), *texts):
        # Functions are printed with their addresses, which change in every run.
        sha.update(re.sub(r"0x[0-9a-f]+", "", text).encode())
    # These include the arrays of the kernel function, which are digested again.
    for x in constants(closed):
        _add_array(sha, x)
    return sha.hexdigest()


def _programs_of_objects(closed: JaxprAndConsts) -> Iterator[Any]:
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


def _has_no_result(eqn: Eqn) -> bool:
    """Whether a callback prints, or raises an error of `equinox.error_if`."""
    if eqn.primitive.name.startswith("debug"):
        return True
    # The callback of `equinox.error_if` is told by the module of its function.
    fun = getattr(eqn.params.get("callback"), "callback_func", None)
    return getattr(fun, "__module__", None) == "equinox._errors"


def read_json(name: str, file: pathlib.Path, remedy: str) -> dict[str, Any]:
    """The object in a file. Raises `ValueError` if the file is damaged."""
    return parsed_json(name, str(file), file.read_bytes(), remedy)


def parsed_json(name: str, file: str, data: bytes, remedy: str) -> dict[str, Any]:
    """The object that a file contains. Raises `ValueError` if the file is damaged."""
    try:
        record = json.loads(data)
        if not isinstance(record, dict):
            raise ValueError(f"got a {type(record).__name__}")
    except ValueError as e:
        raise ValueError(
            f"`{name}` has a damaged file: {file} is not a JSON object ({e}). {remedy}"
        ) from e
    return record


def check_record(
    name: str,
    path: pathlib.Path | str,
    saved: dict[str, Any],
    expected: dict[str, Any],
    what: str,
    remedy: str = "Delete it, or pass another path.",
) -> None:
    """Raises `ValueError` if a folder belongs to something else than expected."""
    parts = [
        _difference(part, saved.get(part), expected.get(part))
        for part in {**expected, **saved}
        if saved.get(part) != expected.get(part)
    ]
    if parts:
        raise ValueError(f"`{name}` {what}: {path}. {'; '.join(parts)}. {remedy}")


def _difference(part: str, there: Any, now: Any) -> str:
    # Digits of a digest say nothing to users.
    if re.search("[0-9a-f]{64}", f"{there}{now}"):
        return f"the contents of {part} differ"
    return f"{part} is {there!r} there and {now!r} now"
