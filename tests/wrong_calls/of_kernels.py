"""Kernels, of functions and of models: in blocks, to stores, reduced, averaged."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import numpy as np
from jaxtyping import Array, Float

import eqxbatch
from eqxbatch.results import MonteCarloEstimate, NTKLayer
from ..helpers import drawn
from .cases import Case, key, linear, model, w, x, y


kernel = functools.partial(eqxbatch.filter_batch_kernel, linear, block_size=2)
ntk = functools.partial(eqxbatch.EmpiricalNTK, model)
nngp = functools.partial(eqxbatch.EmpiricalNNGP, model)
both = functools.partial(eqxbatch.EmpiricalKernel, model)
pseudo = functools.partial(eqxbatch.PseudoNTK, model)
probed = functools.partial(eqxbatch.ProbedNTK, model)
init = lambda key: eqx.nn.MLP(2, 3, 4, 1, key=key)
carlo = functools.partial(eqxbatch.MonteCarloKernel, init, key=key, num_samples=2)
scalar = drawn(eqx.nn.MLP, 2, "scalar", 4, 1, key=key)
layer = drawn(eqx.nn.Linear, 2, 3, key=key)
struct = jax.ShapeDtypeStruct((5, 3), jnp.float32)
block = eqxbatch.Block(0, 0, 2, False, 1)


sketch = eqxbatch.Projection(4, key)
features = ntk(metric=sketch, block_size=2).features


# Metrics of `layer`, which has 9 parameters.
def in_metric(metric, **settings):
    return eqxbatch.EmpiricalNTK(layer, metric=metric, **settings)


def diagonal(bias=(1.0, 1, 1)):
    ones = jax.tree.map(np.ones_like, jax.device_get(layer))
    return eqx.tree_at(lambda x: x.bias, ones, np.array(bias, "float32"))


def curvature(width):
    other = drawn(eqx.nn.Linear, 2, width, key=key)
    call = eqxbatch.filter_kfac(lambda m, x: m(x), lambda out, x: jnp.sum(out**2))
    return call(other, x)


def too_large():
    wide = eqx.nn.Linear(8199, 1, key=key)
    structs = jax.eval_shape(lambda: eqx.filter(wide, eqx.is_inexact_array))
    metric = lineax.IdentityLinearOperator(structs)
    return eqxbatch.EmpiricalNTK(wide, metric=metric)


def reduced(reduce, block_size=2):
    return lambda: kernel(block_size=block_size, reduce=reduce)(x, x[:3])


def symmetric():
    return eqxbatch.KernelOperator(linear, x, block_size=2, symmetric=True)


class Wrong(eqxbatch.AbstractReduction):
    """A reduction whose methods return what is given."""

    first: object
    later: object
    neutral: object = 0.0

    def init(self, kernel):
        return self.first

    def update(self, state, tile, rows, columns):
        return self.later

    def merge(self, first, second):
        return first

    def finalize(self, state):
        return state


class Annotated(eqxbatch.AbstractReduction):
    """A reduction that says what it returns, and returns something else."""

    neutral = 0.0

    def init(self, kernel):
        return jnp.zeros(kernel.shape[0])

    def update(self, state, tile, rows, columns):
        return state

    def merge(self, first, second):
        return first

    def finalize(self, state) -> Float[Array, "n2 *out"]:
        return state


FUNCTIONS = [
    Case(
        "AbstractReduction",
        reduced(Annotated()),
        ValueError,
        r'`Annotated.finalize\(...\)` must be .*"n2 \*out"\]; .* shape \(5, 3\)',
    ),
    Case(
        "filter_batch_kernel",
        lambda: kernel(block_size=2.5),
        TypeError,
        "`block_size` must be int",
    ),
    Case(
        "filter_batch_kernel",
        lambda: kernel(symmetric="yes"),
        TypeError,
        "`symmetric` must be bool",
    ),
    Case(
        "filter_batch_kernel",
        lambda: kernel(pairwise="yes"),
        TypeError,
        "`pairwise` must be bool; got 'yes'",
    ),
    Case(
        "filter_batch_kernel",
        lambda: kernel()(x, key=0),
        TypeError,
        "`key` must be .*got 0",
    ),
    Case("filter_batch_kernel", lambda: kernel()(x, key=w), TypeError, "`key` must be"),
    Case(
        "filter_batch_kernel",
        lambda: kernel()([[1.0]], x),
        ValueError,
        "`x1` is a list of 1 entries",
    ),
    Case(
        "filter_batch_kernel",
        lambda: eqxbatch.filter_batch_kernel(lambda x, y: x[:, :1], block_size=2)(x),
        ValueError,
        "whose axis 1 should be the axis of the columns",
    ),
    Case(
        "filter_batch_kernel",
        lambda: eqxbatch.filter_batch_kernel(
            lambda x, y: jnp.sum(x) * jnp.sum(y), block_size=2
        )(x, x[:3]),
        ValueError,
        "`pairwise=True`",
    ),
    Case(
        "filter_batch_kernel",
        lambda: kernel(pairwise=True, out_axes=(1, 0)),
        ValueError,
        "With `pairwise=True`",
    ),
    Case(
        "filter_batch_kernel",
        lambda: kernel(reduce="sum")(x),
        TypeError,
        "`reduce` must consist of",
    ),
    Case(
        "filter_batch_kernel", lambda: kernel(mesh="data"), TypeError, "`mesh` must be"
    ),
    Case(
        "HostStore",
        lambda: kernel(store=eqxbatch.HostStore),
        TypeError,
        "`store` must be",
    ),
    Case(
        "HostStore",
        lambda: kernel(store=eqxbatch.HostStore(), reduce=eqxbatch.FrobeniusNorm()),
        ValueError,
        "With `reduce`",
    ),
    Case(
        "HostStore",
        lambda: ntk(store="memory"),
        ValueError,
        "`store` must be 'device', 'host', a path on disk.*'./memory'",
    ),
    Case(
        "ZarrStore",
        lambda: eqxbatch.ZarrStore(3),
        TypeError,
        "`path` must be str | PathLike; got 3",
    ),
    Case(
        "ZarrStore",
        lambda: eqxbatch.ZarrStore("folder", version=3),
        TypeError,
        "`version` must be str . None; got 3",
    ),
    Case(
        "AbstractProgressMeter",
        lambda: kernel(progress=eqxbatch.AbstractProgressMeter),
        TypeError,
        "`progress` must be",
    ),
    Case(
        "AbstractProgressMeter",
        lambda: ntk(progress="yes"),
        TypeError,
        "`progress` must be",
    ),
    Case(
        "TqdmProgressMeter",
        lambda: eqxbatch.TqdmProgressMeter(3),
        TypeError,
        r"`description` must be str \| None; got 3",
    ),
    Case(
        "TqdmProgressMeter",
        lambda: kernel(progress=eqxbatch.TqdmProgressMeter),
        TypeError,
        "`progress` must be",
    ),
    Case(
        "AbstractReduction",
        reduced(Wrong("zero", "zero")),
        TypeError,
        r"`Wrong.init\(...\)` must be PyTree.*got 'zero'",
    ),
    Case(
        "AbstractReduction",
        reduced(Wrong(jnp.zeros(()), "one")),
        TypeError,
        r"`Wrong.update\(...\)` must be PyTree.*got 'one'",
    ),
    Case(
        "AbstractReduction",
        reduced(Wrong(jnp.zeros(2), jnp.zeros(3))),
        TypeError,
        "must keep structure, shapes and dtypes",
    ),
    Case(
        "AbstractReduction",
        reduced(Wrong(jnp.zeros(()), jnp.zeros(()), "nothing"), 3),
        TypeError,
        "`Wrong.neutral` must be .*got 'nothing'",
    ),
    Case(
        "FrobeniusNorm",
        reduced([eqxbatch.FrobeniusNorm()]),
        ValueError,
        "`reduce` must be a reduction, or a PyTree prefix",
    ),
    Case(
        "KernelOperator",
        lambda: eqxbatch.KernelOperator(linear, x, block_size=2).mv(y[:2]),
        ValueError,
        "`vector` must have 5 rows, as the kernel has 5 columns; got shape",
    ),
    Case(
        "KernelOperator",
        lambda: eqxbatch.KernelOperator(linear, x, block_size="2"),
        TypeError,
        "`block_size` must be",
    ),
    Case(
        "KernelOperator",
        lambda: eqxbatch.KernelOperator(linear, x, progress=None, store=3),
        TypeError,
        "`store` must be",
    ),
    Case(
        "kernel_solve",
        lambda: eqxbatch.kernel_solve(
            linear, x, np.ma.array(y, mask=y > 0), ridge=0.1, symmetric=True
        ),
        ValueError,
        "Arrays must not have masked entries, which stand for no number; got an array",
    ),
    Case(
        "kernel_solve",
        lambda: eqxbatch.kernel_solve(linear, y, ridge=0.1),
        TypeError,
        r"is a kernel without its examples: .*Call `kernel_solve\(kernel, x, y, ridge",
    ),
    Case(
        "kernel_solve",
        lambda: eqxbatch.kernel_solve(symmetric(), x, y, ridge=0.1, block_size=2),
        TypeError,
        "which has its examples and settings already; got `x`, `block_size`. Call",
    ),
    Case(
        "kernel_solve",
        lambda: eqxbatch.kernel_solve(symmetric(), y, ridge=y),
        ValueError,
        "`ridge` must be",
    ),
    Case(
        "KernelSolution",
        lambda: eqxbatch.kernel_solve(symmetric(), y[:2], ridge=0.1),
        ValueError,
        "`y` must have 5 rows, as the kernel has; got shape",
    ),
    Case(
        "KernelSolution",
        lambda: eqxbatch.kernel_solve(symmetric(), y, ridge=0.1, rtol=2.0),
        ValueError,
        "`rtol` must be between 0 and 1; got 2.0",
    ),
    Case(
        "KernelProduct",
        lambda: eqxbatch.KernelProduct([1.0, 2.0]),
        TypeError,
        "`vectors` must be.*`jax.numpy.asarray`",
    ),
    Case(
        "KernelProduct",
        lambda: eqxbatch.KernelProduct(jnp.ones(())),
        ValueError,
        '`vectors` must be Shaped.Array, "n2".*"n2 k"',
    ),
    Case(
        "KernelProduct",
        reduced(eqxbatch.KernelProduct(y)),
        ValueError,
        "rows of `vectors` must be 3; got 5",
    ),
    Case(
        "KernelProduct",
        lambda: eqxbatch.KernelProduct(jnp.ones((3, 2, 2))),
        ValueError,
        "`vectors` must be",
    ),
    Case(
        "FrobeniusNorm",
        reduced(eqxbatch.FrobeniusNorm, 3),
        TypeError,
        "`reduce` must consist of",
    ),
    Case(
        "FrobeniusNorm",
        lambda: kernel(reduce=eqxbatch.FrobeniusNorm())(x.astype(int)),
        TypeError,
        "FrobeniusNorm needs a kernel of an inexact dtype",
    ),
    Case(
        "TopK",
        lambda: eqxbatch.TopK(2.5),
        TypeError,
        "`k` must be int; got 2.5",
    ),
    Case("TopK", lambda: eqxbatch.TopK(0), ValueError, "`k` must be at least 1"),
    Case(
        "TopK",
        lambda: eqxbatch.TopK(1, without_self="no"),
        TypeError,
        "`without_self` must be bool; got 'no'",
    ),
    Case("TopK", reduced(eqxbatch.TopK(4)), ValueError, "`k` must be at most"),
    Case(
        "Neighbours",
        lambda: eqxbatch.TopK("3"),
        TypeError,
        "`k` must be int; got '3'",
    ),
    Case(
        "Neighbours",
        lambda: kernel(reduce=eqxbatch.TopK(1))(x.astype(complex)),
        TypeError,
        "TopK needs a kernel of real numbers",
    ),
]

MODELS = [
    Case(
        "EmpiricalNTK",
        lambda: ntk(where="layers"),
        TypeError,
        "`where` must be Callable | None; got 'layers'",
    ),
    Case(
        "EmpiricalNTK",
        lambda: ntk()([[1.0, 2.0]]),
        ValueError,
        r"`x1.*it is a float, not an array\. Make an array of it",
    ),
    Case("EmpiricalNTK", lambda: ntk()(x, key=0), TypeError, "`key` must be .*got 0"),
    Case(
        "EmpiricalNTK",
        lambda: ntk()(x, "x2"),
        ValueError,
        "`x2` .*it is a str, not an array",
    ),
    Case(
        "EmpiricalNTK",
        lambda: ntk().untraced_matvec(x, None, x),
        ValueError,
        r"dtype of `v` must be .*got \(\(5, 2\), .*like what the model returns",
    ),
    Case(
        "EmpiricalNTK",
        lambda: ntk().untraced_matvec(x, None, [1.0]),
        ValueError,
        "structure of `v` must be .*like what the model returns",
    ),
    Case("EmpiricalNTK", lambda: ntk().diagonal(x, x[:3]), ValueError, "got 5 and 3"),
    Case(
        "EmpiricalNTK",
        lambda: ntk(trace_axes=1.5),
        TypeError,
        "`trace_axes` must be an int",
    ),
    Case(
        "EmpiricalNTK",
        lambda: eqxbatch.EmpiricalNTK(scalar, trace_axes=-1)(x),
        ValueError,
        "`trace_axes` has the axis -1",
    ),
    Case(
        "EmpiricalNTK",
        lambda: eqxbatch.EmpiricalNTK("model"),
        TypeError,
        "`model` must be",
    ),
    Case(
        "EmpiricalNTK",
        lambda: ntk(block_size=0),
        ValueError,
        "`block_size` must be at least 1",
    ),
    Case(
        "EmpiricalNTK",
        lambda: in_metric({"weight": np.ones((3, 2), "float32")}),
        ValueError,
        "like the parameters.*of the same model",
    ),
    Case(
        "EmpiricalNTK",
        lambda: in_metric(diagonal((1.0, 1))),
        ValueError,
        r"first difference is at `\.bias`",
    ),
    Case(
        "KroneckerOperator",
        lambda: in_metric(curvature(4).operator(damping=0.1)),
        ValueError,
        r"at `\.weight`: .*\(3, 2\).*\(4, 2\)",
    ),
    Case(
        "KroneckerFactors",
        lambda: in_metric(curvature(3)),
        ValueError,
        r"`factors\.operator\(damping=\.\.\.\)`",
    ),
    *(
        Case(
            "EmpiricalNTK",
            lambda metric=metric: in_metric(metric),
            ValueError,
            "must be real, but it has complex",
        )
        for metric in (jax.tree.map(np.complex64, diagonal()), np.eye(9) + 0j)
    ),
    *(
        Case(
            "EmpiricalNTK",
            lambda entry=entry: in_metric(diagonal((1, entry, 1))),
            ValueError,
            r"non-negative and finite. See `\.bias`",
        )
        for entry in (-1, np.nan, np.inf)
    ),
    *(
        Case(
            "EmpiricalNTK",
            lambda metric=metric: in_metric(metric.astype("float32")),
            ValueError,
            "positive definite.*multiple of the identity",
        )
        for metric in (np.ones((9, 9)), -np.eye(9))
    ),
    Case(
        "EmpiricalNTK",
        lambda: in_metric(np.triu(np.ones((9, 9), "float32"))),
        ValueError,
        "symmetric, without NaN",
    ),
    Case("EmpiricalNTK", too_large, ValueError, "8192 rows at most.*got 8200"),
    Case(
        "EmpiricalNTK",
        lambda: eqxbatch.EmpiricalNTK(
            eqx.Partial(jnp.multiply, w.astype(complex)),
            metric=np.eye(2, dtype="float32"),
        ),
        ValueError,
        "real parameters, but some are complex",
    ),
    Case(
        "EmpiricalNTK",
        lambda: in_metric(diagonal(), method="ntk_vector_products"),
        ValueError,
        "no `metric`.*'auto' or 'sites'",
    ),
    Case(
        "EmpiricalNTK",
        lambda: ntk().features(x),
        ValueError,
        "`features` needs a `metric`",
    ),
    Case(
        "EmpiricalNTK",
        lambda: eqxbatch.EmpiricalNTK(
            eqx.Partial(lambda m, x: jax.lax.complex(m(x), m(x)), layer), metric=sketch
        ).features(x),
        ValueError,
        "coordinates of real gradients",
    ),
    *(
        Case(
            "EmpiricalNTK",
            lambda settings=settings: ntk(metric=sketch, **settings).features(
                x, store="host"
            ),
            ValueError,
            "with a `store` needs a `block_size`, .* and examples along axis 0; got",
        )
        for settings in (
            {},
            {"block_size": "1MB"},
            {"block_size": 2, "in_axes": 1},
            {"block_size": 2, "in_axes": {"rows": 0, "shared": None}},
            {"block_size": 2, "kwargs_axes": {"mask": 1}},
        )
    ),
    Case(
        "EmpiricalNTK",
        lambda: features(x, store="device"),
        ValueError,
        "`store` must be 'host', a path on disk, the URL of a bucket, or a store; got",
    ),
    Case(
        "EmpiricalNTK",
        lambda: features([[1.0, 2.0]], store="host"),
        ValueError,
        r"`x1.*it is a float, not an array\. Make an array of it",
    ),
    Case(
        "EmpiricalNTK",
        lambda: features(x, store="host", mask=(x[:3], None)),
        ValueError,
        "The number of rows of each array must be 5; got 3",
    ),
    Case(
        "EmpiricalNTK",
        lambda: jax.jit(lambda x: features(x, store="host"))(x),
        TypeError,
        "Rows are stored by a loop in Python, which cannot be within `jax.jit`",
    ),
    Case(
        "EmpiricalNNGP",
        lambda: nngp()([1.0]),
        ValueError,
        "it is a float, not an array",
    ),
    Case(
        "EmpiricalNNGP",
        lambda: nngp(diagonal_axes="last"),
        TypeError,
        "`diagonal_axes` must be",
    ),
    Case(
        "EmpiricalNNGP",
        lambda: eqxbatch.EmpiricalNNGP(3),
        TypeError,
        "`model` must be callable",
    ),
    Case("EmpiricalKernel", lambda: both()(x, get="both"), ValueError, "`get` must be"),
    Case(
        "EmpiricalKernel",
        lambda: both()(x, key="key"),
        TypeError,
        "`key` must be .*got 'key'",
    ),
    Case(
        "EmpiricalKernel",
        lambda: both(method="fast"),
        ValueError,
        "`method` must be",
    ),
    Case(
        "PseudoNTK", lambda: pseudo()([1.0]), ValueError, "it is a float, not an array"
    ),
    Case("PseudoNTK", lambda: pseudo(where=3), TypeError, "`where` must be"),
    Case(
        "PseudoNTK",
        lambda: eqxbatch.PseudoNTK(scalar, trace_axes=1)(x),
        ValueError,
        "`trace_axes` has the axis 1",
    ),
    Case(
        "ProbedNTK",
        lambda: probed(num_probes=2.5, key=key),
        TypeError,
        "`num_probes` must be int; got 2.5",
    ),
    Case(
        "ProbedNTK",
        lambda: probed(num_probes=2, key=0),
        TypeError,
        "`key` must be Key.* got 0",
    ),
    Case(
        "ProbedNTK",
        lambda: probed(num_probes=2, key=jax.random.split(key)),
        ValueError,
        "`key` must be Key",
    ),
    Case(
        "ProbedNTK",
        lambda: probed(num_probes=0, key=key),
        ValueError,
        "`num_probes` must be at least 1",
    ),
    Case(
        "Projection",
        lambda: ntk(metric=eqxbatch.Projection(0, key)),
        ValueError,
        "`dim` must be at least 1; got 0",
    ),
    Case(
        "Projection",
        lambda: ntk(metric=eqxbatch.Projection(3.0, key)),
        TypeError,
        "`dim` must be int; got 3.0",
    ),
    Case(
        "Projection",
        lambda: ntk(metric=eqxbatch.Projection(3, 0)),
        TypeError,
        "`key` must be Key.* got 0",
    ),
    Case(
        "Projection",
        lambda: eqxbatch.Projection(3, key, entries=4),
        ValueError,
        "`entries` must divide `dim`.* got `dim=3` and `entries=4`",
    ),
    Case(
        "Projection",
        lambda: eqxbatch.Projection(3, key, entries=0),
        ValueError,
        "`entries` must be at least 1; got 0",
    ),
    Case(
        "Projection",
        lambda: eqxbatch.Projection(3, key, kind="any"),
        ValueError,
        "`kind` must be one of .*sparse.* got 'any'",
    ),
    Case(
        "Projection",
        lambda: eqxbatch.Projection(3, key, metric=sketch),
        ValueError,
        "must be the matrix itself; got another `Projection`",
    ),
    Case(
        "Projection",
        lambda: in_metric(eqxbatch.Projection(3, key, metric=diagonal((1, -1.0, 1)))),
        ValueError,
        "`metric` must be non-negative and finite",
    ),
    Case(
        "Projection",
        lambda: in_metric(eqxbatch.Projection(3, key, metric=np.eye(8))),
        ValueError,
        r"a matrix has the shape \(9, 9\)",
    ),
    Case(
        "Projection",
        lambda: in_metric(
            eqxbatch.Projection(3, key, metric=curvature(4).operator(damping=0.1))
        ),
        ValueError,
        "`metric` must be a PyTree of non-negative arrays like the parameters",
    ),
    Case(
        "KernelEstimate",
        lambda: probed(num_probes=2, key=key, trace_axes=())(x),
        ValueError,
        "must name the axes",
    ),
    Case(
        "KernelEstimate",
        lambda: probed(num_probes=2, key=key)("x"),
        ValueError,
        "it is a str, not an array",
    ),
    Case(
        "EmpiricalNTK",
        lambda: ntk()(x, x[:3], mask=(x, None)),
        ValueError,
        "`mask` must be a pair of arrays .*got None for those of `x2`",
    ),
    Case(
        "MonteCarloKernel",
        lambda: carlo(in_axes=None, reduce=eqxbatch.FrobeniusNorm()),
        ValueError,
        "a model of a whole batch cannot be evaluated for blocks",
    ),
    Case(
        "MonteCarloKernel", lambda: carlo(key=0), TypeError, "`key` must be Key.* got 0"
    ),
    Case(
        "MonteCarloKernel",
        lambda: carlo(num_samples=2.5),
        TypeError,
        "`num_samples` must be an int",
    ),
    Case(
        "MonteCarloKernel",
        lambda: carlo(tol="small"),
        ValueError,
        "`tol` must be a positive number",
    ),
    Case(
        "MonteCarloKernel",
        lambda: eqxbatch.MonteCarloKernel(lambda key: "model", key=key, num_samples=1),
        TypeError,
        "`init` must return a callable model",
    ),
    Case(
        "MonteCarloKernel",
        lambda: eqxbatch.MonteCarloKernel("init", key=key, num_samples=1),
        TypeError,
        "`init` must be a function",
    ),
    Case(
        "MonteCarloKernel",
        lambda: carlo()([1.0]),
        ValueError,
        "it is a float, not an array",
    ),
    Case(
        "MonteCarloKernel",
        lambda: carlo()(x, key=3),
        TypeError,
        "`key` must be .*got 3",
    ),
    Case(
        "MonteCarloEstimate",
        lambda: carlo().estimate(x, previous=3),
        TypeError,
        "`previous` must be a `MonteCarloEstimate`",
    ),
    Case(
        "MonteCarloEstimate",
        lambda: carlo().estimate(
            x,
            get="ntk",
            previous=MonteCarloEstimate(jnp.ones((3, 3)), jnp.ones((3, 3)), 1),
        ),
        ValueError,
        r"`kernel` of `previous` must be \(5, 5\); got \(3, 3\)",
    ),
    Case(
        "MonteCarloEstimate",
        lambda: carlo().estimate(
            x, get="ntk", previous=MonteCarloEstimate([1.0], [1.0], 1)
        ),
        TypeError,
        "`kernel` of `previous` must be an array of an inexact dtype",
    ),
    Case(
        "ntk_parameterise",
        lambda: eqxbatch.ntk_parameterise(model, key=0),
        TypeError,
        "`key` must be Key.*got 0",
    ),
    Case(
        "ntk_parameterise",
        lambda: eqxbatch.ntk_parameterise(model, weight_std="1", key=key),
        TypeError,
        "`weight_std` must be float; got '1'",
    ),
    Case(
        "ntk_parameterise",
        lambda: eqxbatch.ntk_parameterise(model, bias_std=-1.0, key=key),
        ValueError,
        "`bias_std` must be finite",
    ),
    Case(
        "ntk_parameterise",
        lambda: eqxbatch.ntk_parameterise(w, key=key),
        ValueError,
        "`model` must have layers",
    ),
    Case(
        "NTKLayer",
        lambda: NTKLayer(3, 1.0, 1.0),
        TypeError,
        "`layer` must be Callable; got 3",
    ),
    Case(
        "NTKLayer",
        lambda: NTKLayer(layer, "1", 1.0),
        TypeError,
        "`weight_scale` must be float; got '1'",
    ),
]
