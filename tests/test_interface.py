"""What users see of the package: names, help, signatures, and what it prints."""

import functools
import importlib.util
import inspect
import os
import pydoc
import re
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxbatch
from eqxbatch import (
    filter_batch_kernel,
    filter_ggn,
    filter_ggnvp,
    filter_grid_vmap,
    filter_hessian,
    filter_hessian_blocks,
    filter_hessian_diagonal,
    filter_hvp,
    filter_jacobian,
    filter_micro_grad,
    filter_micro_value_and_grad,
    filter_micro_vmap,
    filter_microbatch,
)
from .helpers import drawn, make_mesh


pytestmark = pytest.mark.quick


OPERATORS = {
    "GGNOperator",
    "HessianOperator",
    "KernelOperator",
    "KroneckerOperator",
}
RESULTS = [name for name, x in vars(eqxbatch.results).items() if inspect.isclass(x)]
MODEL = drawn(eqx.nn.MLP, 2, "scalar", 4, 1, key=jax.random.key(0))


def loss(model, x):
    return model(x) ** 2


def test_all_public_names_are_listed():
    # Whatever is imported without an underscore is public, and so is what comes late.
    found = {name for name in vars(eqxbatch) if not name.startswith("_")}
    names = {name for name in found if not inspect.ismodule(getattr(eqxbatch, name))}
    assert {*eqxbatch.__all__} == names | OPERATORS
    assert len(eqxbatch.__all__) == len({*eqxbatch.__all__})
    assert {*eqxbatch.__all__} <= {*dir(eqxbatch)}
    found = {name for name in dir(eqxbatch) if name[0] != "_"}
    assert found == {*eqxbatch.__all__, "results"}


def test_results_are_not_at_the_top():
    assert "GradientStatistics" in RESULTS
    assert not {*RESULTS} & {*eqxbatch.__all__}


def test_all_names_can_be_imported():
    names = {}
    exec("from eqxbatch import *", names)
    assert {*names} - {"__builtins__"} == {*eqxbatch.__all__}


def test_without_lineax_and_without_checks():
    """In one process, as it takes long to start."""
    code = (
        "import importlib.util, sys; sys.modules['lineax'] = None; "
        "find = importlib.util.find_spec; "
        "importlib.util.find_spec = lambda n: None if n == 'lineax' else find(n); "
        "from eqxbatch import *; import eqxbatch; "
        "print('GGNOperator' in dir(eqxbatch), 'grid' in dir(eqxbatch)); "
        "print(eqxbatch.Concat('0').axis)\n"
        "for name, call in {\n"
        "    'KroneckerFactors.operator': eqxbatch.results.KroneckerFactors.operator,\n"
        "    'kernel_solve': lambda _: eqxbatch.kernel_solve(min, 1.0, 1.0, ridge=1),\n"
        "    'curvature_solve': lambda _: eqxbatch.curvature_solve(1, 1, damping=1),\n"
        "}.items():\n"
        "    try:\n"
        "        call(None)\n"
        "    except ImportError as e:\n"
        "        print(str(e) == f'`{name}` needs lineax: pip install '\n"
        "              '\"equinox-batch[linalg]\".')"
    )
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "JAXTYPING_DISABLE": "1"}
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["False", "True", "0", "True", "True", "True"]
    assert importlib.util.find_spec("lineax") is not None


@pytest.mark.parametrize("name", (*eqxbatch.__all__, *RESULTS))
def test_help_lists_the_arguments(name):
    is_result = name in RESULTS
    public = getattr(eqxbatch.results if is_result else eqxbatch, name)
    if name == "TaylorExpansion":
        return  # It is shown without the arguments of its constructor.
    shown = pydoc.plain(pydoc.render_doc(public))
    doc = inspect.getdoc(public)
    assert doc.splitlines()[0] in shown
    for parameter in inspect.signature(public).parameters.values():
        assert re.search(rf"`\**{parameter.name}\b", doc), parameter.name
        assert parameter.name in shown


class Scaled(eqx.Module):
    scale: jax.Array

    @filter_micro_vmap(in_axes=(None, 0), microbatch_size=2)
    def many(self, x):
        return self.scale * x

    @filter_micro_grad
    def slope(self, x, *, power=2):
        return jnp.sum(self.scale * x) ** power

    @filter_hvp
    def curved(self, x):
        return jnp.sum(self.scale * x)

    @filter_batch_kernel(block_size=2)
    def kernel(self, x1, x2):
        return self.scale * x1 @ x2.T


SCALED = Scaled(jnp.ones(()))


@pytest.mark.parametrize(
    ("fun", "expected"),
    (
        (Scaled.many, "(self, x)"),
        (SCALED.many, "(x)"),
        (SCALED.slope, "(x, *, power=2)"),
        (Scaled.curved, "(self, vector, x)"),
        (SCALED.curved, "(vector, x)"),
        (SCALED.kernel, "(x1, x2)"),
        (filter_micro_vmap(lambda *xs: xs), "(*xs)"),
        (filter_micro_vmap(MODEL), str(inspect.signature(MODEL))),
    ),
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_signatures(fun, expected):
    assert str(inspect.signature(fun)) == expected


def test_bound_methods_that_take_anything():
    class Model(eqx.Module):
        @filter_micro_vmap(in_axes=0)
        def many(*args):
            return args[1]

    assert str(inspect.signature(Model().many)) == "(*args)"
    assert Model().many(jnp.ones(3)).shape == (3,)


@pytest.mark.parametrize(
    ("fun", "expected"),
    (
        (filter_micro_vmap(loss), "filter_micro_vmap(loss)"),
        (
            filter_micro_vmap(MODEL, microbatch_size=64, in_axes=(None, 0)),
            "filter_micro_vmap(MLP(...), in_axes=(None, 0), microbatch_size=64)",
        ),
        (
            filter_microbatch(
                functools.partial(loss, MODEL), accumulator=eqxbatch.Max()
            ),
            "filter_microbatch(Partial(loss, ...), accumulator=Max())",
        ),
        (
            filter_micro_grad(loss, clip_norm=jnp.ones(()), where=lambda m: m.layers),
            "filter_micro_grad(loss, clip_norm=float32[], where=<lambda>)",
        ),
        (
            filter_micro_value_and_grad(
                loss, accumulator=eqxbatch.Sum(weights=jnp.ones(3)), moments=False
            ),
            "filter_micro_value_and_grad(loss, accumulator=Sum(...))",
        ),
        (filter_jacobian(loss, mode="rev"), "filter_jacobian(loss, mode='rev')"),
        (
            filter_hessian(
                loss, block_size=eqxbatch.MemoryBudget("1MB"), num_blocks=None
            ),
            "filter_hessian(loss, block_size=MemoryBudget(max_bytes=1000000))",
        ),
        (filter_hessian_diagonal(loss, flat=True), "filter_hessian_diagonal(loss, fla"),
        (filter_hessian_blocks(loss), "filter_hessian_blocks(loss)"),
        (filter_hvp(eqx.filter_jit(loss)), "filter_hvp(loss)"),
        (filter_ggn(MODEL, jnp.sum), "filter_ggn(MLP(...), loss=sum)"),
        (
            filter_ggn(MODEL, jnp.sum, fisher="type-2"),
            "filter_ggn(MLP(...), loss=sum)",
        ),
        (
            filter_ggnvp(MODEL, jnp.sum, in_axes=0),
            "filter_ggnvp(MLP(...), loss=sum, in_axes=0)",
        ),
        (
            filter_grid_vmap(loss, in_axes={"x": "i"}, out_axes="i"),
            "filter_grid_vmap(loss, in_axes={'x': grid(('i',), (0,))}, ",
        ),
        (
            filter_batch_kernel(
                loss,
                block_size=(2, 3),
                store=eqxbatch.HostStore(),
                mesh=make_mesh(None, (1,), ("rows",)),
            ),
            "filter_batch_kernel(loss, block_size=(2, 3), store=HostStore(), mesh=Me",
        ),
        (
            filter_micro_vmap(filter_micro_vmap(loss, axis_name="a")),
            "filter_micro_vmap(filter_micro_vmap(loss, axis_name='a'))",
        ),
        (SCALED.many, "filter_micro_vmap(Scaled(...).many, in_axes=(None, 0), microb"),
        (SCALED.kernel, "filter_batch_kernel(Partial(kernel, ...), block_size=2)"),
    ),
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_transformed_functions_are_shown_in_one_line(fun, expected):
    shown = repr(fun)
    assert shown.startswith(expected)
    assert "\n" not in shown
    assert not re.search(r"\b_[a-z]|0x", shown)


def test_what_is_shown_is_what_was_called():
    fun = filter_micro_vmap(MODEL, microbatch_size=2, checkpoint=True)
    shown = repr(fun).replace("MLP(...)", "MODEL")
    assert eqx.tree_equal(eval(shown), fun)


SECRET = 271828


@pytest.mark.parametrize(
    ("call", "expected"),
    (
        (
            lambda: filter_micro_vmap(loss, microbatch_size=np.full(3, SECRET)),
            r"got an array of shape \(3,\) and dtype int64\.",
        ),
        (
            lambda: filter_micro_vmap(jnp.full((2, 2), SECRET)),
            r"`fun` must be callable; got an array of shape \(2, 2\) and dtype int32\.",
        ),
        (
            lambda: filter_micro_vmap({"a": jnp.full(2, SECRET), "b": [1]}),
            r"got a dict with the arrays `\['a'\]` of shape \(2,\) and dtype int32 of ",
        ),
        (
            lambda: filter_micro_grad(loss, transform=MODEL.layers),
            r"`\[0\]\.weight` of shape \(4, 2\) and dtype float32, `\[0\]\.bias` of sh",
        ),
        (
            lambda: filter_hvp(loss)(MODEL, jnp.full(2, SECRET), jnp.ones(2)),
            r"a MLP with the arrays `\.layers\[0\]\.weight` .*; got an array of shape",
        ),
        (
            lambda: filter_micro_grad(loss)({"n": jnp.full(2, SECRET)}, jnp.ones(2)),
            r"got a dict with the arrays `\['n'\]` of shape \(2,\) and dtype int32",
        ),
        (
            lambda: filter_micro_vmap(jnp.sum, out_axes=(0, 1))(jnp.ones((3, 2))),
            r"got \(0, 1\) for an array of shape \(\) and dtype float32",
        ),
        (
            lambda: eqxbatch.filter_linearize(MODEL)(MODEL.layers[0], jnp.ones(2)),
            r"got a Linear with the arrays `\.weight` of shape \(4, 2\) and dtype flo",
        ),
        (
            lambda: eqxbatch.filter_linearize(jnp.full(3, SECRET)),
            r"`model` must be callable; got an array of shape \(3,\)",
        ),
        (
            lambda: filter_micro_vmap([loss, "x" * 1_000]),
            r"got \['<function|got \[<function .*\.\.\. of type list",
        ),
    ),
)
def test_arguments_are_shown_without_their_values(call, expected, unchecked):
    with pytest.raises((TypeError, ValueError), match=expected) as found:
        call()
    assert str(SECRET) not in str(found.value)
    assert "PyTreeDef" not in str(found.value)
    assert "\n" not in str(found.value)


def test_many_paths_are_counted():
    model = eqx.nn.MLP(2, 2, 2, 5, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"dtype float32, 6 more; got an array"):
        filter_hvp(loss)(model, jnp.ones(2), jnp.ones(2))
