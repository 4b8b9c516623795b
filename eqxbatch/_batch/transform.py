"""The Module that every transform returns, and its settings."""

import abc
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Int, PyTree

from .._base.jaxprs import compiled, text_of_numbers
from .._base.mesh import auto_sharded, num_parts, on_one_mesh, within_mesh
from .._base.mistakes import bound_arguments, check_not_jitted
from .._base.shapes import checked
from .._base.trees import as_int, described, shown
from .accumulators import Last
from .cut import Batch, Blocks
from .loop import run_blocks
from .memory import check_size, MemoryBudget, resolve_size, resolved
from .slots import Slots


class AbstractTransform(eqx.Module):
    """The settings of a transform, and what it does with a call.

    - `is_compiled`: whether calls are compiled as a whole. If not, `apply` itself
        decides what to compile.
    - `takes_instance`: whether the instance of a method is an ordinary argument. If
        not, it is part of the function.
    """

    is_compiled: ClassVar[bool]
    takes_instance: ClassVar[bool]

    @abc.abstractmethod
    def apply(self, fun: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of calling the transformed `fun`."""


class AbstractAutoSharded(AbstractTransform):
    """A transform in which the compiler decides how arrays are sharded over a mesh.

    This holds for meshes with explicit axes, too.
    """

    @abc.abstractmethod
    def specs(
        self, call: tuple[Callable, tuple, dict[str, Any]], out: PyTree
    ) -> PyTree:
        """The sharding of the results of a call: a prefix of `PartitionSpec`s."""


class AbstractOtherArguments(AbstractTransform):
    """A transform that changes the arguments of the function."""

    @abc.abstractmethod
    def signature(self, own: inspect.Signature) -> inspect.Signature:
        """The signature of a transformed function; `own` is that of the original."""


def with_second(own: inspect.Signature, name: str) -> inspect.Signature:
    """A signature with one more argument after the first.

    `equinox.filter_jit` binds arguments by signature and needs to find it there.
    """
    parameters = [*own.parameters.values()]
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    if not parameters or parameters[0].kind not in kinds:
        return own
    first, *rest = parameters
    while name in own.parameters:
        name += "_"
    second = first.replace(name=name, annotation=first.empty)
    return own.replace(parameters=[first, second, *rest])


class Transformed(eqx.Module):
    """A transformed function.

    It is a PyTree whose leaves are those of the wrapped function and of the transform's
    settings. It works as a method and has the name and signature of the wrapped
    function. For a method whose instance is an ordinary argument, `_bound` holds the
    instance.
    """

    _transform: AbstractTransform
    _fun: Callable
    _name: str = eqx.field(static=True)
    _bound: tuple = ()

    def __hash__(self) -> int:
        # Fields can be dicts, such as `in_axes`, which have no hash. The structure of a
        # PyTree has one.
        leaves, treedef = jtu.tree_flatten(self)
        if any(map(eqx.is_array, leaves)):
            raise TypeError(
                f"A function that `{self._name}` returns has no hash if there are "
                "arrays in it, as in a module, so that `jax.jit` and `jax.pmap` do not "
                "take it. Call it directly: it is already compiled. For several "
                "devices, put the examples on a `jax.sharding.Mesh`."
            )
        return hash((treedef, *leaves))

    def __eq__(self, other: object) -> Any:
        # `jax.jit` compiles equal functions only once.
        if isinstance(other, Transformed):
            own, others = jtu.tree_leaves(self), jtu.tree_leaves(other)
            if text_of_numbers(own) != text_of_numbers(others):
                return False
        return super().__eq__(other)

    @property
    def __wrapped__(self) -> Callable:
        return self._fun

    @property
    def __signature__(self) -> inspect.Signature:
        own = _signature(self._fun)
        if isinstance(self._transform, AbstractOtherArguments):
            own = self._transform.signature(own)
        parameters = [*own.parameters.values()]
        is_open = parameters and parameters[0].kind == inspect.Parameter.VAR_POSITIONAL
        num = 0 if is_open else len(self._bound)
        return own.replace(parameters=parameters[num:])

    def __repr__(self) -> str:
        owners = [f"{type(instance).__name__}(...)." for instance in self._bound]
        fun = "".join([*owners, _of_function(self._fun)])
        settings = _settings(self._transform, _PUBLIC[self._name])
        return f"{self._name}({', '.join([fun, *settings])})"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        args = (*self._bound, *args)
        if self._transform.is_compiled:
            return _apply(resolved(self._transform), self._fun, args, kwargs)
        return self._transform.apply(self._fun, args, kwargs)

    def __get__(self, instance: Any, owner: Any) -> Callable:
        del owner
        if instance is None:
            return self
        if self._transform.takes_instance:
            return Transformed(self._transform, self._fun, self._name, (instance,))
        method = eqx.Partial(self._fun, instance)
        return Transformed(self._transform, method, self._name)


def _signature(fun: Callable) -> inspect.Signature:
    if isinstance(fun, eqx.Partial):
        fun = functools.partial(fun.func, *fun.args, **fun.keywords)
    return inspect.signature(fun)


# The parameters of the public functions that make transforms.
_PUBLIC: dict[str, Mapping[str, inspect.Parameter]] = {}


def _of_function(fun: Callable) -> str:
    """How a function is displayed."""
    if isinstance(fun, Transformed):
        return repr(fun)
    if isinstance(fun, (functools.partial, eqx.Partial)):
        return f"Partial({_of_function(fun.func)}, ...)"
    own = getattr(fun, "__name__", None)
    return own if isinstance(own, str) else f"{type(fun).__name__}(...)"


def _settings(
    module: eqx.Module, parameters: Mapping[str, inspect.Parameter]
) -> Iterator[str]:
    """The settings of a transform that differ from their defaults.

    Fields that are not settings themselves contain settings.
    """
    for field in dataclasses.fields(module):
        value = getattr(module, field.name)
        parameter = parameters.get(field.name)
        if parameter is None:
            if isinstance(value, eqx.Module):
                yield from _settings(value, parameters)
            continue
        text, default = _of_setting(value), _of_setting(parameter.default)
        # `store="device"` is stored as None.
        is_device = value is None and isinstance(parameter.default, str)
        if text != default and not is_device:
            yield f"{field.name}={text}"


def _of_setting(value: Any) -> str:
    if isinstance(value, Transformed) or inspect.isroutine(value):
        return _of_function(value)
    if eqx.is_array(value):
        return f"{value.dtype}{[*value.shape]}"
    has_arrays = any(map(eqx.is_array, jtu.tree_leaves(value)))
    return f"{type(value).__name__}(...)" if has_arrays else shown(value)


# One compiled function serves all transforms. The called function is an argument of it,
# so that arrays of modules are arguments of the program, and repeated calls with the
# same function and shapes are not retraced.
@compiled
def _apply(
    transform: AbstractTransform, fun: Callable, args: tuple, kwargs: dict[str, Any]
) -> Any:
    operands = on_one_mesh((transform, fun, args, kwargs))
    apply = lambda transform, *call: transform.apply(*call)
    with within_mesh(operands):
        spread = operands[0]
        if not isinstance(spread, AbstractAutoSharded):
            return apply(*operands)
        specs = functools.partial(spread.specs, operands[1:])
        return auto_sharded(apply, operands, (), specs)()


def transformed(transform: AbstractTransform, fun: Any, name: str) -> Transformed:
    """Wraps `fun`; `name` is the public function that does so.

    Raises `TypeError` if it is not callable.
    """
    if not callable(fun):
        raise TypeError(f"`fun` must be callable; got {described(fun)}.")
    check_not_jitted(fun)
    wrapper: Any = eqx.module_update_wrapper(Transformed(transform, fun, name))
    return wrapper


# Settings that transforms convert; the conversion checks their types.
_CONVERTED = (
    "accumulator",
    "block_size",
    "damping",
    "fun",
    "kernel_fn",
    "loss",
    "mesh",
    "mesh_axis",
    "method",
    "metrics",
    "microbatch_size",
    "mode",
    "momentum",
    "num_blocks",
    "num_real_microbatches",
    "out_axes",
    "progress",
    "residual",
    "return",
    "solver",
    "space",
    "store",
    "symmetric",
    "transform",
    "weights",
)


def also_decorator(public: Callable) -> Callable[..., Any]:
    """Makes the first argument of `public`, a function, optional.

    Without it, `public` returns a decorator. For type checkers, a Protocol in a file of
    `*signature*`s describes both forms. It is not imported at run time: transforms are
    decorated by `cast("Typed[TheProtocol]", also_decorator)`.
    """
    public = checked(public, but=_CONVERTED)
    signature = inspect.signature(public)
    name = next(iter(signature.parameters))
    _PUBLIC[public.__name__] = signature.parameters

    @functools.wraps(public)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: python_settings(value) for name, value in kwargs.items()}
        if (args[0] if args else kwargs.get(name)) is not None:
            return public(*args, **kwargs)
        settings = bound_arguments(public.__name__, signature, args, kwargs)
        settings.pop(name, None)
        return functools.partial(wrapper, **settings)

    return wrapper


def python_settings(settings: PyTree) -> PyTree:
    """Converts bools and ints of NumPy, which count as arrays, to those of Python."""
    is_setting = lambda x: isinstance(x, (np.bool_, np.integer))
    is_module = lambda x: isinstance(x, eqx.Module)
    if not any(map(is_setting, jtu.tree_leaves(settings, is_leaf=is_module))):
        return settings
    convert = lambda x: x.item() if is_setting(x) else x
    return jtu.tree_map(convert, settings, is_leaf=is_module)


class Blocking(eqx.Module):
    """How a batch is cut into microbatches, and how many of them run."""

    microbatch_size: int | MemoryBudget | None
    num_real_microbatches: int | Int[Array, ""] | None
    checkpoint: bool

    def __init__(
        self, microbatch_size: Any, num_real_microbatches: Any, checkpoint: bool
    ):
        self.microbatch_size = check_size("microbatch_size", microbatch_size)
        self.num_real_microbatches = _check_count(num_real_microbatches)
        self.checkpoint = checkpoint

    def blocks(
        self,
        batch: Batch,
        total: int,
        transform: AbstractTransform,
        call: tuple[Callable, tuple, dict[str, Any]],
    ) -> Blocks:
        """How a batch of `total` examples is cut.

        A budget measures the program of `transform`, which has this `blocking`, applied
        to `call`.
        """

        def run_with(size: int) -> Callable[[tuple], Any]:
            def run(operands: tuple) -> Any:
                transform, *call = operands
                blocking = dataclasses.replace(transform.blocking, microbatch_size=size)
                return dataclasses.replace(transform, blocking=blocking).apply(*call)

            return run

        # The transform is one of the operands because memory depends on its settings.
        operands = (transform, *call)
        size = resolve_size(self.microbatch_size, total, run_with, operands)
        parts = num_parts(batch.arrays, batch.axes, total)
        # Each part contributes the same share.
        return Blocks(total, min(-(-size // parts) * parts, max(total, 1)), parts)

    def num_examples(self, blocks: Blocks) -> int | Array:
        """The number of examples that run."""
        count = self.num_real_microbatches
        if count is None:
            return blocks.total
        return jnp.minimum(count * blocks.size, blocks.total)

    def run(
        self,
        arrays: list,
        axes: tuple[int, ...],
        blocks: Blocks,
        fun: Callable[[list, int], tuple[PyTree, Any]],
        make_slots: Callable[[PyTree, Any], Slots],
    ) -> PyTree:
        """Runs `fun` over the microbatches of a batch; see `run_blocks`."""
        limit = _check_limit(self.num_real_microbatches, blocks.num)

        def slots(output: PyTree, aux: Any) -> Slots:
            found = make_slots(output, aux).with_states(output)
            if isinstance(limit, int) and limit == 0:
                _check_needs_none(found)
            return found

        return run_blocks(fun, arrays, axes, blocks, slots, limit, self.checkpoint)


def _check_count(count: Any) -> int | Array | None:
    if count is None:
        return None
    if isinstance(count, jax.Array):
        if count.shape == () and jnp.issubdtype(count.dtype, jnp.integer):
            # The numbers of microbatches and examples may need more bits.
            is_narrow = jnp.iinfo(count.dtype).bits < 32
            return count.astype(jnp.int32) if is_narrow else count
        got = f"an array of shape {count.shape} and dtype {count.dtype}"
    else:
        number = as_int(count)
        if number is not None:
            return number
        got = f"{described(count)}"
    raise TypeError(
        "`num_real_microbatches` must be an int, an integer array of shape (), or "
        f"None; got {got}."
    )


def _check_limit(count: int | Array | None, num: int) -> int | Array | None:
    remedy = (
        f"`num_real_microbatches` must be between 0 and the number of microbatches, "
        f"{num}"
    )
    if isinstance(count, jax.Array):
        is_outside = (count < 0) | (count > num)
        # Indices of microbatches have this dtype, too.
        return eqx.error_if(count, is_outside, f"{remedy}.").astype(jnp.int32)
    if count is not None and not 0 <= count <= num:
        raise ValueError(f"{remedy}; got {count}. Use None to run all of them.")
    return count


def _check_needs_none(slots: Slots) -> None:
    """Raises for results that do not exist if no microbatch runs."""
    for slot in slots.slots:
        if isinstance(slot.accumulator, Last):
            raise ValueError(
                f"output{slot.path} is that of the last example that runs, because of "
                "`Last` or None in `out_axes`, but `num_real_microbatches` is 0, so "
                "that none runs. Run at least one microbatch."
            )
