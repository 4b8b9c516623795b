"""Programs for GPUs and TPUs, which are read and not run.

JAX lowers for a GPU anywhere. What XLA makes of it needs a plug-in, and no device: the
tests marked `accelerators` run in an environment that has one, as `.ci/run` says.
"""

import functools
import os
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import eqxbatch as eb
from benchmarks.programs import ACCELERATORS, Program
from eqxbatch._base.platforms import for_platform, GPU
from .derivatives import DERIVATIVES, Net, X, Y
from .features import (
    apply,
    FEATURES,
    loss,
    MODELS,
    of_outputs,
    parameters,
    scaled,
    SIZE,
)
from .helpers import KINDS


# Two microbatches and a remainder, which four devices divide.
TOTAL = 20
DTYPES = (jnp.float32, jnp.bfloat16)


def kfac_step(model, x):
    kfac = eb.filter_kfac(apply, of_outputs, in_axes=0, microbatch_size=SIZE)
    factors = kfac(model, x)
    step = eb.scale_by_kfac(factors, damping=0.1, norm_constraint=0.1)
    state = step.init(parameters(model))
    return step.update(parameters(scaled(model)), state, factors=factors)


def in_metric(model, x):
    kfac = eb.filter_kfac(
        apply, of_outputs, in_axes=0, microbatch_size=SIZE, fisher="empirical"
    )
    metric = kfac(model, x).operator(damping=0.1, factored=True)
    return eb.EmpiricalNTK(model, metric=metric, block_size=SIZE)(x, x[:4])


def projected(model, x):
    sketch = eb.Projection(8, jax.random.key(0))
    return eb.EmpiricalNTK(model, metric=sketch, block_size=SIZE)(x)


# Settings that are those of other features elsewhere.
PROGRAMS = FEATURES | {
    "EmpiricalNTK metric": in_metric,
    "EmpiricalNTK projection": projected,
    "filter_micro_grad against": lambda model, x: eb.filter_micro_grad(
        loss,
        microbatch_size=SIZE,
        scale=lambda norms: jax.tree.map(lambda norm: 1 / (1 + norm), norms),
        norms="leaf",
        against=parameters(scaled(model)),
        return_norms=True,
    )(model, x),
    "filter_jacobian in_axes": eb.filter_jacobian(
        apply, in_axes=0, microbatch_size=SIZE
    ),
    "scale_by_kfac": kfac_step,
}
# These run a program on the device, or compile one themselves.
NO_PROGRAM = ("store", "MemoryBudget")
TRACED = [x for x in PROGRAMS if not any(word in x for word in NO_PROGRAM)]

# The host reads these predicates while a program runs, outside of its loops.
CHECKS = {
    # A bound that is an array must be positive.
    "filter_micro_grad clip_norm": 1,
    # A step must be finite.
    "filter_gauss_newton_step": 1,
    "filter_gauss_newton_step blocks": 1,
    "filter_gauss_newton_step parameter": 1,
    # Damped factors must have an inverse.
    "scale_by_kfac": 1,
}
# What is to be mended.
TRANSPOSED = "patches of images are transposed"


def of_arrays(feature, name="dense", dtype=jnp.float32):
    """A feature as a function of arrays, and these as shapes."""
    make, examples = MODELS[name]
    arrays, static = eqx.partition(make(), eqx.is_array)

    def run(arrays, x):
        return eqx.filter(
            PROGRAMS[feature](eqx.combine(arrays, static), x), eqx.is_array
        )

    def shape(x):
        inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        return jax.ShapeDtypeStruct(x.shape, dtype if inexact else x.dtype)

    return run, jax.tree.map(shape, (arrays, examples(TOTAL)))


def programs_of(eqn):
    """The jaxprs that an equation runs."""
    is_program = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
    for x in jax.tree.leaves([*eqn.params.values()], is_leaf=is_program):
        if is_program(x):
            yield getattr(x, "jaxpr", x)


def checks(jaxpr, within=""):
    """For each check by the host, the loop that it is in."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = [*programs_of(eqn)]
        if any("callback" in x.primitive.name for j in inner for x in j.eqns):
            yield within
            continue
        for program in inner:
            yield from checks(program, name if name in ("scan", "while") else within)


# What XLA is given.


def operations(op):
    for region in op.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from operations(inner.operation)


def returned(op, region=0):
    """What a region of an operation returns."""
    *_, last = op.regions[region].blocks[0]
    return last.operation.operands


class Dependencies:
    """On which values each value of a program depends, through functions and loops."""

    def __init__(self, ops):
        name = lambda op, key: str(op.attributes[key]).strip('@"')
        self.functions = {
            name(op, "sym_name"): op for op in ops if op.name == "func.func"
        }
        self.calls = {}
        for op in ops:
            if op.name == "func.call":
                self.calls.setdefault(name(op, "callee"), []).append(op)

    def of(self, value):
        """Those of a value; None for an argument of the program."""
        op = value.owner
        if not hasattr(op, "results"):  # The value is an argument of a block.
            place = [*op.arguments].index(value)
            op = op.owner.operation
            if op.name == "func.func":
                calls = self.calls.get(str(op.attributes["sym_name"]).strip('"'))
                return calls and [call.operands[place] for call in calls]
            if op.name == "stablehlo.while":
                return [op.operands[place], returned(op, 1)[place]]
            return [*op.operands]
        place = [*op.results].index(value)
        if op.name == "stablehlo.while":
            parts = op.operands[place], returned(op, 1)[place], returned(op, 0)[0]
            return [*parts]
        if op.name in ("stablehlo.case", "stablehlo.if"):
            branches = [returned(op, i)[place] for i in range(len(op.regions))]
            return [op.operands[0], *branches]
        if op.name == "func.call":
            callee = str(op.attributes["callee"]).strip("@")
            return [returned(self.functions[callee])[place]]
        return [*op.operands]

    def is_known(self, value):
        """Whether a value depends on no argument of the program."""
        todo, seen = [value], set()
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            parts = self.of(value)
            if parts is None:
                return False
            todo += parts
        return True


def is_decided(op, dependencies):
    """Whether a conditional always takes the same branch, but not by its platform.

    XLA removes it, so that its branch runs before a loop that it seems to depend on.
    With `x | True`, it is meant to.
    """
    is_choice = op.name in ("stablehlo.case", "stablehlo.if") and len(op.regions) > 1
    if not is_choice:
        return False
    known = ("stablehlo.constant", "stablehlo.or")
    first = source(op.operands[0], dependencies)
    is_meant = getattr(first.owner, "name", None) in known
    return not is_meant and dependencies.is_known(op.operands[0])


def source(value, dependencies):
    """What a value is passed on from: to a function, or where a platform is chosen."""
    op, parts = value.owner, dependencies.of(value)
    name = getattr(op, "name", "argument")
    if name == "stablehlo.case" and len(op.regions) == 1:
        parts = parts[1:]
    passed = "argument", "func.call", "stablehlo.case", "stablehlo.convert"
    is_passed = name in passed and parts is not None and len(parts) == 1
    return source(parts[0], dependencies) if is_passed else value


def number(value):
    """The number that a constant is; None for everything else."""
    if getattr(value.owner, "name", None) != "stablehlo.constant":
        return None
    found = re.match(r"dense<(-?\d+)>", str(value.owner.attributes["value"]))
    return found and int(found[1])


def runs_once(op):
    """Whether a loop has one trip, from one constant to another."""
    if op.name != "stablehlo.while":
        return False
    compared = returned(op)[0].owner
    if getattr(compared, "name", None) != "stablehlo.compare":
        return False
    counter, limit = compared.operands
    place = getattr(counter, "arg_number", None)
    start = None if place is None else number(op.operands[place])
    return start is not None and number(limit) == start + 1


@functools.cache
def lowered(subject):
    """The checks of a program by the host, and the operations that a GPU is given."""
    run, shapes = of_arrays(*subject.split(", "))
    with for_platform(GPU):
        traced = jax.jit(run).trace(*shapes)
    found = tuple(checks(traced.jaxpr.jaxpr))
    if found:
        # JAX lowers callbacks only for a device that is here.
        return found, None
    module = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    # Operations are valid as long as their module.
    return found, (module, [*operations(module.operation)])


SUBJECTS = [f"{feature}, dense" for feature in TRACED]
SUBJECTS += [
    "filter_micro_grad sites, attention",
    "filter_ggn, conv",
    "filter_micro_grad sites, conv",
]


def subjects(reason="", is_wrong=lambda _: False, without=()):
    """Values for `parametrize`, of which some must fail until they are mended.

    By default, those of public names are tried.
    """
    params = []
    for subject in SUBJECTS:
        feature, _ = subject.split(", ")
        marks = [pytest.mark.matrix] if " " in feature else []
        marks += [pytest.mark.xfail(reason=reason)] if is_wrong(subject) else []
        if feature not in without:
            params.append(pytest.param(subject, marks=marks))
    return params


where = lambda ops: [str(op.location)[:1000] for op in ops]


@pytest.mark.parametrize("subject", subjects())
def test_the_host_checks_what_users_give_and_no_more(subject):
    found, _ = lowered(subject)
    assert found == ("",) * CHECKS.get(subject.split(", ")[0], 0)


@pytest.mark.parametrize("subject", subjects(without=CHECKS))
def test_no_conditional_is_decided(subject):
    _, (_, ops) = lowered(subject)
    dependencies = Dependencies(ops)
    assert where(op for op in ops if is_decided(op, dependencies)) == []


@pytest.mark.parametrize("subject", subjects(without=CHECKS))
def test_no_loop_runs_once(subject):
    _, (_, ops) = lowered(subject)
    assert where(filter(runs_once, ops)) == []


# What XLA makes of it.


@pytest.fixture(params=[*ACCELERATORS])
def accelerator(request):
    found = ACCELERATORS[request.param]
    if not found.is_installed:
        pytest.skip(f"no plug-in for {found.name}")
    # Otherwise, JAX lowers callbacks only for a device that is here.
    assert os.environ.get("EQX_ON_ERROR") == "nan", "set EQX_ON_ERROR=nan"
    return found


def program(run, shapes, accelerator):
    """`run` compiled for shapes that are on devices, as XLA's program."""
    compiled = accelerator.compile_placed(run, *shapes)
    return Program(compiled.as_text())


def one_device(shapes, accelerator):
    sharding = SingleDeviceSharding(accelerator.devices()[0])
    put = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(put, shapes)


def on_mesh(shapes, accelerator, kind):
    """Parameters on each of four devices, and examples spread over these."""
    devices = np.array(accelerator.devices(4))
    mesh = Mesh(devices, ("data",), axis_types=(kind,))

    def put(x, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    arrays, x = shapes
    return jax.tree.map(put, arrays), put(x, "data")


def check_program(found):
    """The host has no part in it, and no loop runs once."""
    for x in found.instructions():
        assert "callback" not in x.setting(r'custom_call_target="([^"]*)"')
        assert x.op != "while" or found.trips(x) != 1, x.rest


# A data type or a kind of mesh in turn, and all of them for some.
SETTINGS = (*DTYPES, *KINDS)
MOST = ("filter_micro_vmap", "filter_micro_grad sites", "EmpiricalNTK")
TRIED = [
    (feature, setting)
    for i, feature in enumerate(TRACED)
    for j, setting in enumerate(SETTINGS)
    if j == i % 4 or feature in MOST
]


@pytest.mark.accelerators
@pytest.mark.parametrize(("feature", "setting"), TRIED)
def test_compiles(feature, setting, accelerator):
    if setting in KINDS:
        run, shapes = of_arrays(feature)
        shapes = on_mesh(shapes, accelerator, setting)
    else:
        run, shapes = of_arrays(feature, dtype=setting)
        shapes = one_device(shapes, accelerator)
    check_program(program(run, shapes, accelerator))


@pytest.mark.accelerators
@pytest.mark.parametrize("name", DERIVATIVES)
def test_a_model_at_the_highest_precision_stays_there(name, accelerator):
    arrays, static = eqx.partition(Net(jax.lax.Precision.HIGHEST), eqx.is_array)

    def run(arrays, x, y):
        result = DERIVATIVES[name](eqx.combine(arrays, static), x, y)
        return eqx.filter(result, eqx.is_array)

    shapes = one_device((arrays, X, Y), accelerator)
    assert program(run, shapes, accelerator).cost(accelerator).lower_precision == 0


@pytest.mark.accelerators
@pytest.mark.parametrize(
    "name",
    (
        "dense",
        "attention",
        pytest.param("conv", marks=pytest.mark.xfail(reason=TRANSPOSED)),
    ),
)
def test_clipping_by_sites_transposes_no_more_than_a_gradient(name, accelerator):
    def transposed(feature):
        run, shapes = of_arrays(feature, name)
        found = program(run, one_device(shapes, accelerator), accelerator)
        return found.cost(accelerator).transposed

    plain = transposed("filter_micro_value_and_grad")
    assert transposed("filter_micro_grad sites") <= plain


@pytest.mark.accelerators
def test_no_table_is_formed_for_its_norm(accelerator):
    loss = lambda table, x: jnp.sum(jnp.tanh(jnp.mean(table[x], axis=0)))
    table = jax.ShapeDtypeStruct((1000, 128), jnp.float32)
    tokens = jax.ShapeDtypeStruct((16, 8), jnp.int32)
    shapes = one_device((table, tokens), accelerator)
    clipped = eb.filter_micro_grad(loss, clip_norm=1.0)
    compiled = accelerator.compile_placed(clipped, *shapes)
    size = compiled.memory_analysis().temp_size_in_bytes
    assert size < table.size * table.dtype.itemsize


@pytest.mark.accelerators
def test_norms_out_of_range_are_a_branch(accelerator):
    # Without a barrier, XLA always runs a branch that only adds up what it reads.
    clipped = eb.filter_micro_grad(loss, clip_norm=0.1, method="materialise")
    arrays, static = eqx.partition(MODELS["dense"][0](), eqx.is_array)
    run = lambda arrays, x: clipped(eqx.combine(arrays, static), x)
    _, (_, x) = of_arrays("filter_micro_vmap")
    shapes = one_device((arrays, x), accelerator)
    found = program(run, shapes, accelerator)
    assert any(x.op == "conditional" for x in found.instructions())
