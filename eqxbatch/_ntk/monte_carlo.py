"""Kernels averaged over random models."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, SupportsIndex

import equinox as eqx
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Inexact, Key, PyTree, UInt32

from .._base.checks import as_int, check_callable, no_arrays_remedy
from .._base.mesh import gathered
from .._base.trees import described, shown, type_of
from .._batch.memory import check_size, MemoryBudget, resolved
from .._batch.progress import metered
from .._batch.store import HostStore
from .._kernels.batch_kernel import AbstractStored, BatchKernel, settings_of
from .._kernels.on_devices import check_mesh, MeshAxis
from .._kernels.on_host import check_concrete
from .._kernels.sides import Examples, Keys
from .average import (
    Average,
    check_tol,
    count_nans,
    Estimated,
    Moments,
    relative_error,
)
from .empirical import EmpiricalKernel, EmpiricalNNGP
from .estimator import checked_constructor
from .settings import (
    AbstractJacobianKernel,
    AbstractKernelSettings,
    check_get,
    Get,
    named,
    names_of,
)
from .traced_model import has_state


# With fewer samples, a standard error is unreliable.
_LEAST_SAMPLES = 8


class MonteCarloEstimate(NamedTuple):
    """The estimate of [`eqxbatch.MonteCarloKernel`][] after some samples.

    - `kernel`: the mean over the samples.
    - `standard_error`: the standard error of each entry; NaN for a single sample.
    - `num_samples`: the number of samples.
    """

    kernel: PyTree[Inexact[Array, "..."] | Inexact[np.ndarray, "..."]]
    standard_error: PyTree[Inexact[Array, "..."] | Inexact[np.ndarray, "..."]]
    num_samples: int


def check_models(init: Callable, key: Any) -> None:
    """Raises if `init` returns no models, or models of different structures."""
    check_callable("init", init, "a function from a key to a model")
    # Samples are mapped over, so that only their values may differ.
    drawn = [eqx.filter_eval_shape(init, key) for _ in range(2)]
    model = drawn[0][0] if has_state(drawn[0]) else drawn[0]
    if not callable(model):
        raise TypeError(
            "`init` must return a callable model, or a pair of it and an "
            f"`equinox.nn.State`; got {described(model)}."
        )
    # The types of all arrays by their paths, which a message can show.
    first, second = (
        {
            jtu.keystr(path): type_of(x)
            for path, x in jtu.tree_leaves_with_path(draw)
            if hasattr(x, "dtype")
        }
        for draw in drawn
    )
    if not first:
        raise ValueError(
            f"`init` must return a model with arrays in it; got {shown(drawn[0])}, "
            f"which is the same for all keys.{no_arrays_remedy(drawn[0])}"
        )
    # Two draws with one key tell apart what depends on earlier calls.
    differing = [
        f"{path}: {first.get(path)} and {second.get(path)}"
        for path in {**first, **second}
        if first.get(path) != second.get(path)
    ]
    if differing:
        raise ValueError(
            "`init` must return models of the same structure for all keys; got "
            f"different arrays for two keys at {'; '.join(differing)}. Only the values "
            "of arrays may depend on the key, and nothing on earlier calls."
        )


def _check_counts(
    num_samples: SupportsIndex | Iterable[SupportsIndex],
) -> int | tuple[int, ...]:
    """The number of samples, or several of them in increasing order."""
    is_several = isinstance(num_samples, Iterable) and not isinstance(num_samples, str)
    # An iterable means a generator of results, even if it has one number.
    several: Any = num_samples if is_several else [num_samples]
    counts = {as_int(count) for count in several}
    if None in counts:
        raise TypeError(
            "`num_samples` must be an int or an iterable of ints; got "
            f"{described(num_samples)}."
        )
    ordered = sorted(count for count in counts if count is not None)
    if not ordered or ordered[0] < 1:
        raise ValueError(
            "`num_samples` must be at least 1, and at least one number; got "
            f"{num_samples}."
        )
    return tuple(ordered) if is_several else ordered[0]


def _check_per_batch(size: int | MemoryBudget | str) -> int | MemoryBudget:
    checked = check_size("samples_per_batch", size)
    if checked is None:
        raise TypeError(
            "`samples_per_batch` must be an int or a `MemoryBudget`; got None."
        )
    return checked


@checked_constructor
class MonteCarloKernel(AbstractJacobianKernel, AbstractStored):
    """Kernels averaged over random models: Monte-Carlo estimates of NNGP and NTK.

    Empirical kernels are averaged over models drawn by `init`. As the models get wider,
    the average tends to the kernel of an infinitely wide model; see
    [`eqxbatch.ntk_parameterise`][] for models that have such a limit.

    The kernel is a function `kernel(x1, x2=None, get=None, *, key=None, **kwargs)`,
    like an [`eqxbatch.EmpiricalKernel`][]. It is also a PyTree whose arrays are the
    `key` and those of `init`.

    **Arguments:**

    - `init`: a function from a random key to a model, or to a pair of a model and its
        `equinox.nn.State`; both are called as for [`eqxbatch.EmpiricalNTK`][]. `init`
        is traced.
    - `key`: the random key. Sample `i` is `init(jax.random.fold_in(key, i))`, so a
        larger number of samples extends a smaller one, independent of batches, blocks
        and devices.
    - `num_samples`: the number of samples. If several numbers are given, calls return a
        generator that yields an estimate for each of them, in increasing order. All of
        these share their samples.
    - `get`: which kernels to return if a call does not specify `get`, as for
        [`eqxbatch.EmpiricalKernel`][].
    - `samples_per_batch`: the number of samples that are computed at a time (on each
        device of the `sample_axis`): an int, or an [`eqxbatch.MemoryBudget`][]. With a
        `store` or `reduce`, the budget is for one block, and cannot be used with `tol`.
    - `tol`: stops as soon as the relative standard error is at most `tol`, after at
        least 8 and at most `num_samples` samples. The relative standard error is the
        norm of all standard errors divided by the norm of the kernel; of several
        kernels, the worst one counts.
    - `trace_axes`, `diagonal_axes`, `in_axes`, `out_axes`, `kwargs_axes`, `method`,
        `where`, `filter_spec`: as for [`eqxbatch.EmpiricalNTK`][]; `where` takes a
        model and `filter_spec` is a prefix of one.
    - `block_size`: the number of rows and columns of the kernel that are computed at a
        time, as for [`eqxbatch.EmpiricalNTK`][]; with `mesh_axis` or a `store`, as for
        [`eqxbatch.filter_batch_kernel`][].
    - `mesh`, `mesh_axis`: a mesh, and its axis over which rows of the kernel are
        distributed, as for [`eqxbatch.filter_batch_kernel`][].
    - `sample_axis`: the axis of the mesh over which samples are distributed. Rows are
        then distributed only if `mesh_axis` is given, too.
    - `store`, `reduce`: where the averaged kernel is stored, or how it is reduced, as
        for [`eqxbatch.filter_batch_kernel`][]. Each block is averaged over all samples
        first.
    - `progress`: True or an [`eqxbatch.AbstractProgressMeter`][], which counts batches
        of samples, or blocks if there is a `store` or `reduce`.

    **Returns:**

    A call returns the same as an [`eqxbatch.EmpiricalKernel`][], averaged over the
    samples, or a generator of such results for several `num_samples`. The method
    `estimate` returns an [`eqxbatch.results.MonteCarloEstimate`][] with standard
    errors. An estimate can be resumed: pass it as `previous` to a later call of
    `estimate`.

    **Raises:**

    - `ValueError` if `num_samples` is empty or below 1, if `tol` is not positive, if
        `init` returns no arrays or a different structure for different keys, for an
        axis that the mesh does not have, for a store on disk or `reduce` together with
        several `num_samples` or `tol`, for `previous` with a store on disk, for
        `in_axes=None` with `mesh_axis`, `store` or `reduce`, and for `estimate` with
        `reduce`. With a `store` or `reduce`, outputs must have batch axis 0, and it
        must be in neither `trace_axes` nor `diagonal_axes`.
    - `TypeError` for `num_samples` that are not ints, if `init` does not return a
        model, and for `tol`, stores or `progress` inside `jax.jit` and other
        transforms.

    **Keys:** the `key` of a call is split into one key for each example, as for
    [`eqxbatch.EmpiricalNTK`][], and the index of the sample is folded in: dropout
    differs between samples.

    **Compilation:** the program is compiled once for any number of samples, and once
    more if `samples_per_batch` does not divide this number.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> def init(key):
        ...     mlp = eqx.nn.MLP(2, 1, 64, 2, key=key)
        ...     return eqxbatch.ntk_parameterise(mlp, key=key)
        >>> kernel = eqxbatch.MonteCarloKernel(
        ...     init, key=jax.random.key(0), num_samples=20
        ... )
        >>> both = kernel(jnp.ones((5, 2)))
        >>> both.nngp.shape, both.ntk.shape
        ((5, 5), (5, 5))
        >>> estimate = kernel.estimate(jnp.ones((5, 2)), get="ntk")
        >>> bool((estimate.standard_error < 0.3 * estimate.kernel).all())
        True

        ```

        Running means:

        ```python
        >>> kernels = eqxbatch.MonteCarloKernel(
        ...     init, key=jax.random.key(0), num_samples=(1, 10, 20), get="nngp"
        ... )
        >>> [nngp.shape for nngp in kernels(jnp.ones((5, 2)))]
        [(5, 5), (5, 5), (5, 5)]

        ```

    ??? cite

        Kernels of random networks are due to [Lee et al.,
        2018](https://arxiv.org/abs/1711.00165) and [Jacot, Gabriel and Hongler,
        2018](https://arxiv.org/abs/1806.07572); averaging empirical kernels is due to
        [Novak et al., 2019](https://arxiv.org/abs/1810.05148), as in
        `neural_tangents.monte_carlo_kernel_fn`. Moments are merged as in
        [`eqxbatch.Variance`][].
    """

    init: Callable[[Any], Any]
    _: dataclasses.KW_ONLY
    key: Key[Array, ""] | UInt32[Array, "2"]
    num_samples: int | tuple[int, ...] = eqx.field(static=True, converter=_check_counts)
    get: str | tuple[str, ...] | None = eqx.field(
        static=True, converter=check_get, default=None
    )
    samples_per_batch: int | MemoryBudget = eqx.field(
        static=True, converter=_check_per_batch, default=1
    )
    tol: float | None = eqx.field(static=True, converter=check_tol, default=None)
    sample_axis: str | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        # This looks up the axes of the mesh, and raises for one that it does not have.
        average = self._average(None, with_error=False)
        check_models(self.init, self.key)
        # Rows and samples cannot share an axis of the mesh, nor the devices of a block
        # that is stored.
        if self.sample_axis is not None and self.sample_axis == self.mesh_axis:
            raise ValueError(
                "`mesh_axis` and `sample_axis` must be different axes of the mesh; got "
                f"{self.mesh_axis!r} for both."
            )
        if average.samples is not None and average.rows is not None and self.is_stored:
            raise ValueError(
                "With a `store`, devices share the rows of a block or the samples, and "
                f"not both; got `mesh_axis={self.mesh_axis!r}` and "
                f"`sample_axis={self.sample_axis!r}`. Leave one of them out."
            )
        # A kernel on disk, or one that is reduced, is averaged once.
        needs_several = self._is_generator or self.tol is not None
        if self._is_on_disk and needs_several:
            _raise_on_disk("several `num_samples` or `tol`")
        if self.reduce is not None and needs_several:
            raise ValueError(
                "With `reduce`, each block is averaged over all samples once, and not "
                "kept for several `num_samples` or for `tol`. Leave them out."
            )
        is_in_blocks = self.is_stored or self.reduce is not None
        if is_in_blocks or average.rows is not None:
            self.check_is_batched()
        # A budget may give each block another number of samples, and `tol` needs one.
        is_budget = isinstance(self.samples_per_batch, MemoryBudget)
        if is_budget and is_in_blocks and self.tol is not None:
            raise ValueError(
                "With a `store` and `tol`, `samples_per_batch` must be an int; got "
                f"{self.samples_per_batch}."
            )
        # To make the kernel of blocks checks the reduction, before any call.
        if is_in_blocks:
            self._check_axes_of_blocks()
        if self.reduce is not None:
            self._in_blocks(self.init)

    def _check_axes_of_blocks(self) -> None:
        """Raises unless rows and columns are the first axes of a block."""
        if any(axis != 0 for axis in jtu.tree_leaves(self.out_axes)):
            raise ValueError(
                "With a `store` or `reduce`, `out_axes` must be 0; got "
                f"{self.out_axes}. Leave it out, and move axes of the kernel "
                "afterwards."
            )
        if 0 in (*self.traced_axes, *self.diagonal_axes):
            raise ValueError(
                "`store` and `reduce` are for kernels of all pairs of examples; got "
                "the batch axis 0 in `trace_axes` or `diagonal_axes`. Remove it from "
                "them, or leave out `store` and `reduce`."
            )

    @property
    def _counts(self) -> tuple[int, ...]:
        """The numbers of samples, in increasing order."""
        counts = self.num_samples
        return counts if isinstance(counts, tuple) else (counts,)

    @property
    def _is_generator(self) -> bool:
        return isinstance(self.num_samples, tuple)

    @property
    def _is_on_disk(self) -> bool:
        return self.is_stored and not isinstance(self.store, HostStore)

    @property
    def _row_axis(self) -> MeshAxis | None:
        """The axis of the mesh over which rows are distributed."""
        has_rows = self.sample_axis is None or self.mesh_axis is not None
        return self.row_axis if has_rows else None

    def _average(self, get: Get, *, with_error: bool) -> Average:
        get = self.get if get is None else check_get(get)
        # An NNGP alone needs no estimator with parameters, which a model may not have.
        settings, of_model = settings_of(self, AbstractKernelSettings), EmpiricalNNGP
        size = settings.pop("block_size")
        if "ntk" in names_of(get):
            names, of_model = ("where", "filter_spec", "method"), EmpiricalKernel
            settings |= {name: getattr(self, name) for name in names}
        # The free memory is looked up here, before anything is traced.
        is_spread = self.sample_axis is not None
        return Average(
            eqx.Partial(of_model, **settings),
            self.symmetric,
            self.kwargs_axes,
            get,
            self.init,
            self.key,
            MemoryBudget(size.resolve()) if isinstance(size, MemoryBudget) else size,
            self.samples_per_batch,
            self._row_axis,
            check_mesh(self.mesh, self.sample_axis) if is_spread else None,
            with_error,
        )

    def _in_blocks(self, kernel_fn: Callable) -> BatchKernel:
        # Each block is one call of the function, with all samples of an average.
        settings = settings_of(self, AbstractStored)
        settings["mesh"] = None if self._row_axis is None else self.mesh
        axes, size = self.in_axes, self.block_size
        return BatchKernel(kernel_fn, block_size=size, in_axes=axes, **settings)

    def __call__(
        self,
        x1: PyTree,
        x2: PyTree = None,
        get: Get = None,
        *,
        key: Keys = None,
        **kwargs: Any,
    ) -> Any:
        """The kernels of all examples of `x1` with all of `x2`, averaged."""
        average = self._average(get, with_error=self.tol is not None)
        # Compiled functions do not see that two arguments are the same object.
        examples = Examples(x1, None if x2 is x1 else x2, key, kwargs)
        if self.reduce is not None:
            # Each block is averaged over all samples first.
            num = self._counts[0]
            average, examples = self._ready(average, examples, num)
            return self._run_blocks(average.of_blocks(0, num, "mean"), examples)
        estimates = self._estimates(average, examples, None)
        kernels = (estimate.kernel for estimate in estimates)
        return kernels if self._is_generator else next(kernels)

    def estimate(
        self,
        x1: PyTree,
        x2: PyTree = None,
        get: Get = None,
        *,
        previous: MonteCarloEstimate | None = None,
        key: Keys = None,
        **kwargs: Any,
    ) -> Any:
        """The kernels and errors, as an [`eqxbatch.results.MonteCarloEstimate`][].

        `previous` is an earlier estimate for the same examples, `init`, `key` and
        `get`. It is extended to a total of `num_samples`, with the same result as an
        uninterrupted run, up to rounding.
        """
        if self.reduce is not None:
            raise ValueError(
                "A kernel with `reduce` has no standard error. Call it, or make a "
                "kernel without `reduce`."
            )
        average = self._average(get, with_error=True)
        examples = Examples(x1, None if x2 is x1 else x2, key, kwargs)
        estimates = self._estimates(average, examples, previous)
        return estimates if self._is_generator else next(estimates)

    def _estimates(
        self, average: Average, examples: Examples, previous: MonteCarloEstimate | None
    ) -> Iterator[MonteCarloEstimate]:
        """Estimates for all numbers of samples; invalid arguments raise immediately."""
        counts = _remaining(self._counts, previous, self._is_generator)
        # These run in Python, between compiled programs.
        for what, is_set in (
            ("a `store`", self.is_stored),
            ("`progress`", self.progress is not None),
            ("`tol`", self.tol is not None),
        ):
            if is_set:
                check_concrete((average, examples), what)
        average, examples = self._ready(average, examples, counts[-1])
        # On devices, batches of samples advance the moments of whole kernels.
        if not self.is_stored:
            # A traced call is one program, in which the loop over batches would be
            # unrolled.
            arrays = jtu.tree_leaves((average, examples))
            at_once = any(isinstance(x, Tracer) for x in arrays)
            moments = Moments(average, examples, None, at_once=at_once)
            return self._run(moments, counts, previous)
        # Means and errors of a block go to the store as they are if each is seen once.
        if not self._is_generator and self.tol is None and previous is None:
            whole = average.of_blocks(0, counts[0], "estimate")
            estimate = Estimated(*self._run_blocks(whole, examples))
            return iter([_named_estimate(average, estimate, counts[0])])
        if self._is_on_disk:
            _raise_on_disk("`previous`")
        # If possible, each block is copied to the host only once, for all samples.
        at_once = self.tol is None
        moments = Moments(average, examples, self._run_blocks, at_once=at_once)
        return self._run(moments, counts, previous)

    def _ready(
        self, average: Average, examples: Examples, num: int
    ) -> tuple[Average, Examples]:
        """The average with all sizes resolved, for the given number of samples."""
        # The free memory is looked up before tracing.
        average, examples = gathered((resolved(average), examples))
        if self.is_stored or self.reduce is not None:
            return average, examples
        return average.of(0, num).fitted(examples), examples

    def _run_blocks(self, average: Average, examples: Examples) -> PyTree:
        """Averages the kernel block by block, into its store or reduction."""
        x1, x2, key, kwargs = examples
        return self._in_blocks(average)(x1, x2, key=key, **kwargs)

    def _run(
        self, moments: Moments, counts: list[int], previous: MonteCarloEstimate | None
    ) -> Iterator[MonteCarloEstimate]:
        # An earlier estimate counts as the samples that it was made of.
        num = 0
        if previous is not None:
            num = previous.num_samples
            moments.resume(previous)
        # With a store, the meter counts blocks.
        meter = None if self.is_stored else self.progress
        spans = itertools.pairwise((num, *counts))
        total = sum(len(moments.sizes(end - start)) for start, end in spans)
        num_nans, is_done = 0, False
        with metered(meter, total, 0, "samples of a kernel", "batch") as step:
            # The meter and the tolerance look at the estimate after each batch, and
            # wait for it. Without them, nothing waits.
            for count in counts:
                for size in moments.sizes(count - num):
                    moments.advance(num, size)
                    num += size
                    if meter is not None:
                        total_nans = count_nans(moments.estimated().means)
                        step(total_nans - num_nans)
                        num_nans = total_nans
                    if self.tol is not None and num >= _LEAST_SAMPLES:
                        is_done = relative_error(moments.estimated()) <= self.tol
                        if is_done:
                            break
                # Also what was stopped early is an estimate, with its own number.
                yield _named_estimate(moments.average, moments.estimated(), num)
                if is_done:
                    return


def _named_estimate(
    average: Average, estimate: Estimated, num: int
) -> MonteCarloEstimate:
    get = average.get
    error = named(get, estimate.errors) if average.with_error else None
    return MonteCarloEstimate(named(get, estimate.means), error, num)


def _remaining(
    counts: tuple[int, ...], previous: MonteCarloEstimate | None, is_generator: bool
) -> list[int]:
    """The numbers of samples that are still to be computed."""
    if previous is None:
        return list(counts)
    if not isinstance(previous, MonteCarloEstimate):
        raise TypeError(
            "`previous` must be a `MonteCarloEstimate`, as `estimate` returns it; got "
            f"{described(previous)}."
        )
    # An equal number is what was estimated already, and is yielded again.
    remaining = [count for count in counts if count >= previous.num_samples]
    if not remaining:
        raise ValueError(
            f"`previous` has {previous.num_samples} samples, more than `num_samples`, "
            f"{counts if is_generator else counts[0]}. Make a kernel with more."
        )
    return remaining


def _raise_on_disk(what: str) -> None:
    raise ValueError(
        f"With {what}, the kernel is averaged as a whole several times, which a store "
        "on disk does not support. Use `store='host'`, or one number of samples."
    )
