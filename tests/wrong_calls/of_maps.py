"""Maps, gradients, accumulators and sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import eqxbatch
from eqxbatch import grid
from .cases import Case, loss, w, x, y
from .first_mistakes import net


vmap = functools.partial(eqxbatch.filter_micro_vmap, jnp.sum)
batch = functools.partial(
    eqxbatch.filter_microbatch, jnp.sum, accumulator=eqxbatch.Sum()
)
value_and_grad = functools.partial(eqxbatch.filter_micro_value_and_grad, loss)
grad = functools.partial(eqxbatch.filter_micro_grad, loss)
on_grid = functools.partial(
    eqxbatch.filter_grid_vmap, lambda x, y: x * y, in_axes=(grid("i"), grid("j"))
)


class Wrong(eqxbatch.AbstractAccumulator):
    """An accumulator whose methods return what is given."""

    first: object
    later: object

    def init(self, value, blocks):
        return self.first

    def update(self, state, value, block):
        return self.later

    def finalize(self, state):
        return state

    def aggregate(self, values, block):
        return values.sum(axis=0)


def reduced(accumulator):
    return lambda: vmap(accumulator=accumulator, microbatch_size=2)(x)


MAPS = [
    Case(
        "filter_micro_vmap",
        lambda: vmap(checkpoint="no"),
        TypeError,
        "`checkpoint` must be bool; got 'no'",
    ),
    Case(
        "filter_micro_vmap",
        lambda: vmap(axis_size=2.5),
        TypeError,
        "`axis_size` must be int | None; got 2.5",
    ),
    Case(
        "filter_micro_vmap",
        lambda: vmap(axis_size=-1)(),
        ValueError,
        "`axis_size` must be at least 0; got -1",
    ),
    Case(
        "filter_micro_vmap",
        lambda: vmap(vmap_fn=3),
        TypeError,
        "`vmap_fn` must be Callable.*; got 3",
    ),
    Case(
        "filter_micro_vmap",
        lambda: vmap(microbatch_size=2.5),
        TypeError,
        "`microbatch_size` must be int",
    ),
    Case(
        "filter_micro_vmap",
        lambda: vmap(microbatch_size=2)(x, y[1:]),
        ValueError,
        "must agree on the number of examples",
    ),
    Case(
        "filter_micro_vmap",
        lambda: eqxbatch.filter_micro_vmap(lambda net, x: net(x))(net, x),
        ValueError,
        r"share `net`, as they do a model, its axis is None.*`in_axes=\(None, 0\)`",
    ),
    Case(
        "filter_micro_vmap",
        lambda: vmap()(1.0),
        ValueError,
        "Nothing is batched",
    ),
    Case(
        "filter_micro_vmap",
        lambda: eqxbatch.filter_micro_vmap("sum"),
        TypeError,
        "`fun` must be callable; got 'sum'",
    ),
    Case(
        "filter_micro_vmap",
        lambda: vmap(axis_name=[])(x),
        TypeError,
        "`axis_name` must be",
    ),
    Case(
        "filter_microbatch",
        lambda: batch(checkpoint=None),
        TypeError,
        "`checkpoint` must be bool; got None",
    ),
    Case(
        "filter_microbatch",
        lambda: batch(num_real_microbatches=1.0),
        TypeError,
        "`num_real_microbatches` must be int",
    ),
    Case(
        "filter_microbatch",
        lambda: batch(in_axes=1)(y),
        ValueError,
        "out of range for its shape",
    ),
    Case(
        "filter_grid_vmap",
        lambda: on_grid(checkpoint="no"),
        TypeError,
        "`checkpoint` must be bool",
    ),
    Case(
        "filter_grid_vmap",
        lambda: on_grid(block_size="4"),
        TypeError,
        "`block_size` must be int",
    ),
    Case(
        "filter_grid_vmap",
        lambda: on_grid()(y, 3.0),
        ValueError,
        "has no arrays. Pass arrays",
    ),
    Case(
        "filter_grid_vmap",
        lambda: on_grid(out_axes=1.5),
        TypeError,
        "`out_axes` must be int .*; got 1.5",
    ),
    Case(
        "filter_grid_vmap",
        lambda: on_grid(out_axes=(1, 2)),
        TypeError,
        r"`out_axes` must be int .*; got \(1, 2\)",
    ),
    Case("grid", lambda: grid(3), TypeError, "`name` must be"),
    Case(
        "grid",
        lambda: grid("i", 1.5),
        TypeError,
        r"`axis` must be int | Sequence\[int\]; got 1.5",
    ),
    Case("grid", lambda: grid("i", (0, 1)), ValueError, "an axis for each of them"),
    Case(
        "MemoryBudget",
        lambda: eqxbatch.MemoryBudget("much"),
        ValueError,
        "`max_bytes` must be an int or a string",
    ),
    Case(
        "MemoryBudget",
        lambda: eqxbatch.MemoryBudget([3]),
        ValueError,
        "`max_bytes` must be an int or a string",
    ),
    Case(
        "MemoryBudget",
        lambda: eqxbatch.MemoryBudget(0),
        ValueError,
        "`max_bytes` must be positive",
    ),
]

# What has a row for each example cannot be added up: a remainder has other shapes.
MAPS += [
    Case(
        "filter_microbatch",
        lambda accumulator=accumulator: eqxbatch.filter_microbatch(
            lambda x: x, microbatch_size=4, accumulator=accumulator
        )(x),
        ValueError,
        r"needs results of one shape, but output has shape \(4, 2\) .* and \(1, 2\)",
    )
    for accumulator in (
        eqxbatch.Sum(),
        eqxbatch.Mean(),
        eqxbatch.Mean(running=True),
        eqxbatch.Variance(),
        eqxbatch.Max(),
        eqxbatch.Min(),
        eqxbatch.LogSumExp(),
    )
]

GRADIENTS = [
    Case(
        "filter_micro_value_and_grad",
        lambda: value_and_grad(has_aux="no"),
        TypeError,
        "`has_aux` must be bool; got 'no'",
    ),
    Case(
        "filter_micro_value_and_grad",
        lambda: value_and_grad(where="weight"),
        TypeError,
        "`where` must be Callable | None; got 'weight'",
    ),
    Case(
        "filter_micro_value_and_grad",
        lambda: value_and_grad(clip_norm="1"),
        TypeError,
        "`clip_norm` must be float .*got '1'",
    ),
    Case(
        "filter_micro_value_and_grad",
        lambda: value_and_grad(clip_norm=w[None]),
        ValueError,
        r"`clip_norm` .*got an array of shape \(1, 2\)",
    ),
    Case(
        "filter_micro_value_and_grad",
        lambda: value_and_grad(batched=1),
        TypeError,
        "`batched` must be bool; got 1",
    ),
    Case(
        "filter_micro_value_and_grad",
        lambda: value_and_grad()([1.0, 2.0], x),
        ValueError,
        "has no arrays of an inexact dtype",
    ),
    Case(
        "filter_micro_value_and_grad",
        lambda: eqxbatch.filter_micro_value_and_grad(lambda w, x: w * x)(w, x),
        ValueError,
        "must be a real floating-point scalar",
    ),
    Case(
        "filter_micro_value_and_grad",
        lambda: value_and_grad(moments="yes"),
        TypeError,
        "`moments` must be bool",
    ),
    Case(
        "parameters",
        lambda: eqxbatch.parameters([x], where="weight"),
        TypeError,
        "`where` must be.*got 'weight'",
    ),
    Case(
        "parameters",
        lambda: eqxbatch.parameters([1, 2]),
        ValueError,
        "`model` has no arrays of an inexact dtype",
    ),
    Case(
        "filter_micro_grad",
        lambda: grad(nan_safe="no"),
        TypeError,
        "`nan_safe` must be bool; got 'no'",
    ),
    Case(
        "filter_micro_grad",
        lambda: grad(return_norms=1.0),
        TypeError,
        "`return_norms` must be bool; got 1.0",
    ),
    Case(
        "filter_micro_grad",
        lambda: grad(features=64),
        TypeError,
        "`features` must be a `Projection` or None; got 64",
    ),
    Case(
        "filter_micro_grad",
        lambda: grad(features=eqxbatch.Projection(4, jax.random.key(0)), batched=True),
        ValueError,
        "`features` is about single examples, but with `batched=True`",
    ),
    Case(
        "filter_micro_grad",
        lambda: grad(transform=3),
        TypeError,
        "`transform` must be Callable",
    ),
    Case(
        "filter_micro_grad",
        lambda: grad(metrics=lambda g: "large")(w, x),
        TypeError,
        "What `metrics` returns must be PyTree.*got 'large'",
    ),
    Case(
        "filter_micro_grad",
        lambda: grad(transform=lambda g: "large")(w, x),
        TypeError,
        "What `transform` returns must be PyTree.*got 'large'",
    ),
    Case(
        "filter_micro_grad",
        lambda: grad(accumulator=eqxbatch.Mean(y[1:]))(w, x),
        ValueError,
        r"one weight for each example, .*shape \(5,\)",
    ),
    Case(
        "filter_micro_grad",
        lambda: grad(method="fast"),
        ValueError,
        "`method` must be one of",
    ),
    Case(
        "GradientMoments",
        lambda: grad(moments=True, accumulator=eqxbatch.Mean(y)),
        ValueError,
        "accumulator has weights",
    ),
    Case(
        "GradientMoments", lambda: grad(moments=0), TypeError, "`moments` must be bool"
    ),
    Case(
        "GradientStatistics",
        lambda: grad(return_norms="all"),
        TypeError,
        "`return_norms` must be bool",
    ),
    Case(
        "GradientStatistics",
        lambda: grad(metrics=jnp.ones(2)),
        TypeError,
        "`metrics` must be Callable",
    ),
]

GRADIENTS += [
    Case("filter_micro_grad", call, TypeError, "`transform` returns, so that it must")
    for call in (
        lambda: grad(transform=lambda g: g.astype(int), return_norms=True)(w, x),
        lambda: grad(transform=lambda g: (g, g > 0), clip_norm=1.0)(w, x),
        lambda: grad(transform=lambda g: {"a": g, "b": 3}, nan_safe=True)(w, x),
    )
]


rows = eqxbatch.over_batches(vmap())
two = eqxbatch.filter_micro_grad(lambda w, x, y: loss(w, x) * y)


class Rows:
    """Rows on disk, of which most are missing."""

    shape, dtype = (5,), np.dtype(float)

    def __getitem__(self, index):
        return np.ones(1)


class NoArray:
    """An array of a library whose dtype no other one has."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("not as NumPy")

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **_):
        raise BufferError("not at all")


def used(stream):
    state = stream.init(x)
    stream.update(state, x)
    return state


def update(stream, w, x, y):
    return stream.update(stream.init(w, (x, y)), w, x, y)


STREAMS = [
    Case(
        "over_batches",
        lambda: eqxbatch.over_batches(jnp.sum),
        TypeError,
        "takes a transform that accumulates over a batch, such as",
    ),
    Case(
        "over_batches",
        lambda: rows(x),
        TypeError,
        r"`batches`, the last argument, must be .* `\[\(x, y\)\]`, or .* `\(x, y\)`",
    ),
    Case(
        "over_batches",
        lambda: rows({"x": x}),
        TypeError,
        "must be an iterable of batches.*got a dict .* without one",
    ),
    Case(
        "over_batches",
        lambda: eqxbatch.over_batches(two, batch_size=2)(w, x, y),
        ValueError,
        r"`x`, before the batches, has the batch axis 0.*give `\(x, y\)` in place",
    ),
    Case(
        "over_batches",
        lambda: eqxbatch.over_batches(two, batch_size=2)(w, Rows(), Rows()),
        TypeError,
        r"Before the batches, there is an array .* are read.*give `\(x, y\)` in place",
    ),
    Case(
        "over_batches",
        lambda: eqxbatch.over_batches(vmap(accumulator=eqxbatch.Mean()), weighted=True)(
            [x]
        ),
        ValueError,
        "`weighted=True`, a batch must be a tuple or list that has the weights .* last",
    ),
    Case(
        "over_batches",
        lambda: eqxbatch.over_batches(vmap(accumulator=eqxbatch.Last()))([x[:0]]),
        ValueError,
        "output comes from the last example.*, but no batch has an example",
    ),
    Case(
        "over_batches",
        lambda: rows([np.ma.array(np.ones(2), mask=[0, 1])]),
        ValueError,
        r"must not have masked entries.*; got an array of shape \(2,\).* Fill them",
    ),
    Case(
        "over_batches",
        lambda: eqxbatch.over_batches(vmap(), batch_size=2)(Rows()),
        ValueError,
        r"Rows 0 to 2 of an array of shape \(5,\) .* must be 2 rows; got .* \(1,\)",
    ),
    Case(
        "over_batches",
        lambda: rows([NoArray()]),
        TypeError,
        "NumPy and JAX cannot read .*: not as NumPy; not at all. Convert it to",
    ),
    Case(
        "over_batches",
        lambda: rows(()),
        ValueError,
        "`batches` must have a batch; got .*, which is empty",
    ),
    Case(
        "over_batches",
        lambda: eqxbatch.over_batches(grad(accumulator=eqxbatch.Mean(weights=y))),
        ValueError,
        "The transform has `weights` for the examples of one batch.*weighted=True",
    ),
    Case(
        "over_batches",
        lambda: eqxbatch.over_batches(grad(clip_norm=y)),
        ValueError,
        "The transform has `clip_norm` for the examples of one batch",
    ),
    Case(
        "over_batches",
        lambda: eqxbatch.over_batches(vmap(num_real_microbatches=1)),
        ValueError,
        "The transform has `num_real_microbatches` for the examples of one batch",
    ),
    Case(
        "over_batches",
        lambda: eqxbatch.over_batches(vmap(), weighted=True),
        ValueError,
        "`weighted=True` gives weights to each `Sum` and `Mean`.* has none",
    ),
    Case(
        "over_batches",
        lambda: eqxbatch.over_batches(vmap(accumulator=eqxbatch.Max()), weighted=True),
        ValueError,
        r"`weighted=True` gives weights to each `Sum` and `Mean`.* has \[Max\(\)\]",
    ),
    Case(
        "over_batches",
        lambda: eqxbatch.over_batches(vmap(), batch_size=0),
        ValueError,
        "`batch_size` must be at least 1; got 0",
    ),
    Case(
        "over_batches",
        lambda: eqxbatch.over_batches(vmap(), batch_size=2)((x, y[1:])),
        ValueError,
        "The number of rows of each array must be 5; got 4",
    ),
    Case(
        "over_batches",
        lambda: eqxbatch.over_batches(eqxbatch.filter_hessian(jnp.sum))(w, [()]),
        TypeError,
        "takes a transform that accumulates.*Give it a batch axis with `in_axes`",
    ),
    Case(
        "over_batches",
        lambda: eqxbatch.over_batches(
            eqxbatch.filter_kfac(
                lambda w, x: w @ x, lambda out, x: out**2, corrected=True
            )
        )(w, iter([x])),
        ValueError,
        "takes 2 passes over all batches, but `batches` is an iterator",
    ),
    Case(
        "over_batches",
        lambda: eqxbatch.over_batches(vmap(), store="host"),
        ValueError,
        "`store` needs a `batch_size`, the number of rows that are stored together",
    ),
    Case(
        "over_batches",
        lambda: eqxbatch.over_batches(vmap(), batch_size=2, store="device"),
        ValueError,
        "`store` must be 'host', a path on disk, the URL of a bucket, or a store; got",
    ),
    Case(
        "over_batches",
        lambda: eqxbatch.over_batches(
            vmap(accumulator=eqxbatch.Mean()), batch_size=2, store="host"
        )(x),
        ValueError,
        "`store` is for results with a row for each example, along axis 0",
    ),
    Case(
        "over_batches",
        lambda: eqxbatch.over_batches(vmap(in_axes=1), batch_size=2)(x),
        ValueError,
        "`batch_size` reads rows along axis 0, so that all batch axes must be 0; got",
    ),
    Case(
        "over_batches",
        lambda: eqxbatch.over_batches(
            eqxbatch.filter_micro_vmap(jnp.multiply, in_axes=(0, None))
        )([(x, w)]),
        ValueError,
        "Each array of a batch must have a batch axis, but .* gives one to 1 of 2",
    ),
    Case(
        "over_batches",
        lambda: eqxbatch.over_batches(
            eqxbatch.filter_micro_vmap(
                jnp.multiply, in_axes=(0, None), accumulator=eqxbatch.Sum()
            ),
            weighted=True,
        )([(x, w, jnp.ones(len(x)))]),
        ValueError,
        "Each array of a batch must have a batch axis, but .* gives one to 1 of 2",
    ),
    Case(
        "over_batches",
        lambda: eqxbatch.over_batches(vmap(), batch_size=2)([1.0, 2.0]),
        TypeError,
        "`batches` must be arrays of rows, because `batch_size` is given; got 1.0",
    ),
    Case(
        "over_batches",
        lambda: jax.jit(eqxbatch.over_batches(vmap(), batch_size=2, store="host"))(x),
        TypeError,
        "Rows are stored by a loop in Python, which cannot be within `jax.jit`",
    ),
    Case(
        "StreamState",
        lambda: rows.update(rows.init(x), x, number=1),
        ValueError,
        "`number` must be that of a pass, .* takes 1: from 0 to 0; got 1",
    ),
    Case(
        "StreamState",
        lambda: update(eqxbatch.over_batches(two), w, x, y),
        ValueError,
        r"All batches must have the structure.*one argument, the last: give `\(x, y\)`",
    ),
    Case(
        "StreamState",
        lambda: rows.update(used(rows), x),
        ValueError,
        "`state` has no arrays any more: `update` reuses its memory",
    ),
    Case(
        "StreamState",
        lambda: rows.update(None, x),
        TypeError,
        "`state` must be StreamState; got None",
    ),
    Case(
        "StreamState",
        lambda: rows.finish(rows.init(x)),
        ValueError,
        "`rows` must have the rows of output: join what `update` returned",
    ),
]


ACCUMULATORS = [
    Case(
        "AbstractAccumulator",
        lambda: vmap(accumulator=eqxbatch.Sum)(x),
        TypeError,
        "Unknown accumulator",
    ),
    Case(
        "AbstractAccumulator",
        reduced(Wrong("zero", "zero")),
        TypeError,
        "the state from `init` of `Wrong` must be PyTree.*got 'zero'",
    ),
    Case(
        "AbstractAccumulator",
        reduced(Wrong(jnp.zeros(()), "one")),
        TypeError,
        "the state from `update` of `Wrong` must be PyTree.*got 'one'",
    ),
    Case(
        "AbstractAccumulator",
        reduced(Wrong(jnp.zeros(2), jnp.zeros(3))),
        TypeError,
        "must keep structure, shapes and dtypes",
    ),
    Case(
        "Concat",
        lambda: eqxbatch.Concat("0"),
        TypeError,
        "`axis` must be int; got '0'",
    ),
    Case(
        "Concat",
        lambda: eqxbatch.Concat(0.0),
        TypeError,
        "`axis` must be int; got 0.0",
    ),
    Case(
        "Concat",
        lambda: batch(accumulator=eqxbatch.Concat(2))(x),
        ValueError,
        r"Concat\(axis=2\) does not fit",
    ),
    Case(
        "Last",
        lambda: vmap(accumulator=eqxbatch.Last())(x[:0]),
        ValueError,
        "Last needs at least one example",
    ),
    *(
        Case("Last", call, ValueError, "output comes from the last example.* is 0, so")
        for call in (
            lambda: batch(accumulator=eqxbatch.Last(), num_real_microbatches=0)(y),
            lambda: vmap(
                out_axes=None, in_axes=None, axis_size=3, num_real_microbatches=0
            )(y),
        )
    ),
    Case(
        "Sum",
        lambda: eqxbatch.Sum([1.0, 2.0]),
        TypeError,
        "`weights` must be.*`jax.numpy.asarray`",
    ),
    Case(
        "Sum",
        lambda: eqxbatch.Sum(x),
        ValueError,
        r'`weights` must be Shaped.Array, "n".*shape \(5, 2\)',
    ),
    Case(
        "Sum",
        lambda: eqxbatch.Sum(dtype="number"),
        TypeError,
        "`dtype` must be a dtype",
    ),
    Case(
        "Sum",
        reduced(eqxbatch.Sum(y[1:])),
        ValueError,
        r"one weight for each example, .*shape \(5,\)",
    ),
    *(
        Case("Sum", call, ValueError, r"output.*\] is \d of type int, and only arrays")
        for call in (
            lambda: eqxbatch.filter_micro_vmap(
                lambda x: (x, 1), accumulator=eqxbatch.Sum()
            )(y),
            lambda: eqxbatch.filter_microbatch(
                lambda x: {"sum": x.sum(), "num": x.shape[0]},
                microbatch_size=2,
                accumulator=Wrong(jnp.zeros(()), jnp.zeros(())),
            )(y),
            lambda: eqxbatch.filter_micro_grad(
                lambda w, x: (jnp.sum(x @ w), x.shape[0]),
                has_aux=True,
                batched=True,
                accumulator=eqxbatch.Sum(),
                aux_accumulator=eqxbatch.Sum(),
            )(w, x),
        )
    ),
    Case(
        "Mean",
        lambda: eqxbatch.Mean(jnp.ones(())),
        ValueError,
        r"`weights` must be .*got an array of shape \(\)",
    ),
    Case(
        "Mean",
        lambda: eqxbatch.Mean(weights=np.ma.array(np.ones(5), mask=[0, 0, 1, 0, 0])),
        ValueError,
        "Arrays must not have masked entries, which stand for no number; got an array",
    ),
    Case(
        "Mean",
        lambda: eqxbatch.Mean("weights"),
        TypeError,
        "`weights` must be",
    ),
    Case(
        "Mean",
        lambda: eqxbatch.Mean(dtype=3),
        TypeError,
        "`dtype` must be a dtype",
    ),
    Case(
        "Mean",
        lambda: eqxbatch.Mean(running="yes"),
        TypeError,
        "`running` must be bool; got 'yes'",
    ),
    Case(
        "Mean",
        lambda: eqxbatch.Mean(y, running=True),
        ValueError,
        r"`weights=.* and `running=True` exclude each other. Weighted",
    ),
    Case(
        "Variance",
        lambda: eqxbatch.Variance("1"),
        TypeError,
        "`ddof` must be",
    ),
    Case(
        "Variance",
        lambda: eqxbatch.Variance(0, "number"),
        TypeError,
        "`dtype` must be a dtype",
    ),
    Case(
        "MeanAndVariance",
        lambda: eqxbatch.Variance(ddof=None),
        TypeError,
        "`ddof` must be",
    ),
    Case(
        "MeanAndVariance",
        lambda: vmap(accumulator=eqxbatch.Variance())(x.astype(int)),
        TypeError,
        "Variance",
    ),
    Case(
        "Max",
        reduced(eqxbatch.Max),
        TypeError,
        r"Unknown accumulator Max, which is a class.* `Max\(\)`",
    ),
    Case(
        "Max",
        lambda: vmap(accumulator=eqxbatch.Max())(x.astype(complex)),
        TypeError,
        "Max needs ordered results",
    ),
    Case("Min", reduced("min"), TypeError, "Unknown accumulator 'min'"),
    Case(
        "Min",
        lambda: vmap(accumulator=eqxbatch.Min())(x.astype(complex)),
        TypeError,
        "Min needs ordered results",
    ),
    Case(
        "LogSumExp",
        lambda: eqxbatch.LogSumExp("number"),
        TypeError,
        "`dtype` must be a dtype",
    ),
    Case(
        "LogSumExp",
        lambda: vmap(accumulator=eqxbatch.LogSumExp())(x.astype(int)),
        TypeError,
        "LogSumExp",
    ),
    Case(
        "Block",
        lambda: eqxbatch.Block(0, 0, 2, False, 1).take(x, 2),
        ValueError,
        "`axis` must be one of the 2 axes",
    ),
    Case(
        "Block",
        lambda: eqxbatch.Block(0, 0, 2, False, 1, 4).take(x),
        ValueError,
        r"`array` must have all 4 examples along axis 0; got shape \(5, 2\)",
    ),
    Case(
        "Blocks",
        lambda: eqxbatch.Blocks(10, -2),
        ValueError,
        "`size` of `Blocks` must be at least 1; got -2",
    ),
    Case(
        "Blocks",
        lambda: eqxbatch.Blocks(10, 0),
        ValueError,
        "`size` of `Blocks` must be at least 1; got 0",
    ),
]
