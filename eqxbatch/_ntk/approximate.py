"""Estimates of a neural tangent kernel with fewer backward passes."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
from jaxtyping import Array, Inexact, Key, PyTree, UInt32

from .._base.checks import check_at_least
from .._kernels.calls import Keys
from .estimator import AbstractEstimator, checked_constructor, KernelTask, Probes
from .request import AbstractParameterKernel


@checked_constructor
class PseudoNTK(AbstractEstimator, AbstractParameterKernel):
    """The NTK of the sum of a model's outputs: one backward pass per example.

    For `k` outputs along the `trace_axes`, this is the kernel of their sum divided by
    `sqrt(k)`. For wide models at initialisation, it is close to the result of
    [`eqxbatch.EmpiricalNTK`][]. It is biased, because it includes products between
    different outputs.

    It is called like an [`eqxbatch.EmpiricalNTK`][], and its results have the same
    shapes.

    **Arguments:**

    - `model`, `trace_axes`, `diagonal_axes`, `vmap_axes`, `block_size`, `where`,
        `filter_spec`: as for [`eqxbatch.EmpiricalNTK`][].

    Raises the errors of [`eqxbatch.EmpiricalNTK`][], and `ValueError` when called if
    `trace_axes=()`.

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
    - `standard_error`: the standard error of each entry; NaN for a single probe.
    """

    kernel: PyTree[Inexact[Array, "..."]]
    standard_error: PyTree[Inexact[Array, "..."]]


@checked_constructor
class ProbedNTK(AbstractEstimator, AbstractParameterKernel):
    """An unbiased estimate of a traced NTK, from random directions of the outputs.

    Instead of every output entry along the `trace_axes`, `num_probes` sums of these
    entries with random signs are pulled back, with the same signs for all examples. The
    mean of the kernels of the sums is an unbiased estimate of the kernel of
    [`eqxbatch.EmpiricalNTK`][]. It is positive semidefinite and comes with a standard
    error. It saves time if there are more outputs than probes.

    **Arguments:**

    - `model`, `trace_axes`, `diagonal_axes`, `vmap_axes`, `block_size`, `where`,
        `filter_spec`: as for [`eqxbatch.EmpiricalNTK`][]. Calls take the same
        arguments, too.
    - `num_probes`: the number of random directions, at least 1.
    - `key`: the random key for the directions.

    **Returns:**

    A call returns an [`eqxbatch.KernelEstimate`][].

    **Raises:**

    The errors of [`eqxbatch.EmpiricalNTK`][], and `ValueError` if `num_probes` is below
    1 and, when called, if `trace_axes` is empty or names the axis of the examples.

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

        The estimator of the trace is that of [Hutchinson,
        1989](https://doi.org/10.1080/03610918908812806).
    """

    _: dataclasses.KW_ONLY
    num_probes: int = eqx.field(static=True)
    key: Key[Array, ""] | UInt32[Array, "2"]

    def __check_init__(self) -> None:
        check_at_least("num_probes", self.num_probes, 1)

    def _asked(self, **kwargs: Any) -> tuple[KernelTask, Any, dict[str, Any]]:
        return (
            KernelTask(("ntk",), Probes(self.num_probes, self.key)),
            KernelEstimate,
            kwargs,
        )

    def __call__(
        self, x1: PyTree, x2: PyTree = None, *, key: Keys = None, **kwargs: Any
    ) -> KernelEstimate:
        """The estimated kernel of all examples of `x1` with all of `x2`."""
        return self._computed(x1, x2, key, self._asked(**kwargs))
