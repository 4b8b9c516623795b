"""What the last line of a cell of a notebook shows."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from eqxbatch import (
    EmpiricalNTK,
    explain_sites,
    filter_kfac,
    filter_micro_grad,
    GGNOperator,
    HessianOperator,
    KernelOperator,
    Mean,
    over_batches,
)
from eqxbatch._base.tables import Table
from eqxbatch._base.traced_function import TracedFunction
from eqxbatch._batch.rows import Rows
from eqxbatch._batch.slots import as_slots
from eqxbatch._gradients.clipping import clipping_groups
from .helpers import drawn


pytestmark = pytest.mark.quick


DEEP = drawn(eqx.nn.MLP, 2, 3, 4, 12, key=jax.random.key(0))
X, Y = jnp.ones((5, 2)), jnp.arange(5) % 3


def predict(model, x, y):
    return model(x)


def loss(out, x, y):
    return -jax.nn.log_softmax(out)[y]


def whole_loss(model, x, y):
    return loss(model(x), x, y)


def factors(model=DEEP):
    return eqx.filter_eval_shape(filter_kfac(predict, loss), model, X, Y)


TABLES = {
    "factors": (factors, ".layers[12].weight, .layers[12].bias"),
    "report": (
        lambda: explain_sites(whole_loss, DEEP, X, Y),
        'method="auto" is "sites"',
    ),
    "Hessian": (
        lambda: HessianOperator(whole_loss, DEEP, X, Y, in_axes=0),
        "HessianOperator, 247 x 247",
    ),
    "GGN": (lambda: GGNOperator(predict, loss, DEEP, X, Y), "tags: "),
    "kernel": (
        lambda: KernelOperator(lambda x, y: x @ y.T, X, symmetric=True),
        "KernelOperator, 5 x 5",
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_short_and_have_html(name):
    make, line = TABLES[name]
    shown = make()
    short, whole = repr(shown).splitlines(), str(shown).splitlines()
    assert len(short) <= 20
    assert max(map(len, short)) <= 120
    assert any(line in row for row in short)
    if len(whole) > 20:
        rest = len(whole) - len(short) + 1
        assert short[-1] == f"{rest} more lines: `print` shows all of them."
        cells = lambda rows: [row.split()[:2] for row in rows[:12] if row[0] != "-"]
        assert cells(short) == cells(whole)
    else:
        assert short == whole
    html = shown._repr_html_()
    assert html.startswith("<table>")
    for row in short[:1]:
        assert all(
            f">{cell.strip()}</th>" in html for cell in row.split("  ") if cell.strip()
        )
    assert html.count("<tr>") <= 20


def test_html_is_escaped_and_has_all_that_fits():
    table = Table([("<b>", "n"), ("a & b", "1")], num_texts=1, notes=["x < y"])
    html = table.short().html()
    for text in (">&lt;b&gt;</th>", ">a &amp; b</td>", "<p>x &lt; y</p>"):
        assert text in html
    assert 'text-align: right">1</td>' in html


def test_others_are_one_line():
    grad = filter_micro_grad(whole_loss)
    ntk = EmpiricalNTK(DEEP, block_size=2, where=lambda model: model.layers[-1])
    assert repr(ntk) == "EmpiricalNTK(MLP(...), block_size=2, where=<lambda>)"
    state = over_batches(grad).init(DEEP, (X, Y))
    assert repr(state) == "StreamState(examples in each pass: 0)"
    assert repr(factors().unravel) == "Unravel(247 numbers in 26 arrays)"
    bounds, tree = {"a": 1.0, "b": None}, {"a": (X, X), "b": X}
    groups = clipping_groups(bounds, None, None, False, tree)
    assert repr(groups) == "<leaves in groups [0, 1], [2], scaled by bounds>"


def test_what_travels_is_one_line():
    rows = Rows([X, Y], (0, 0), 5, weights=jnp.ones(5))
    assert repr(rows) == "Rows(5 examples in [f32[5,2], i32[5]] with weights)"
    program = TracedFunction(lambda w, rows: w @ rows[0], jnp.ones(2), [X], [0])
    assert repr(program) == "TracedFunction([f32[2]] and [f32[5,2]] -> f32[])"
    struct = {"norm": jax.ShapeDtypeStruct((), jnp.float32)}
    assert repr(as_slots(Mean(), struct)) == "Slots(Mean() for output['norm'])"
