"""Block sizes from a memory budget, measured by compiling programs."""

import collections
import dataclasses
import functools
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.tree_util as jtu
from jax import lax
from jaxtyping import PyTree

from .._base.checks import check_at_least, check_types
from .._base.jaxprs import axis_names, number_types
from .._base.mesh import (
    explicit_mesh,
    manual_axes,
    on_all_devices,
    outside_of_mesh,
    structs_on_devices,
)
from .._base.platforms import platform
from .._base.trees import as_int, log


# The first size to try, if the caller knows no better one.
_FIRST = 16


# The program that runs is one more.
_MAX_COMPILATIONS = 3


# A size is large enough if it is this fraction of the largest that should fit: a few
# more microbatches cost less than another compilation.
_ENOUGH = 0.6


# A first guess assumes that memory is proportional to the size. It is a little low
# because layouts and padding grow, and a guess that does not fit costs another one.
_CAUTION = 0.94


# XLA for CPUs assigns memory before LLVM optimises the code. Optimisation takes up to
# half of the time and does not change the memory.
_OPTIONS: dict[str, Any] = {"cpu": {"xla_backend_optimization_level": 0}}


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
    fits; if the second one is less than 60% of it, a larger one is tried. This takes at
    most three compilations, once for each function and shapes of its arguments. The
    chosen size is always one that was compiled and found to fit. If the whole batch
    does not fit, it runs in at least two parts: a larger size needs two parts as well,
    and XLA may allocate memory for both at once.

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


_Settings = TypeVar("_Settings", bound=eqx.Module)


def resolved(settings: _Settings) -> _Settings:
    """Settings with all budgets resolved to bytes.

    Call this before tracing: the free memory is then part of the key of the compiled
    program.
    """
    # Neither `getattr` nor `isinstance`: both take Equinox ten times as long.
    changes, fields = {}, vars(settings)
    for name in _NAMES:
        value = fields.get(name)
        if type(value) is MemoryBudget and value.max_bytes is None:
            changes[name] = MemoryBudget(value.resolve())
    return dataclasses.replace(settings, **changes) if changes else settings


# The names of settings that are sizes.
_NAMES = ("block_size", "microbatch_size", "per_batch")


def check_size(name: str, size: Size | str) -> Size:
    """The size as a Python int, a budget, or `None`.

    Raises `TypeError` for any other type and `ValueError` for a size below 1.
    """
    # Digits alone are a number of rows by mistake.
    if isinstance(size, str) and not size.strip().isdecimal():
        size = MemoryBudget(_parse_bytes(size, name))
    remedy = "It sets the shapes of the compiled program."
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

    def bytes_at(size: int) -> CompiledBytes:
        start = time.perf_counter()
        used = compiled_bytes(run(size), operands)
        seconds = time.perf_counter() - start
        log.debug(
            "MemoryBudget(%d): compiled blocks of %d in %.2f s; %d bytes for "
            "temporaries and %d for outputs.",
            *(budget, size, seconds, used.temporaries, used.outputs),
        )
        return used

    def choose() -> int:
        size = fit_size(budget, largest, bytes_at, first)
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
        while len(_SIZES) > _MAX_SIZES:
            _SIZES.popitem(last=False)
    return _SIZES[key]


_SIZES: collections.OrderedDict[Any, int] = collections.OrderedDict()


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


def compiled_bytes(fun: Callable[[PyTree], Any], operands: PyTree) -> CompiledBytes:
    """The temporaries and outputs of the compiled `fun(operands)`, which is not run."""
    # The constants of a jaxpr are what `fun` closes over. Inside another transformation
    # they can be tracers; only their types matter here.
    leaves = jtu.tree_leaves(eqx.filter(operands, eqx.is_array))
    trace = eqx.filter_make_jaxpr(lambda operands: fun(operands))
    is_manual = bool(manual_axes())
    if is_manual or explicit_mesh(leaves) is not None:
        closed, *_ = trace(operands)
    else:
        with outside_of_mesh():
            struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
            is_array = eqx.is_array
            types = jtu.tree_map(lambda x: struct(x) if is_array(x) else x, operands)
            closed, *_ = trace(types)
    num = len(closed.consts)

    def program(*args: Any) -> list:
        inner = jex.ClosedJaxpr(closed.jaxpr, list(args[:num]))
        return jex.jaxpr_as_fun(inner)(*args[num:])

    args = [*closed.consts, *leaves]
    program = _within_vmaps(program, axis_names(closed.jaxpr) - manual_axes())
    if is_manual:
        program, structs = on_all_devices(program, args)
    else:
        structs = structs_on_devices(args)
    options = _OPTIONS.get(jax.default_backend())
    with outside_of_mesh():
        lowered = jax.jit(program).lower(*structs)
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

    Assumes that the sum of `bytes_at(size)` is roughly affine and increasing, and calls
    it at most three times. If it is not, the returned size still fits, but much larger
    ones may fit, too.

    Raises `ValueError` if not even size 1 fits.
    """
    measured: dict[int, CompiledBytes] = {}

    def fits(size: int) -> bool:
        if size not in measured:
            measured[size] = bytes_at(size)
        return sum(measured[size]) <= budget

    # Blocks of one row can need more memory than larger ones.
    if not any(fits(min(size, largest)) for size in (first, _FIRST, 1)):
        raise ValueError(
            f"A memory budget of {budget:,} bytes is too small: with blocks of one "
            f"example, the program needs {sum(measured[1]):,} bytes for temporaries "
            "and outputs. Raise the budget, or reduce the memory of the function: "
            "`jax.checkpoint` keeps fewer intermediate values, and where there is a "
            "result for each example, an accumulator such as `Sum` keeps only one."
        )
    while len(measured) < _MAX_COMPILATIONS:
        predicted = _predict(budget, largest, measured)
        exact, lower = (
            _useful(size, largest) for size in (predicted, int(_CAUTION * predicted))
        )
        best = max((size for size in measured if fits(size)), default=0)
        if len(measured) > 1 and best >= _ENOUGH * (exact + 1):
            break
        # Guesses are low, so that one fits even if memory is not affine.
        is_last = len(measured) == _MAX_COMPILATIONS - 1
        cautious = exact if exact == largest and not is_last else lower
        if len(measured) == 1 and exact < largest:
            # Far enough from the first one to estimate the slope.
            cautious = max(cautious, min(best + best // 2, largest))
        guesses = [guess for guess in (cautious, exact) if guess not in measured]
        if not guesses or guesses[0] < 1:
            break
        fits(guesses[0])
    return max(filter(fits, measured))


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


# Assumed of a machine that does not say how much memory it has.
_UNKNOWN = 2**32


def machine_bytes(root: pathlib.Path = pathlib.Path("/")) -> int:
    """The memory that this process can allocate, as far as the system says.

    Linux says what is available, and containers (control groups) limit it. Elsewhere,
    or if that cannot be read, it is the physical memory of the machine. `root` is where
    `proc` and `sys` are.
    """
    limits = [*_of_machine(root), *_of_groups(root)]
    return max(min(limits), 0) if limits else _physical_bytes()


# To read so many files takes longer than a small kernel.
@functools.lru_cache(1)
def _machine_bytes_at(tenth: int) -> int:
    """The memory in a tenth of a second."""
    del tenth
    return machine_bytes()


def _physical_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no `sysconf`.
        return _UNKNOWN


def _of_machine(root: pathlib.Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            yield int(rest.split()[0]) * 1024


def _of_groups(root: pathlib.Path) -> Iterator[int]:
    """What each control group of this process leaves: limits minus use.

    A group is limited by those above it, too. Inside a container, the path of its group
    is often that on the host, and only the root is mounted.
    """
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, limit, use = "sys/fs/cgroup", "memory.max", "memory.current"
            cache = "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            use, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        path_of_group = pathlib.PurePosixPath(path.lstrip("/"))
        for group in (path_of_group, *path_of_group.parents):
            folder = root / top / group
            numbers = [*_lines(folder / limit), *_lines(folder / use)]
            if len(numbers) == 2 and all(map(str.isdecimal, numbers)):
                stats = dict(map(str.split, _lines(folder / "memory.stat")))
                # The kernel gives up cached files where memory is needed.
                yield int(numbers[0]) - int(numbers[1]) + int(stats.get(cache, 0))


def _lines(file: pathlib.Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
