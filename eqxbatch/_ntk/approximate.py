"""Estimates of a neural tangent kernel that take fewer backward passes."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
from jaxtyping import Array, Inexact, Key, PyTree, UInt32

from .._pairs.batch import BatchKernel
from .._pairs.calls import BlockSize, Keys, VmapSpec
from .random_model import selected
from .request import Kernels, KernelTask, make_kernels, Probes
from .task_kernel import AbstractEstimator, checked_settings


class PseudoNTK(AbstractEstimator):
    """The kernel of the sum of a model's outputs: one backward pass an example.

    With `k` outputs along the `trace_axes`, it is that of their sum divided by
    `sqrt(k)`. For wide models at initialisation it is close to what
    [`eqxbatch.EmpiricalNTK`][] returns; it is not unbiased, as it has what different
    outputs have in common.

    It is called as that is, its results have the same shapes, and its arguments mean
    what they mean there: `model`, `trace_axes`, `diagonal_axes`, `vmap_axes`,
    `block_size`, `where` and `filter_spec`.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, 10, 32, 2, key=jax.random.key(0))
        >>> eqxbatch.PseudoNTK(model)(jnp.ones((5, 2))).shape
        (5, 5)

        ```

    ??? cite

        The pseudo-NTK of
        [Mohamadi, Bae and Sutherland, 2023](https://arxiv.org/abs/2206.12543).
    """

    _kernels: Kernels
    _blocks: BatchKernel | None

    @checked_settings
    def __init__(
        self,
        model: Callable | tuple[Callable, eqx.nn.State],
        *,
        trace_axes: int | tuple[int, ...] | None = None,
        diagonal_axes: int | tuple[int, ...] = (),
        vmap_axes: VmapSpec = 0,
        block_size: BlockSize = None,
        where: Callable[[Any], Any] | None = None,
        filter_spec: PyTree = eqx.is_inexact_array,
    ):
        self._kernels = make_kernels(
            *selected(model, where, filter_spec),
            trace_axes=trace_axes,
            diagonal_axes=diagonal_axes,
            vmap_axes=vmap_axes,
            block_size=block_size,
        )
        self._blocks = None

    def _asked(self, **kwargs: Any) -> tuple[KernelTask, Any, dict[str, Any]]:
        return KernelTask(("ntk",), Probes(1, None)), "ntk", kwargs

    def __call__(
        self, x1: PyTree, x2: PyTree = None, *, key: Keys = None, **kwargs: Any
    ) -> PyTree[Inexact[Array, "..."]]:
        """The kernel of all examples of `x1` with all of `x2`."""
        return self._computed(x1, x2, key, self._asked(**kwargs))


class KernelEstimate(NamedTuple):
    """What [`eqxbatch.ProbedNTK`][] returns.

    - `kernel`: the mean over the probes.
    - `standard_error`: of each of its entries; NaN for a single probe.
    """

    kernel: PyTree[Inexact[Array, "..."]]
    standard_error: PyTree[Inexact[Array, "..."]]


class ProbedNTK(AbstractEstimator):
    """An unbiased estimate of a traced NTK, from random directions of the outputs.

    Instead of all entries of the output along the `trace_axes`, `num_probes` sums of
    them with random signs are pulled back, the same for all examples. The mean of their
    kernels has that of [`eqxbatch.EmpiricalNTK`][] as its expectation, is positive
    semidefinite, and comes with its standard error. Worth it for more outputs than
    probes.

    **Arguments:**

    - `model`, `trace_axes`, `diagonal_axes`, `vmap_axes`, `block_size`, `where`,
        `filter_spec`: as for [`eqxbatch.EmpiricalNTK`][], as which it is called.
    - `num_probes`: how many directions.
    - `key`: what they are drawn from.

    **Returns:**

    From a call, an [`eqxbatch.KernelEstimate`][].

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, 1_000, 32, 2, key=jax.random.key(0))
        >>> ntk = eqxbatch.ProbedNTK(model, num_probes=16, key=jax.random.key(1))
        >>> estimate = ntk(jnp.ones((5, 2)))
        >>> estimate.kernel.shape, estimate.standard_error.shape
        ((5, 5), (5, 5))

        ```

    ??? cite

        The estimate of a trace is that of
        [Hutchinson, 1989](https://doi.org/10.1080/03610918908812806).
    """

    _kernels: Kernels
    _blocks: BatchKernel | None
    _probes: Probes

    @checked_settings
    def __init__(
        self,
        model: Callable | tuple[Callable, eqx.nn.State],
        *,
        num_probes: int,
        key: Key[Array, ""] | UInt32[Array, "2"],
        trace_axes: int | tuple[int, ...] | None = None,
        diagonal_axes: int | tuple[int, ...] = (),
        vmap_axes: VmapSpec = 0,
        block_size: BlockSize = None,
        where: Callable[[Any], Any] | None = None,
        filter_spec: PyTree = eqx.is_inexact_array,
    ):
        if num_probes < 1:
            raise ValueError(f"`num_probes` must be at least 1; got {num_probes}.")
        self._probes = Probes(operator.index(num_probes), key)
        self._kernels = make_kernels(
            *selected(model, where, filter_spec),
            trace_axes=trace_axes,
            diagonal_axes=diagonal_axes,
            vmap_axes=vmap_axes,
            block_size=block_size,
        )
        self._blocks = None

    def _asked(self, **kwargs: Any) -> tuple[KernelTask, Any, dict[str, Any]]:
        return KernelTask(("ntk",), self._probes), KernelEstimate, kwargs

    def __call__(
        self, x1: PyTree, x2: PyTree = None, *, key: Keys = None, **kwargs: Any
    ) -> KernelEstimate:
        """The estimated kernel of all examples of `x1` with all of `x2`."""
        return self._computed(x1, x2, key, self._asked(**kwargs))
