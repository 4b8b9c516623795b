"""Compares every contraction that is exact for a leaf with what JAX says."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from eqxbatch._base.dtypes import common_dtype, squared_norm
from eqxbatch._base.traced_function import TracedFunction
from eqxbatch._sites.factors import (
    EXAMPLE,
    Factors,
    gradients,
    Labels,
    OTHER_EXAMPLE,
    weighted_sum,
)
from eqxbatch._sites.gram import gram, has_gram, OfLeaf, squared_norms
from eqxbatch._sites.site import Label, Site
from eqxbatch._sites.trace import Program
from ..experts import masked_products
from .second_order import second_order
from .subject import as_numpy, largest_entry, largest_error, make_subject, Subject


_OUTPUTS: tuple[Label, Label] = (("output", 0), ("output", 1))


_KERNEL: Labels = (EXAMPLE, _OUTPUTS[0], OTHER_EXAMPLE, _OUTPUTS[1])


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
    dtype = common_dtype(*(x.dtype for x in subject.leaves))
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
    program = Program(TracedFunction(subject.outputs, subject.leaves, one))

    @jax.jit
    def run(leaves: list, rows: list) -> list:
        def of_one(*rows: Array) -> tuple[list, list, list]:
            outs, operands, pullback = program.linearize(leaves, [*rows], 1)
            pull = lambda seed: pullback([seed])
            seeds = jnp.eye(outs[0].size, dtype=outs[0].dtype)
            gradient = pull(jax.grad(subject.scalar)(outs[0]))
            return operands, gradient, jax.vmap(pull)(seeds)

        operands, cotangents, pulled = jax.vmap(of_one)(*rows)
        values = program.values(leaves)
        factors = Factors(operands, cotangents, values=values)
        sides = [
            Factors(operands, pulled, (label,), values=values) for label in _OUTPUTS
        ]
        return [
            _contracted(program.sites_of(leaf), factors, sides, struct, subject)
            for leaf, struct in enumerate(program.leaves)
        ]

    return run(subject.leaves, subject.rows)


def _contracted(
    sites: list[Site],
    factors: Factors,
    sides: list[Factors],
    struct: jax.ShapeDtypeStruct,
    subject: Subject,
) -> tuple[dict[str, list[Array]], Array]:
    num = subject.num
    if not sites:
        zeros = jnp.zeros((num, subject.num_outputs, *struct.shape), struct.dtype)
        return {"each": [zeros[:, 0]], "sums": [], "norms": [], "kernels": []}, zeros
    each = gradients(sites, factors, struct)
    dtype = each.real.dtype
    weights = jnp.asarray(_weights(subject), dtype)
    found = {
        "each": [each],
        "sums": [weighted_sum(sites, factors, struct, weights)],
        "norms": [squared_norm(each)],
        "kernels": [],
    }
    if has_gram(sites):
        found["norms"] += squared_norms([OfLeaf(sites, factors, struct)])
        pair = (OfLeaf(sites, side, struct) for side in sides)
        kernel = gram(*pair, OTHER_EXAMPLE, _KERNEL)
        found["kernels"].append(kernel)
    return found, gradients(sites, sides[0], struct)


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
