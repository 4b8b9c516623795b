"""Arguments are checked against their annotations, with messages that say more."""

import functools
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Inexact, PyTree, Shaped

import eqxbatch
from eqxbatch._base import types
from eqxbatch._base.types import AnyArray, check_types, checked
from ..helpers import drawn


pytestmark = pytest.mark.quick

# Where a test run checks all types of the package, each of its functions has sizes of
# its own, so that none are the same in several arguments.
ONE_SCOPE = pytest.mark.skipif(
    hasattr(check_types, "__wrapped__"), reason="each function has a scope of its own"
)


@checked
def everything(
    x: Float[AnyArray, "n *in"],
    y: Float[ArrayLike, ""] = 1.0,
    tree: PyTree[Inexact[Array, "?*p"], "T"] = None,
    like: PyTree[Inexact[Array, "?*p"], "T"] = None,
    kind: Literal["a", "b"] = "a",
    flag: bool = True,
    number: int = 1,
    real: float = 1.0,
    names: tuple[str, ...] = (),
    limits: tuple[int, float] = (1, 1.0),
    other: dict[str, int] | None = None,
    **kwargs: Any,
) -> Shaped[AnyArray, "..."]:
    return kwargs.get("result", jnp.zeros(x.shape[0]))


X = jnp.ones((2, 3))


@pytest.mark.parametrize(
    "kwargs",
    (
        {"y": 2},
        {"y": np.float32(2)},
        {"y": jnp.array(2.0)},
        {"tree": {"a": X}, "like": {"a": X}},
        {"kind": "b", "flag": np.True_, "number": np.int64(2), "real": 3},
        {"names": ("a", "b"), "limits": (1, 2.0), "other": {"a": 1}},
    ),
)
def test_right_calls(kwargs):
    assert everything(X, **kwargs).shape == (2,)
    assert everything(np.ones((2, 3), "float32"), **kwargs).shape == (2,)


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    (
        ({"x": [1.0]}, TypeError, r'`x` must be Float\[Array, "n \*in"\]; got \[1.0\]'),
        (
            {"x": jnp.ones(())},
            ValueError,
            r"got an array of shape \(\) and",
        ),
        (
            {"x": jnp.ones(2, int)},
            TypeError,
            r"got an array of shape \(2,\) and dtype int",
        ),
        (
            {"y": X},
            ValueError,
            r'`y` must be Float\[Array, ""\] | bool .*; got an array',
        ),
        ({"kind": "c"}, ValueError, r"`kind` must be one of \('a', 'b'\); got 'c'\."),
        ({"flag": 1}, TypeError, "`flag` must be bool; got 1 of type int"),
        ({"number": True}, TypeError, "`number` must be int; got True of type bool"),
        ({"real": "1"}, TypeError, "`real` must be float; got '1'"),
        (
            {"names": ("a", 1)},
            TypeError,
            r"`names` must be tuple\[str, ...\]; got \('a'",
        ),
        ({"limits": (1,)}, TypeError, r"`limits` must be tuple\[int, float\]; got"),
        ({"other": {"a": "b"}}, TypeError, r"`other` must be dict\[str, int\] | None"),
    ),
)
def test_wrong_calls_of_a_checked_function(kwargs, error, match):
    with pytest.raises(error, match=match):
        everything(**{"x": X, **kwargs})


@ONE_SCOPE
@pytest.mark.parametrize("like", ([X], {"a": X.T}))
def test_trees_have_one_structure_and_equal_shapes(like):
    with pytest.raises(ValueError, match=r"`like` must be PyTree.*, with `x` of shape"):
        everything(X, tree={"a": X}, like=like)


@ONE_SCOPE
def test_sizes_are_the_same_in_all_arguments():
    hints = {"x": Float[Array, "n k"], "y": Float[Array, "k"]}
    check_types({"x": X, "y": X[0]}, hints)
    message = r"`y` must be .*\(2,\) .*, with `x` of shape \(2, 3\)\. Transpose it\."
    with pytest.raises(ValueError, match=message):
        check_types({"x": X, "y": X[:, 0]}, hints, {"y": "Transpose it."})


def test_checks_can_be_switched_off(unchecked):
    assert everything(X, flag=1, result=3) == 3
    assert eqxbatch.TopK(2.5).k == 2.5


MODEL = drawn(eqx.nn.MLP, 2, 3, 4, 1, key=jax.random.key(0))
SCALAR = lambda model, x: jnp.sum(model(x) ** 2)


class Total(eqxbatch.AbstractAccumulator):
    """An accumulator of a user, whose states are checked."""

    def init(self, value, blocks):
        return jnp.zeros(value.shape, value.dtype)

    def update(self, state, value, block):
        return state + value

    def finalize(self, state):
        return state

    def aggregate(self, values, block):
        return jnp.sum(values, axis=0)


@pytest.mark.parametrize(
    "call",
    (
        functools.partial(
            eqxbatch.filter_micro_vmap(MODEL, microbatch_size=2, accumulator=Total()),
            X[:, :2],
        ),
        functools.partial(
            eqxbatch.filter_micro_grad(SCALAR, clip_norm=1.0), MODEL, X[:, :2]
        ),
    ),
)
def test_a_second_call_checks_nothing(call, monkeypatch):
    seen = []
    fits = types.fits
    record = lambda *args: (seen.append(args[0]), fits(*args))[1]
    monkeypatch.setattr(types, "fits", record)
    jax.clear_caches()
    call()
    assert seen
    seen.clear()
    call()
    assert seen == []
