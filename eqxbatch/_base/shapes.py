"""Annotations of public functions, which are checked when these are called.

All public functions have jaxtyping annotations. This module checks calls against them,
for every user and not only in tests: `checked` for functions and methods,
`check_fields` for modules, and a `Contract` for arrays that are arranged first or come
from a user's function. Checks run when a program is traced and cost nothing once it is
compiled.

`jaxtyping.jaxtyped` would check the same, but its errors name neither the argument nor
a remedy, and it requires `n` to be a single size in each call, while traced functions
are often called in several pieces. Annotations without arrays, other than classes, are
left to beartype, which is imported only when needed because its import is slow.

`JAXTYPING_DISABLE=1` switches off all checks, except those that prevent wrong numbers.
"""

import collections.abc
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, cast, get_args, get_origin, Literal, TypeVar, Union

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import AbstractArray, Array, config, PyTree

from .mistakes import bound_arguments
from .trees import as_int, described


_Function = TypeVar("_Function", bound=Callable)


Size = int | tuple[int, ...]


# Everything that is accepted as a JAX array; and arrays with rearranged axes.
AnyArray = Array | np.ndarray | np.generic


Arranged = AnyArray | jax.ShapeDtypeStruct


_UNIONS = (Union, types.UnionType)


@dataclasses.dataclass(frozen=True)
class Joined:
    """An annotation of arrays with the axes of two others, which jaxtyping lacks.

    - `dtype`: such as `jaxtyping.Inexact`.
    - `dims`: such as `"*a *b"`. At least one of them must be known when it is checked.
    """

    dtype: Any
    dims: str

    def __str__(self) -> str:
        return f'{self.dtype.__name__}[Array, "{self.dims}"]'


@dataclasses.dataclass
class _Mismatch:
    """Why a value does not match an annotation.

    - `path`: its position in a PyTree.
    - `is_shape`: whether only the shape of an array is wrong.
    - `known`: the known sizes of that shape.
    """

    value: Any
    remedy: str
    path: str = ""
    is_shape: bool = False
    known: str = ""


class Sizes:
    """The sizes of named axes in the annotations of one call."""

    def __init__(self, known: dict[str, Size] | None = None):
        self.known = dict(known or {})
        self.structures: dict[str, Any] = {}

    def shown(self, dims: str, leaf: str) -> str:
        """The known sizes of names in `dims`."""
        names = {name: _of_leaf(name, leaf) for name in dims.split()}
        return ", ".join(
            f"{name.strip('*?')}={self.known[own]}"
            for name, own in names.items()
            if own in self.known
        )

    def fits(self, dims: str, shape: tuple[int, ...], leaf: str = "") -> bool:
        """Whether a shape matches `dims`; if so, remembers its sizes.

        Like jaxtyping, but `*a *b` is allowed if one of them is known. Names with a `?`
        belong to one `leaf` of a PyTree. Anything that is neither a name nor a number,
        as in users' annotations, matches any size.
        """
        sizes: list[Any] = []
        for name in map(_plain, dims.split()):
            known = self.known.get(_of_leaf(name, leaf))
            if isinstance(known, tuple):
                sizes += known
            else:
                sizes.append(name if known is None else known)
        is_open = [isinstance(x, str) and _is_several(x) for x in sizes]
        assert sum(is_open) <= 1, f"Of {dims!r}, at most one part can be open."
        if True in is_open:
            at, num = is_open.index(True), len(shape) - len(sizes) + 1
            if num < 0:
                return False
            several, shape = shape[at : at + num], (*shape[:at], *shape[at + num :])
            name = cast(str, sizes.pop(at))
        else:
            several, name = (), "..."
        if len(sizes) != len(shape):
            return False
        found: dict[str, Any] = {}
        for size, extent in zip(sizes, shape, strict=True):
            if isinstance(size, str) and not size.isdigit() and size != "_":
                size = found.setdefault(_of_leaf(size, leaf), extent)
            if size != "_" and int(size) != extent:
                return False
        if name != "...":
            found[_of_leaf(name, leaf)] = several
        self.known |= found
        return True


def _plain(name: str) -> str:
    """A part of a shape as a name, a number, or a wildcard."""
    name = name.rpartition("=")[2]
    return name if name == "..." or name.strip("*?").isalnum() or "_" in name else "_"


def _is_several(name: str) -> bool:
    return name == "..." or "*" in name


def _of_leaf(name: str, leaf: str) -> str:
    own = leaf if "?" in name else ""
    return name.replace("*", "").replace("?", "") + own


def _mismatch(hint: Any, value: Any, sizes: Sizes, leaf: str = "") -> _Mismatch | None:
    """The mismatch between a value and an annotation; None if they match."""
    return _way_of(hint)(hint, value, sizes, leaf)


@functools.cache
def _way_of(hint: Any) -> Callable[[Any, Any, Sizes, str], _Mismatch | None]:
    """The function that compares values with an annotation."""
    if hint is Any or isinstance(hint, (str, TypeVar)):
        return lambda *_: None
    if _is_dtype_hint(hint):
        return _of_dtype
    if get_origin(hint) in _UNIONS:
        return _of_union
    if isinstance(hint, Joined):
        return _of_joined
    if _is_array_hint(hint):
        return _of_array
    if hint is PyTree or hasattr(hint, "leaftype"):
        return _of_tree
    if _is_record_hint(hint):
        return _of_record
    is_several = get_origin(hint) in (tuple, list, collections.abc.Sequence)
    return _of_several if is_several else _of_other


def _of_other(hint: Any, value: Any, sizes: Sizes, leaf: str) -> _Mismatch | None:
    is_fine = value is None if hint in (None, type(None)) else _is_a(hint, value)
    return None if is_fine else _Mismatch(value, "")


def _is_a(hint: Any, value: Any) -> bool:
    """Whether a value that is not an array matches its annotation."""
    origin = get_origin(hint) or hint
    if origin is Literal:
        return any(type(x) is type(value) and x == value for x in get_args(hint))
    if origin is collections.abc.Callable:
        return callable(value)
    if hint is bool:
        return isinstance(value, (bool, np.bool_))
    if hint is int:
        return as_int(value) is not None
    if hint is float:
        is_number = isinstance(value, (float, int, np.floating, np.integer))
        return is_number and not isinstance(value, bool)
    if isinstance(hint, type) and not get_args(hint):
        return isinstance(value, hint)
    from beartype.door import is_bearable

    return is_bearable(value, hint)


def _of_union(hint: Any, value: Any, sizes: Sizes, leaf: str) -> _Mismatch | None:
    found = []
    for one in get_args(hint):
        known = dict(sizes.known)
        wrong = _mismatch(one, value, sizes, leaf)
        if wrong is None:
            return None
        sizes.known = known
        found.append(wrong)
    # The closest match gives the most helpful message.
    return max(found, key=lambda wrong: (wrong.is_shape, bool(wrong.remedy)))


def _of_several(hint: Any, value: Any, sizes: Sizes, leaf: str) -> _Mismatch | None:
    hints: tuple = get_args(hint)
    origin, is_tuple = get_origin(hint), get_origin(hint) is tuple
    if not isinstance(value, origin if origin in (tuple, list) else (list, tuple)):
        return _of_other(hint, value, sizes, leaf)
    if not is_tuple or hints[-1:] == (...,):
        hints = hints[:1] * len(value)
    if len(hints) != len(value):
        return _Mismatch(value, "")
    for i, (hint, x) in enumerate(zip(hints, value, strict=True)):
        wrong = _mismatch(hint, x, sizes)
        if wrong is not None:
            return dataclasses.replace(wrong, path=f"[{i}]{wrong.path}")
    return None


def _of_joined(hint: Joined, value: Any, sizes: Sizes, leaf: str) -> _Mismatch | None:
    wrong = _mismatch(hint.dtype[AnyArray, "..."], value, sizes)
    return wrong or _of_dims(hint.dims, value, sizes, leaf)


def _of_array(hint: Any, value: Any, sizes: Sizes, leaf: str) -> _Mismatch | None:
    if not isinstance(value, hint.array_type):
        are_numbers = isinstance(value, (list, tuple, int, float, complex))
        remedy = "Make an array of it with `jax.numpy.asarray`." if are_numbers else ""
        return _Mismatch(value, remedy)
    if not isinstance(value, _of_any_shape(hint)):
        return _Mismatch(value, "Give an array of such a dtype.")
    return _of_dims(hint.dim_str, value, sizes, leaf)


def _of_dims(dims: str, value: Any, sizes: Sizes, leaf: str) -> _Mismatch | None:
    if sizes.fits(dims, tuple(value.shape), leaf):
        return None
    known = sizes.shown(dims, leaf)
    return _Mismatch(value, "Give an array of such a shape.", "", True, known)


def _of_tree(hint: Any, value: Any, sizes: Sizes, leaf: str) -> _Mismatch | None:
    leaf_hint = getattr(hint, "leaftype", Any)
    if leaf_hint is Any:
        return None
    leaves, structure = jtu.tree_flatten_with_path(value)
    if getattr(hint, "structure", None) is not None:
        expected = sizes.structures.setdefault(hint.structure, structure)
        if structure != expected:
            remedy = f"Give a PyTree of the structure {expected}."
            return _Mismatch(value, remedy, is_shape=True)
    for path, x in leaves:
        place = leaf + jtu.keystr(path)
        wrong = _mismatch(leaf_hint, x, sizes, place)
        if wrong is not None:
            return dataclasses.replace(wrong, path=place)
    return None


def _is_record_hint(hint: Any) -> bool:
    """Whether this is a named tuple, or a state with annotations in `checked_as`."""
    is_record = hasattr(hint, "_fields") or hasattr(hint, "checked_as")
    return isinstance(hint, type) and is_record


def _of_record(hint: Any, value: Any, sizes: Sizes, leaf: str) -> _Mismatch | None:
    if not isinstance(value, hint):
        return _Mismatch(value, "")
    fields = getattr(hint, "checked_as", hint.__annotations__)
    for name, of_field in fields.items():
        wrong = _mismatch(of_field, getattr(value, name), sizes)
        if wrong is not None:
            return dataclasses.replace(wrong, path=f".{name}{wrong.path}")
    return None


def _is_dtype_hint(hint: Any) -> bool:
    is_union = get_origin(hint) in _UNIONS
    return is_union and {*get_args(hint)} >= {*get_args(DTypeLike)}


def _of_dtype(hint: Any, value: Any, sizes: Sizes, leaf: str) -> _Mismatch | None:
    is_fine = _is_dtype(value) or (value is None and type(None) in get_args(hint))
    return None if is_fine else _Mismatch(value, "")


def _is_dtype(value: Any) -> bool:
    # NumPy accepts anything with a dtype as a dtype, including arrays.
    if value is None or (hasattr(value, "shape") and not isinstance(value, np.dtype)):
        return False
    try:
        jnp.dtype(value)
    except TypeError:
        return False
    return True


def _is_array_hint(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


@functools.cache
def _of_any_shape(hint: Any) -> Any:
    return hint.dtype[hint.array_type, "..."]


def as_jax(x: Any) -> Any:
    """Converts NumPy arrays to JAX arrays, and leaves everything else to checks."""
    # JAX reads NumPy arrays later, when their owner may have changed them. A copy for
    # that would stay until then, and may be as large as all examples.
    return jax.block_until_ready(jnp.array(x)) if isinstance(x, np.ndarray) else x


def arranged(x: Any, *axes: int) -> jax.ShapeDtypeStruct:
    """The type of an array with these axes moved to the front, for checks."""
    others = [size for i, size in enumerate(x.shape) if i not in axes]
    return jax.ShapeDtypeStruct((*(x.shape[i] for i in axes), *others), x.dtype)


def text_of(hint: Any) -> str:
    """How an annotation is displayed."""
    if _is_dtype_hint(hint):
        return "a dtype | None" if type(None) in get_args(hint) else "a dtype"
    if get_origin(hint) in _UNIONS:
        texts = [text_of(one) for one in get_args(hint)]
        # Annotations of JAX arrays also cover NumPy arrays and numbers.
        own = [x for x in texts if x == _of_jax(x) or _of_jax(x) not in texts]
        if any("[Array," in x for x in own) and {*_NUMBERS} & {*own}:
            own = [x.replace("[Array,", "[ArrayLike,") for x in own]
            own = [x for x in own if x not in _NUMBERS]
        return " | ".join(dict.fromkeys(own))
    if isinstance(hint, Joined):
        return str(hint)
    if _is_array_hint(hint):
        array = getattr(hint.array_type, "__name__", "Any").rpartition(".")[2]
        return f'{hint.dtype.__name__}[{array}, "{hint.dim_str.strip()}"]'
    if hint is PyTree or hasattr(hint, "leaftype"):
        leaf = getattr(hint, "leaftype", Any)
        structure = getattr(hint, "structure", None)
        parts = [] if leaf is Any else [text_of(leaf)]
        parts += [] if structure is None else [f'"{structure}"']
        return f"PyTree[{', '.join(parts)}]" if parts else "PyTree"
    if hint is None or hint is type(None):
        return "None"
    if isinstance(hint, TypeVar):
        return "Any"
    if hasattr(hint, "checked_as"):
        fields = [f"{name}: {text_of(x)}" for name, x in hint.checked_as.items()]
        return f"a state with {', '.join(fields)}"
    if isinstance(hint, str):
        return hint
    arguments = get_args(hint)
    if not arguments:
        return getattr(hint, "__name__", str(hint)).rpartition(".")[2]
    if get_origin(hint) is Literal:
        return " | ".join(map(repr, arguments))
    if get_origin(hint) is collections.abc.Callable:
        return "Callable"
    inner = ", ".join("..." if x is ... else text_of(x) for x in arguments)
    return f"{getattr(get_origin(hint), '__name__', hint)}[{inner}]"


_NUMBERS = ("bool", "complex", "float", "generic", "int", "number")


def _of_jax(text: str) -> str:
    return text.replace("[ndarray,", "[Array,").replace("[ShapeDtypeStruct,", "[Array,")


# All contracts other than annotations of functions and classes.
CONTRACTS: list["Contract"] = []


class Contract:
    """The annotations of a call, by the names of its arguments and results.

    - `annotations`: those of arguments, and that of the result as `return`.
    - `remedies`: what to do, if the annotation alone does not say so.
    - `of`: the public functions that make such calls.
    """

    def __init__(
        self,
        annotations: dict[str, Any],
        remedies: dict[str, str] | None = None,
        of: Sequence[str] = (),
    ):
        self.annotations = annotations
        self.remedies = remedies or {}
        self.of = of
        if of:
            CONTRACTS.append(self)

    def begin(self, **known: Size) -> "CheckedCall":
        """Begins a call, for which only these sizes are known yet."""
        return CheckedCall(self, Sizes(known))


@dataclasses.dataclass(frozen=True)
class CheckedCall:
    """A call that is checked against its contract."""

    contract: Contract
    sizes: Sizes

    def check(
        self, name: str, value: Any, what: str | None = None, *, always: bool = False
    ) -> None:
        """Raises if a value does not match the contract for this name.

        Raises `ValueError` for an array of another shape or a PyTree of another
        structure, and `TypeError` for anything else. `what` describes the value in the
        message; the default is its name. Checks that prevent wrong numbers use
        `always`.
        """
        if config.jaxtyping_disable and not always:
            return
        hint = self.contract.annotations[name]
        wrong = _mismatch(hint, value, self.sizes)
        if wrong is None:
            return
        what = f"`{name}`" if what is None else what
        place = f" at {wrong.path}" if wrong.path else ""
        known = f" with {wrong.known}" if wrong.known else ""
        own = self.contract.remedies.get(name, "")
        remedy = own or wrong.remedy if wrong.is_shape else wrong.remedy or own
        got = f"{described(wrong.value)}{place}"
        message = f"{what} must be {text_of(hint)}{known}; got {got}. {remedy}"
        raise (ValueError if wrong.is_shape else TypeError)(message.rstrip())


def checked(
    fun: _Function, remedies: dict[str, str] | None = None, but: Sequence[str] = ()
) -> _Function:
    """Wraps `fun` to check arguments and results against their annotations.

    `remedies` are appended to messages about arguments. Arguments named in `but` are
    not checked.
    """
    signature = inspect.signature(fun)
    annotations = {
        name: hint for name, hint in fun.__annotations__.items() if name not in but
    }
    contract = Contract(annotations, remedies)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    variadic = [x.name for x in signature.parameters.values() if x.kind in kinds]
    public = fun.__qualname__.removesuffix(".__init__")

    @functools.wraps(fun)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if config.jaxtyping_disable:
            return fun(*args, **kwargs)
        call = contract.begin()
        for name, value in bound_arguments(public, signature, args, kwargs).items():
            if name in contract.annotations and name not in variadic:
                call.check(name, value)
        result = fun(*args, **kwargs)
        if "return" in contract.annotations:
            call.check("return", result, f"What `{fun.__name__}` returns")
        return result

    return cast(_Function, wrapper)


def check_fields(module: Any) -> None:
    """Raises if fields of a module do not match their annotations."""
    if config.jaxtyping_disable:
        return
    cls = type(module)
    call = _contract_of(cls).begin()
    for name in call.contract.annotations:
        value = getattr(module, name)
        # Structs can replace arrays if only shapes are needed.
        if not isinstance(value, jax.ShapeDtypeStruct):
            call.check(name, value, f"`{name}` of `{cls.__name__}`")


@functools.cache
def _contract_of(cls: type) -> Contract:
    fields = dataclasses.fields(cls)
    return Contract({field.name: field.type for field in fields})
