"""What follows from the sites of a random program, against what JAX says of it.

Each check yields names, what the package says, and what the dense derivative is. Every
contraction that may be used for a leaf is forced in turn, and not only the one that is
estimated to be cheapest.
"""

import collections
import contextlib
import math
import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqxbatch
from ..sites.adapter import Form, Sites, with_hessians_by_sites, with_kernels_by
from .program_draw import Program
from .program_subject import Subject


Triples = Iterator[tuple[str, Any, Any]]
CHECKS: dict[str, Callable[["Subject"], Triples]] = {}
CLIP = 0.3


# How often each rule and each step of a view met each contraction.
EXERCISED: collections.Counter = collections.Counter()


def count(sites: Sites, form: Form) -> None:
    forms = sites.forms(form)
    for place in sites.places:
        kind = ("scanned " * place.num_loops) + place.kind
        EXERCISED["rule", kind, forms[place.leaf]] += 1
        for step in place.steps:
            EXERCISED["view", re.split(r"[\[( ]", step)[0], forms[place.leaf]] += 1


def forced_mixture(seed: int) -> contextlib.AbstractContextManager:
    """Hessians by sites for some leaves, and by products for the others.

    For some seeds, as if they were large: blocks and examples one after the other.
    """
    rng = random.Random(seed)
    return with_hessians_by_sites(
        lambda leaf: rng.random() < 0.5, in_turn=seed % 4 == 0
    )


class _Model(eqx.Module):
    """A program as a model; those with another `form` are compiled anew."""

    parameters: Any
    program: Program = eqx.field(static=True)
    form: str = eqx.field(static=True)

    def __call__(self, x: Any) -> Any:
        return self.program.fun(self.parameters, *x)


def check(fun: Callable[[Subject], Triples]) -> Callable:
    CHECKS[fun.__name__] = fun
    return fun


# Gradients.


@check
def norms_and_sums(s: Subject) -> Triples:
    """Each contraction, of all leaves for which it may be used."""
    one_example = [x[0] for x in s.examples]
    by_rules = Sites.of(lambda ws, rows: s.loss(ws, *rows), s.leaves, one_example)
    truth = s.gradients
    num = s.examples[0].shape[0]
    is_kept = jnp.arange(num) != 1
    weights = jnp.arange(1.0, num + 1)
    forms: dict[bool, tuple[Form, ...]]
    forms = {True: ("factors", "once", "twice"), False: ("derivative",)}
    for has_rules in forms:
        sites = by_rules if has_rules else by_rules.without_rules()
        examples = sites.examples(s.leaves, s.examples)
        for form in forms[has_rules]:
            count(sites, form)
            norms, sums = examples.contracted(form, weights, is_kept)
            for i, true in enumerate(truth):
                square = jnp.sum(jnp.abs(true.reshape(num, -1)) ** 2, 1)
                yield f"{form}: squared norms of leaf {i}", norms[i], square
                total = jnp.tensordot((weights * is_kept).astype(true.dtype), true, 1)
                yield f"{form}: sum of leaf {i}", sums[i], total
        for i, true in enumerate(truth if has_rules else ()):
            if sites.is_used(i):
                formed = jnp.broadcast_to(examples.gradients(i), true.shape)
                yield f"gradients of leaf {i}", formed, true


def _clipped(s: Subject, method: str) -> Triples:
    truth = s.gradients
    num = s.examples[0].shape[0]
    squares = [jnp.sum(jnp.abs(g.reshape(num, -1)) ** 2, 1) for g in truth]
    norm = jnp.sqrt(sum(squares))
    scale = jnp.where(norm > CLIP, CLIP / jnp.where(norm > CLIP, norm, 1), 1)
    run = eqxbatch.filter_micro_grad(
        s.program.loss,
        clip_norm=CLIP,
        return_norms=True,
        method=method,
        nan_safe=s.program.seed % 3 == 0,
        **s.settings,
    )
    got, statistics = run(s.parameters, *s.examples)
    yield "norms", statistics.norms**2, norm**2
    found = jax.tree.leaves(eqx.filter(got, eqx.is_inexact_array))
    for i, (a, true) in enumerate(zip(found, truth, strict=True)):
        expected = jnp.tensordot((s.scales * scale).astype(true.dtype), true, 1)
        yield f"leaf {i}", a, expected


@check
def clipped_by_sites(s: Subject) -> Triples:
    yield from _clipped(s, "sites")


@check
def clipped(s: Subject) -> Triples:
    yield from _clipped(s, ("auto", "materialise")[s.program.seed % 2])


class _Loss(eqx.Module):
    """The loss of a program as a model, for an estimator."""

    parameters: Any
    program: Program = eqx.field(static=True)

    def __call__(self, x: Any) -> Any:
        return self.program.loss(self.parameters, *x)


@check
def features(s: Subject) -> Triples:
    """Projections of gradients, beside their sum and by the estimator."""
    if s.is_complex:
        return
    seed, num = s.program.seed, s.examples[0].shape[0]
    kind, method = ("dense", "sparse", "auto")[seed % 3], ("sites", "auto")[seed % 2]
    sketch = eqxbatch.Projection(6, jax.random.key(seed), kind=kind, entries=2)
    run = eqxbatch.filter_micro_grad(
        s.program.loss, features=sketch, method=method, **s.settings
    )
    _, statistics = run(s.parameters, *s.examples)
    units = jax.vmap(s.unravelled)(jnp.eye(sum(x.size for x in s.leaves)))
    matrix = sketch.drawn(s.leaves).of_gradients(units)
    flat = jnp.concatenate([g.reshape(num, -1) for g in s.gradients], axis=1)
    yield kind, statistics.features, flat @ matrix
    ntk = eqxbatch.EmpiricalNTK(_Loss(s.parameters, s.program), metric=sketch)
    yield f"{kind} of the estimator", ntk.features(s.examples), flat @ matrix


# Kernels.


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
    size = (None, None, 2, (1, 2))[s.program.seed % 4]
    defaults = {"method": "sites", "trace_axes": (), "block_size": size}
    settings = {**defaults, **settings}
    return eqxbatch.EmpiricalNTK(_Model(s.parameters, s.program, tag), **settings)


def _kernels(s: Subject, form: str) -> Triples:
    """Between two inputs, which may be of two lengths."""
    try:
        examples, others, kind = s.others, s.other_jacobians, "two"
    except (TypeError, ValueError):  # Not for inputs of that length.
        examples, others, kind = s.examples, s.jacobians, "itself"
    with with_kernels_by(form):
        found = jax.tree.leaves(_ntk(s, form)(s.examples, examples))
    for i, k in enumerate(found):
        expected = _interleaved(_kernel(s, s.jacobians, others, i))
        yield f"output {i}, of {kind}", k, expected


@check
def kernels_by_factors(s: Subject) -> Triples:
    yield from _kernels(s, "gram")


@check
def kernels_by_jacobians(s: Subject) -> Triples:
    yield from _kernels(s, "formed")


def _settings(s: Subject) -> tuple[str, list]:
    form = ("gram", "formed", "auto")[s.program.seed % 3]
    example = [x[0] for x in s.examples]
    return form, jax.eval_shape(lambda: s.outputs(s.leaves, *example))


@check
def kernels_symmetric(s: Subject) -> Triples:
    """Of one input, and of each example with itself."""
    form, outs = _settings(s)
    with with_kernels_by(form):
        found = jax.tree.leaves(_ntk(s, form)(s.examples))
        each = jax.tree.leaves(_ntk(s, form).diagonal(s.examples))
    for i in range(len(outs)):
        full = _kernel(s, s.jacobians, s.jacobians, i)
        yield f"output {i}, symmetric", found[i], _interleaved(full)
        own = jnp.moveaxis(jnp.diagonal(full), -1, 0)
        yield f"output {i}, of each", each[i], _interleaved(own[None])[0]


@check
def kernels_traced(s: Subject) -> Triples:
    """The trace over an axis, and its diagonal."""
    form, outs = _settings(s)
    if not all(out.ndim for out in outs):
        return
    with with_kernels_by(form):
        traces = jax.tree.leaves(_ntk(s, form, trace_axes=(-1,))(s.examples))
        diagonals = jax.tree.leaves(_ntk(s, form, diagonal_axes=(1,))(s.examples))
    for i, out in enumerate(outs):
        full, num = _kernel(s, s.jacobians, s.jacobians, i), out.ndim
        traced = jnp.trace(full, axis1=1 + num, axis2=1 + 2 * num)
        expected = _interleaved(traced / max(out.shape[-1], 1))
        yield f"output {i}, traced", traces[i], expected
        diagonal = jnp.moveaxis(jnp.diagonal(full, axis1=2, axis2=2 + num), -1, 2)
        rest = [axis for j in range(num - 1) for axis in (3 + j, 2 + num + j)]
        expected = diagonal.transpose(0, 1, 2, *rest)
        yield f"output {i}, diagonal", diagonals[i], expected


# Curvature.


@contextlib.contextmanager
def _only_deprecations() -> Iterator[None]:
    """Of the warnings of random programs, only deprecations are of interest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", DeprecationWarning)
        yield


def _curvature(
    s: Subject, transform: Callable, *funs: Callable, **settings: Any
) -> Any:
    rng = random.Random(s.program.seed)
    size, checkpoint = rng.choice((None, None, 1, 3)), rng.random() < 0.2
    settings |= {"block_size": size, "checkpoint": checkpoint, **s.settings}
    run = transform(*funs, in_axes=0, flat=True, **settings)
    with _only_deprecations():
        return run(s.parameters, *s.examples)


METHODS = ("sites", "products", "auto")


def _of_hessian(s: Subject, method: str) -> Triples:
    if s.is_complex:
        return
    loss, settings = s.program.loss, {"method": method}
    with forced_mixture(s.program.seed):
        full, _ = _curvature(s, eqxbatch.filter_hessian, loss, **settings)
        own, _ = _curvature(s, eqxbatch.filter_hessian_diagonal, loss, **settings)
    yield "hessian", full, s.hessian
    yield "diagonal", own, jnp.diagonal(s.hessian)


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
def hessian_blocks(s: Subject) -> Triples:
    if s.is_complex:
        return
    method = METHODS[s.program.seed % 3]
    transform = eqxbatch.filter_hessian_blocks
    with forced_mixture(s.program.seed):
        found = _curvature(s, transform, s.program.loss, method=method)
    blocks = [x for x in jax.tree.leaves(found) if eqx.is_array(x) and x.ndim == 2]
    start = 0
    for i, (leaf, block) in enumerate(zip(s.leaves, blocks, strict=True)):
        end = start + leaf.size
        yield f"block {i}, {method}", block, s.hessian[start:end, start:end]
        start = end


def _marked(tree: Any, chosen: list[bool]) -> Any:
    """Which leaves of a tree are parameters: those of an inexact dtype, if chosen."""
    marks = iter(chosen)

    def mark(x: Any) -> bool:
        is_inexact = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)
        return is_inexact and next(marks)

    return jax.tree.map(mark, tree)


@check
def of_some_leaves(s: Subject) -> Triples:
    """Of a part of the parameters, the others of which are constants."""
    rng = random.Random(s.program.seed)
    chosen = [rng.random() < 0.5 for _ in s.leaves]
    chosen[0] |= not any(chosen)
    model = _Model(s.parameters, s.program, f"some {chosen}")
    ntk = eqxbatch.EmpiricalNTK(
        model, trace_axes=(), method="sites", filter_spec=_marked(model, chosen)
    )
    for i, got in enumerate(jax.tree.leaves(ntk(s.examples))):
        marked = zip(s.jacobians[i], chosen, strict=True)
        own = {i: [x if is_chosen else 0 * x for x, is_chosen in marked]}
        expected = _interleaved(_kernel(s, own, own, i))
        yield f"kernel of {chosen}, output {i}", got, expected
    if s.is_complex:
        return
    entries = [[mark] * x.size for x, mark in zip(s.leaves, chosen, strict=True)]
    which = np.flatnonzero(np.concatenate(entries))
    method = METHODS[s.program.seed % 2]
    settings = {"method": method, "filter_spec": _marked(s.parameters, chosen)}
    with forced_mixture(s.program.seed):
        got, _ = _curvature(s, eqxbatch.filter_hessian, s.program.loss, **settings)
    yield f"hessian of {chosen}, {method}", got, s.hessian[which][:, which]


@check
def gauss_newton_by_sites(s: Subject) -> Triples:
    if not s.is_complex:
        funs = s.program.fun, s.program.loss_of
        got, _ = _curvature(s, eqxbatch.filter_ggn, *funs, method="sites")
        yield "sites", got, s.gauss_newton


@check
def gauss_newton_by_products(s: Subject) -> Triples:
    if s.is_complex:
        return
    funs = s.program.fun, s.program.loss_of
    method = ("products", "auto")[s.program.seed % 2]
    with forced_mixture(s.program.seed):
        got, _ = _curvature(s, eqxbatch.filter_ggn, *funs, method=method)
    yield method, got, s.gauss_newton
    product = eqxbatch.filter_ggnvp(*funs, in_axes=0, **s.settings)
    yield "product", _product(s, product), s.gauss_newton @ _direction(s)


def _direction(s: Subject) -> Any:
    return jnp.arange(1.0, sum(x.size for x in s.leaves) + 1)


def _product(s: Subject, product: Callable) -> Any:
    with _only_deprecations():
        vector = s.tree(s.unravelled(_direction(s)))
        got = product(s.parameters, vector, *s.examples)
    return s.ravelled(jax.tree.leaves(eqx.filter(got, eqx.is_inexact_array)))


@check
def hessian_product(s: Subject) -> Triples:
    if not s.is_complex:
        product = eqxbatch.filter_hvp(s.program.loss, in_axes=0, **s.settings)
        yield "product", _product(s, product), s.hessian @ _direction(s)


# One after the other, these have all contractions and ways. The first of each are done
# for each program; of the rest, one for each program in turn is enough.
ALWAYS = (
    "norms_and_sums",
    "kernels_by_factors",
    "hessian_by_sites",
    "gauss_newton_by_sites",
)
IN_TURN = tuple(name for name in CHECKS if name not in ALWAYS)


def some_checks(seed: int, num: int = 1) -> list[str]:
    """Those that are done for the program of a seed, where time is short."""
    turns = [IN_TURN[(num * seed + i) % len(IN_TURN)] for i in range(num)]
    return [*ALWAYS, *turns]
