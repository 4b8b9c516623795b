"""What tells the kernel of one run from that of another."""

import hashlib
import importlib.metadata
import re
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .grid import Grid
from .kernel import AbstractBlockKernel, KernelCall


# Of what is stored, so that a later version knows what an earlier one wrote.
_FORMAT = 1


def fingerprint(
    call: KernelCall, kernel: AbstractBlockKernel, grid: Grid
) -> dict[str, Any]:
    """The parts by which the kernel of a call is known, as JSON has them."""
    first, second = kernel.structs(grid.sizes)
    program = [_of_program(kernel.tile, first, second)]
    if grid.is_same:
        program.append(_of_program(kernel.tile, first, None))
    return {
        "format": _FORMAT,
        "package": f"eqxbatch {importlib.metadata.version('eqxbatch')}",
        "compiler": f"jax {jax.__version__} {jax.default_backend()}",
        "inputs": _digest((call.calls, call.args, call.shared)),
        "kernel_fn": _digest(call.kernel_fn),
        "program": program,
        "grid": {
            "totals": list(grid.totals),
            "sizes": list(grid.sizes),
            "is_same": grid.is_same,
            "is_symmetric": grid.is_symmetric,
        },
        "arrays": [
            {
                "path": leaf.path,
                "axes": list(leaf.axes),
                "shape": list(leaf.shape(grid.totals)),
                "dtype": str(np.dtype(leaf.dtype)),
            }
            for leaf in kernel.leaves
        ],
    }


def _digest(tree: PyTree) -> str:
    """A digest of all arrays of a PyTree."""
    digest = hashlib.sha256()
    for path, leaf in jtu.tree_leaves_with_path(eqx.filter(tree, eqx.is_array)):
        digest.update(jtu.keystr(path).encode())
        _add(digest, leaf)
    return digest.hexdigest()


def _add(digest: Any, x: Any) -> None:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        digest.update(str(x.dtype).encode())
        x = jr.key_data(x)
    x = np.asarray(x)
    digest.update(f"{x.dtype}{x.shape}".encode())
    digest.update(np.ascontiguousarray(x).tobytes())


def _of_program(fun: Any, *args: Any) -> str:
    """A digest of what a function does, and of what it closes over."""
    closed = eqx.filter_make_jaxpr(fun)(*args)[0]
    # Functions are shown with their addresses, which are others in each run.
    text = re.sub(r"0x[0-9a-f]+", "", str(closed))
    digest = hashlib.sha256(text.encode())
    # The arrays of the kernel function are among these, and digested once more.
    for x in constants(closed):
        _add(digest, x)
    return digest.hexdigest()


def constants(x: Any) -> Iterator[Any]:
    """All arrays that are part of a jaxpr."""
    if isinstance(x, jex.ClosedJaxpr):
        yield from x.consts
        yield from constants(x.jaxpr)
    elif isinstance(x, jex.Jaxpr):
        for eqn in x.eqns:
            for atom in eqn.invars:
                if isinstance(atom, jex.Literal):
                    yield np.asarray(atom.val)
            for param in eqn.params.values():
                yield from constants(param)
    elif isinstance(x, (tuple, list)):
        for part in x:
            yield from constants(part)
