"""What loaders and readers give: all rows, once, or an error."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqxbatch import filter_micro_vmap, Mean, over_batches, Sum
from ..helpers import aligned, assert_same, make_mesh


pytestmark = pytest.mark.versions


NUM = 11
X = np.random.default_rng(0).standard_normal((NUM, 3)).astype(np.float32)


def double(x):
    return 2 * x


def times(x, y):
    return x * y


ROWS = filter_micro_vmap(double)
MEAN = filter_micro_vmap(double, accumulator=Mean())


class Reader:
    """Rows that are read by slices, up to some row: then something else happens."""

    shape, dtype = X.shape, X.dtype

    def __init__(self, end, error=None):
        self.end, self.error = end, error

    def __getitem__(self, rows):
        # Some libraries have no rows beyond the end, not even none of them.
        assert 0 <= rows.start <= rows.stop <= NUM
        if self.error is not None and rows.stop > self.end:
            raise self.error("a row")
        return X[rows.start : min(rows.stop, self.end)]


@pytest.mark.parametrize("error", (IndexError, KeyError, StopIteration))
@pytest.mark.parametrize("store", (None, "host", "disk"))
def test_no_error_of_a_reader_is_the_end(error, store, tmp_path):
    place = tmp_path / "rows" if store == "disk" else store
    transform = MEAN if store is None else ROWS
    run = over_batches(transform, batch_size=4, store=place)
    # A loop of Python would end by a `StopIteration`.
    raised = RuntimeError if error is StopIteration else error
    for end in (0, 4, NUM - 1):
        with pytest.raises(raised) as info:
            run(Reader(end, error))
        number = f"This is about batch {end // 4}, counted from 0."
        assert info.value.__notes__[-1] == number
    assert_same(jax.tree.map(np.asarray, run(Reader(NUM))), np.asarray(transform(X)))


@pytest.mark.parametrize("store", (None, "host"))
def test_all_rows_come(store):
    run = over_batches(MEAN if store is None else ROWS, batch_size=4, store=store)
    for end in (0, 7, NUM - 1):
        first = end // 4 * 4
        last = min(first + 4, NUM)
        match = rf"Rows {first} to {last} of .* must be {last - first} rows; got .*\("
        with pytest.raises(ValueError, match=f"{match}{end - first}, 3"):
            run(Reader(end))


def test_rows_have_the_shape_that_is_promised():
    class Narrow(Reader):
        def __getitem__(self, index):
            return super().__getitem__(index)[:, 0]

    with pytest.raises(ValueError, match="as `shape` says,"):
        over_batches(MEAN, batch_size=4)(Narrow(NUM))


class Items:
    """Batches by their numbers, of which one may be damaged."""

    def __init__(self, damaged=None):
        self.damaged = damaged

    def __getitem__(self, number):
        if number == self.damaged:
            raise IndexError("a batch")
        return X[[range(4), range(4, NUM)][number]]


class Sized(Items):
    def __len__(self):
        return 2


class Sequential(Sized, Sequence):
    """Its `__iter__`, that of all sequences, takes an `IndexError` for the end."""


@pytest.mark.parametrize("make", (Items, Sized, Sequential))
def test_batches_by_number(make):
    run = over_batches(MEAN)
    assert_same(run(make()), MEAN(X))
    if make is not Items:  # What has no length ends by an `IndexError`.
        with pytest.raises(IndexError, match="a batch"):
            run(make(damaged=1))


class Lossy(Sized):
    """Ends by the first error."""

    def __iter__(self):
        return iter([X[:4]])


def test_fewer_batches_than_promised():
    with pytest.warns(UserWarning, match="ended after 1 of 2 batches, its `len`"):
        got = over_batches(MEAN)(Lossy())
    assert_same(got, MEAN(X[:4]))


class Pair(NamedTuple):
    x: object
    y: object


class Several(tuple):
    """JAX knows nothing of its entries."""

    __slots__ = ()


class Wrapped:
    """An array of a library that is made of NumPy's."""

    def __init__(self, x):
        self.x = x

    def __array__(self, dtype=None, copy=None):
        return self.x


MASKED = np.ma.array(X[:4], mask=X[:4] > 1)


@pytest.mark.devices
@pytest.mark.parametrize(
    "batch",
    (
        MASKED,
        (X[:4], MASKED),
        {"x": MASKED},
        Pair(X[:4], MASKED),
        [Wrapped(MASKED)],
    ),
)
def test_masks_are_not_lost(batch):
    match = "must not have masked entries, which stand for no number"
    mean = filter_micro_vmap(lambda *args: args, accumulator=Mean())
    sharding = NamedSharding(make_mesh(AxisType.Auto), P("data"))
    for settings in ({}, {"sharding": sharding}):
        stream = over_batches(mean, **settings)
        with pytest.raises(ValueError, match=match) as info:
            stream([batch])
        assert info.value.__notes__[-1] == "This is about batch 0, counted from 0."
        with pytest.raises(ValueError, match=match):
            stream.init(batch)
        whole = jax.tree.map(lambda x: X[:4], batch)
        with pytest.raises(ValueError, match=match):
            stream.update(stream.init(whole), batch)


def test_no_masked_entry():
    batches = np.ma.array(X[:4]), np.ma.array(X[4:], mask=X[4:] > 100)
    assert_same(over_batches(MEAN)(batches), MEAN(X))


def product(batch):
    return batch.x * batch.y


def test_a_named_tuple_is_one_argument():
    mean = filter_micro_vmap(product, accumulator=Mean())
    whole, batches = Pair(X, X), [Pair(X[:4], X[:4]), Pair(X[4:], X[4:])]
    expected = mean(whole)
    stream = over_batches(mean)
    assert_same(stream(batches), expected)
    assert_same(stream([(x,) for x in batches]), expected)
    assert_same(over_batches(mean, batch_size=4)(whole), expected)
    state = stream.init(batches[0])
    for batch in batches:
        state, _ = stream.update(state, batch)
    assert_same(stream.finish(state), expected)
    weights = np.arange(NUM, dtype=np.float32)
    weighted = over_batches(mean, weighted=True, batch_size=4)((whole, weights))
    expected = np.average(X**2, axis=0, weights=weights)
    assert_same(weighted, expected.astype(np.float32))
    # It is a batch, and no iterable of two.
    with pytest.raises(TypeError, match=r"an iterable of batches.*got a Pair"):
        over_batches(MEAN)(whole)
    with pytest.raises(ValueError, match="a batch must be a tuple or list"):
        over_batches(MEAN, weighted=True)(batches)


def test_other_tuples_are_several_arguments():
    mean = filter_micro_vmap(times, accumulator=Mean())
    batches = [Several((X[:4], X[:4])), Several((X[4:], X[4:]))]
    assert_same(over_batches(mean)(batches), mean(X, X))


class Tensor:
    """An array of a dtype that NumPy has not, as PyTorch's of bfloat16 and float8."""

    def __init__(self, x):
        self.x = jax.device_put(x, jax.devices("cpu")[0])
        self.shape, self.dtype = x.shape, x.dtype

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Got unsupported ScalarType")

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def __dlpack__(self, **settings):
        return self.x.__dlpack__(**settings)

    def __getitem__(self, rows):
        return Tensor(self.x[rows])


@pytest.mark.parametrize("dtype", (ml_dtypes.bfloat16, ml_dtypes.float8_e5m2))
def test_dtypes_that_numpy_has_not(dtype):
    x = X.astype(dtype)
    wide = filter_micro_vmap(lambda x: x.astype(jnp.float32), accumulator=Mean())
    expected = wide(x)
    assert_same(over_batches(wide)([Tensor(x[:4]), Tensor(x[4:])]), expected)
    assert_same(over_batches(wide, batch_size=4)(Tensor(x)), expected)


def test_their_memory_is_copied():
    """A loader may use it for the next batch."""

    def loader():
        x = aligned((2_000, 100), ml_dtypes.bfloat16)
        for i in range(20):
            x[:] = i
            yield Tensor(x)

    def slow(x):
        x = x.astype(jnp.float32)
        return jnp.sum(jnp.cos(jnp.cumsum(x)) ** 2) * 0 + jnp.sum(x)

    total = over_batches(filter_micro_vmap(slow, accumulator=Sum()))(loader())
    assert total == 190 * 200_000


def test_tensors_on_other_devices():
    class OnGPU(Tensor):
        def __dlpack_device__(self):
            return 2, 0

    with pytest.raises(TypeError, match="Got unsupported ScalarType"):
        over_batches(MEAN)([OnGPU(X)])
