"""Releases of JAX with silently wrong numbers, which the project excludes.

`.ci/wrong_releases.py` checks the environment of the Python that runs it: neither JAX
nor jaxlib is one of these releases, and the programs that tell them are right. It needs
JAX and NumPy only, so a release can be tried before it is supported.
`tests/test_project.py` checks that `pyproject.toml` excludes just these.
"""

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


def small_products() -> Iterator[str]:
    """What is wrong in reductions of `A p` for many vectors `p` of 3 numbers.

    Rows after the first 128 kB of the vectors are wrong.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    reductions: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
        "sum(A p)": (jnp.sum, lambda x: x.sum(1)),
        "max(A p)": (jnp.max, lambda x: x.max(1)),
        "|A p|^2": (lambda x: jnp.sum(x**2), lambda x: (x**2).sum(1)),
    }
    draw = np.random.default_rng(0)
    points = draw.standard_normal((40_000, 3), dtype=np.float32)
    for num in (2, 3):
        matrix = draw.standard_normal((num, 3), dtype=np.float32)
        products = points.astype(np.float64) @ matrix.T.astype(np.float64)
        for name, (reduce, expected) in reductions.items():
            of_one = lambda p, matrix=matrix, reduce=reduce: reduce(matrix @ p)
            got = np.asarray(jax.jit(jax.vmap(of_one))(points))
            wrong = ~np.isclose(got, expected(products), rtol=1e-4, atol=1e-4)
            if wrong.any():
                rows = f"{wrong.sum()} rows, from row {wrong.argmax()} on"
                yield f"{name} for A of shape {matrix.shape}: {rows}"


class WrongRelease(NamedTuple):
    """A release of `jax` and `jaxlib`, what is wrong, and the report of it."""

    version: str
    wrong: str
    report: str
    find: Callable[[], Iterator[str]]


_ISSUE = "https://github.com/jax-ml/jax/issues/39103"
_SOME = "on CPUs, sums and maxima of small products of many vectors"
_ALL = "on CPUs, all reductions of small products of many vectors"


RELEASES = (
    WrongRelease("0.9.1", _SOME, _ISSUE, small_products),
    WrongRelease("0.9.2", _SOME, _ISSUE, small_products),
    WrongRelease("0.10.0", _SOME, _ISSUE, small_products),
    WrongRelease("0.10.1", _SOME, _ISSUE, small_products),
    WrongRelease("0.10.2", _ALL, _ISSUE, small_products),
)


def problems() -> Iterator[str]:
    """What is wrong with the JAX of this environment."""
    for package in ("jax", "jaxlib"):
        version = importlib.metadata.version(package)
        for release in RELEASES:
            if version == release.version:
                wrong = f"{release.wrong} ({release.report})"
                yield f"{package} {version} is wrong: {wrong}"
    for find in dict.fromkeys(release.find for release in RELEASES):
        yield from find()


if __name__ == "__main__":
    found = [*problems()]
    print("\n".join(found) or "No known wrong release, and no wrong number.")
    sys.exit(bool(found))
