"""PyTrees, and descriptions of arguments in messages."""

import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Iterator
from typing import Any, TYPE_CHECKING

import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree


# Logs slow steps and automatic choices.
log = logging.getLogger("eqxbatch")


# Arguments of different lengths are an error.
if TYPE_CHECKING:
    safe_zip = zip
else:
    safe_zip = functools.partial(zip, strict=True)


def type_of(x: Any) -> Any:
    """The shape and dtype of an array or struct; anything else is unchanged."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return tuple(x.shape), str(x.dtype)
    return x


# NumPy scalars are numbers, so messages show their values.
_NO_ARRAYS = (type, np.generic)


def _is_array(x: object) -> bool:
    """Whether `x` is an array of any library, or a struct."""
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, _NO_ARRAYS)


# The largest number of paths in a message, and the longest quoted text.
_MOST_PATHS = 6


_LONGEST = 200


def shown(x: Any) -> str:
    """Describes an argument in one line, without the values of arrays.

    An array is shown by its shape and dtype, and a PyTree by the paths of its arrays.
    """
    if _is_array(x):
        return f"an array of shape {tuple(x.shape)} and dtype {x.dtype}"
    if inspect.isroutine(x) or isinstance(x, type):
        return str(getattr(x, "__qualname__", type(x).__name__))
    # JAX warns of an iterator that it takes for a leaf.
    leaves = [] if isinstance(x, Iterator) else jtu.tree_leaves_with_path(x)
    paths = [
        f"`{jtu.keystr(path)}` of shape {tuple(leaf.shape)} and dtype {leaf.dtype}"
        for path, leaf in leaves
        if _is_array(leaf)
    ]
    if paths:
        more = len(paths) - _MOST_PATHS
        unlisted = [f"{more} more"] if more > 0 else []
        listed = ", ".join([*paths[:_MOST_PATHS], *unlisted])
        return f"a {type(x).__name__} with the arrays {listed}"
    text = " ".join(repr(x).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def described(x: object) -> str:
    """Like `shown`, with the type of anything that is not an array."""
    text = shown(x)
    return text if _is_array(x) else f"{text} of type {type(x).__name__}"


def difference(expected: PyTree, got: PyTree) -> str:
    """A sentence about where a PyTree first differs from what is expected."""
    arrays = [
        {jtu.keystr(path): shown(x) for path, x in jtu.tree_leaves_with_path(tree)}
        for tree in (expected, got)
    ]
    for path in {**arrays[0], **arrays[1]}:
        there, here = (x.get(path, "nothing") for x in arrays)
        if there != here:
            return f"The first difference is at `{path}`: {there}; got {here}."
    return "Only static parts differ: use `jax.tree.map` on what is expected."


def import_extra(module: str, what: str, extra: str) -> Any:
    """Imports a module of an optional package.

    Raises `ImportError` with instructions if the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = module.partition(".")[0]
        raise ImportError(
            f'`{what}` needs {package}: pip install "equinox-batch[{extra}]".'
        ) from e


def sparse_nodes(tree: PyTree) -> list[tuple[tuple, Any]]:
    """The sparse arrays of JAX in a PyTree, with anything in place of their arrays.

    Each comes after its path.
    """
    is_one = _is_sparse()
    if is_one is None:
        return []
    nodes = jtu.tree_leaves_with_path(tree, is_leaf=is_one)
    return [(path, x) for path, x in nodes if is_one(x)]


def num_batch_axes(x: Any) -> int:
    """The number of batch axes of a sparse array, as its arrays have them."""
    return x.indptr.ndim - 1 if hasattr(x, "indptr") else x.indices.ndim - 2


def with_shapes_of_arrays(tree: PyTree, *, is_sized: bool = True) -> PyTree:
    """Gives sparse arrays the shapes that their arrays have.

    Unflattened from some examples, they still have the shape of the whole batch, and
    from the results of a batch that of one example. Unless `is_sized`, their batch axes
    get size zero, so that those of different sizes are alike.
    """
    is_one = _is_sparse()
    if is_one is None:
        return tree

    def fitted(x: Any) -> Any:
        if not is_one(x) or not _have_shapes(x):
            return x
        num, num_sparse = num_batch_axes(x), 2
        if not hasattr(x, "indptr"):
            num_sparse = x.indices.shape[-1]
        # An axis of size one stands for all.
        batch = np.broadcast_shapes(x.data.shape[:num], x.indices.shape[:num])
        num_others = num_sparse + x.data.ndim - num - 1
        children, static = x.tree_flatten()
        batch = batch if is_sized else (0,) * num
        static["shape"] = (*batch, *x.shape[len(x.shape) - num_others :])
        return type(x).tree_unflatten(static, children)

    return jtu.tree_map(fitted, tree, is_leaf=is_one)


def _is_sparse() -> Any:
    """Whether something is a sparse array; None if there can be none."""
    sparse = sys.modules.get("jax.experimental.sparse")
    if sparse is None:
        return None
    return lambda x: isinstance(x, (sparse.BCOO, sparse.BCSR))


def _have_shapes(x: Any) -> bool:
    return all(hasattr(part, "ndim") for part in x.tree_flatten()[0])
