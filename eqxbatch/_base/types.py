"""Arguments compared with their annotations.

`JAXTYPING_DISABLE=1` switches these checks off, except for those of settings.
"""

import collections.abc
import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    get_args,
    get_origin,
    Literal,
    TYPE_CHECKING,
    TypeVar,
    Union,
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import AbstractArray, Array, config, jaxtyped, PyTree

from .checks import as_int, bound_arguments, check_one_of
from .trees import described, shown


_Function = TypeVar("_Function", bound=Callable)


if TYPE_CHECKING:
    Hint = Any
else:
    # An annotation: a class, a union, or what `typing` and jaxtyping make.
    Hint = Hashable


# Everything that is accepted as a JAX array.
AnyArray = Array | np.ndarray | np.generic


def check_types(
    values: Mapping[str, Any],
    hints: Mapping[str, Hint],
    remedies: Mapping[str, str] | None = None,
    *,
    always: bool = False,
) -> None:
    """Raises if values do not match their annotations.

    Names of sizes in annotations of arrays are the same in all `values`. With `always`,
    values are checked although checks are switched off.

    Raises `ValueError` for an array of another shape and for an unknown string, and
    `TypeError` for anything else.
    """
    is_on = always or not config.jaxtyping_disable
    with jaxtyped("context"):
        for name, value in values.items():
            hint = hints.get(name, Any)
            if get_origin(hint) is Literal and isinstance(value, str):
                check_one_of(name, value, get_args(hint))
            elif is_on and not fits(value, hint):
                raise _mismatch(name, values, hint, (remedies or {}).get(name, ""))


def _mismatch(
    name: str, values: Mapping[str, Any], hint: Hint, remedy: str
) -> TypeError | ValueError:
    value = values[name]
    are_numbers = isinstance(value, (list, tuple, int, float, complex))
    what = name if " " in name else f"`{name}`"
    message = f"{what} must be {text_of(hint)}; got {described(value)}"
    is_shape = any(fits(value, wide) for wide in _of_any_shape(hint))
    if is_shape:
        arrays = {key: x for key, x in values.items() if hasattr(x, "shape")}
        shapes = [f"`{key}` of shape {x.shape}" for key, x in arrays.items()]
        shapes_before = shapes[: [*arrays].index(name)] if name in arrays else shapes
        message += f", with {' and '.join(shapes_before)}" * bool(shapes_before)
    elif not remedy and any(map(_is_array_hint, _options(hint))) and are_numbers:
        remedy = "Make an array of it with `jax.numpy.asarray`."
    error = ValueError if is_shape else TypeError
    return error(f"{message}. {remedy}".rstrip())


def check_fields(module: Any) -> None:
    """Raises if fields of a module do not match their annotations."""
    fields = {field.name: field for field in dataclasses.fields(module)}
    values = {name: getattr(module, name) for name in fields}
    # Structs can replace arrays if only shapes are needed.
    values = {
        name: value
        for name, value in values.items()
        if value is not fields[name].default
        and not isinstance(value, jax.ShapeDtypeStruct)
    }
    check_types(values, {name: field.type for name, field in fields.items()})


def as_jax(x: Any) -> Any:
    """Converts NumPy arrays to JAX arrays, and leaves everything else to checks."""
    if not isinstance(x, np.ndarray):
        return x
    check_unmasked(x)
    # JAX reads NumPy arrays later, when their owner may have changed them. A copy for
    # that would stay until then, and may be as large as all examples.
    return jax.block_until_ready(jnp.array(x))


def check_unmasked(x: object) -> None:
    """Raises `ValueError` if an array has masked entries, of which copies know nothing.

    JAX raises for them only where it makes no copy.
    """
    if np.ma.is_masked(x):
        raise ValueError(
            "Arrays must not have masked entries, which stand for no number; got "
            f"{shown(x)}. Fill them by `numpy.ma.filled(array, value)`, also those "
            "that a loader or a slice returns."
        )


def fits(value: object, hint: Hint) -> bool:
    """Whether a value matches an annotation."""
    options = _options(hint)
    if {*options} >= {*get_args(DTypeLike)}:
        return _is_dtype(value) or (value is None and type(None) in options)
    return any(_fits_one(value, option) for option in options)


_UNIONS = (Union, types.UnionType)


def _options(hint: Hint) -> tuple:
    """The members of a union, or the annotation itself."""
    return get_args(hint) if get_origin(hint) in _UNIONS else (hint,)


def _fits_one(value: Any, hint: Hint) -> bool:
    """Whether a value, and all of its entries, match a member of a union."""
    if not _is_bearable()(value, hint):
        return False
    # `beartype` looks at one of many entries only.
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is dict:
        return all(fits(pair, tuple[arguments]) for pair in value.items())
    is_open = origin is tuple and ... in arguments
    if is_open or origin in (list, collections.abc.Sequence):
        return all(fits(x, arguments[0]) for x in value)
    return True


@functools.cache
def _is_bearable() -> Callable[[object, Hint], bool]:
    """What matches values with annotations: `beartype`, also for numbers of NumPy."""
    # To import it takes longer than most checks.
    from beartype import BeartypeConf, FrozenDict
    from beartype.door import is_bearable
    from beartype.vale import Is

    # Otherwise, a bool is an int.
    is_int = lambda x: not isinstance(x, jax.Array) and as_int(x) is not None
    numbers = {
        bool: bool | np.bool_,
        int: Annotated[object, Is[is_int]],
        float: float | int | np.floating,
    }
    conf = BeartypeConf(hint_overrides=FrozenDict(numbers))
    return functools.partial(is_bearable, conf=conf)


def _is_dtype(value: Any) -> bool:
    # NumPy accepts anything with a dtype as a dtype, including arrays.
    if value is None or (hasattr(value, "shape") and not isinstance(value, np.dtype)):
        return False
    try:
        jnp.dtype(value)
    except TypeError:
        return False
    return True


def _is_array_hint(hint: Hint) -> bool:
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


def _of_any_shape(hint: Hint) -> list[Hint]:
    """The annotations of arrays in `hint`, for arrays of any shape."""
    if get_origin(hint) in _UNIONS:
        return [wide for option in get_args(hint) for wide in _of_any_shape(option)]
    if _is_array_hint(hint):
        return [hint.dtype[hint.array_type, "..."]]
    leaf = getattr(hint, "leaftype", None)
    return [] if leaf is None else [PyTree[wide] for wide in _of_any_shape(leaf)]


def text_of(hint: Hint) -> str:
    """An annotation as it is written, without the names of modules."""
    if get_origin(hint) in _UNIONS:
        if {*get_args(hint)} >= {*get_args(DTypeLike)}:
            return "a dtype"
        # Annotations of JAX arrays also cover those of NumPy.
        texts = [text_of(option) for option in get_args(hint)]
        return " | ".join(dict.fromkeys(x for x in texts if x not in _SCALARS))
    if _is_array_hint(hint):
        return f'{hint.dtype.__name__}[Array, "{hint.dim_str.strip()}"]'
    if get_origin(hint) is Literal:
        return " | ".join(map(repr, get_args(hint)))
    if get_origin(hint) is collections.abc.Callable:
        return "Callable"
    if hint is type(None):
        return "None"
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    text = re.sub(r"[A-Za-z_][\w.]*\.(?=[A-Za-z_])", "", text)
    return re.sub(r"<class '(\w+)'>", r"\1", text)


_SCALARS = ("ndarray", "generic")


def checked(
    fun: _Function,
    remedies: dict[str, str] | None = None,
    but: Sequence[str] = (),
    *,
    always: bool = False,
) -> _Function:
    """Wraps a function that users call to check its arguments' types.

    `remedies` are appended to messages about arguments. Arguments named in `but` are
    not checked. `always` is as for `check_types`.
    """
    signature = inspect.signature(fun)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    hints = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if parameter.annotation is not parameter.empty
        and parameter.kind not in kinds
        and name not in but
    }
    public = fun.__qualname__.removesuffix(".__init__")

    @functools.wraps(fun)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        values = bound_arguments(public, signature, args, kwargs)
        given = {name: values[name] for name in hints if name in values}
        if given:
            check_types(given, hints, remedies, always=always)
        return fun(*args, **kwargs)

    return wrapper  # pyright: ignore[reportReturnType]
