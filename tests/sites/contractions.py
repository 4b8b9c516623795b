"""Compares every contraction that is exact for a leaf with what JAX says."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..experts import masked_products
from .adapter import Examples, Sites
from .second_order import second_order
from .subject import as_numpy, largest_entry, largest_error, make_subject, Subject


Errors = dict[str, float]


def contraction_errors(fun, model, xs) -> list[Errors]:
    """The largest relative errors for each leaf, by quantity.

    Second derivatives that are too large to compare are missing. `fun(model, x)` is
    called in double precision, which must be enabled, with examples `xs`.
    """
    subject = make_subject(fun, model, xs)
    each, jacobians = _truth(subject)
    floor = _floor(subject, max(map(largest_entry, each), default=0.0))
    truth = zip(each, jacobians, strict=True)
    first = [
        _leaf_errors(*by_sites, *true, _weights(subject), floor)
        for by_sites, true in zip(_by_sites(subject), truth, strict=True)
    ]
    second = second_order(subject, jacobians)
    return [{**a, **b} for a, b in zip(first, second, strict=True)]


def _floor(subject: Subject, largest: float) -> float:
    """The value below which an entry is rounding error relative to other leaves."""
    dtype = jnp.result_type(*(x.dtype for x in subject.leaves))
    return float(jnp.finfo(dtype).eps) ** 0.5 * largest


def _weights(subject: Subject) -> np.ndarray:
    return np.linspace(1.0, -0.5, subject.num)


@masked_products()
def _truth(subject: Subject) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Per-example gradients and Jacobians from `jax.grad` and `jax.jacrev`."""

    @jax.jit
    def run(leaves: list, rows: list) -> tuple[list, list]:
        gradient = jax.vmap(jax.grad(subject.value), (None, 0))(leaves, rows)
        jacobian = jax.vmap(jax.jacrev(subject.outputs), (None, 0))(leaves, rows)
        return gradient, jacobian

    each, jacobians = run(subject.leaves, subject.rows)
    return [as_numpy(x) for x in each], [as_numpy(x) for x in jacobians]


def _by_sites(subject: Subject) -> list[tuple[dict[str, list[Array]], Array]]:
    """For each leaf, the results of all contractions that are exact for it.

    These are per-example gradients, their weighted sums, squared norms, kernels and
    Jacobians.
    """
    one = [np.asarray(row)[0] for row in subject.rows]
    sites = Sites.of(subject.outputs, subject.leaves, one)

    @jax.jit
    def run(leaves: list, rows: list) -> list:
        gradient = jax.grad(subject.scalar)
        found = sites.examples(leaves, rows, gradient, with_jacobians=True)
        return [
            _contracted(sites, found, leaf, subject)
            for leaf, _ in enumerate(sites.leaves)
        ]

    return run(subject.leaves, subject.rows)


def _contracted(
    sites: Sites, found: Examples, leaf: int, subject: Subject
) -> tuple[dict[str, list[Array]], Array]:
    if not sites.is_used(leaf):
        struct = sites.leaves[leaf]
        shape = (subject.num, subject.num_outputs, *struct.shape)
        zeros = jnp.zeros(shape, struct.dtype)
        return {"each": [zeros[:, 0]], "sums": [], "norms": [], "kernels": []}, zeros
    each = found.gradients(leaf)
    weights = jnp.asarray(_weights(subject), each.real.dtype)
    squares = jnp.sum(jnp.abs(each.reshape(each.shape[0], -1)) ** 2, 1)
    results = {
        "each": [each],
        "sums": [found.weighted_sum(leaf, weights)],
        "norms": [squares],
        "kernels": [],
    }
    if sites.has_kernel(leaf):
        results["norms"] += found.squared_norms(leaf)
        results["kernels"].append(found.kernel_of_outputs(leaf))
    return results, found.jacobians(leaf)


def _leaf_errors(
    found: dict[str, list[Array]],
    jacobian: Array,
    each: np.ndarray,
    true_jacobian: np.ndarray,
    weights: np.ndarray,
    floor: float,
) -> Errors:
    norms = _norms([each])
    kernel = _kernel(true_jacobian)
    total = np.tensordot(weights, each, 1)
    scale = max(largest_entry(each), floor)
    pairs = [(x, each) for x in found["each"]] + [(x, total) for x in found["sums"]]
    errors = [largest_error(*pair, scale) for pair in pairs]
    errors.append(largest_error(jacobian, true_jacobian))
    kernels = [_kernel(as_numpy(jacobian)), *found["kernels"]]
    kernels = [np.broadcast_to(as_numpy(x), kernel.shape) for x in kernels]
    norm_scale = max(largest_entry(norms), floor)
    return {
        "gradient": max(errors),
        "norm": max(
            (
                largest_error(np.sqrt(as_numpy(x)), norms, norm_scale)
                for x in found["norms"]
            ),
            default=0.0,
        ),
        "kernel": max(largest_error(x, kernel) for x in kernels),
    }


def _norms(each: list[np.ndarray]) -> np.ndarray:
    """The norms of the per-example gradients of some leaves together."""
    flat = [x.reshape(x.shape[0], -1) for x in each]
    return np.sqrt(sum(np.sum(np.abs(x) ** 2, 1) for x in flat))


def _kernel(jacobian: np.ndarray) -> np.ndarray:
    """A leaf's share in the kernel, from its Jacobian; complex counts as two real."""
    flat = jacobian.reshape(*jacobian.shape[:2], -1)
    return np.real(np.einsum("iap,jbp->iajb", flat, flat.conj(), optimize=True))
