"""What depends on the platform of a program.

Which program is cheaper, the precision of products, which some platforms round, and the
programs that are compiled for each. Workarounds for XLA on CPUs: separate programs,
mirror images, layouts.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Inexact, Int, PyTree, Shaped

from .checks import warn_of_new_functions, without_layers
from .jaxprs import (
    as_remat,
    callee,
    equations_in,
    evaluate_with,
    is_remat,
    name_of,
    parameters,
    run_jaxpr,
    vary,
    varying,
)
from .mesh import where_it_is, zeros_like
from .trees import safe_zip
from .versions import is_compiler_option, partitions, with_barrier


@dataclasses.dataclass(frozen=True)
class Platform:
    """Numbers that choose among programs with the same result.

    Only orders of magnitude matter.

    - `flops_per_byte`: the number of floating-point operations that take as long as
        moving a byte.
    - `exact_product`: how much slower products are that keep all digits of float32.
    - `grouped_convolution`: how much slower per-example gradients of a convolution are
        than matrix products, because `vmap` turns them into grouped convolutions.
    - `block_bytes`: the size of what is read again soon after it was written: gradients
        that are formed for some examples, tiles, and blocks contracted together.
    - `factor_bytes`: what the factors of some examples may take, whatever the size of
        the result.
    - `patch_bytes`: what the patches of some images may take, whatever the size of the
        images.
    - `joins_sums`: whether a kernel takes longer to start than to add up a few numbers.
    """

    flops_per_byte: float
    exact_product: float
    grouped_convolution: float
    block_bytes: int
    factor_bytes: int
    patch_bytes: int
    joins_sums: bool


# Rounded from `python -m benchmarks --suite costs` on 2 cores of an AMD EPYC. Blocks
# stay in the caches.
CPU = Platform(8.0, 1.0, 4.0, 2**22, 2**24, 0, False)


# Measured on an H100: 408 TFLOP/s for float32 in TF32, JAX's default, and 3.0 TB/s. (It
# is 300 FLOP a byte in bfloat16.) With all digits it is 52 TFLOP/s; for transformers of
# the benchmarks, 12 predicts the faster program: a branch comes with such norms. Blocks
# are so large that their kernels take longer than to launch these, and small beside the
# memory of the device. With contractions as large as these, an H200 does 66 FLOPs a
# byte, and grouped convolutions are 2 times slower.
GPU = Platform(136.0, 12.0, 4.0, 2**28, 2**28, 2**28, True)


# From the data sheet of a v5e: 197 TFLOP/s in bfloat16, JAX's default, and 819 GB/s.
# All digits of float32 take six passes.
TPU = Platform(240.0, 6.0, 4.0, 2**27, 2**27, 2**24, False)


_PLATFORMS = {"cpu": CPU, "tpu": TPU}


_CHOSEN: contextvars.ContextVar[Platform | None]
_CHOSEN = contextvars.ContextVar("platform", default=None)


def platform(arrays: Sequence[Any] = ()) -> Platform:
    """The platform that a program is for, of which some arrays are arguments.

    It is that of arrays which are committed to a device, or else that of JAX's default
    device.
    """
    chosen = _CHOSEN.get()
    if chosen is not None:
        return chosen
    config: Any = jax.config  # Type checkers do not know its settings.
    device = config.jax_default_device
    for x in arrays:
        if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.committed:
            device = next(iter(x.devices()))
            break
    name = getattr(device, "platform", device) or jax.default_backend()
    return _PLATFORMS.get(name, GPU)


def for_platform(chosen: Platform) -> contextlib.AbstractContextManager:
    """A context in which programs are for a platform, whatever devices there are."""
    return assigned(_CHOSEN, chosen)


@contextlib.contextmanager
def assigned(variable: contextvars.ContextVar, value: Any) -> Iterator[None]:
    """A context in which a variable has a value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_PRECISIONS = (lax.Precision.DEFAULT, lax.Precision.HIGH, lax.Precision.HIGHEST)


# The setting in one of the contexts below, and that of the user around all of them.
_INSIDE: contextvars.ContextVar[tuple[str, str | None] | None]
_INSIDE = contextvars.ContextVar("inside", default=None)


def _setting() -> str | None:
    return getattr(jax.config, "jax_default_matmul_precision", None)


def user_precision() -> str | None:
    """The user's `jax.default_matmul_precision`, in the contexts below as outside."""
    inside, now = _INSIDE.get(), _setting()
    # A function of the user may set it again in one of them.
    return inside[1] if inside is not None and inside[0] == now else now


def exact_products() -> contextlib.AbstractContextManager:
    """A context in which products of float32 arrays keep their digits.

    On GPUs and TPUs, JAX rounds the factors of products to 10 or 7 bits by default.
    This is for results that are judged to more digits. The user's own context
    `jax.default_matmul_precision` has the last word.
    """
    is_chosen = user_precision() is not None
    return contextlib.nullcontext() if is_chosen else _with_precision("highest")


def products_of(*programs: Any) -> contextlib.AbstractContextManager:
    """A context in which products have the precision that closed jaxprs ask for.

    If they ask for several, it is the highest. Without it, a contraction that stands
    for a derivative of `jnp.dot(x, y, precision="highest")` would be rounded on GPUs
    and TPUs. Programs that ask for none leave JAX's own setting. `exact_products`
    around it is not lowered.
    """
    inside = _INSIDE.get()
    is_exact = inside is not None and inside[0] == _setting() == "highest"
    named = {x for closed in programs for x in _precisions(closed)}
    if is_exact or not named:
        return contextlib.nullcontext()
    if len(named) == 1:
        (one,) = named
        is_preset = isinstance(one, lax.DotAlgorithmPreset)
        name = one.name if is_preset else _name(one)
    else:
        name = max(map(_name, named), key=_NAMES.index)
    return _with_precision(name)


_NAMES = [x.name.lower() for x in _PRECISIONS]


def _name(precision: Any) -> str:
    """The name of a precision; "highest" for what has no order among them."""
    return precision.name.lower() if precision in _PRECISIONS else "highest"


def _precisions(closed: Any) -> Iterator[Any]:
    """The precisions that the equations of a program name."""
    for eqn in equations_in(closed):
        precision = parameters(eqn).get("precision")
        # One for each factor; an algorithm is a tuple, too.
        is_pair = type(precision) is tuple
        yield from (x for x in (precision if is_pair else [precision]) if x is not None)


@contextlib.contextmanager
def _with_precision(name: str) -> Iterator[None]:
    inside = name, user_precision()
    with assigned(_INSIDE, inside), jax.default_matmul_precision(name):
        yield


_Function = TypeVar("_Function", bound=Callable[..., Any])


_NUMBERS = frozenset((bool, int, float, complex))


_ARRAYS = (jax.Array, np.ndarray, np.generic)


def number_types(leaves: Sequence[Any]) -> str:
    """What tells numbers apart that are equal: `2 == 2.0 == True`, and `0.0 == -0.0`.

    Programs differ for these, so that caches of them need it as a part of their keys.
    """
    return repr([x for x in leaves if type(x) in _NUMBERS])


# XLA for CPUs assigns memory before LLVM optimises the code. Optimisation takes up to
# half of the time and does not change the memory.
_UNOPTIMISED = {"cpu": {"xla_backend_optimization_level": 0}}


# XLA for CPUs gives a product and what follows it to YNNPACK, as
# one fusion, whose memory it reports as 0: softmax of attention in 36 MB blocks is seen
# to take 72 MB, and 73 MB are reported without such fusions. The value is a list of
# kinds; this one is empty.
_WITHOUT_LIBRARY = {"cpu": {"xla_cpu_experimental_ynn_fusion_type": ""}}


def memory_options(
    backend: str, *, optimised: bool = False, with_library: bool = False
) -> dict[str, Any]:
    """Compiler options with which XLA reports the memory that a program may take.

    They are for programs that are compiled only to be measured.
    """
    options: dict[str, Any] = {} if optimised else {**_UNOPTIMISED.get(backend, {})}
    if not with_library and has_library(backend):
        options |= _WITHOUT_LIBRARY[backend]
    return options


def has_library(backend: str) -> bool:
    """Whether the compiler gives products to a library, and can do without."""
    options = _WITHOUT_LIBRARY.get(backend, {})
    return any(is_compiler_option(*x) for x in options.items())


def num_bytes(tree: PyTree) -> int:
    """The number of bytes of some arrays or structs."""
    return sum(x.size * x.dtype.itemsize for x in jtu.tree_leaves(tree))


# Not a Module: Equinox would warn of the user's own functions of JAX in the PyTree.
@jtu.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Split:
    """A PyTree as its arrays, which programs take and return, and the rest of it."""

    arrays: list
    rest: tuple = eqx.field(static=True)

    @classmethod
    def of(cls, tree: PyTree) -> "_Split":
        leaves, treedef = jtu.tree_flatten(tree)
        arrays, static = eqx.partition(leaves, eqx.is_array)
        return cls([x for x in arrays if x is not None], (treedef, (*static,)))

    @property
    def tree(self) -> PyTree:
        (treedef, static), arrays = self.rest, iter(self.arrays)
        return treedef.unflatten([next(arrays) if x is None else x for x in static])


class _CallsHostError(Exception):
    """Has a program that calls functions on the host."""


def calls_host(eqn: Any) -> bool:
    """Whether an equation calls a function on the host."""
    # `equinox` hides programs in its own primitive.
    return any(name in eqn.primitive.name for name in ("callback", "noinline"))


def compiled(
    fun: _Function,
    *,
    donate: Literal["none", "all-except-first"] = "none",
    inline: bool = False,
    waits: bool = True,
) -> _Function:
    """`equinox.filter_jit`, which gives equal numbers of other types other programs.

    So it does for arrays on another platform. With `inline`, other programs that call
    it have its equations in place of a call. With `waits=False`, a call returns before
    its program has ended, unless that reads memory of the user, or calls functions on
    the host, whose errors belong to the call.
    """
    traces = 0
    # Those that call functions on the host.
    waiting: dict[frozenset, Callable] = {}

    def run(key: frozenset, *lists: list) -> _Split:
        ((treedef, static, _, chosen),) = key

        def called(*lists: list) -> _Split:
            nonlocal traces
            traces += 1
            arrays = [*itertools.chain(*lists)]
            of_first, of_rest = _Split(arrays, (treedef, static)).tree
            with for_platform(chosen):
                return _Split.of(fun(of_first, *of_rest))

        called.__name__, called.__qualname__ = fun.__name__, fun.__qualname__
        if getattr(jax.config, "jax_disable_jit", False):
            return called(*lists)
        inner = jax.jit(called, inline=inline)
        if any(map(calls_host, equations_in(inner.trace(*lists).jaxpr))):
            raise _CallsHostError(inner)
        return inner(*lists)

    run.__name__, run.__qualname__ = fun.__name__, fun.__qualname__
    donated = () if donate == "none" else 2
    jitted = jax.jit(run, static_argnums=0, donate_argnums=donated, inline=inline)
    # It waits for the end of a program, and explains errors of `equinox.error_if`. Its
    # types lack the settings of `jax.jit`.
    jit: Any = eqx.filter_jit
    waited = jit(lambda first, *rest: first[0](first[1], *rest), donate=donate)

    def computed(key: frozenset, lists: list[list]) -> _Split:
        if key not in waiting:
            try:
                return jitted(key, *lists)
            except _CallsHostError as e:
                (waiting[key],) = e.args
        return waited((waiting[key], lists[0]), *lists[1:])

    @functools.wraps(fun)
    def wrapper(first: Any, *rest: Any) -> Any:
        __tracebackhide__ = True
        leaves, treedef = jtu.tree_flatten((first, rest))
        arrays, static = [], []
        for x in leaves:
            is_array = isinstance(x, _ARRAYS)
            static.append(None if is_array else x)
            if is_array:
                arrays.append(x)
        # A set is one leaf for JAX, which would go through a tuple in each call.
        content = treedef, (*static,), number_types(static), platform(arrays)
        key, lists = frozenset([content]), [arrays]
        if donate != "none":
            num = sum(map(eqx.is_array, jtu.tree_leaves(first)))
            lists = [arrays[:num], arrays[num:]]
        before = traces
        try:
            out = computed(key, lists)
        except Exception as e:
            raise e.with_traceback(without_layers(e.__traceback__))  # noqa: B904
        # JAX reads arrays of NumPy later, when their owner may have changed them.
        if waits or any(isinstance(x, np.ndarray) for x in arrays):
            jax.block_until_ready(out)
        if traces != before and not any(isinstance(x, Tracer) for x in out.arrays):
            warn_of_new_functions(static, (fun, treedef, *map(jax.typeof, arrays)))
        return out.tree

    return cast(_Function, wrapper)


def in_opaque_branch(
    run: Callable[..., list[Array]], always: Bool[Array, ""]
) -> Callable[..., list[Array]]:
    """Makes `run` a separate program, as far as XLA for CPUs can tell.

    Otherwise, XLA would fuse the computation of a block with writing it to its place,
    and once more with writing its mirror image. The block would be computed twice, with
    different rounding, and on a single core each time, like in-place writes. XLA does
    not look through a condition, even one that is `always` true.
    """
    run = jax.jit(run)  # Traced only once.

    def run_apart(*args: Any) -> list:
        structs = jax.eval_shape(run, *args)
        skip = lambda *_: jtu.tree_map(zeros_like, structs)
        # If the program is compiled for another device, XLA may see that it is true.
        is_true = lambda x: x | True
        known = lax.platform_dependent(always, cpu=lambda x: x, default=is_true)
        return lax.cond(known, run, skip, *args)

    return run_apart


def after_loop(
    always: Bool[Array, ""], results: PyTree, later: PyTree
) -> tuple[Bool[Array, ""], PyTree, PyTree]:
    """Condition, results of a loop and what comes later, so that it does come later.

    What does not depend on a loop may run before it, and then shares no memory with it.
    As a branch, it does in XLA for CPUs, which does not know that a count of steps is
    `always` as large. Other devices know, and have a barrier instead.
    """
    later, static = eqx.partition(later, eqx.is_array)
    in_order = lambda x, *trees: (x | True, *in_turn(trees))
    always, results, later = lax.platform_dependent(
        *(always, results, later), cpu=lambda *trees: trees, default=in_order
    )
    return always, results, eqx.combine(later, static)


def in_turn(trees: PyTree) -> PyTree:
    """Arrays of which none is read before all are computed."""
    leaves, treedef = jtu.tree_flatten(trees)
    return jtu.tree_unflatten(treedef, with_barrier(leaves))


def materialised(arrays: list[Array], always: Bool[Array, ""]) -> list[Array]:
    """`arrays`, written completely before anything reads them.

    XLA for CPUs writes rows of an array in place while it reads their inputs from the
    same memory. It makes sure that nothing is read after it was overwritten, but not if
    the array is reshaped afterwards: `lax.dynamic_update_slice(x, y, at)[None]` is
    wrong if `y` permutes a slice of `x` (https://github.com/openxla/xla/issues/49176).
    """
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    keys, numbers = eqx.partition(arrays, is_key)
    return eqx.combine(keys, in_opaque_branch(lambda x: x, always)(numbers))


def opaque_true(x: Inexact[Array, "..."]) -> Bool[Array, ""]:
    """True, but not known to be true at compile time."""
    return jnp.all((x == x) | (x != x))


def runtime_indices(
    numbers: Sequence[int], x: Inexact[Array, "..."]
) -> list[Int[Array, ""]]:
    """Start indices that are not known at compile time.

    XLA for CPUs compiles reads and writes at constant indices separately for each
    index. With these, they share the compiled code. `x` is any array, preferably a
    small one.
    """
    known = lambda: [jnp.asarray(i, "int32") for i in numbers]
    return in_opaque_branch(known, opaque_true(x))()


def unstack(arrays: list[Array], like: Sequence[Array]) -> list[list[Array]]:
    """The entries of each array along its axis 0; `like` are arguments of the program.

    (Results may be constants although `like` is not, such as the Hessian of a square.)
    """
    most = max((x.shape[0] for x in arrays), default=0)
    indices = []
    if most > 1:
        indices = runtime_indices(range(most), min(like, key=lambda x: x.size))

    def entries(x: Array) -> list[Array]:
        if x.shape[0] == 1:
            return [lax.squeeze(x, [0])]
        first = indices[: x.shape[0]]
        take = functools.partial(
            lax.dynamic_index_in_dim, keepdims=False, allow_negative_indices=False
        )
        return [take(x, i) for i in first]

    return [entries(x) for x in arrays]


_PIECE = 256


def mirrored(x: Shaped[Array, "n n"]) -> Shaped[Array, "n n"]:
    """Copies entries on and above the diagonal to their mirror images below it.

    For 512 or more rows, XLA for CPUs takes minutes to compile the selection between an
    entry and its mirror image. So this is done in pieces, which are written in place.
    """
    default = _mirrored_at_once
    if x.shape[0] <= _PIECE:
        return default(x)
    return lax.platform_dependent(x, cpu=_mirrored_in_pieces, default=default)


def _mirrored_at_once(x: Array) -> Array:
    # An entry and its mirror image must not be computed with different rounding.
    x = lax.optimization_barrier(x)
    index = jnp.arange(x.shape[0])
    return jnp.where(index[:, None] <= index[None], x, x.T)


def _mirrored_in_pieces(x: Array) -> Array:
    def run(x: Array, places: Array, mirror: Callable[[Array], Array]) -> Array:
        def step(x: Array, corner: Array) -> tuple[Array, None]:
            piece = lax.dynamic_slice(x, corner, (_PIECE, _PIECE))
            return lax.dynamic_update_slice(x, mirror(piece), corner[::-1]), None

        return lax.scan(step, x, places)[0]

    starts = _starts(x.shape[0])
    # The last two pieces may overlap. What the other pieces then have below the
    # diagonal is symmetric by the time they are read.
    x = run(x, jnp.stack([starts, starts], -1), _mirrored_at_once)
    above = jnp.triu_indices(len(starts), 1)
    return run(x, jnp.stack([starts[i] for i in above], -1), jnp.transpose)


def with_mirror_image(
    x: Shaped[Array, "n n ..."],
    combine: Callable[[Array, Array], Array],
    exchanged: Callable[[Array], Array],
) -> Shaped[Array, "n n ..."]:
    """`combine(x, exchanged(x))`, which must be symmetric.

    XLA for CPUs reads the columns of a large array one number at a time, with large
    strides. So this is done in pieces small enough for both images to fit into a cache.
    A product with 2,048 rows then takes less than half the time.
    """
    at_once = lambda x: combine(x, exchanged(x))
    if x.shape[0] <= 2 * _PIECE:
        return at_once(x)
    zeros = [jnp.zeros((), jnp.int32) for _ in x.shape[2:]]
    starts = _starts(x.shape[0]).astype(jnp.int32)
    row, column = jnp.triu_indices(len(starts))

    def step(result: Array, corner: Array) -> tuple[Array, None]:
        here, there = [*corner, *zeros], [*corner[::-1], *zeros]
        size = (_PIECE, _PIECE, *x.shape[2:])
        pieces = [lax.dynamic_slice(x, place, size) for place in (here, there)]
        piece = combine(pieces[0], exchanged(pieces[1]))
        result = lax.dynamic_update_slice(result, piece, here)
        return lax.dynamic_update_slice(result, exchanged(piece), there), None

    def in_pieces(x: Array) -> Array:
        corners = jnp.stack([starts[row], starts[column]], axis=-1)
        zero = vary(jnp.zeros_like(x), varying(jax.typeof(x)))
        return lax.scan(step, zero, corners)[0]

    return lax.platform_dependent(x, cpu=in_pieces, default=at_once)


def _starts(num: int) -> Array:
    """The start indices of pieces of equal size."""
    size = min(num, _PIECE)
    return jnp.minimum(jnp.arange(0, max(num, 1), max(size, 1)), num - size)


# Up to so many output channels of one input channel, channels last is several times
# slower, also where XLA has to run the convolution inside a loop.
_FEW_CHANNELS = 16


def evaluate_in_loop(jaxpr: Any, consts: list, args: list) -> list:
    """Evaluates a jaxpr that is going to be the body of a loop, or a branch.

    XLA for CPUs converts convolutions to the layout of its fast kernels (batch,
    spatial, features), but only at the top level of a program. Inside a loop or a
    branch, a convolution in the layout of `equinox.nn.Conv` (batch, features, spatial)
    runs several times slower than outside. So the layout is converted here if the
    program is compiled for CPUs, where that is faster. On other devices, nothing is
    changed.
    """
    # Effects, such as a debug print, belong to the whole jaxpr, so it is not split.
    if jaxpr.effects or not _has_convolution(jaxpr):
        return run_jaxpr(jaxpr, consts, args)

    def replace(_: int, eqn: Any) -> Callable[[list], list] | None:
        if _is_convolution(eqn) and not _is_narrow(eqn):
            return lambda ins: [_convolution(eqn, *ins)]
        closed = callee(eqn)
        if closed is None or not _has_convolution(closed.jaxpr):
            return None
        run = lambda *ins: evaluate_in_loop(closed.jaxpr, closed.consts, [*ins])
        if is_remat(eqn):
            # A policy may keep convolutions, but does not find those below.
            if parameters(eqn)["policy"] is not None:
                return None
            run = as_remat(eqn, run)
        return lambda ins: run(*ins)

    return evaluate_with(jaxpr, consts, args, replace)


def _is_convolution(eqn: Any) -> bool:
    return name_of(eqn) == "conv_general_dilated"


def _is_narrow(eqn: Any) -> bool:
    """Whether channels last is the slower layout: one channel in, and few out."""
    numbers = eqn.params["dimension_numbers"]
    inputs = eqn.invars[0].aval.shape[numbers.lhs_spec[1]]
    outputs = eqn.outvars[0].aval.shape[numbers.out_spec[1]]
    return inputs == 1 and outputs <= _FEW_CHANNELS


def _has_convolution(jaxpr: Any) -> bool:
    programs = (callee(eqn) for eqn in jaxpr.eqns)
    return any(map(_is_convolution, jaxpr.eqns)) or any(
        closed is not None and _has_convolution(closed.jaxpr) for closed in programs
    )


def _convolution(eqn: Any, lhs: Array, rhs: Array) -> Array:
    """The convolution of an equation, in the layout that is fast on its device."""
    bind = functools.partial(eqn.primitive.bind, **eqn.params)
    last = functools.partial(_channels_last, eqn)
    choose = lambda lhs, rhs: lax.platform_dependent(lhs, rhs, cpu=last, default=bind)
    # For its derivative, a choice stores the residuals of all its branches. With
    # rematerialisation it stores its inputs, as a convolution does.
    checkpointed = jax.checkpoint(choose, prevent_cse=False)
    # Mesh axes can have been automatic while this was traced.
    with where_it_is(lhs, rhs):
        return checkpointed(lhs, rhs)


def _channels_last(eqn: Any, lhs: Array, rhs: Array) -> Array:
    """The same convolution, computed channels last."""
    params = dict(eqn.params)
    numbers = params["dimension_numbers"]
    ndim = lhs.ndim
    last = (0, ndim - 1, *range(1, ndim - 1))
    params["dimension_numbers"] = lax.ConvDimensionNumbers(
        lhs_spec=last, rhs_spec=(ndim - 1, ndim - 2, *range(ndim - 2)), out_spec=last
    )
    back = _moved_last(numbers.out_spec)
    sharding = params.get("out_sharding")
    if sharding is not None:
        spec = [*partitions(sharding.spec), *[None] * ndim]
        moved = PartitionSpec(*(spec[axis] for axis in back))
        params["out_sharding"] = NamedSharding(sharding.mesh, moved)
    lhs = jnp.transpose(lhs, _moved_last(numbers.lhs_spec))
    outputs, inputs, *rest = numbers.rhs_spec
    rhs = jnp.transpose(rhs, (*rest, inputs, outputs))
    out = eqn.primitive.bind(lhs, rhs, **params)
    return jnp.transpose(out, sorted(range(ndim), key=back.__getitem__))


def _moved_last(spec: tuple[int, ...]) -> tuple[int, ...]:
    batch, features, *dims = spec
    return (batch, *dims, features)


def patches(
    lhs: Array, kernel: tuple[int, ...], out: tuple[int, ...], params: dict[str, Any]
) -> Array:
    """The patch of each output position: (batch, features, *kernel, *out).

    Slices are copied one by one. `jax.lax.conv_general_dilated_patches` uses a grouped
    convolution with a kernel of zeros and ones instead, which is slow on CPUs.
    """
    if 0 in out:
        return jnp.zeros((*lhs.shape[:2], *kernel, *out), lhs.dtype)
    zero = jnp.zeros((), lhs.dtype)
    padding = safe_zip(params["padding"], params["lhs_dilation"])
    config = [(0, 0, 0), (0, 0, 0), *((lo, hi, dil - 1) for (lo, hi), dil in padding)]
    lhs = lax.pad(lhs, zero, config)
    strides, dilation = params["window_strides"], params["rhs_dilation"]
    slices = []
    for offset in itertools.product(*map(range, kernel)):
        start = [k * step for k, step in safe_zip(offset, dilation)]
        limit = [
            first + (num - 1) * stride + 1
            for first, num, stride in safe_zip(start, out, strides)
        ]
        slices.append(
            lax.slice(lhs, (0, 0, *start), (*lhs.shape[:2], *limit), (1, 1, *strides))
        )
    stacked = jnp.stack(slices, axis=2)
    return stacked.reshape(*lhs.shape[:2], *kernel, *out)
