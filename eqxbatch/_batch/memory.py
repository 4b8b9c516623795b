"""The number of rows of a microbatch, as given or for a memory budget.

For a budget, it is the largest one for which the compiled program fits.
"""

import contextlib
import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.tree_util as jtu
from jax import lax
from jaxtyping import PyTree

from .._base.checks import (
    as_int,
    check_at_least,
)
from .._base.compile import number_types
from .._base.compiler_options import has_library, memory_options
from .._base.jaxprs import axis_names
from .._base.mesh import (
    explicit_mesh,
    manual_axes,
    on_all_devices,
    outside_of_mesh,
    structs_on_devices,
)
from .._base.platforms import platform
from .._base.structs import is_struct
from .._base.trees import (
    log,
    safe_zip,
)
from .._base.types import check_types
from .._base.versions import with_consts
from .arguments import RowArrays
from .batch import Batch
from .machine import machine_bytes


@contextlib.contextmanager
def explained_failure(
    call: Callable[[list], Any],
    batch: Batch,
    kind: Literal["example", "microbatch"],
    remedy: str | None,
    rows: list | None = None,
    if_named: str = "Switch such layers to inference mode.",
    name: str = "fun",
) -> Iterator[None]:
    """Adds a note if a function fails here: with what, and if it works otherwise.

    It is called with one example or a microbatch. `call(rows)` calls the function with
    these as the batched arrays. `kind` is what it is called with here, `rows`
    are the arrays of a microbatch, and `remedy` says what to do if the other kind was
    meant; without it, there is no note. `if_named` is the remedy if the function uses a
    named axis that is not there, and `name` is that of the function. The exception is
    still the user's.
    """
    try:
        yield
    except Exception as e:
        if remedy is None or not batch.arrays:
            raise
        rows = batch.arrays if rows is None else rows
        example = batch.example()
        calls = ("a microbatch", rows), ("a single example", example)
        if kind == "example":
            calls = ("one example", example), ("a whole batch", batch.arrays)
        (what, rows), (other, other_rows) = calls
        # Say with what it was called; and, if the other kind works, that it was meant.
        shapes = (
            f"{name} of shape {x.shape}" for name, x in safe_zip(batch.names, rows)
        )
        listed = ", ".join(shapes)
        note = f"`{name}` is called with {what}, {listed}, and raises this error."
        # JAX names the missing axis in the message only.
        if isinstance(e, NameError) and "unbound axis name" in str(e):
            axis = str(e).partition("axis name: ")[2].partition(".")[0]
            e.add_note(f"{note} {_NAMED.format(axis)} {if_named}")
        elif _works(call, other_rows):
            e.add_note(f"{note} It works for {other}. {remedy}")
        elif isinstance(e, (TypeError, ValueError)) and not hasattr(e, "__notes__"):
            e.add_note(note)  # JAX raises these for shapes that do not fit.
        raise


# What to do if there is another named axis than the function uses.
OTHER_AXIS_NAME = "But `axis_name` is {!r}: pass the name that `fun` uses."


_NAMED = "It uses a named axis, `{}`, as BatchNorm does in training mode."


def _works(call: Callable[[list], Any], rows: RowArrays) -> bool:
    try:
        eqx.filter_eval_shape(call, rows)
    except Exception:
        return False
    return True


# The first size to try, if the caller knows no better one.
_FIRST = 16


# The program that runs is one more. Two or three suffice unless memory has a kink, as
# where another method becomes cheaper.
_MAX_COMPILATIONS = 4


# A size is large enough if the largest that should fit is at most this many times as
# large: a few more microbatches cost less than another compilation.
_ENOUGH = 1.3


# A first guess assumes that memory is proportional to the size. It is a little low
# because layouts and padding grow, and a guess that does not fit costs another one.
_CAUTION = 0.94


class MemoryBudget(eqx.Module):
    """A block size chosen from a memory budget: the largest that fits into `max_bytes`.

    Pass it in place of a number as `microbatch_size`, `block_size` or
    `samples_per_batch`; a string such as `"500MB"` there is a budget, too. It bounds
    what the compiled program allocates: its outputs and its temporaries (intermediate
    values). Inputs, which exist already, and memory used outside the call are not
    counted.

    Candidates are compiled, but not run, and XLA's reported memory is read. The first
    candidate is a small size; the second one should need slightly less than the budget.
    Memory is roughly `fixed + slope * size`, so these two predict the largest size that
    fits; if it is more than 1.3 times the second one, a third one is tried, and a
    fourth one where that leaves as much room. This is done once for each function and
    shapes of its arguments. The chosen size is always one that was compiled and found
    to fit. If the whole batch does not fit, it runs in at least two parts: a larger
    size needs two parts as well, and XLA may allocate memory for both at once.

    On CPUs, XLA gives some products, with what follows them, to a library (YNNPACK),
    whose memory it reports as 0. Candidates are compiled without that library, which
    reports what products and attention take at most; the chosen size is compiled with
    it, too. What libraries allocate within a
    convolution or a decomposition (LAPACK) is not reported: leave room for as much as
    the largest inputs of the gradient of a convolution.

    The logger `eqxbatch` reports at `logging.DEBUG` what was compiled, how long it
    took, and which size was chosen.

    **Arguments:**

    - `max_bytes`: an int, or a string such as `"500MB"` or `"2GiB"`. The default is the
        free memory that the device reports or, on a CPU, what the machine has available
        and the limits of containers (control groups) leave. That is read on Linux;
        elsewhere it is the physical memory, and 4 GiB on Windows, which does not tell
        Python. Free memory is looked up on every call, on a CPU at most ten times a
        second, and rounded down, on a device by up to 6% and on a CPU to a power of
        two, so that small changes do not cause recompilation. Inside `jax.jit` or
        another transform, it is looked up at trace time; pass a number there.

    Raises `ValueError` if `max_bytes` is not positive or cannot be parsed and, when
    used, if not even a block of one example fits. Raises `RuntimeError`, when used, if
    the compiler does not report how much memory a program takes.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> outer = lambda x: jnp.tanh(x[:, None] * x).sum()
        >>> f = eqxbatch.filter_micro_vmap(
        ...     outer, microbatch_size=eqxbatch.MemoryBudget("100KB")
        ... )
        >>> f(jnp.ones((1_000, 50))).shape
        (1000,)

        ```
    """

    max_bytes: int | None = eqx.field(static=True)

    def __init__(self, max_bytes: int | str | None = None):
        self.max_bytes = None if max_bytes is None else _parse_bytes(max_bytes)

    def resolve(self) -> int:
        """The budget in bytes."""
        return available_bytes() if self.max_bytes is None else self.max_bytes


# A number of rows that are processed at a time. A budget chooses it; None means all.
Size = int | MemoryBudget | None


def _parse_bytes(value: int | str, name: str = "max_bytes") -> int:
    number: Any = value
    if isinstance(value, str):
        # A number, a decimal or binary prefix, and an optional B: 500MB, 2GiB, 1.5g.
        match = re.fullmatch(
            r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?\s*", value, re.I
        )
        if match is not None:
            power = " kmgt".index((match[2] or " ").lower())
            number = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    number = None if isinstance(number, jax.Array) else as_int(number)
    if number is None:
        raise ValueError(
            f"`{name}` must be an int or a string such as '500MB' or '2GiB'; got "
            f"{value!r}."
        )
    if number <= 0:
        raise ValueError(f"`{name}` must be positive; got {value!r}.")
    return number


def available_bytes(digits: int = 5) -> int:
    """The free memory, rounded down to this many binary digits.

    It is a static argument of programs, so small changes must not recompile them.
    Other programs use a machine's memory, so only one digit of it is kept.
    """
    stats = jax.local_devices()[0].memory_stats()
    if stats is None or "bytes_limit" not in stats:
        free, digits = _machine_bytes_at(int(10 * time.monotonic())), 1
    else:
        free = max(stats["bytes_limit"] - stats.get("bytes_in_use", 0), 0)
    shift = max(free.bit_length() - digits, 0)
    return free >> shift << shift


# The most bytes of a result that surely fits.
_SMALL_RESULT = 2**28


def check_fits_memory(what: str, num_bytes: int, remedy: str) -> None:
    """Raises `ValueError` if a result takes more than all memory, before compiling."""
    # Every device has room for it, so the memory is not looked up while tracing.
    if num_bytes < _SMALL_RESULT:
        return
    stats = jax.local_devices()[0].memory_stats()
    if stats is not None and "bytes_limit" in stats:
        largest = stats["bytes_limit"] * jax.device_count()
    else:
        largest = machine_bytes() * jax.process_count()
    if num_bytes > largest:
        raise ValueError(
            f"{what} takes {num_bytes:,} bytes ({num_bytes / 1e9:,.0f} GB), but there "
            f"are {largest:,} bytes of memory. {remedy}"
        )


_Settings = TypeVar("_Settings", bound=eqx.Module)


def resolved(settings: _Settings) -> _Settings:
    """Settings with all budgets resolved to bytes.

    Call this before tracing: the free memory is then part of the key of the compiled
    program.
    """
    # Neither `getattr` nor `isinstance`: both take Equinox ten times as long.
    changes = {}
    for name, value in vars(settings).items():
        if type(value) is MemoryBudget and value.max_bytes is None:
            changes[name] = MemoryBudget(value.resolve())
    return dataclasses.replace(settings, **changes) if changes else settings


def check_size(name: str, size: Size | str) -> Size:
    """The size as a Python int, a budget, or `None`.

    Raises `TypeError` for any other type and `ValueError` for a size below 1.
    """
    if size is None or isinstance(size, MemoryBudget):
        return size
    # Digits alone are a number of rows by mistake.
    if isinstance(size, str) and not size.strip().isdecimal():
        size = MemoryBudget(_parse_bytes(size, name))
    remedy = (
        "It sets the shapes of the compiled program. A string such as '500MB' is a "
        "budget of memory."
    )
    check_types({name: size}, {name: Size}, {name: remedy}, always=True)
    if size is None or isinstance(size, MemoryBudget):
        return size
    check_at_least(name, size, 1, "Use None for one block.")
    return as_int(size)


def as_microbatch_size(size: Size | str) -> Size:
    return check_size("microbatch_size", size)


def as_block_size(size: Size | str) -> Size:
    return check_size("block_size", size)


def resolve_size(
    size: int | MemoryBudget | None,
    total: int,
    run: Callable[[int], Callable[[PyTree], Any]],
    operands: PyTree,
    first: int = _FIRST,
) -> int:
    """The block size, between 1 and `total` (1 if there are no examples).

    For a [`eqxbatch.MemoryBudget`][], `run(size)(operands)` is the program to fit, and
    `first` the first size to try.
    """
    largest = max(total, 1)
    if size is None:
        return largest
    if isinstance(size, int):
        return min(size, largest)

    budget = size.resolve()

    # So that no program is traced twice.
    lowered = functools.cache(lambda size: lowered_program(run(size), operands))

    def bytes_at(size: int, *, with_library: bool = False) -> CompiledBytes:
        start = time.perf_counter()
        used = compiled_bytes(lowered(size), with_library=with_library)
        seconds = time.perf_counter() - start
        log.debug(
            "MemoryBudget(%d): compiled blocks of %d in %.2f s; %d bytes for "
            "temporaries and %d for outputs.",
            *(budget, size, seconds, used.temporaries, used.outputs),
        )
        return used

    def choose() -> int:
        size = fit_size(budget, largest, bytes_at, first)
        if has_library(jax.default_backend()):
            size = _fitting_too(size, budget, bytes_at)
        log.debug("MemoryBudget(%d): chose blocks of %d of %d.", budget, size, largest)
        return size

    # Only a key. `compiled_bytes` compiles for the default backend, because its structs
    # are on no device.
    key = (budget, jax.default_backend(), platform(), total, *_structure(operands))
    try:
        hash(key)
    except TypeError:  # A static argument has no hash.
        return choose()
    if key not in _SIZES:
        _SIZES[key] = choose()
        if len(_SIZES) > _MAX_SIZES:
            _SIZES.pop(next(iter(_SIZES)))
    return _SIZES[key]


_SIZES: dict[Any, int] = {}


_MAX_SIZES = 1024


def _structure(operands: PyTree) -> tuple:
    dynamic, static = eqx.partition(operands, eqx.is_array)
    leaves, treedef = jtu.tree_flatten(jtu.tree_map(jax.typeof, dynamic))
    static_leaves, static_treedef = jtu.tree_flatten(static)
    numbers = number_types(static_leaves)
    return tuple(leaves), treedef, tuple(static_leaves), static_treedef, numbers


class CompiledBytes(NamedTuple):
    """The bytes that a compiled program allocates."""

    temporaries: int
    outputs: int


def lowered_program(
    fun: Callable[[PyTree], Any], operands: PyTree
) -> jax.stages.Lowered:
    """The program of `fun(operands)`, to be compiled.

    Arrays of `fun` are arguments, too, and there can be structs in place of arrays.
    """
    is_array = lambda x: eqx.is_array(x) or is_struct(x)
    operands = (fun, operands)
    # The constants of a jaxpr are what `fun` closes over. Inside another transformation
    # they can be tracers; only their types matter here.
    leaves = jtu.tree_leaves(eqx.filter(operands, is_array))
    trace = eqx.filter_make_jaxpr(lambda operands: operands[0](operands[1]))
    is_manual = bool(manual_axes())
    if is_manual or explicit_mesh(leaves) is not None:
        closed, *_ = trace(operands)
    else:
        with outside_of_mesh():
            struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
            types = jtu.tree_map(lambda x: struct(x) if is_array(x) else x, operands)
            closed, *_ = trace(types)
    num = len(closed.consts)

    def program(*args: Any) -> list:
        inner = with_consts(closed.jaxpr, args[:num])
        return jex.jaxpr_as_fun(inner)(*args[num:])

    args = [*closed.consts, *leaves]
    # Outside of the `vmap`s around this call, their axis names would be unbound.
    program = _within_vmaps(program, axis_names(closed.jaxpr) - manual_axes())
    if is_manual:
        program, structs = on_all_devices(program, args)
    else:
        structs = structs_on_devices(args)
    with outside_of_mesh():
        return jax.jit(program).lower(*structs)


def compiled_bytes(
    lowered: jax.stages.Lowered, *, with_library: bool = False
) -> CompiledBytes:
    """The temporaries and outputs of a program that is compiled, but not run.

    `with_library` is as for `memory_options`.
    """
    options = memory_options(jax.default_backend(), with_library=with_library)
    with outside_of_mesh():
        stats = lowered.compile(compiler_options=options).memory_analysis()
    if stats is None:
        # Only for the message: it names the backend that was compiled for.
        raise RuntimeError(
            f"The compiler for {jax.default_backend()!r} does not report how much "
            "memory a program takes. Give a size in place of the `MemoryBudget`."
        )
    return CompiledBytes(stats.temp_size_in_bytes, stats.output_size_in_bytes)


def _within_vmaps(program: Callable[..., list], names: set) -> Callable[..., list]:
    """`program` inside `jax.vmap`s that bind the same axis names as here."""
    if not names:
        return program
    sizes = {name: int(lax.psum(1, name)) for name in names}

    def run(*args: Any) -> list:
        # Mapped as here: only what varies along the axes varies in the program.
        mapped = lambda: program(*args)
        for name, size in sizes.items():
            mapped = jax.vmap(mapped, axis_name=name, axis_size=size)
        return [x[(0,) * len(sizes)] for x in mapped()]

    return run


def fit_size(
    budget: int,
    largest: int,
    bytes_at: Callable[[int], CompiledBytes],
    first: int = _FIRST,
) -> int:
    """A size in `[1, largest]` that fits into `budget`, close to the largest such size.

    Assumes that the sum of `bytes_at(size)` is roughly affine and increasing, or that
    it is so on both sides of a kink, and calls it at most four times: a fourth time
    only if the size is far below what should fit. If it is neither, the returned size
    still fits, but much larger ones may fit, too.

    Raises `ValueError` if not even size 1 fits.
    """
    measured: dict[int, CompiledBytes] = {}

    def fits(size: int) -> bool:
        if size not in measured:
            measured[size] = bytes_at(size)
        return sum(measured[size]) <= budget

    # Blocks of one row can need more memory than larger ones.
    if not any(fits(min(size, largest)) for size in (first, _FIRST, 1)):
        raise _too_small(budget, measured[1])
    half = -(-largest // 2)
    while len(measured) < _MAX_COMPILATIONS:
        predicted = _predict(budget, largest, measured)
        exact, lower = (
            _useful(size, largest) for size in (predicted, int(_CAUTION * predicted))
        )
        best = max((size for size in measured if fits(size)), default=0)
        # Nothing between a half and all has fewer blocks than a half.
        most = half if predicted < largest else largest
        if len(measured) > 1 and (best >= most or _ENOUGH * best > predicted):
            break
        # Guesses are low, so that one fits even if memory is not affine. But a half is
        # tried if it should fit, and all rows at once, at first.
        is_first = len(measured) == 1
        is_exact = exact == half < largest or (exact == largest and is_first)
        cautious = exact if is_exact else lower
        if is_first and exact < largest:
            # Far enough from the first one to estimate the slope.
            cautious = max(cautious, min(best + best // 2, largest))
        guesses = [guess for guess in (cautious, exact) if guess not in measured]
        if not guesses or guesses[0] < 1:
            break
        fits(guesses[0])
    return max(filter(fits, measured))


def _fitting_too(size: int, budget: int, bytes_at: Callable[..., CompiledBytes]) -> int:
    """A size that fits with the library of a CPU, too, or a smaller one that does.

    What XLA allocates around the library can be more than what it needs without.
    """
    while sum(used := bytes_at(size, with_library=True)) > budget:
        if size == 1:
            raise _too_small(budget, used)
        size = max(1, min(size - 1, int(_CAUTION * size * budget / sum(used))))
    return size


def _too_small(budget: int, used: CompiledBytes) -> ValueError:
    return ValueError(
        f"A memory budget of {budget:,} bytes is too small: with blocks of one "
        f"example, the program needs {sum(used):,} bytes for temporaries and outputs. "
        "Raise the budget, or reduce the memory of the function: `jax.checkpoint` "
        "keeps fewer intermediate values, and where there is a result for each "
        "example, an accumulator such as `Sum` keeps only one."
    )


def _predict(budget: int, largest: int, measured: dict[int, CompiledBytes]) -> int:
    """Predicts the largest size by a line through the two sizes nearest to the budget.

    With one size only, temporaries are assumed to be proportional to it.
    """
    totals = {size: sum(bytes) for size, bytes in measured.items()}
    below = sorted(size for size in totals if totals[size] <= budget)
    above = [size for size in totals if totals[size] > budget]
    most = min(above) - 1 if above else largest
    if len(measured) == 1:
        ((size, (temporaries, outputs)),) = measured.items()
        guess = size * (budget - outputs) // max(temporaries, 1)
    elif above or totals[below[-1]] > totals[below[-2]]:
        low, high = (below[-1], min(above)) if above else below[-2:]
        slope = (totals[high] - totals[low]) / (high - low)
        guess = int(low + (budget - totals[low]) / slope)
    else:
        guess = largest
    return min(guess, most)


def _useful(size: int, largest: int) -> int:
    """`size`, or half of `largest` for sizes between the two.

    Sizes in between also need two blocks. These are not in a loop, so XLA may allocate
    memory for both at once.
    """
    half = -(-largest // 2)
    return half if half < size < largest else size


# To read so many files takes longer than a small kernel.
@functools.lru_cache(1)
def _machine_bytes_at(tenth: int) -> int:
    """The memory in a tenth of a second."""
    del tenth
    return machine_bytes()
