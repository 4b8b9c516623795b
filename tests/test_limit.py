"""The column of the limit in the benchmarks: what it counts, and where it is."""

import ast
import dataclasses
import math
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

import eqxbatch as eb
from benchmarks import chart, harness, limit, work
from benchmarks.limit import NoLimit, Rates, Share, Shares, Work
from benchmarks.work import Site


BENCHMARKS = pathlib.Path(harness.__file__).parent
KEY = jr.key(0)
NUM, WIDTH, OUTPUTS = 16, 32, 8


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def of_program(fun, weights, *example):
    """The products of a function of weights and an example with these shapes."""
    return work.products_of(fun, weights, *(shape(1, *x.shape) for x in example))


def looped(weight, x):
    """The same weight in each of 5 steps."""
    return jax.lax.scan(lambda y, _: (weight @ y, None), x, length=5)[0]


def stacked(weights, x):
    """Another weight in each step, and in each of these 2 products."""
    inner = lambda weight, y: jax.lax.scan(
        lambda y, _: (weight @ y, None), y, length=2
    )[0]
    return jax.lax.scan(lambda y, weight: (inner(weight, y), None), x, weights)[0]


def convolved(groups):
    def run(weight, x):
        settings = {"padding": "SAME", "window_strides": (1, 1)}
        settings["feature_group_count"] = groups
        outs = jax.lax.conv_general_dilated(x[None], weight, **settings)
        return jnp.squeeze(outs, 0)

    return run


@pytest.mark.parametrize(
    ("fun", "weight", "example", "sites"),
    (
        (
            lambda w, x: w @ x + 1,
            shape(3, 4),
            shape(4),
            (Site(4, 3, is_inner=False, is_last=True),),
        ),
        (
            lambda w, x: jnp.sum(jnp.tanh(x @ w)),
            shape(4, 3),
            shape(7, 4),
            (Site(4, 3, 7, is_inner=False),),
        ),
        (
            lambda w, x: jnp.sum(jnp.tanh(w @ jnp.tanh(w @ x))),
            shape(4, 4),
            shape(4),
            (Site(4, 4, is_inner=False), Site(4, 4)),
        ),
        (looped, shape(3, 3), shape(3), (Site(3, 3, 5),)),
        (stacked, shape(6, 3, 3), shape(3), (Site(3, 3, 2, num=6),)),
        (
            jax.checkpoint(convolved(1)),
            shape(5, 3, 3, 3),
            shape(3, 8, 8),
            (Site(27, 5, 64, is_inner=False, is_last=True),),
        ),
        (
            convolved(3),
            shape(6, 1, 3, 3),
            shape(3, 8, 8),
            (Site(9, 2, 64, num=3, is_inner=False, is_last=True),),
        ),
    ),
)
def test_sites(fun, weight, example, sites):
    found = of_program(fun, weight, example)
    assert found == work.Products(sites)


def test_products_that_are_no_sites():
    def attention(w, x):
        y = x @ (w @ w)
        return jnp.sum(y @ y.T @ x)

    found = of_program(attention, shape(4, 4), shape(7, 4))
    of_scores, of_values = (2 * 7 * 4 * 7,) * 2
    assert found.shared == 2 * 4 * 4 * 4
    assert found.sites == (Site(4, 4, 7, is_inner=False),)
    # Both factors of the scores have gradients, and one of the values.
    assert found.others == of_scores + of_values
    assert found.others_back == 2 * of_scores + of_values
    assert found.gradient == 3 * of_scores + 2 * of_values + 2 * found.weights


def test_branches_and_unknown_loops():
    def branches(w, x):
        return jax.lax.cond(x[0] > 0, lambda: w @ (w @ x), lambda: w @ x)

    found = of_program(branches, shape(4, 4), shape(4))
    assert found.forward == 2 * 4 * 4
    assert found.is_known
    assert of_program(lambda w, x: (w @ x, 1.0), shape(4, 4), shape(4)).forward == 32

    def unknown(w, x):
        return jax.lax.while_loop(lambda y: y[0] > 0, lambda y: w @ y, x)

    found = of_program(unknown, shape(4, 4), shape(4))
    assert found.forward == 2 * 4 * 4
    assert not found.is_known


def xla_flops(fun, *args):
    """Those of a program without loops; XLA counts a trip of a loop only."""
    arrays, static = eqx.partition(args, eqx.is_array)
    run = lambda arrays: eqx.filter(fun(*eqx.combine(arrays, static)), eqx.is_array)
    return jax.jit(run).lower(arrays).compile().cost_analysis()["flops"]


def predict(model, x, label):
    return model(x)


def loss_of(logits, x, label):
    return -jax.nn.log_softmax(logits)[label]


def loss(model, x, label):
    return loss_of(model(x), x, label)


def mean_loss(model, x, label):
    return jnp.mean(jax.vmap(loss, (None, 0, 0))(model, x, label))


MODEL = eqx.nn.MLP(WIDTH, OUTPUTS, WIDTH, 2, jnp.tanh, key=KEY)
DATA = jr.normal(KEY, (NUM, WIDTH)), jnp.arange(NUM) % OUTPUTS
NTK = {"full": {"trace_axes": ()}, "traced": {}}


def of_loss():
    return work.products_of(loss, MODEL, *DATA)


def of_logits():
    return work.products_of(predict, MODEL, *DATA)


@pytest.mark.parametrize(
    ("fun", "flops"),
    (
        (mean_loss, lambda: work.mapped(of_loss(), NUM)),
        (eqx.filter_grad(mean_loss), lambda: work.accumulated(of_loss(), NUM)),
        (
            eb.filter_micro_grad(loss, microbatch_size=NUM, clip_norm=1.0),
            lambda: work.clipped(of_loss(), NUM),
        ),
        (
            eb.filter_micro_grad(loss, microbatch_size=NUM, moments=True),
            lambda: work.moments(of_loss(), NUM),
        ),
        (
            lambda model, x, _: eb.EmpiricalNTK(model)(x),
            lambda: work.kernel(of_logits(), NUM, outputs=OUTPUTS),
        ),
        (
            lambda model, x, _: eb.EmpiricalNTK(model, trace_axes=())(x),
            lambda: work.kernel(of_logits(), NUM, outputs=OUTPUTS, traced=False),
        ),
        (
            eb.filter_kfac(predict, loss_of),
            lambda: work.kfac(of_logits(), NUM, OUTPUTS),
        ),
        (
            eb.filter_ggn_diagonal(predict, loss_of),
            lambda: work.ggn_diagonal(of_logits(), NUM, OUTPUTS),
        ),
        (
            eb.filter_hessian(loss, in_axes=0, flat=True),
            lambda: work.hessian(of_loss(), NUM),
        ),
    ),
    ids=(
        "loss",
        "gradient",
        "clipped",
        "moments",
        "kernel",
        "full kernel",
        "kfac",
        "diagonal",
        "hessian",
    ),
)
def test_formulas_are_what_xla_counts(fun, flops):
    # Whatever is no product is in the rest.
    assert 0.95 < xla_flops(fun, MODEL, *DATA) / flops() < 2


RATES = Rates({"default": 100.0, "highest": 10.0}, 50.0)
TABLE = ["| job | way | time |", "|---|---|---:|", "| a | x | 1 |", "|  | y | 2 |"]


def test_limit_is_what_takes_longer():
    assert RATES.seconds(Work(200, 50)) == 2
    assert RATES.seconds(Work(200, 50, "highest")) == 20
    assert RATES.seconds(Work(200, 500)) == 10
    assert limit.num_bytes(shape(2, 3), {"x": jnp.ones(4, jnp.bfloat16)}) == 32


def test_column_and_its_notes():
    works = {
        "a": (Work(200, 50), 2.5),
        "b": (Work(100, 0, "highest", reason="because of patches"), 100.0),
        "c": (Work(0, 50), 8.0),
        "d": (NoLimit("it waits"), 1.0),
    }
    shares = Shares.of(works, RATES)
    lines = [*TABLE, "| b | x | 1 |", "| c | x | 1 |", "| d | x | 1 |"]
    cells = [line.split("|")[-2].strip() for line in shares.table(lines)]
    assert cells == [limit.COLUMN, "---:", "0.80", "", "0.10", "0.12", "-"]
    *_, meaning, lists = shares.notes.split("\n\n")
    assert meaning.startswith("*Of the limit*")
    assert lists.splitlines() == [
        "- Below a half, because of patches: b.",
        "- Below a half, for no known reason: c.",
        "- No limit, because it waits: d.",
    ]
    read = {x: Share.read(job) for x, job in shares.figures["jobs"].items()}
    assert read == shares.by_title


def test_no_job_is_without_work():
    with pytest.raises(ValueError, match="'a' declares neither"):
        Shares.of({}, RATES).table(TABLE)
    (field,) = [x for x in dataclasses.fields(harness.Case) if x.name == "work"]
    assert field.default is dataclasses.MISSING
    with pytest.raises(ValueError, match="must be one of"):
        Work(1, 1, "low")
    with pytest.raises(ValueError, match="Some work is needed"):
        Work(0, 0)


def test_a_suite_has_the_column_or_a_reason():
    without, reason = "\n".join(TABLE), NoLimit("it waits")
    works = {"a": (Work(1, 1), 1.0)}
    text = "\n".join(Shares.of(works, RATES).table(TABLE))
    limit.check(f"{text}\n\n| model | choice |\n|---|---|\n", None)
    limit.check(without, reason)
    with pytest.raises(ValueError, match="has no column"):
        limit.check(f"{text}\n\n{without}", None)
    with pytest.raises(ValueError, match="must say so"):
        limit.check("no table", None)
    with pytest.raises(ValueError, match="With `NO_LIMIT`"):
        limit.check(text, reason)


def suites():
    """The modules of all suites."""
    tree = ast.parse((BENCHMARKS / "__main__.py").read_text())
    listed = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id in ("SUITES", "NAMED")
    ]
    assert len(listed) == 2
    return [name.id for suites in listed for name in suites.elts]


@pytest.mark.parametrize("suite", suites())
def test_each_suite_makes_the_column_or_has_a_reason(suite):
    tree = ast.parse((BENCHMARKS / f"{suite}.py").read_text())
    has_reason = any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NO_LIMIT"
        for node in tree.body
    )
    calls = {ast.unparse(x.func) for x in ast.walk(tree) if isinstance(x, ast.Call)}
    makes = not calls.isdisjoint({"results", "harness.results", "shares.table"})
    makes = makes or "close.table" in calls
    assert makes != has_reason


def test_sentence_of_the_first_page():
    job = {"of_limit": 0.5}
    figures = [
        {"limit": {"jobs": {"a": job, "b": {"of_limit": 0.2}}}},
        {"limit": {"jobs": {"c": {"of_limit": None}, "d": {"of_limit": math.nan}}}},
        {"limit": {"jobs": {"e": {"of_limit": 0.7}}}},
        {"machine": {}},
    ]
    found = limit.sentence(figures)
    assert found.startswith("2 of 3 jobs")
    assert "0.50 of this limit" in found
    assert limit.sentence([{"machine": {}}]) == ""
    assert not any(name.endswith(chart.NO_CPUS) for name in chart.read())
