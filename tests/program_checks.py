"""What follows from the sites of a random program, against what JAX says of it.

Each check yields names, what the package says, and what the dense derivative is. Every
contraction that may be used for a leaf is forced in turn, and not only the one that is
estimated to be cheapest.
"""

import contextlib
import dataclasses
import math
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqxbatch
from eqxbatch._kernels import choose as choose_kernel
from eqxbatch._sites import choose
from eqxbatch._sites.contract import are_comparable, Factors, gradients
from eqxbatch._sites.gradients import SiteGradients
from eqxbatch._sites.trace import Program as Sites
from eqxbatch._transforms import curvature

from .program_draw import Program


Triples = Iterator[tuple[str, Any, Any]]
CHECKS: dict[str, Callable[["Subject"], Triples]] = {}
CLIP = 0.3


# The three functions below are all that depends on how a contraction is chosen.


def forced(sites: Sites, form: str) -> list[choose.Contraction]:
    """The contraction of each leaf: `form`, where it may be used for that leaf."""
    kind = {"once": "gradient", "twice": "gradient"}.get(form, form)

    def one(leaf: int) -> choose.Contraction:
        own = sites.sites_of(leaf)
        chosen, keeps = kind, form == "once"
        if not own:
            chosen = "unused"
        elif leaf in sites.fallbacks:
            chosen, keeps = "leaf", True
        elif kind == "gram" and not all(are_comparable(a, b) for a in own for b in own):
            chosen = "gradient"
        return choose.Contraction(leaf, chosen, keeps, 0.0, 0.0)

    return [one(leaf) for leaf in range(len(sites.leaves))]


@contextlib.contextmanager
def forced_kernel(form: str) -> Iterator[None]:
    """Factors for all leaves that they may be used for, or Jacobians for all leaves."""
    real = choose_kernel.choose_formed

    def chosen(first: Any, second: Any, which: int, load: Any) -> tuple[list[int], float]:
        if form == "auto":
            return real(first, second, which, load)
        from eqxbatch._sites import features

        leaves = range(len(first.program.leaves))
        costs = [features._costs(first, second, leaf, which, load) for leaf in leaves]
        wanted = {"gram": lambda gram, own: math.isinf(gram), "formed": lambda _, own: not math.isinf(own)}
        used = [leaf for leaf in leaves if first.program.sites_of(leaf)]
        return [leaf for leaf in used if wanted[form](*costs[leaf])], 0.0

    with mock.patch.object(choose_kernel, "choose_formed", chosen):
        yield


@contextlib.contextmanager
def forced_mixture(seed: int) -> Iterator[None]:
    """Hessians by sites for some leaves, and by products for the others."""
    rng = random.Random(seed)
    some = lambda program, covered, *_: {i for i in sorted(covered) if rng.random() < 0.5}
    with mock.patch.object(curvature, "_cheapest", some):
        yield


class _Model(eqx.Module):
    """A program as a model; those with another `form` are compiled anew."""

    parameters: Any
    program: Program = eqx.field(static=True)
    form: str = eqx.field(static=True)

    def __call__(self, x: Any) -> Any:
        return self.program.fun(self.parameters, *x)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A program with its parameters and examples, as traced or concrete arrays."""

    program: Program
    leaves: list
    examples: tuple
    others: tuple

    def tree(self, leaves: list) -> Any:
        diff, rest = eqx.partition(self.program.parameters, eqx.is_inexact_array_like)
        treedef = jax.tree.structure(diff)
        return eqx.combine(jax.tree.unflatten(treedef, leaves), rest)

    @property
    def parameters(self) -> Any:
        return self.tree(self.leaves)

    @property
    def is_complex(self) -> bool:
        return any(map(jnp.iscomplexobj, self.leaves))

    def loss(self, leaves: list, x: Any, t: Any) -> Any:
        return self.program.loss(self.tree(leaves), x, t)

    def outputs(self, leaves: list, x: Any, t: Any) -> list:
        return jax.tree.leaves(self.program.fun(self.tree(leaves), x, t))

    def mean(self, leaves: list) -> Any:
        return jnp.mean(jax.vmap(self.loss, (None, 0, 0))(leaves, *self.examples))

    def gradients(self) -> list:
        return jax.vmap(jax.grad(self.loss), (None, 0, 0))(self.leaves, *self.examples)

    def ravelled(self, arrays: list) -> Any:
        return jnp.concatenate([x.ravel().astype(jnp.float64) for x in arrays])

    def unravelled(self, vector: Any) -> list:
        ends = np.cumsum([x.size for x in self.leaves])
        return [
            vector[end - x.size : end].reshape(x.shape).astype(x.dtype)
            for x, end in zip(self.leaves, ends, strict=True)
        ]

    def hessian(self) -> Any:
        value = lambda vector: self.mean(self.unravelled(vector))
        gradient = jax.grad(value)
        vector = self.ravelled(self.leaves)
        try:
            return jax.jacfwd(gradient)(vector)
        except TypeError:  # What has a custom derivative in reverse mode only.
            return jax.jacrev(gradient)(vector)

    def gauss_newton(self) -> Any:
        """Of real and imaginary parts of all outputs."""

        def one(x: Any, t: Any) -> Any:
            outs = lambda vector: self.outputs(self.unravelled(vector), x, t)
            split = lambda vector: [np_split(out) for out in outs(vector)]
            structs = jax.eval_shape(outs, self.ravelled(self.leaves))
            ravelled = lambda vector: jnp.concatenate([o.ravel() for o in split(vector)])
            vector = self.ravelled(self.leaves)

            def value(flat: Any) -> Any:
                return self.program.loss_of(np_joined(flat, structs))

            jacobian = jax.jacrev(ravelled)(vector)
            return jacobian.T @ jax.hessian(value)(ravelled(vector)) @ jacobian

        return jnp.mean(jax.vmap(one)(*self.examples), 0)


def np_split(x: Any) -> Any:
    """Real and imaginary part along a new first axis."""
    parts = [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
    return jnp.stack([part.astype(jnp.float64) for part in parts])


def np_joined(flat: Any, structs: list) -> list:
    outs, start = [], 0
    for struct in structs:
        is_complex = jnp.issubdtype(struct.dtype, jnp.complexfloating)
        size = struct.size * (1 + is_complex)
        part = flat[start : start + size].reshape(-1, *struct.shape)
        outs.append(part[0] + 1j * part[1] if is_complex else part[0])
        start += size
    return outs


def check(fun: Callable[[Subject], Triples]) -> Callable:
    CHECKS[fun.__name__] = fun
    return fun


# Gradients.


@check
def norms_and_sums(s: Subject) -> Triples:
    """Each contraction, of all leaves for which it may be used."""
    closed = jax.make_jaxpr(s.loss)(s.leaves, *(x[0] for x in s.examples))
    truth = s.gradients()
    num = s.examples[0].shape[0]
    is_kept = jnp.arange(num) != 1
    weights = jnp.arange(1.0, num + 1)
    for rules, forms in ((True, ("gram", "once", "twice")), (False, ("leaf",))):
        sites = Sites(closed, len(s.leaves), use_rules=rules)

        def one(x: Any, t: Any, sites: Sites = sites) -> tuple[list, list]:
            outs, operands, pull = sites.linearize(s.leaves, [x, t], 1)
            return operands, pull([jnp.ones_like(outs[0])])

        factors = Factors(*jax.vmap(one)(*s.examples))
        for form in forms:
            contractions = forced(sites, form)
            found = SiteGradients(sites, contractions, factors, s.leaves)
            norms = found.squared_norms()
            sums = found.weighted_sums([weights] * len(s.leaves), is_kept)
            for i, true in enumerate(truth):
                square = jnp.sum(jnp.abs(true.reshape(num, -1)) ** 2, 1)
                yield f"{form}: squared norms of leaf {i}", norms[i], square
                total = jnp.tensordot((weights * is_kept).astype(true.dtype), true, 1)
                yield f"{form}: sum of leaf {i}", sums[i], total
        if rules:
            for i, true in enumerate(truth):
                own = sites.sites_of(i)
                if own:
                    formed = gradients(own, factors, sites.leaves[i])
                    formed = jnp.broadcast_to(formed, true.shape)
                    yield f"gradients of leaf {i}", formed, true


def _clipped(s: Subject, method: str) -> Triples:
    truth = s.gradients()
    num = s.examples[0].shape[0]
    squares = [jnp.sum(jnp.abs(g.reshape(num, -1)) ** 2, 1) for g in truth]
    norm = jnp.sqrt(sum(squares))
    scale = jnp.where(norm > CLIP, CLIP / jnp.where(norm > CLIP, norm, 1), 1)
    run = eqxbatch.filter_micro_grad(
        s.program.loss, clip_norm=CLIP, return_norms=True, method=method
    )
    got, statistics = run(s.parameters, *s.examples)
    yield "norms", statistics.norms**2, norm**2
    found = jax.tree.leaves(eqx.filter(got, eqx.is_inexact_array))
    for i, (a, true) in enumerate(zip(found, truth, strict=True)):
        expected = jnp.tensordot(scale.astype(true.dtype), true, 1) / num
        yield f"leaf {i}", a, expected


@check
def clipped_by_sites(s: Subject) -> Triples:
    yield from _clipped(s, "sites")


@check
def clipped(s: Subject) -> Triples:
    yield from _clipped(s, "auto")


@check
def clipped_materialised(s: Subject) -> Triples:
    yield from _clipped(s, "materialise")


# Kernels.


def _jacobians(s: Subject, examples: tuple) -> list[list]:
    """For each output and leaf, those of real and imaginary parts by the same."""
    parts = [np_split(x) for x in s.leaves]

    def join(part: Any, like: Any) -> Any:
        x = part[0] + 1j * part[1] if jnp.iscomplexobj(like) else part[0]
        return x.astype(like.dtype)

    def one(x: Any, t: Any) -> Any:
        outs = lambda parts: [
            np_split(out) for out in s.outputs([*map(join, parts, s.leaves)], x, t)
        ]
        return jax.jacrev(outs)(parts)

    return jax.vmap(one)(*examples)


def _kernel(s: Subject, first: list, second: list, index: int) -> Any:
    """Shape `(n1, n2, *shape1, *shape2)`, for one of the outputs."""
    total: Any = 0
    for leaf, a, b in zip(s.leaves, first[index], second[index], strict=True):
        n1, n2, parts = a.shape[0], b.shape[0], a.shape[1]
        ndim = a.ndim - 3 - leaf.ndim
        shapes = [x.shape[2 : 2 + ndim] for x in (a, b)]
        a = a.reshape(n1, parts, math.prod(shapes[0]), -1)
        b = b.reshape(n2, parts, math.prod(shapes[1]), -1)
        k = jnp.einsum("mpiw,nqjw->mnpqij", a, b)
        if parts == 2:
            real, imag = k[:, :, 0, 0] + k[:, :, 1, 1], k[:, :, 1, 0] - k[:, :, 0, 1]
            k = (real + 1j * imag) * (0.5 if jnp.iscomplexobj(leaf) else 1.0)
        else:
            k = k[:, :, 0, 0]
        total = total + k.reshape(n1, n2, *shapes[0], *shapes[1])
    return total


def _interleaved(k: Any) -> Any:
    """With the output axes of the two sides taking turns."""
    num = (k.ndim - 2) // 2
    order = [axis for i in range(num) for axis in (2 + i, 2 + num + i)]
    return jnp.transpose(k, (0, 1, *order))


def _ntk(s: Subject, form: str, **settings: Any) -> Any:
    tag = f"{form} {settings}"
    settings = {"implementation": "sites", "trace_axes": (), **settings}
    return eqxbatch.EmpiricalNTK(_Model(s.parameters, s.program, tag), **settings)


def _kernels(s: Subject, form: str) -> Triples:
    own = _jacobians(s, s.examples)
    with forced_kernel(form):
        same = jax.tree.leaves(_ntk(s, form)(s.examples))
        for i, k in enumerate(same):
            yield f"output {i}, symmetric", k, _interleaved(_kernel(s, own, own, i))
        try:
            other = _jacobians(s, s.others)
        except (TypeError, ValueError):  # Not for inputs of this length.
            return
        if any(a.shape[1:] != b.shape[1:] for a, b in _pairs(own, other)):
            # Traces and diagonals are of outputs of one shape.
            found = jax.tree.leaves(_ntk(s, form)(s.examples, s.others))
            for i, k in enumerate(found):
                expected = _interleaved(_kernel(s, own, other, i))
                yield f"output {i}, of two lengths", k, expected
            return
        found = jax.tree.leaves(_ntk(s, form)(s.examples, s.others))
        for i, k in enumerate(found):
            yield f"output {i}, of two", k, _interleaved(_kernel(s, own, other, i))


def _pairs(own: list, other: list) -> list:
    return [*zip(jax.tree.leaves(own), jax.tree.leaves(other), strict=True)]


@check
def kernels_by_factors(s: Subject) -> Triples:
    yield from _kernels(s, "gram")


@check
def kernels_by_jacobians(s: Subject) -> Triples:
    yield from _kernels(s, "formed")


@check
def kernels_traced(s: Subject) -> Triples:
    """The trace, the diagonal, and the kernel of each example with itself."""
    own = _jacobians(s, s.examples)
    shapes = [x[0].shape for x in own]
    del shapes
    outs = jax.eval_shape(lambda: s.outputs(s.leaves, *(x[0] for x in s.examples)))
    full = [_kernel(s, own, own, i) for i in range(len(outs))]
    ndims = [out.ndim for out in outs]
    form = ("gram", "formed", "auto")[s.program.seed % 3]
    with forced_kernel(form):
        if all(ndims):
            found = jax.tree.leaves(_ntk(s, form, trace_axes=(-1,))(s.examples))
            for i, k in enumerate(found):
                num = ndims[i]
                traced = jnp.trace(full[i], axis1=1 + num, axis2=1 + 2 * num)
                expected = _interleaved(traced / max(outs[i].shape[-1], 1))
                yield f"output {i}, traced", k, expected
            found = jax.tree.leaves(_ntk(s, form, diagonal_axes=(1,))(s.examples))
            for i, k in enumerate(found):
                num = ndims[i]
                expected = jnp.diagonal(full[i], axis1=2, axis2=2 + num)
                expected = jnp.moveaxis(expected, -1, 2)
                rest = [axis for j in range(num - 1) for axis in (3 + j, 2 + num + j)]
                yield f"output {i}, diagonal", k, expected.transpose(0, 1, 2, *rest)
        found = jax.tree.leaves(_ntk(s, form).diagonal(s.examples))
        for i, k in enumerate(found):
            each = jnp.moveaxis(jnp.diagonal(full[i]), -1, 0)
            expected = _interleaved(each[None])[0]
            yield f"output {i}, of each", k, expected


# Curvature.


def _curvature(s: Subject, transform: Callable, *funs: Callable, **settings: Any) -> Any:
    run = transform(*funs, in_axes=0, flat=True, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(s.parameters, *s.examples)


METHODS = ("sites", "products", "auto")


def _of_hessian(s: Subject, method: str) -> Triples:
    if s.is_complex:
        return
    truth = s.hessian()
    loss = s.program.loss
    settings = {"method": method}
    with forced_mixture(s.program.seed):
        got, _ = _curvature(s, eqxbatch.filter_hessian, loss, **settings)
        yield "hessian", got, truth
        got, _ = _curvature(s, eqxbatch.filter_hessian_diagonal, loss, **settings)
        yield "diagonal", got, jnp.diagonal(truth)
        blocks = _curvature(s, eqxbatch.filter_hessian_blocks, loss, **settings)
    blocks = [x for x in jax.tree.leaves(blocks) if eqx.is_array(x) and x.ndim == 2]
    start = 0
    used = [x.size for x in s.leaves]
    for i, (num, block) in enumerate(zip(used, blocks, strict=True)):
        yield f"block {i}", block, truth[start : start + num, start : start + num]
        start += num


@check
def hessian_by_sites(s: Subject) -> Triples:
    yield from _of_hessian(s, "sites")


@check
def hessian_by_products(s: Subject) -> Triples:
    yield from _of_hessian(s, "products")


@check
def hessian_by_both(s: Subject) -> Triples:
    yield from _of_hessian(s, "auto")


@check
def gauss_newton(s: Subject) -> Triples:
    if s.is_complex:
        return
    truth = s.gauss_newton()
    funs = s.program.fun, s.program.loss_of
    for method in METHODS:
        with forced_mixture(s.program.seed):
            got, _ = _curvature(s, eqxbatch.filter_ggn, *funs, method=method)
        yield method, got, truth
    vector = jnp.arange(1.0, truth.shape[0] + 1)
    product = eqxbatch.filter_ggnvp(*funs, in_axes=0)
    got = product(s.parameters, s.tree(s.unravelled(vector)), *s.examples)
    got = s.ravelled(jax.tree.leaves(eqx.filter(got, eqx.is_inexact_array)))
    yield "product", got, truth @ vector


@check
def hessian_product(s: Subject) -> Triples:
    if s.is_complex:
        return
    truth = s.hessian()
    vector = jnp.arange(1.0, truth.shape[0] + 1)
    product = eqxbatch.filter_hvp(s.program.loss, in_axes=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = product(s.parameters, s.tree(s.unravelled(vector)), *s.examples)
    got = s.ravelled(jax.tree.leaves(eqx.filter(got, eqx.is_inexact_array)))
    yield "product", got, truth @ vector
