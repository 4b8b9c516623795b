"""All primitives of the installed JAX, beside the tables of `_base/primitives.py`."""

import importlib
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqxbatch._base import primitives
from eqxbatch._base.jaxprs import equations_in
from eqxbatch._base.traced_function import TracedFunction
from eqxbatch._sites import rules
from eqxbatch._sites.program import Program
from ..layers import Case, vectors, weight
from ..sites.oracle import compare


pytestmark = pytest.mark.versions

# Public modules make their primitives when they are imported, and some need packages
# that are not installed. The collector does not list what is frozen, as by these
# tests, so this has a process of its own.
LIST = """
import gc, importlib, json, pkgutil, warnings
import jax
from jax.extend.core import Primitive

warnings.simplefilter("ignore")

def subclasses(kind):
    for sub in kind.__subclasses__():
        yield sub
        yield from subclasses(sub)

def visit(package):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if "._" in module.name:
            continue
        try:
            found = importlib.import_module(module.name)
        except ImportError:
            continue
        if module.ispkg:
            visit(found)

visit(jax)
names = {x.name for x in gc.get_objects() if isinstance(x, Primitive)}
base = getattr(getattr(jax.experimental, "hijax", None), "HiPrim", None)
kinds = [] if base is None else [x.__name__ for x in subclasses(base)]
print(json.dumps([sorted(names), sorted(kinds)]))
"""

# Rows of the table for primitives that the newest JAX does not have.
OLDER = {"call": "0.9", "closed_call": "0.9"}
# That of the package: see `test_experts.py`.
OWN = {"ragged_dot"}


@pytest.fixture(scope="module")
def bound():
    """The names of all primitives of JAX, and of the classes that stand for some."""
    done = subprocess.run([sys.executable, "-c", LIST], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names, kinds = json.loads(done.stdout.splitlines()[-1])
    return {*names}, {*kinds}


def test_every_primitive_has_one_row(bound):
    tables = [frozenset(primitives._KNOWN), *primitives.WITHOUT_RULES.values()]
    rows = frozenset().union(*tables)
    assert len(rows) == sum(map(len, tables))
    # There must be something to compare.
    assert {"dot_general", "scan", "pallas_call", "bcoo_todense"} <= bound[0]
    assert sorted(bound[0] - rows) == []


def test_every_class_has_a_row(bound):
    assert sorted(bound[1] - {*primitives._CLASSES} - primitives.OPAQUE_CLASSES) == []


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="rows are for newer ones")
def test_no_row_is_dead(bound):
    stand_ins = {*primitives._CLASSES.values()}
    assert {*primitives._KNOWN} - bound[0] - stand_ins == {*OLDER} | OWN


def layer(w, x):
    return jnp.tanh(w @ x)


def ordered(**settings):
    def run(w, x):
        # Older versions of JAX have no such module.
        overlap = importlib.import_module("jax.experimental.overlap")
        return overlap.program_order(layer, **settings)(w, x)

    return run


def tagged(**settings):
    def run(w, x):
        from jax.experimental.xla_metadata import xla_metadata_call2

        return xla_metadata_call2(layer, {"tag": "layer"}, **settings)(w, x)

    return run


def unpacked(w, x):
    a, b, *others = w
    return a * x + jnp.tanh(b * x) * others[0] + others[3]


@jax.custom_jvp
def forward(w, x):
    return w @ x


forward.defjvp(lambda p, t: (forward(*p), t[0] @ p[1] + p[0] @ t[1]))


@jax.custom_vjp
def reverse(w, x):
    return w @ x


reverse.defvjp(
    lambda w, x: (w @ x, (w, x)), lambda s, d: (jnp.outer(d, s[1]), s[0].T @ d)
)


# For each word that leads into a program: networks inside, by the primitive.
CALLS = {
    "custom_jvp_call": (forward,),
    "custom_vjp_call": (reverse,),
    "jit": (jax.jit(layer),),
    "polynomial": (
        lambda w, x: jnp.polyval(w, x),
        lambda w, x: jnp.polyval(x, w[0]),
        lambda w, x: jnp.polyval(w[0], w[1] * x),
    ),
    "program_order": (
        ordered(enforce=True, strict_in_out=True),
        ordered(enforce=False, exclude_argnames="w"),
    ),
    "remat2": (jax.checkpoint(layer),),
    "unstack": (unpacked,),
    "xla_metadata_call": (tagged(), tagged(ad_metadata={"tag": "backward"})),
}
# `test_flags.py` has these, with flags of JAX.
ELSEWHERE = {"call", "checkpoint", "closed_call", "einsum", "eval_jaxpr"}


def names_in(fun):
    closed = jax.make_jaxpr(fun)(jnp.ones((6, 6)), jnp.ones(6))
    return {eqn.primitive.name for eqn in equations_in(closed)}


def test_all_calls_are_tested():
    words = ("call", "custom", "expand", "remat")
    rows = frozenset().union(*map(primitives.with_trait, words))
    assert rows - ELSEWHERE == {*CALLS}


@pytest.mark.parametrize(
    ("name", "number"), [(name, i) for name in CALLS for i, _ in enumerate(CALLS[name])]
)
def test_network_in_a_call(name, number, bound, x64):
    if name not in bound[0]:
        pytest.skip(f"this JAX has no `{name}`")
    fun = CALLS[name][number]
    assert name in names_in(fun)
    # A row has too many numbers to be taken for a few directions.
    program, comparable = compare(Case(weight(6, 6), fun, vectors(6)))
    assert not program.fallbacks
    assert all(comparable)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX 0.12 has both calls")
def test_order_and_metadata_are_kept(x64):

    for name, fun in (
        ("program_order", ordered(enforce=True, strict_in_out=True)),
        ("program_order", ordered(enforce=False, exclude_argnames="w")),
        ("xla_metadata_call", tagged(ad_metadata="drop")),
    ):
        traced = TracedFunction(
            lambda w, rows: fun(w, *rows), weight(4, 4), [weight(4)]
        )
        program = Program(traced)
        zeros = [jnp.zeros(s.shape, s.dtype) for s in program.table.perturbations]
        run = lambda w, x: program.evaluate([w], [x], zeros)[0]
        params = [
            [eqn.params for eqn in equations_in(closed) if eqn.primitive.name == name]
            for closed in (
                jax.make_jaxpr(f)(weight(4, 4), weight(4)) for f in (fun, run)
            )
        ]
        (before,), (after,) = params
        kept = ("enforce", "strict_in", "strict_out", "xla_metadata", "ad_metadata")
        assert [before.get(x) for x in kept] == [after.get(x) for x in kept]
        if name == "program_order":
            assert sum(before["exclude_mask"]) == sum(after["exclude_mask"])


ENTRIES = {
    "bessel_i0e": lax.bessel_i0e,
    "bessel_i1e": lax.bessel_i1e,
    "igamma": lambda x: lax.igamma(x + 3, x + 4),
    "igammac": lambda x: lax.igammac(x + 3, x + 4),
    "log2": lambda x: jnp.log2(x + 3),
    "one_minus_square": lambda x: lax.one_minus_square(x),
    "polygamma": lambda x: lax.polygamma(jnp.ones_like(x), x + 3),
    "regularized_incomplete_beta": lambda x: lax.betainc(
        jnp.ones_like(x), 2 * jnp.ones_like(x), x / 4 + 0.5
    ),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_entries_depend_on_their_own(name, bound, x64):
    if name not in bound[0]:
        pytest.skip(f"this JAX has no `{name}`")
    fun, x = ENTRIES[name], np.linspace(-0.9, 1.1, 5)
    assert name in primitives.with_trait("entries")
    assert name in {e.primitive.name for e in jax.make_jaxpr(fun)(x).eqns} or (
        name == "log2"
    )
    slopes = np.asarray(jax.jacobian(fun)(x))
    np.testing.assert_array_equal(slopes, np.diag(np.diag(slopes)))
    assert np.all(np.diag(slopes) != 0)


def conv(x, w):
    return lax.conv(x[None, None], w[None, None], (1, 1), "SAME")


def chosen(x):
    return jnp.argsort(x[0])


# For each rule: a use of the parameter `w` in each place that can be one. Beside it is
# `x`, which differs between examples.
PLACES = {
    "dot_general": (lambda w, x: lax.dot(w, x), lambda w, x: lax.dot(x, w)),
    "conv_general_dilated": (lambda w, x: conv(w, x), lambda w, x: conv(x, w)),
    "mul": (lax.mul, lambda w, x: lax.mul(x, w)),
    "div": (lambda w, x: lax.div(w, 9 + x), lambda w, x: lax.div(x, 9 + w)),
    "add": (lax.add, lambda w, x: lax.add(x, w)),
    "sub": (lax.sub, lambda w, x: lax.sub(x, w)),
    "gather": (lambda w, x: w.at[chosen(x)].get(mode="clip"),),
    "dynamic_slice": (lambda w, x: lax.dynamic_slice_in_dim(w, chosen(x)[0], 1),),
    "concatenate": (
        lambda w, x: lax.concatenate([w, x], 0),
        lambda w, x: lax.concatenate([x, w], 0),
    ),
    "stack": (lambda w, x: jnp.stack([w, x]), lambda w, x: jnp.stack([x, w])),
    "dynamic_update_slice": (
        lambda w, x: lax.dynamic_update_slice(w, x[:2], (1, 0)),
        lambda w, x: lax.dynamic_update_slice(x, w[:2], (1, 0)),
    ),
    "select_n": (
        None,  # No derivative.
        lambda w, x: lax.select_n(x > 0, w, x),
        lambda w, x: lax.select_n(x > 0, x, w),
    ),
}
# The data of a convolution, not its kernel.
DECLINED = {("conv_general_dilated", 0)}


def test_all_rules_are_tested():
    # JAX adds cotangents by `add_any`: see "with_bias" in `test_custom.py`.
    assert {*rules._RULES} - {"add_any"} - OWN == {*PLACES}


@pytest.mark.parametrize(
    ("name", "place"),
    [(name, i) for name, funs in PLACES.items() for i, fun in enumerate(funs) if fun],
)
def test_rule_in_each_place(name, place, bound, x64):
    if name not in bound[0]:
        pytest.skip(f"this JAX has no `{name}`")
    use = PLACES[name][place]
    fun = lambda w, x: use(w, jnp.outer(x, 1 + x))
    program, _ = compare(Case(weight(4, 4), fun, vectors(4)))
    if (name, place) in DECLINED:
        assert f"no rule for `{name}`" in program.fallbacks[0]
    else:
        assert not program.fallbacks
        assert [x.input for x in program.places] == [f"{name}[{place}]"]
