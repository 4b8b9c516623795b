"""A transform: a Module whose fields are a function and how to transform it.

Each setting of a transform is declared once, as a field. `also_decorator` makes the
public function from the Module. Signature, types, checks, `repr` and documentation
follow from the fields.
"""

import abc
import collections
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import (
    Any,
    cast,
    ClassVar,
    Concatenate,
    overload,
    ParamSpec,
    Protocol,
    TYPE_CHECKING,
    TypeVar,
)

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Integer, PyTree

from .._base.checks import bound_arguments, check_callable, check_unjitted
from .._base.compile import compiled, number_types
from .._base.mesh import (
    auto_sharded,
    check_reduced,
    num_parts,
    on_one_mesh,
    within_mesh,
)
from .._base.run_time_checks import can_raise, on_devices_of
from .._base.trees import shown
from .._base.types import check_types
from .arguments import Arguments
from .batch import Batch
from .blocks import Blocks
from .memory import as_microbatch_size, resolve_size, resolved, Size
from .passes import current_passes, of_passes


P = ParamSpec("P")


# Bound to `Any`, so that a lambda without annotations can use its model freely.
Model = TypeVar("Model", bound=Any)


Out = TypeVar("Out")


_Settings = ParamSpec("_Settings")


_Plain = ParamSpec("_Plain")


_Fun = TypeVar("_Fun")


_Made = TypeVar("_Made")


_MadePlain = TypeVar("_MadePlain")


_FunPlain = TypeVar("_FunPlain")


_Fun_contra = TypeVar("_Fun_contra", contravariant=True)


_FunPlain_contra = TypeVar("_FunPlain_contra", contravariant=True)


_Made_co = TypeVar("_Made_co", covariant=True)


_MadePlain_co = TypeVar("_MadePlain_co", covariant=True)


class AbstractTransform(eqx.Module):
    """A function, the first field, and how to transform it.

    It is a PyTree whose leaves are those of the function and of the settings. It has
    the name and signature of the function, and works as a method, whose instance is the
    first argument. Subclasses define `__call__` with its types.

    - `public_name`, `public_signature`: those of the function that makes it, from
        `also_decorator`.
    - `second_argument`: the name of an argument after the first that the function does
        not have.
    """

    public_name: ClassVar[str]
    public_signature: ClassVar[inspect.Signature]
    second_argument: ClassVar[str | None] = None

    # Unlike `__check_init__`, this comes before the checks of subclasses, which rely on
    # the types.
    def __post_init__(self) -> None:
        first = self._first
        check_callable(first, self.__wrapped__)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == first or value is field.default:
                continue
            # Equinox converts fields after this.
            value = field.metadata.get("converter", lambda x: x)(value)
            check_types({field.name: value}, {field.name: field.type}, always=True)

    @abc.abstractmethod
    def apply(self, args: Arguments, kwargs: dict[str, Any]) -> Any:
        """The result of calling the transformed function."""

    def fitting_size(
        self,
        name: str,
        total: int,
        args: Arguments,
        kwargs: dict[str, Any],
        **settings: Any,
    ) -> int:
        """The setting of this name as a number of at most `total` rows.

        A budget measures a call with these other `settings`.
        """

        def run_with(size: int) -> Callable[[tuple], Any]:
            def run(operands: Arguments) -> Any:
                transform, *call = operands
                sized = dataclasses.replace(transform, **{name: size}, **settings)
                with of_passes(None):
                    return sized.apply(*call)

            return run

        # The transform is one of the operands because memory depends on its settings.
        return resolve_size(getattr(self, name), total, run_with, (self, args, kwargs))

    def __hash__(self) -> int:
        # Fields can be dicts, such as `in_axes`, which have no hash. The structure of a
        # PyTree has one.
        leaves, treedef = jtu.tree_flatten(self)
        if any(map(eqx.is_array, leaves)):
            raise TypeError(
                f"A function that `{self.public_name}` returns has no hash if it "
                "contains arrays, as a module does, so that `jax.jit` and `jax.pmap` "
                "do not take it. Call it directly: it is already compiled. For several "
                "devices, put the examples on a `jax.sharding.Mesh`."
            )
        return hash((treedef, *leaves))

    def __eq__(self, other: object) -> Any:
        # `jax.jit` compiles equal functions only once.
        if isinstance(other, AbstractTransform):
            # Equal numbers of other types, such as 1 and 1.0, make other programs.
            both = [number_types(jtu.tree_leaves(x)) for x in (self, other)]
            if both[0] != both[1]:
                return False
        return super().__eq__(other)

    @property
    def _first(self) -> str:
        """The name of the field that is the function."""
        fields = dataclasses.fields(self)
        return next(field.name for field in fields if not field.kw_only)

    @property
    def __wrapped__(self) -> Callable:
        return getattr(self, self._first)

    @property
    def __signature__(self) -> inspect.Signature:
        signature = _signature(self.__wrapped__)
        if self.second_argument is None:
            return signature
        return with_second(signature, self.second_argument)

    def __repr__(self) -> str:
        settings = [f"{name}={text}" for name, text in _settings(self)]
        texts = [of_function(self.__wrapped__), *settings]
        return f"{self.public_name}({', '.join(texts)})"

    @overload
    def __get__(self: _Made, instance: None, owner: Any) -> _Made: ...
    @overload
    def __get__(
        self: Callable[Concatenate[Any, P], Out], instance: Any, owner: Any
    ) -> Callable[P, Out]: ...
    def __get__(self: Any, instance: Any, owner: Any) -> Any:
        del owner
        return self if instance is None else BoundMethod(self, instance)


class BoundMethod(eqx.Module):
    """A transformed method and its instance, which is the first argument."""

    transform: Callable
    instance: Any

    @property
    def __wrapped__(self) -> Callable:
        return self.transform

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.transform)
        parameters = [*signature.parameters.values()]
        # `*args` take the instance as well, and stay.
        is_open = parameters and parameters[0].kind == inspect.Parameter.VAR_POSITIONAL
        return signature.replace(parameters=parameters[0 if is_open else 1 :])

    def __repr__(self) -> str:
        return repr(self.__wrapped__).replace(
            "(", f"({type(self.instance).__name__}(...).", 1
        )

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return self.transform(self.instance, *args, **kwargs)


# The share of examples that may run twice. Otherwise, microbatches are made smaller.
_MOST_REPEATED = 0.1


class AbstractSharded(AbstractTransform):
    """A transform in which the compiler decides how arrays are sharded over a mesh.

    This holds for meshes with explicit axes, too.
    """

    @abc.abstractmethod
    def specs(self, args: Arguments, kwargs: dict[str, Any], out: PyTree) -> PyTree:
        """The sharding of the results of a call: a prefix of `PartitionSpec`s."""


class AbstractMicrobatched(AbstractTransform):
    """A transform that cuts a batch into microbatches of `microbatch_size`."""

    _: dataclasses.KW_ONLY
    microbatch_size: Size = eqx.field(default=None, converter=as_microbatch_size)

    @property
    def overlaps(self) -> bool:
        """Whether the last microbatch may have examples of the one before it again.

        Examples must be independent, and accumulators must count new ones only.
        """
        return False

    @property
    def couples(self) -> bool:
        """Whether the examples of a microbatch are coupled, so that it matters which.

        They are then the same on any number of devices.
        """
        return False

    def blocks(
        self, batch: Batch, args: Arguments, kwargs: dict[str, Any], total: int
    ) -> Blocks:
        """How a batch of `total` examples is cut."""
        size = self.fitting_size("microbatch_size", total, args, kwargs)
        parts = num_parts(batch.arrays, batch.axes, total)
        if self.couples and parts > 1 and isinstance(self.microbatch_size, int):
            # No other size, which would couple others.
            return Blocks(total, size, 1 if size % parts else parts, in_order=True)
        # Each part contributes the same share.
        size = min(-(-size // parts) * parts, max(total, 1))
        blocks = Blocks(total, size, parts, in_order=self.couples and parts > 1)
        if blocks.remainder == 0 or not self.overlaps:
            return blocks
        # As many microbatches, but each as small as they can be: fewer rows repeat.
        if _MOST_REPEATED * total < blocks.num * size - total:
            least = -(-total // (blocks.num * parts))
            # XLA for GPUs copies factors with a number of rows that 8 does not divide.
            least = -(-least // 8) * 8 if least >= 128 else least
            size = min(least * parts, size)
        return Blocks(total, size, parts, overlaps=total % size > 0)


class AbstractEarlyStop(AbstractMicrobatched):
    """A transform that can stop after some microbatches."""

    _: dataclasses.KW_ONLY
    num_real_microbatches: int | Integer[Array, ""] | None = None

    def num_examples(self, blocks: Blocks) -> int | Array:
        """The number of examples that run."""
        passes, count = current_passes(), _as_index(self.num_real_microbatches)
        if passes is not None:
            return passes.num_examples
        if count is None:
            return blocks.total
        return jnp.minimum(count * blocks.size, blocks.total)

    def limit(self, blocks: Blocks) -> int | Array | None:
        """How many microbatches to run, as for `run_blocks`; None for all."""
        return _check_limit(_as_index(self.num_real_microbatches), blocks.num)


def _as_index(count: int | Array | None) -> int | Array | None:
    """A number of microbatches in at least 32 bits, which numbers of examples need."""
    if not isinstance(count, jax.Array):
        return count
    return count.astype(jnp.int32) if jnp.iinfo(count.dtype).bits < 32 else count


def _check_limit(count: int | Array | None, num: int) -> int | Array | None:
    remedy = (
        f"`num_real_microbatches` must be between 0 and the number of microbatches, "
        f"{num}"
    )
    if isinstance(count, jax.Array):
        index = count.astype(jnp.int32)  # As indices of microbatches are.
        if not can_raise(count):  # `run_blocks` returns NaNs instead.
            return index
        is_outside = (count < 0) | (count > num)
        return eqx.error_if(count, is_outside, f"{remedy}.").astype(jnp.int32)
    if count is not None and not 0 <= count <= num:
        raise ValueError(f"{remedy}; got {count}. Use None to run all of them.")
    return count


def _signature(fun: Callable) -> inspect.Signature:
    # `inspect` looks into a partial function of Python, but not into this one.
    if isinstance(fun, eqx.Partial):
        fun = functools.partial(fun.func, *fun.args, **fun.keywords)
    return inspect.signature(fun)


def with_second(signature: inspect.Signature, name: str) -> inspect.Signature:
    """A signature with one more argument after the first.

    `equinox.filter_jit` binds arguments by signature and needs to find it there.
    """
    parameters = [*signature.parameters.values()]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in kinds:
        return signature
    first, *following = parameters
    # Two arguments of one name make no signature.
    while name in signature.parameters:
        name += "_"
    second = first.replace(name=name, annotation=first.empty)
    return signature.replace(parameters=[first, second, *following])


def of_function(fun: object) -> str:
    """How a function is displayed."""
    if isinstance(fun, (AbstractTransform, BoundMethod)):
        return repr(fun)
    if isinstance(fun, (functools.partial, eqx.Partial)):
        return f"Partial({of_function(fun.func)}, ...)"
    name = getattr(fun, "__name__", None)
    return name if isinstance(name, str) else f"{type(fun).__name__}(...)"


def _settings(transform: AbstractTransform) -> Iterator[tuple[str, str]]:
    """The settings that differ from their defaults."""
    _, *parameters = transform.public_signature.parameters.values()
    for parameter in parameters:
        text = of_setting(getattr(transform, parameter.name))
        if text != of_setting(parameter.default):
            yield parameter.name, text


def of_setting(value: PyTree) -> str:
    if isinstance(value, AbstractTransform) or inspect.isroutine(value):
        return of_function(value)
    if eqx.is_array(value):
        return f"{value.dtype}{[*value.shape]}"
    has_arrays = any(map(eqx.is_array, jtu.tree_leaves(value)))
    # A grid keeps the dict that users pass in one, whose order JAX does not change.
    if isinstance(value, collections.OrderedDict):
        value = dict(value)
    return f"{type(value).__name__}(...)" if has_arrays else shown(value)


def run_compiled(transform: AbstractTransform, /, *args: Any, **kwargs: Any) -> Any:
    """Compiles and runs a call of a transformed function."""
    __tracebackhide__ = True
    return _apply(resolved(transform), args, kwargs)


# One compiled function serves all transforms. The transform is an argument of it, so
# that arrays of modules are arguments of the program, and repeated calls with the same
# function and shapes are not retraced.
@compiled
def _apply(
    transform: AbstractTransform, args: Arguments, kwargs: dict[str, Any]
) -> Any:
    # An array that is yet to be summed over devices would be taken for the sum.
    for name, tree in [("args", args), *kwargs.items()]:
        check_reduced(tree, name)
    apply = lambda transform, *call: transform.apply(*call)
    with of_passes(None):
        return on_their_mesh(apply, (transform, args, kwargs))


def on_their_mesh(
    fun: Callable[..., PyTree],
    operands: Arguments,
    specs: Callable[..., PyTree] | None = None,
) -> PyTree:
    """A function of a transform, a call of it, and more, on the mesh of their arrays.

    `specs` has the sharding of the results, by default that of the transform's.
    """
    operands = on_one_mesh(operands)
    with within_mesh(operands), on_devices_of(operands):
        transform, *call = operands
        # Others run as they are written, with the mesh of their arrays.
        if not isinstance(transform, AbstractSharded):
            return fun(*operands)
        specs = functools.partial(specs or transform.specs, *call)
        return auto_sharded(fun, operands, (), specs)()


class Transform(
    Protocol[_FunPlain_contra, _Plain, _MadePlain_co, _Fun_contra, _Settings, _Made_co]
):
    """A transform in both forms: called with a function, and with settings only."""

    @overload
    def __call__(
        self, fun: _FunPlain_contra, /, *args: _Plain.args, **settings: _Plain.kwargs
    ) -> _MadePlain_co: ...
    @overload
    def __call__(
        self, fun: _Fun_contra, /, *args: _Settings.args, **settings: _Settings.kwargs
    ) -> _Made_co: ...
    @overload
    def __call__(
        self, *args: _Plain.args, **settings: _Plain.kwargs
    ) -> Callable[[_FunPlain_contra], _MadePlain_co]: ...
    @overload
    def __call__(
        self, *args: _Settings.args, **settings: _Settings.kwargs
    ) -> Callable[[_Fun_contra], _Made_co]: ...


# beartype, which tests use, does not know classes with several `ParamSpec`s.
if TYPE_CHECKING:

    @overload
    def also_decorator(
        name: str, cls: Callable[Concatenate[_Fun, _Settings], _Made]
    ) -> Transform[_Fun, _Settings, _Made, _Fun, _Settings, _Made]: ...
    @overload
    def also_decorator(
        name: str,
        cls: Callable[Concatenate[_Fun, _Settings], _Made],
        plain: Callable[Concatenate[_FunPlain, _Plain], _MadePlain],
    ) -> Transform[_FunPlain, _Plain, _MadePlain, _Fun, _Settings, _Made]: ...


def also_decorator(name: str, cls: Any, plain: Any = None) -> Any:
    """The public function `name` that makes transforms of class `cls`.

    Without a function, it returns a decorator. `plain` is the base class without the
    settings that change the type of the result, for type checkers.
    """
    del plain
    signature = inspect.signature(cls)
    first, *rest = signature.parameters.values()

    @functools.wraps(cls, updated=())
    def make(*args: Any, **settings: Any) -> Any:
        settings = {key: _python_setting(value) for key, value in settings.items()}
        fun = args[0] if args else settings.get(first.name)
        expected = public if fun is None else signature
        arguments = bound_arguments(name, expected, args, settings)
        if fun is None:
            arguments.pop(first.name, None)
            return functools.partial(make, **arguments)
        # Before Equinox warns of it.
        check_unjitted(fun)
        return eqx.module_update_wrapper(cls(**arguments))

    # Settings of the class itself come before those of its bases. A decorator takes
    # settings only.
    bases = [inspect.get_annotations(base) for base in cls.__mro__]
    level = lambda x: next(i for i, base in enumerate(bases) if x.name in base)
    rest = sorted(rest, key=lambda x: (x.kind, level(x)))
    optional = [x.replace(default=None) if x.default is x.empty else x for x in rest]
    parameters = [first.replace(default=None), *optional]
    public = signature.replace(parameters=parameters, return_annotation=Any)
    wrapper = cast(Any, make)
    wrapper.__name__ = wrapper.__qualname__ = name
    wrapper.__signature__ = public
    cls.public_name, cls.public_signature = name, public
    return make


def _python_setting(value: PyTree) -> PyTree:
    """Converts bools and ints of NumPy, which count as arrays, to those of Python."""
    is_setting = lambda x: (
        isinstance(x, (np.bool_, np.integer))
        or (isinstance(x, np.ndarray) and x.shape == () and x.dtype.kind in "biu")
    )
    is_module = lambda x: isinstance(x, eqx.Module)
    if not any(map(is_setting, jtu.tree_leaves(value, is_leaf=is_module))):
        return value
    convert = lambda x: x.item() if is_setting(x) else x
    return jtu.tree_map(convert, value, is_leaf=is_module)
