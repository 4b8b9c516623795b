"""Progress meters for long loops."""

import abc
import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import equinox as eqx

from .._base.trees import import_extra
from .._base.types import check_fields, check_types


_State = TypeVar("_State")


class AbstractProgressMeter(eqx.Module, Generic[_State]):
    """Reports the progress of a loop or a solver; subclass it to write your own.

    `close` is called once for each `start`, even if the loop ends with an exception or
    is interrupted.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> class Dots(eqxbatch.AbstractProgressMeter):
        ...     def start(self, num_blocks, num_done):
        ...         print(f"{num_blocks} blocks ", end="")
        ...     def step(self, state, num_nans):
        ...         print(".", end="")
        ...     def close(self, state):
        ...         print()
        >>> kernel = eqxbatch.filter_batch_kernel(
        ...     lambda x, y: x @ y.T, block_size=2, progress=Dots()
        ... )
        >>> kernel(jnp.ones((6, 3)), jnp.ones((4, 3))).shape
        6 blocks ......
        (6, 4)

        ```
    """

    @abc.abstractmethod
    def start(self, num_blocks: int | None, num_done: int) -> _State:
        """Returns the state before the first block.

        **Arguments:**

        - `num_blocks`: the total number of blocks; for a solver, its `max_steps`; for
            batches, their number, or None if they have no `len`.
        - `num_done`: the number of blocks or products that an earlier run has computed.
        """

    @abc.abstractmethod
    def step(
        self, state: _State, num_nans: int, residual: float | None = None
    ) -> _State:
        """Returns the state after one more block, or one more product of a solver.

        **Arguments:**

        - `state`: what `start` or the previous `step` returned.
        - `num_nans`: the number of NaNs that the block adds to the result.
        - `residual`: the relative residual of a solver. A meter that is never used with
            a solver can leave this argument out.
        """

    @abc.abstractmethod
    def close(self, state: _State) -> None:
        """Called once when the loop ends, whether all blocks are done or not."""


class _Bar(NamedTuple):
    """A bar of tqdm, and the number of NaNs so far."""

    bar: Any
    num_nans: int


class TqdmProgressMeter(AbstractProgressMeter[_Bar]):
    """A tqdm progress bar: blocks done, blocks per second, time left, and NaNs.

    Needs the extra `progress`: `pip install "equinox-batch[progress]"`.

    **Arguments:**

    - `description`: the text in front of the bar. The default says what is computed.
    - `unit`: what the bar counts. The default is `"block"` for kernels, `"product"` for
        solvers, and `"batch"` for batches.

    Raises `ImportError`, when used, if tqdm is not installed.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> kernel = eqxbatch.filter_batch_kernel(
        ...     lambda x, y: x @ y.T,
        ...     block_size=2,
        ...     progress=eqxbatch.TqdmProgressMeter("linear kernel"),
        ... )
        >>> kernel(jnp.ones((6, 3)), jnp.ones((4, 3))).shape
        (6, 4)

        ```
    """

    description: str | None = eqx.field(static=True, default=None)
    unit: str | None = eqx.field(static=True, default=None)

    __check_init__ = check_fields

    def start(self, num_blocks: int | None, num_done: int) -> _Bar:
        tqdm = import_extra("tqdm.auto", "TqdmProgressMeter", "progress").tqdm
        # Blocks of an earlier run do not count for the speed of this one.
        texts = {"desc": self.description, "unit": self.unit or "block"}
        return _Bar(tqdm(total=num_blocks, initial=num_done, **texts), 0)

    def step(self, state: _Bar, num_nans: int, residual: float | None = None) -> _Bar:
        bar, total = state.bar, state.num_nans + num_nans
        # Only `update` draws the bar, and not more often than it has to.
        if num_nans:
            bar.set_postfix(NaN=total, refresh=False)
        if residual is not None:
            bar.set_postfix(residual=f"{residual:.1e}", refresh=False)
        bar.update()
        return _Bar(bar, total)

    def close(self, state: _Bar) -> None:
        state.bar.close()


# What users pass for a meter.
Progress = AbstractProgressMeter | bool | None


def as_meter(progress: Progress) -> AbstractProgressMeter | None:
    """The meter that `progress` stands for."""
    check_types({"progress": progress}, {"progress": Progress}, always=True)
    if isinstance(progress, bool):
        return TqdmProgressMeter() if progress else None
    return progress


def check_takes_residual(meter: AbstractProgressMeter, name: str) -> None:
    """Raises `TypeError` for a meter that the solver `name` cannot use."""
    try:
        # Found out before the solve, not after its first product.
        inspect.signature(meter.step).bind(None, 0, 1.0)
    except TypeError:
        raise TypeError(
            f"`step` of `{type(meter).__name__}` must take a third argument, the "
            f"residual, to be used by `{name}`."
        ) from None


@contextlib.contextmanager
def metered(
    meter: AbstractProgressMeter | None,
    num: int | None,
    num_done: int,
    description: str = "kernel",
    unit: str = "block",
) -> Iterator[Callable[..., None]]:
    """The step of a meter that is closed even if the loop raises an error.

    `description` and `unit` are for a bar that has none.
    """
    if meter is None:
        yield lambda *_: None
        return
    if isinstance(meter, TqdmProgressMeter):
        texts = meter.description or description, meter.unit or unit
        meter = TqdmProgressMeter(*texts)
    # A list, because each step replaces the state, which `finally` needs as it is then.
    states = [meter.start(num, num_done)]

    def step(num_nans: Any, *residual: float) -> None:
        states[0] = meter.step(states[0], int(num_nans), *residual)

    try:
        yield step
    finally:
        meter.close(states[0])
