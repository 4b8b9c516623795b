"""Workarounds for XLA, most of them on CPUs: barriers, mirror images, layouts."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Inexact, Int, PyTree, Shaped

from .jaxpr_types import Eqn, Jaxpr, Params, Rule, Value
from .jaxprs import as_remat, callee, evaluate_with, inner_programs, run_jaxpr
from .mesh import where_it_is, zeros_like
from .platforms import platform
from .primitives import is_remat, parameters
from .structs import vary
from .trees import safe_zip
from .versions import partitions, varying, with_barrier


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
        condition = lax.platform_dependent(always, cpu=lambda x: x, default=is_true)
        return lax.cond(condition, run, skip, *args)

    return run_apart


class AfterLoop(NamedTuple):
    """What comes after a loop.

    - `always`: a condition that is true.
    - `results`: what the loop computed.
    - `later`: what is computed after that.
    """

    always: Bool[Array, ""]
    results: PyTree
    later: PyTree


def after_loop(always: Bool[Array, ""], results: PyTree, later: PyTree) -> AfterLoop:
    """Orders what comes after a loop, so that it does come later.

    What does not depend on a loop may run before it, and then shares no memory with it
    (as in https://github.com/openxla/xla/issues/35719).
    As a branch, it does in XLA for CPUs, which does not know that a count of steps is
    `always` as large. Other devices know, and have a barrier instead.
    """
    later, static = eqx.partition(later, eqx.is_array)
    in_order = lambda x, *trees: (x | True, *in_turn(trees))
    always, results, later = lax.platform_dependent(
        *(always, results, later), cpu=lambda *trees: trees, default=in_order
    )
    return AfterLoop(always, results, eqx.combine(later, static))


def in_turn(trees: PyTree) -> PyTree:
    """Arrays of which none is read before all are computed."""
    leaves, treedef = jtu.tree_flatten(trees)
    return jtu.tree_unflatten(treedef, with_barrier(leaves))


def computed_once(tree: PyTree) -> PyTree:
    """Arrays that kernels of XLA for CPUs read, and do not compute again.

    XLA for CPUs computes what is stacked in the kernel that stacks it, entry by entry
    of the stack, and once more for each layout that a stack is read in. For the flat
    Hessian of an MLP of depth 4, these kernels were two thirds of the compiled code.
    Older versions of XLA take barriers away before they fuse. On other devices, nothing
    is changed.
    """
    # One barrier for each, so that they need not all be in memory at the same time.
    barrier = lax.optimization_barrier
    return jtu.tree_map(barrier, tree) if platform().recomputes else tree


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
    constants = lambda: [jnp.asarray(i, "int32") for i in numbers]
    return in_opaque_branch(constants, opaque_true(x))()


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
    def run(x: Array, places: np.ndarray, mirror: Callable[[Array], Array]) -> Array:
        def step(x: Array, corner: Array) -> tuple[Array, None]:
            piece = lax.dynamic_slice(x, corner, (_PIECE, _PIECE))
            return lax.dynamic_update_slice(x, mirror(piece), corner[::-1]), None

        return lax.scan(step, x, jnp.asarray(places))[0]

    starts = _starts(x.shape[0])
    # Places are constants: `jnp.triu_indices` would be a dozen kernels to compile.
    # The last two pieces may overlap. What the other pieces then have below the
    # diagonal is symmetric by the time they are read.
    x = run(x, np.stack([starts, starts], -1), _mirrored_at_once)
    above = np.triu_indices(len(starts), 1)
    return run(x, np.stack([starts[i] for i in above], -1), jnp.transpose)


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
    # Each piece above the diagonal is read together with its mirror image.
    zeros = [jnp.zeros((), jnp.int32) for _ in x.shape[2:]]
    starts = _starts(x.shape[0])
    row, column = np.triu_indices(len(starts))

    def step(result: Array, corner: Array) -> tuple[Array, None]:
        here, there = [*corner, *zeros], [*corner[::-1], *zeros]
        size = (_PIECE, _PIECE, *x.shape[2:])
        pieces = [lax.dynamic_slice(x, place, size) for place in (here, there)]
        piece = combine(pieces[0], exchanged(pieces[1]))
        result = lax.dynamic_update_slice(result, piece, here)
        return lax.dynamic_update_slice(result, exchanged(piece), there), None

    def in_pieces(x: Array) -> Array:
        corners = np.stack([starts[row], starts[column]], axis=-1)
        # What a loop carries must vary over the mesh axes that its results vary over.
        zero = vary(jnp.zeros_like(x), varying(jax.typeof(x)))
        return lax.scan(step, zero, jnp.asarray(corners))[0]

    return lax.platform_dependent(x, cpu=in_pieces, default=at_once)


def _starts(num: int) -> np.ndarray:
    """The start indices of pieces of equal size, as constants of the program."""
    size = min(num, _PIECE)
    # The last piece begins earlier, so that it is as large as the others.
    starts = np.arange(0, max(num, 1), max(size, 1), dtype="int32")
    return np.minimum(starts, np.int32(num - size))


# Up to so many output channels of one input channel, channels last is several times
# slower, also where XLA has to run the convolution inside a loop.
_FEW_CHANNELS = 16


def evaluate_in_loop(
    jaxpr: Jaxpr, consts: Sequence[Value], args: Sequence[Value]
) -> list:
    """Evaluates a jaxpr that is going to be the body of a loop, or a branch.

    XLA for CPUs converts convolutions to the layout of its fast kernels (batch,
    spatial, features), but only at the top level of a program. Inside a loop or a
    branch, a convolution in the layout of `equinox.nn.Conv` (batch, features, spatial)
    runs several times slower than outside
    (https://github.com/jax-ml/jax/issues/12868). So the layout is converted here if the
    program is compiled for CPUs, where that is faster. On other devices, nothing is
    changed.
    """
    # Effects, such as a debug print, belong to the whole jaxpr, so it is not split.
    if jaxpr.effects or not _has_convolution(jaxpr):
        return run_jaxpr(jaxpr, consts, args)

    def replace(_: int, eqn: Eqn) -> Rule | None:
        if eqn.primitive.name == _CONVOLUTION and not _is_narrow(eqn):
            return lambda ins: [_fast_convolution(eqn, *ins)]
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


_CONVOLUTION = "conv_general_dilated"


def _is_narrow(eqn: Eqn) -> bool:
    """Whether channels last is the slower layout: one channel in, and few out."""
    numbers = eqn.params["dimension_numbers"]
    inputs = eqn.invars[0].aval.shape[numbers.lhs_spec[1]]
    outputs = eqn.outvars[0].aval.shape[numbers.out_spec[1]]
    return inputs == 1 and outputs <= _FEW_CHANNELS


def _has_convolution(jaxpr: Jaxpr) -> bool:
    if _CONVOLUTION in [eqn.primitive.name for eqn in jaxpr.eqns]:
        return True
    called = [callee(eqn) for eqn in jaxpr.eqns if inner_programs(eqn)]
    return any(
        closed is not None and _has_convolution(closed.jaxpr) for closed in called
    )


def _fast_convolution(eqn: Eqn, lhs: Array, rhs: Array) -> Array:
    """The convolution of an equation, in the layout that is fast on its device."""
    bind = functools.partial(eqn.primitive.bind, **eqn.params)
    last = functools.partial(_channels_last, eqn)
    choose = lambda lhs, rhs: lax.platform_dependent(lhs, rhs, cpu=last, default=bind)
    # For its derivative, a choice stores the residuals of all its branches
    # (https://github.com/jax-ml/jax/issues/2775). With rematerialisation it stores its
    # inputs, as a convolution does.
    checkpointed = jax.checkpoint(choose, prevent_cse=False)
    # Mesh axes can have been automatic while this was traced.
    with where_it_is(lhs, rhs):
        return checkpointed(lhs, rhs)


def _channels_last(eqn: Eqn, lhs: Array, rhs: Array) -> Array:
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
    # `[outputs, inputs, *spatial]` to `[*spatial, inputs, outputs]`.
    outputs, inputs, *spatial = numbers.rhs_spec
    rhs = jnp.transpose(rhs, (*spatial, inputs, outputs))
    out = eqn.primitive.bind(lhs, rhs, **params)
    return jnp.transpose(out, sorted(range(ndim), key=back.__getitem__))


def _moved_last(spec: tuple[int, ...]) -> list[int]:
    batch, features, *dims = spec
    return [batch, *dims, features]


def patches(
    lhs: Array,
    kernel: Sequence[range],
    out: Sequence[int],
    params: Params,
    *,
    is_last: bool = False,
) -> Array:
    """The patch of each output position: (batch, features, *kernel, *out).

    `kernel` has the entries of the kernel along each axis, in order. If `is_last`,
    features are the last axis of `lhs`, and the axes are (batch, *out, *kernel,
    features).

    Slices are copied one by one. `jax.lax.conv_general_dilated_patches` uses a grouped
    convolution with a kernel of zeros and ones instead, which is slow on CPUs.
    """
    batch, sizes = lhs.shape[0], tuple(map(len, kernel))
    features = lhs.shape[-1 if is_last else 1]
    shape = (batch, features, *sizes, *out)
    shape = (batch, *out, *sizes, features) if is_last else shape
    if 0 in out:
        return jnp.zeros(shape, lhs.dtype)

    def arranged(of_features: Any, of_space: Sequence) -> list:
        return [*of_space, of_features] if is_last else [of_features, *of_space]

    # With gaps and borders written out, each patch is a part of the image.
    zero, nothing = jnp.zeros((), lhs.dtype), (0, 0, 0)
    padding = safe_zip(params["padding"], params["lhs_dilation"])
    borders = [(lo, hi, dil - 1) for (lo, hi), dil in padding]
    lhs = lax.pad(lhs, zero, [nothing, *arranged(nothing, borders)])
    strides, dilation = params["window_strides"], params["rhs_dilation"]
    slices = []
    for offset in itertools.product(*kernel):
        # All that this entry of the kernel meets: one pixel for each output position.
        start = [k * step for k, step in safe_zip(offset, dilation)]
        limit = [
            first + (num - 1) * stride + 1
            for first, num, stride in safe_zip(start, out, strides)
        ]
        start, limit, steps = (
            arranged(of_features, of_space)
            for of_features, of_space in (
                (0, start),
                (features, limit),
                (1, strides),
            )
        )
        slices.append(lax.slice(lhs, [0, *start], [batch, *limit], [1, *steps]))
    return jnp.stack(slices, axis=-2 if is_last else 2).reshape(shape)
