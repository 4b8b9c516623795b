"""The calls whose programs are compared.

Each is traced with a model of its own, so that no call has the trace of another.
"""

import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, PartitionSpec as P

import eqxbatch as eb
from .. import features
from ..features import FEATURES, in_batch, KEY, loss, of_outputs, SIZE
from ..helpers import drawn, make_mesh, normal, put
from .programs import digest, Line, lines_of, noted, Totals


# Two whole microbatches, and a remainder; and one that devices divide.
NUM, NUM_ON_MESH = 19, 12
TRACES: list[None] = []


class Counted(eqx.Module):
    """A model that counts how often Python calls it."""

    model: Any
    name: str = eqx.field(static=True)

    def __call__(self, *args: Any) -> Any:
        TRACES.append(None)
        return self.model(*args)


class Tied(eqx.Module):
    """A table of tokens that is the last layer, too."""

    table: jax.Array
    layer: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        first, second = jr.split(key)
        self.table = normal(first, (6, 4))
        self.layer = eqx.nn.Linear(4, 4, key=second)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        hidden = jnp.tanh(self.layer(jnp.mean(self.table[tokens], 0)))
        return self.table @ hidden


MODELS = {
    **features.MODELS,
    "tied": (lambda: drawn(Tied, key=KEY), features.MODELS["attention"][1]),
}
# These are called with each model, and all others with the dense one.
OF_ALL_MODELS = (
    "filter_micro_grad clip_norm",
    "filter_hessian",
    "filter_kfac",
    "EmpiricalNTK two sides",
)
# They compile to measure, or are among the calls below.
LEFT_OUT = (
    "MemoryBudget clip_norm",
    "MemoryBudget hessian",
    "MemoryBudget kernel",
    "filter_batch_kernel store",
)


def keyed_loss(model: Any, x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    out = model(x + 0.1 * jr.normal(key, x.shape))
    return jnp.sum(out**2), out


def rbf() -> Callable:
    """A kernel function, made anew for each call as the models are."""

    def kernel(x: jax.Array, y: jax.Array) -> jax.Array:
        TRACES.append(None)
        return jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, -1))

    return kernel


def pairwise(model: Any, x: jax.Array) -> jax.Array:
    def kernel(x: jax.Array, y: jax.Array) -> jax.Array:
        TRACES.append(None)
        return jnp.exp(-jnp.sum((x - y) ** 2))

    return eb.filter_batch_kernel(kernel, pairwise=True, block_size=SIZE)(x, x + 1)


def reductions(model: Any, x: jax.Array) -> Any:
    reduce = {
        "norm": eb.FrobeniusNorm(),
        "largest": eb.TopK(3),
        "product": eb.KernelProduct(x),
    }
    several = lambda x, y: dict.fromkeys(reduce, rbf()(x, y))
    return eb.filter_batch_kernel(several, block_size=5, reduce=reduce)(x)


def reduced_in_all_ways(model: Any, x: jax.Array) -> Any:
    accumulator = {
        "mean": eb.Mean(jnp.arange(1.0, len(x) + 1)),
        "variance": eb.Variance(),
        "largest": eb.Max(),
        "smallest": eb.Min(),
        "log": eb.LogSumExp(),
        "last": eb.Last(),
    }
    of_one = lambda model, x: dict.fromkeys(accumulator, model(x))
    return eb.filter_micro_vmap(
        of_one, in_axes=(None, 0), microbatch_size=SIZE, accumulator=accumulator
    )(model, x)


def reduced_grid(model: Any, x: jax.Array) -> jax.Array:
    return eb.filter_grid_vmap(
        lambda model, x, y: jnp.dot(model(x), model(y)),
        in_axes=(None, eb.grid("i"), eb.grid("j")),
        block_size=SIZE,
        accumulator={"j": eb.Mean()},
    )(model, x, x)


def with_key(model: Any, x: jax.Array) -> Any:
    keys = jr.split(KEY, len(x))
    return eb.filter_micro_value_and_grad(
        keyed_loss,
        has_aux=True,
        microbatch_size=SIZE,
        accumulator=eb.Mean(jnp.arange(1.0, len(x) + 1)),
        value_accumulator=eb.Max(),
    )(model, x, keys)


def clipped(model: Any, x: jax.Array) -> Any:
    return eb.filter_micro_grad(loss, microbatch_size=SIZE, clip_norm=0.1)(model, x)


def coupled(model: Any, x: jax.Array) -> Any:
    centred = lambda model, x: jnp.sum((model(x) - jax.lax.pmean(x[:2], "batch")) ** 2)
    return eb.filter_micro_grad(centred, axis_name="batch", microbatch_size=SIZE)(
        model, x
    )


def inverse(model: Any, x: jax.Array) -> Any:
    factors = in_batch(eb.filter_kfac, features.apply, of_outputs)(model, x)
    return factors.operator(damping=0.1).inverse().mv(eb.parameters(model))


def scaled_steps(model: Any, x: jax.Array) -> Any:
    factors = in_batch(eb.filter_kfac, features.apply, of_outputs)(model, x)
    optimiser = optax.chain(eb.scale_by_kfac(factors, damping=0.1), optax.scale(-1.0))
    parameters = eb.parameters(model)
    state = optimiser.init(parameters)
    return optimiser.update(parameters, state, factors=factors)


def hessian_as_tree(model: Any, x: jax.Array) -> Any:
    matrix, _ = in_batch(eb.filter_hessian, loss, flat=True)(model, x)
    return eb.hessian_to_pytree(matrix, eb.parameters(model))


def operators(model: Any, x: jax.Array) -> Any:
    settings: dict[str, Any] = {"in_axes": 0, "microbatch_size": SIZE}
    hessian = eb.HessianOperator(loss, model, x, **settings)
    ggn = eb.GGNOperator(features.apply, of_outputs, model, x, **settings)
    vector = eb.parameters(model)
    return hessian.mv(vector), ggn.mv(vector)


def metric_of_curvature(model: Any, x: jax.Array) -> Any:
    entries = in_batch(eb.filter_ggn_diagonal, features.apply, of_outputs)(model, x)
    return eb.EmpiricalNTK(model, metric=entries)(x)


TRACED: dict[str, Callable] = {
    "filter_micro_vmap all accumulators": reduced_in_all_ways,
    "filter_micro_vmap checkpoint": features.grad_of(
        eb.filter_micro_vmap(
            features.apply, in_axes=(None, 0), microbatch_size=SIZE, checkpoint=True
        )
    ),
    "filter_micro_vmap num_real_microbatches": lambda model, x: eb.filter_micro_vmap(
        features.apply,
        in_axes=(None, 0),
        microbatch_size=SIZE,
        num_real_microbatches=jnp.int32(2),
        accumulator=eb.Sum(),
    )(model, x),
    "filter_grid_vmap accumulator": reduced_grid,
    "filter_micro_value_and_grad keys, aux": with_key,
    "filter_micro_grad materialise": eb.filter_micro_grad(
        loss, microbatch_size=SIZE, clip_norm=0.1, method="materialise"
    ),
    "filter_micro_grad features": eb.filter_micro_grad(
        loss, microbatch_size=SIZE, features=eb.Projection(4, KEY)
    ),
    "filter_micro_grad derivative": features.grad_of(
        lambda model, x: ravel_pytree(clipped(model, x))[0]
    ),
    "filter_micro_grad axis_name": coupled,
    "filter_hessian reverse": in_batch(
        eb.filter_hessian, loss, method="products", mode="rev", block_size=5
    ),
    "filter_ggn mc": in_batch(
        eb.filter_ggn, features.apply, of_outputs, fisher="mc", key=KEY
    ),
    "filter_ggn empirical": in_batch(
        eb.filter_ggn, features.apply, of_outputs, fisher="empirical", flat=True
    ),
    "hessian_to_pytree": hessian_as_tree,
    "HessianOperator, GGNOperator": operators,
    "KroneckerOperator inverse": inverse,
    "scale_by_kfac": scaled_steps,
    "filter_batch_kernel pairwise": pairwise,
    "filter_batch_kernel reductions": reductions,
    "EmpiricalNTK diagonal_axes": lambda model, x: eb.EmpiricalNTK(
        model, trace_axes=(), diagonal_axes=(0,)
    )(x),
    "EmpiricalNTK jacobian_contraction": lambda model, x: eb.EmpiricalNTK(
        model, method="jacobian_contraction", block_size=5
    )(x),
    "EmpiricalNTK metric": metric_of_curvature,
    "EmpiricalNTK Projection": lambda model, x: eb.EmpiricalNTK(
        model, metric=eb.Projection(4, KEY)
    )(x),
    "KernelOperator": lambda model, x: eb.KernelOperator(rbf(), x, block_size=5).mv(x),
    "ntk_parameterise": lambda model, x: jax.vmap(eb.ntk_parameterise(model, key=KEY))(
        x
    ),
}


def stream(model: Any, x: jax.Array) -> Any:
    grad = eb.filter_micro_grad(loss, microbatch_size=SIZE, clip_norm=0.1)
    return eb.over_batches(grad)(model, [x[:11], x[11:]])


def stream_of_weights(model: Any, x: jax.Array) -> Any:
    hessian = in_batch(eb.filter_hessian_diagonal, loss)
    batches = [(x[:11], jnp.ones(11)), (x[11:], jnp.ones(len(x) - 11))]
    stream = eb.over_batches(hessian, weighted=True)
    return stream(model, ((*batch,) for batch in batches))


def stream_of_slices(model: Any, x: jax.Array) -> Any:
    stream = eb.over_batches(features.MAP, batch_size=11, store="host")
    return stream(model, jax.device_get(x))


def in_host_memory(model: Any, x: jax.Array) -> Any:
    return eb.EmpiricalNTK(model, block_size=5, store="host")(x)


def on_disk(model: Any, x: jax.Array) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        kernel = eb.filter_batch_kernel(rbf(), block_size=5, store=f"{folder}/kernel")
        kernel(x)


def solved(model: Any, x: jax.Array) -> Any:
    operator = eb.KernelOperator(rbf(), x, block_size=5, symmetric=True)
    return eb.kernel_solve(operator, x[:, 0], ridge=0.1, preconditioner_rank=3)


# Their loops are in Python, so that they run, and note what they compile.
IN_PYTHON: dict[str, Callable] = {
    "over_batches": stream,
    "over_batches weighted": stream_of_weights,
    "over_batches store": stream_of_slices,
    "EmpiricalNTK store": in_host_memory,
    "filter_batch_kernel disk": on_disk,
    "kernel_solve": solved,
}


ON_MESHES = (
    "filter_micro_vmap",
    "filter_micro_grad clip_norm",
    "filter_hessian flat",
    "filter_batch_kernel",
)


def in_shard_map(model: Any, x: jax.Array) -> Any:
    arrays, static = eqx.partition(model, eqx.is_array)
    run = lambda arrays, x: eb.filter_micro_grad(
        loss, microbatch_size=2, clip_norm=0.1
    )(eqx.combine(arrays, static), x)
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    return jax.shard_map(run, mesh=make_mesh(AxisType.Auto), **specs)(arrays, x)


def kernel_on_mesh(model: Any, x: jax.Array) -> Any:
    mesh = make_mesh(AxisType.Auto)
    return eb.EmpiricalNTK(model, block_size=2, mesh=mesh)(x)


@dataclasses.dataclass(frozen=True)
class Traced:
    """The programs of a call, and how often the user's function was run for them."""

    lines: list[Line]
    traces: int
    programs: int
    totals: Totals

    @property
    def row(self) -> list[str]:
        sizes = self.traces, self.programs, *dataclasses.astuple(self.totals)
        return [*map(str, sizes), digest(self.lines)]


def _call(run: Callable, name: str, model: str = "dense", mesh: Any = None) -> Traced:
    make, examples = MODELS[model]
    counted = Counted(make(), name)
    x = examples(NUM if mesh is None else NUM_ON_MESH)
    x = x if mesh is None else put(x, mesh, "data")
    TRACES.clear()
    if run in IN_PYTHON.values():
        # What calls before this one have compiled counts.
        jax.clear_caches()
        programs = noted(lambda: run(counted, x))
    else:
        programs = [eqx.filter_make_jaxpr(run)(counted, x)[0]]
    totals, lines = Totals(), []
    for program in programs:
        lines += lines_of(program, totals)
    return Traced(lines, len(TRACES), len(programs), totals)


def _report(name: str) -> Traced:
    """Of `explain_sites`, the report is compared, too."""
    make, examples = MODELS["tied"]
    TRACES.clear()
    report = eb.explain_sites(loss, Counted(make(), name), examples(NUM), in_axes=0)
    lines = [Line(line, "") for line in str(report).splitlines()]
    return Traced(lines, len(TRACES), 0, Totals())


def calls() -> dict[str, Callable[[], Traced]]:
    """By name, what traces each call."""
    found: dict[str, Callable[[], Traced]] = {}

    def add(name: str, run: Callable, **settings: Any) -> None:
        found[name] = lambda: _call(run, name, **settings)

    for name, run in FEATURES.items():
        if name not in LEFT_OUT:
            add(name, run)
    for model in MODELS:
        for name in OF_ALL_MODELS if model != "dense" else ():
            add(f"{name}, {model}", FEATURES[name], model=model)
    for name, run in (TRACED | IN_PYTHON).items():
        add(name, run)
    for kind in (AxisType.Auto, AxisType.Explicit):
        for name in ON_MESHES:
            add(f"{name}, {kind.name} mesh", FEATURES[name], mesh=make_mesh(kind))
    mesh = make_mesh(AxisType.Auto)
    add("filter_micro_grad, shard_map", in_shard_map, mesh=mesh)
    add("EmpiricalNTK, mesh", kernel_on_mesh, mesh=mesh)
    found["explain_sites"] = lambda: _report("explain_sites")
    return found
