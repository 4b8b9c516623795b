"""Annotations are held to as jaxtyping does, with messages that say more."""

import functools
import subprocess
import sys
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Inexact, Int, jaxtyped, PyTree, Shaped

import eqxbatch
from eqxbatch._base import shapes
from eqxbatch._base.shapes import AnyArray, checked, Contract, Joined, Sizes, text_of


pytestmark = pytest.mark.quick


DIMS = (
    "",
    "n",
    "n n",
    "n m",
    "*r",
    "n *r",
    "*r n",
    "n *r n",
    "3",
    "n 3",
    "_ n",
    "... n",
)
SHAPES = ((), (3,), (2,), (3, 3), (2, 3), (3, 2), (2, 3, 2), (2, 2, 3), (1, 1, 1))


@pytest.mark.parametrize("dims", DIMS)
def test_shapes_fit_as_for_jaxtyping(dims):
    hint = Float[np.ndarray, dims]
    for shape in SHAPES:
        with jaxtyped("context"):
            expected = isinstance(np.zeros(shape), hint)
        assert Sizes().fits(dims, shape) == expected, shape


@pytest.mark.parametrize("first", DIMS)
def test_sizes_are_kept_as_for_jaxtyping(first):
    for one in SHAPES:
        for second in DIMS:
            for other in SHAPES:
                sizes = Sizes()
                with jaxtyped("context"):
                    hints = Float[np.ndarray, first], Float[np.ndarray, second]
                    expected = [
                        isinstance(np.zeros(shape), hint)
                        for shape, hint in zip((one, other), hints, strict=True)
                    ]
                found = [sizes.fits(first, one), sizes.fits(second, other)]
                assert found == expected, (one, second, other)


def test_two_parts_of_which_one_is_known():
    sizes = Sizes({"a": (2, 3)})
    assert sizes.fits("*a *b", (2, 3, 4))
    assert sizes.known["b"] == (4,)
    assert not sizes.fits("*a *b", (2, 3, 5))
    assert not Sizes({"a": (2, 3)}).fits("*a *b", (3, 2, 4))


def test_what_users_write_beyond_names_is_not_checked():
    assert Sizes({"n": 2}).fits("n+1 n=2", (7, 2))
    assert not Sizes({"n": 2}).fits("n+1 n=2", (7,))


class Pair(NamedTuple):
    values: Float[Array, "n k"]
    indices: Int[Array, "n k"]


@checked
def everything(
    x: Float[AnyArray, "n *in"],
    y: Float[ArrayLike, ""] = 1.0,
    tree: PyTree[Inexact[Array, "?*p"], "T"] = None,
    like: PyTree[Inexact[Array, "?*p"], "T"] = None,
    pair: Pair | None = None,
    kind: Literal["a", "b"] = "a",
    flag: bool = True,
    number: int = 1,
    real: float = 1.0,
    names: tuple[str, ...] = (),
    limits: tuple[int, float] = (1, 1.0),
    other: dict[str, int] | None = None,
    **kwargs: Any,
) -> Shaped[AnyArray, "n"]:
    return kwargs.get("result", jnp.zeros(x.shape[0]))


X = jnp.ones((2, 3))
INDICES = jnp.ones((2, 3), int)


@pytest.mark.parametrize(
    "kwargs",
    (
        {"y": 2},
        {"y": np.float32(2)},
        {"y": jnp.array(2.0)},
        {"tree": {"a": X}, "like": {"a": X}},
        {"pair": Pair(X, INDICES)},
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
            "Give an array of such a dtype.",
        ),
        ({"y": X}, ValueError, r'`y` must be Float\[ArrayLike, ""\]; got an array'),
        ({"tree": {"a": X}, "like": [X]}, ValueError, "`like` must be PyTree.*structu"),
        (
            {"tree": {"a": X}, "like": {"a": X.T}},
            ValueError,
            r"with p=\(2, 3\); got an array of shape \(3, 2\) .* at \['a'\]",
        ),
        (
            {"pair": Pair(X, jnp.ones((2, 4), int))},
            ValueError,
            r"with n=2, k=3.*indices",
        ),
        (
            {"pair": Pair(X.T, jnp.ones((3, 2), int))},
            ValueError,
            "with n=2.*at .values",
        ),
        ({"pair": (X, X)}, TypeError, "`pair` must be Pair | None"),
        ({"kind": "c"}, TypeError, "`kind` must be 'a' | 'b'; got 'c' of type str"),
        ({"flag": 1}, TypeError, "`flag` must be bool; got 1 of type int"),
        ({"number": True}, TypeError, "`number` must be int; got True of type bool"),
        ({"real": "1"}, TypeError, "`real` must be float; got '1'"),
        ({"names": ("a", 1)}, TypeError, r"`names` .*tuple\[str, ...\]; .*1 .*\[1\]"),
        ({"limits": (1,)}, TypeError, r"`limits` must be tuple\[int, float\]; got"),
        ({"other": {"a": "b"}}, TypeError, r"`other` must be dict\[str, int\] | None"),
        (
            {"result": X},
            ValueError,
            r'What `everything` returns .*"n"\] with n=2',
        ),
    ),
)
def test_wrong_calls_of_a_checked_function(kwargs, error, match):
    with pytest.raises(error, match=match):
        everything(**{"x": X, **kwargs})


def test_a_failed_alternative_binds_nothing():
    contract = Contract(
        {"x": tuple[Int[Array, "n"], Int[Array, "n"]] | tuple[Any, Any]}
    )
    call = contract.begin()
    call.check("x", (jnp.ones(2, int), jnp.ones(3, int)))
    assert call.sizes.known == {}


def test_joined_annotations():
    hint = Joined(Inexact, "*a *b")
    assert text_of(hint) == 'Inexact[Array, "*a *b"]'
    call = Contract({"x": hint}).begin(a=(2,), b=(3,))
    call.check("x", X)
    with pytest.raises(ValueError, match=r"with a=\(2,\), b=\(3,\); got .* \(3, 2\)"):
        call.check("x", X.T)


def test_checks_can_be_switched_off(unchecked):
    assert everything(X, flag=1, result=3) == 3
    assert eqxbatch.TopK(2.5).k == 2.5


def test_checks_are_off_by_the_variable():
    code = "import eqxbatch; print(eqxbatch.Concat('0').axis)"
    environment = {"JAXTYPING_DISABLE": "1", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "0\n", done.stderr


MODEL = eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))
SCALAR = lambda model, x: jnp.sum(model(x) ** 2)


@pytest.mark.parametrize(
    "call",
    (
        functools.partial(
            eqxbatch.filter_micro_vmap(MODEL, microbatch_size=2), X[:, :2]
        ),
        functools.partial(
            eqxbatch.filter_micro_grad(SCALAR, clip_norm=1.0), MODEL, X[:, :2]
        ),
        functools.partial(eqxbatch.filter_hvp(SCALAR), MODEL, MODEL, X[0, :2]),
        functools.partial(eqxbatch.EmpiricalNTK(MODEL), X[:, :2]),
        functools.partial(
            eqxbatch.filter_batch_kernel(
                lambda x, y: x @ y.T, block_size=1, reduce=eqxbatch.RowSums()
            ),
            X,
        ),
    ),
)
def test_a_second_call_checks_nothing(call, monkeypatch):
    seen = []
    own = shapes._mismatch
    record = lambda *args: (seen.append(args[0]), own(*args))[1]
    monkeypatch.setattr(shapes, "_mismatch", record)
    jax.clear_caches()
    call()
    assert seen
    seen.clear()
    call()
    assert seen == []
