"""Checks of what users pass, and the errors that these raise.

Each function here raises one kind of error. Every message names the argument, what was
passed, what was expected, and the remedy if there is a known one. Common first mistakes
in calls have messages of their own.
"""

import difflib
import inspect
import operator
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .trees import described, shown


def check_one_of(name: str, value: object, options: Sequence[Any]) -> None:
    """Raises `ValueError` if a value is none of several."""
    # By type as well, because True equals 1.
    if not any(type(x) is type(value) and x == value for x in options):
        raise ValueError(f"`{name}` must be one of {tuple(options)}; got {value!r}.")


def check_at_least(name: str, value: Any, least: int | float, remedy: str = "") -> None:
    """Raises `ValueError` if a number is too small."""
    # In this form, NaN raises, too.
    if not value >= least:
        message = f"`{name}` must be at least {least}; got {shown(value)}. {remedy}"
        raise ValueError(message.rstrip())


def check_callable(name: str, value: object, what: str = "callable") -> None:
    """Raises `TypeError` if a value cannot be called."""
    if not callable(value):
        raise TypeError(f"`{name}` must be {what}; got {described(value)}.")


def check_exclusive(remedy: str, **settings: Any) -> None:
    """Raises `ValueError` if more than one of several settings is given."""
    passed = {name: x for name, x in settings.items() if x is not None}
    if len(passed) > 1:
        listed = " and ".join(f"`{name}={shown(x)}`" for name, x in passed.items())
        raise ValueError(f"{listed} exclude each other. {remedy}")


def check_equal(what: str, value: object, expected: object, remedy: str = "") -> None:
    """Raises `ValueError` for shapes, structures or types that must agree."""
    if value != expected:
        message = f"{what} must be {expected}; got {value}. {remedy}"
        raise ValueError(message.rstrip())


def is_none(x: object) -> bool:
    return x is None


class PrefixLeaf(NamedTuple):
    """A leaf of a prefix, its path, and what of the PyTree it is for."""

    path: tuple
    leaf: Any
    subtree: PyTree


def match_prefix(
    name: str,
    spec: PyTree,
    tree: PyTree,
    what: str,
    remedy: str = "",
    is_leaf: Callable[[Any], bool] = is_none,
) -> list[PrefixLeaf]:
    """The leaves of a prefix of `tree`, each with its path and its subtree.

    Raises `ValueError` if `spec` is not a prefix. `name`, `what` (the expected
    argument) and `remedy` are used in the message.
    """
    places: list[PrefixLeaf] = []
    # JAX checks the prefix as it goes through it.
    add = lambda *place: places.append(PrefixLeaf(*place))
    try:
        jtu.tree_map_with_path(add, spec, tree, is_leaf=is_leaf)
    except (TypeError, ValueError) as e:
        got = f"got {shown(spec)} for {shown(tree)}"
        raise ValueError(f"`{name}` must be {what}; {got}. {remedy}".rstrip()) from e
    return places


def as_int(x: Any) -> int | None:
    """Converts an int, or an int-like value, to an int; None for others and bools."""
    # Python takes a bool for an int, where it is a mistake.
    if isinstance(x, bool):
        return None
    try:
        return operator.index(x)
    except TypeError:
        return None


# What may lie between a line of a user and this package.
_LIBRARIES = (
    *("beartype", "contextlib", "eqxbatch", "equinox", "functools", "jax", "jaxlib"),
    *("jaxtyping", "lineax", "optax"),
)


def warn_user(message: str) -> None:
    """Warns at the innermost line that belongs to no library."""
    # A warning at a line of a library would be shown once, for all users of it.
    level, frame = 1, inspect.currentframe()
    name = lambda frame: str(frame.f_globals.get("__name__", ""))
    while frame is not None and name(frame).partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


# Modules between the call of a transform and the user's function.
_LAYERS = ("eqxbatch.", "equinox._jit", "equinox._module")


def without_layers(trace: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without the frames of the package, unless JAX shows its own."""
    if getattr(jax.config, "jax_traceback_filtering", None) == "off":
        return trace
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    # Each entry of a traceback has the next one inside: the last one is made first.
    for frame in reversed(frames):
        if not str(frame.tb_frame.f_globals.get("__name__")).startswith(_LAYERS):
            place = frame.tb_frame, frame.tb_lasti, frame.tb_lineno
            trace = types.TracebackType(trace, *place)
    return trace


NUMBERS = "Make an array of a list of numbers with `jax.numpy.asarray`."


def has_numbers(x: object) -> bool:
    """Whether `x` is a (possibly nested) list or tuple of numbers only."""
    leaves = jtu.tree_leaves(x)
    is_number = lambda leaf: isinstance(leaf, (int, float, complex))
    return isinstance(x, (list, tuple)) and bool(leaves) and all(map(is_number, leaves))


def is_one_key(x: object) -> bool:
    """Whether `x` looks like a single PRNG key, typed or not."""
    if not isinstance(x, jax.Array):
        return False
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x.shape == ()
    # An untyped key is no different from two numbers.
    return x.shape == (2,) and x.dtype == jnp.uint32


def key_remedy(name: str, num: int | None) -> str:
    """The remedy for one PRNG key instead of one for each example."""
    num_keys = "n" if num is None else num
    of = "" if num is None else f" {num}"
    return (
        f"{name} looks like one PRNG key, and each example needs its own: give "
        f"`jax.random.split(key, {num_keys})` for the{of} examples, or None in "
        "`in_axes` if all are to have the same."
    )


# The names of block sizes, one of which is meant by `batch_size` and the like.
_SIZES = ("microbatch_size", "block_size", "samples_per_batch")


# Settings that other functions have.
_ELSEWHERE = {
    "progress": "For a progress bar, pass all examples to "
    "`eqxbatch.over_batches(transform, batch_size=..., progress=True)`. ",
    "store": "To store results for each example, pass all examples to "
    "`eqxbatch.over_batches(transform, batch_size=..., store=...)`. ",
    "weights": "Weights of examples belong to the accumulator, as in "
    "`accumulator=eqxbatch.Mean(weights=...)`. ",
}


# What `neural_tangents` calls settings.
_NAMESAKES = {"vmap_axes": "in_axes", "implementation": "method"}


def bound_arguments(
    name: str,
    signature: inspect.Signature,
    args: tuple[object, ...],
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    """The arguments of a call, by the names of the parameters.

    Raises `TypeError` for arguments that do not fit the signature of the public `name`.
    """
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as e:
        text = _wrong_arguments(name, signature, args, kwargs)
        raise TypeError(text or f"`{name}`: {e}.") from None


def _wrong_arguments(
    name: str,
    signature: inspect.Signature,
    args: tuple[object, ...],
    kwargs: dict[str, Any],
) -> str | None:
    # `*args` and `**kwargs` are no names that a user could pass.
    parameters = {
        key: parameter
        for key, parameter in signature.parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    names = [key for key in parameters if key != "self"]
    # A misspelt name comes first, because it also makes another argument missing.
    for key in kwargs:
        if key not in parameters:
            return (
                f"`{name}` has no argument `{key}`. {_meant(key, names)}It takes "
                f"{', '.join(f'`{other}`' for other in names)}."
            )
    positional = [
        key
        for key, parameter in parameters.items()
        if parameter.kind is not parameter.KEYWORD_ONLY
    ]
    # A size by position is the most common of these mistakes.
    if len(args) > len(positional):
        extra = args[len(positional)]
        first = [f"`{key}`" for key in positional if key != "self"]
        sizes = [key for key in _SIZES if key in names]
        is_size = as_int(extra) is not None
        example = f", as in `{sizes[0]}={extra}`" if sizes and is_size else ""
        return (
            f"`{name}` takes {' and '.join(first) or 'nothing'} by position, and got "
            f"{described(extra)} as well. Give settings by keyword{example}."
        )
    # Python names only the first of these.
    missing = [
        f"`{key}`"
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty
        and key not in kwargs
        and key not in positional[: len(args)]
    ]
    return f"`{name}` needs {' and '.join(missing)}." if missing else None


def _meant(key: str, names: list[str]) -> str:
    """The argument that was probably meant by an unknown one."""
    key = _NAMESAKES.get(key, key)
    if key in _ELSEWHERE and ("microbatch_size" in names or "in_axes" in names):
        return _ELSEWHERE[key]
    names_alike = difflib.get_close_matches(key, names, 1)
    if "size" in key or key in ("batch", "chunk"):
        names_alike = [other for other in _SIZES if other in names][:1] or names_alike
    return f"Did you mean `{names_alike[0]}`? " if names_alike else ""


def hidden_module(x: Any) -> eqx.Module | None:
    """The module with arrays that a function such as `jax.jit(model)` wraps."""
    while not isinstance(x, eqx.Module) and hasattr(x, "__wrapped__"):
        x = x.__wrapped__
    has_arrays = any(map(eqx.is_array, jtu.tree_leaves(x)))
    return x if isinstance(x, eqx.Module) and has_arrays else None


def no_arrays_remedy(x: object) -> str:
    """A remedy for an argument without arrays; empty if the mistake is not common."""
    # From the most special mistake to the most general one, which would fit as well.
    module = hidden_module(x)
    if module is not None and module is not x:
        name = type(module).__name__
        return (
            f" It is a {name} in `jax.jit`, `jax.vmap` or `jax.pmap`, which hides the "
            f"arrays of the {name}: give the {name} itself. eqxbatch compiles it."
        )
    # JAX looks into PyTrees only, and so not into an instance of any class.
    if inspect.ismethod(x) and unseen_arrays(x.__self__):
        return f" It is a method of {unseen_arrays(x.__self__)}"
    if unseen_arrays(x):
        return f" It is {unseen_arrays(x)}"
    # What a function closes over is a part of its program.
    if inspect.isroutine(x):
        return (
            " It is a function, and the arrays of a module that it calls are constants "
            "to it: give the module itself, or `equinox.Partial(function, module)`."
        )
    if has_numbers(x):
        return f" {NUMBERS}"
    if any(isinstance(leaf, (float, complex)) for leaf in jtu.tree_leaves(x)):
        return (
            " Python numbers are constants, as in Equinox: make arrays of them with "
            "`jax.tree.map(jax.numpy.asarray, ...)`."
        )
    return ""


def unseen_arrays(x: object) -> str:
    """What and why an object is in which JAX sees no arrays, and the remedy.

    Empty for any other object.
    """
    has_arrays = lambda value: any(map(eqx.is_array, jtu.tree_leaves(value)))
    # JAX sees the arrays of a PyTree, and a class has none.
    if isinstance(x, type) or not jtu.all_leaves([x]):
        return ""
    names = [
        name for name, value in getattr(x, "__dict__", {}).items() if has_arrays(value)
    ]
    if not names:
        return ""
    return (
        f"a {type(x).__name__}, which is no PyTree: JAX does not see the arrays in "
        f"its `{names[0]}`. Make the class an `equinox.Module`, or pass what has the "
        f"arrays as an argument, such as `.{names[0]}`."
    )


def unhashable(static: Sequence[Any]) -> TypeError | None:
    """The error for an argument that is no array and has no hash, if there is one."""
    for x in static:
        try:
            hash(x)
        except TypeError:
            remedy = unseen_arrays(x) or (
                f"a {type(x).__name__}, which is neither an array nor a PyTree. Make "
                "an array or an `equinox.Module` of it, or give its class a hash."
            )
            return TypeError(
                "What is no array is a constant of the compiled program, and must have "
                f"a hash. One argument is {remedy}"
            )
    return None


def check_unjitted(fun: object) -> None:
    """Raises for `jax.jit(module)`, which JAX cannot call: it has no hash."""
    module = hidden_module(fun)
    if module is None or module is fun or not hasattr(fun, "lower"):
        return
    name = type(module).__name__
    raise TypeError(
        f"`fun` is a {name} in `jax.jit` or `jax.pmap`, which do not take modules with "
        f"arrays. Give the {name} itself: eqxbatch compiles it. For several devices, "
        "put the examples on a `jax.sharding.Mesh`."
    )


def called(
    fun: Callable,
    args: tuple[object, ...],
    kwargs: dict[str, Any],
    what: str = "`fun`",
    of: str | None = None,
) -> Any:
    """Calls a user's function, which is `what` in messages.

    Adds a note to the error if it takes other arguments, or if it is a `jax.jit`
    function whose arguments only `equinox.filter_jit` accepts. `of` says what the
    arguments belong to, such as one example: errors of JAX then get their shapes.
    """
    try:
        return fun(*args, **kwargs)
    except (IndexError, TypeError, ValueError) as e:
        # The error stays the user's, with a note on what the call was.
        is_jitted = hasattr(fun, "lower") and not isinstance(fun, eqx.Module)
        # The start of JAX's own message.
        if is_jitted and "Error interpreting argument to" in str(e):
            e.add_note(
                "`fun` is in `jax.jit` or `jax.pmap`, which take only arrays, but its "
                "arguments contain something else, such as a module. Leave `jax.jit` "
                "out: eqxbatch compiles `fun`."
            )
        # Arguments that do not fit the signature have not reached the function.
        if not _takes(fun, args, kwargs):
            texts = [shown(x).partition(" with the arrays")[0] for x in args]
            texts += (f"`{name}` by name" for name in kwargs)
            e.add_note(
                f"{what} is called with {len(texts)} arguments: {'; '.join(texts)}."
            )
        elif of is not None and not hasattr(e, "__notes__"):
            texts = [
                *map(shown, args),
                *(f"`{n}`: {shown(x)}" for n, x in kwargs.items()),
            ]
            e.add_note(f"{what} is called for {of}, with {'; '.join(texts)}.")
        raise


def _takes(fun: Any, args: tuple[object, ...], kwargs: dict[str, Any]) -> bool:
    try:
        inspect.signature(fun).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True
