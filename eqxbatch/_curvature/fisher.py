"""What replaces the Hessian of a loss in a Gauss-Newton matrix."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Key, PRNGKeyArray, PyTree, Real, UInt32

from .._base.checks import check_at_least
from .._base.dtypes import widened
from .._base.run_time_checks import error_if
from .._base.trees import described, shown
from .._batch.blocks import Blocks
from .._batch.derivative import AbstractOverExamples
from .._batch.passes import current_passes
from .._batch.rows import Rows
from .._batch.transform import Model, Out, P


class AbstractOfOutputs(AbstractOverExamples, Generic[Model, P, Out]):
    """A transform of a model and a `loss` of its outputs."""

    fun: Callable[Concatenate[Model, P], Out]
    loss: Callable[Concatenate[Out, ...], ArrayLike]
    _: dataclasses.KW_ONLY
    in_axes: PyTree = eqx.if_array(0)

    @property
    def has_aux(self) -> bool:
        return False

    @property
    def holomorphic(self) -> None:
        return None


def _as_fisher(
    fisher: Literal["exact", "type-2", "mc", "empirical"],
) -> Literal["exact", "mc", "empirical"]:
    return "exact" if fisher == "type-2" else fisher


class AbstractFisher(AbstractOfOutputs[Model, P, Out]):
    """A transform with a choice of what replaces the Hessian of the loss.

    - `fisher`: `"exact"` (or `"type-2"`) uses this Hessian. `"mc"` uses its square root
        times random vectors, or gradients for drawn labels. `"empirical"` uses the
        gradient.
    - `key`, `num_samples`: settings for random draws, shared by all examples.
    - `sampler`: draws labels, as `sampler(key, out)`.
    """

    _: dataclasses.KW_ONLY
    fisher: Literal["exact", "type-2", "mc", "empirical"] = eqx.field(
        converter=_as_fisher, default="exact"
    )
    key: PRNGKeyArray | UInt32[Array, "2"] | None = None
    num_samples: int = 1
    sampler: Callable[..., Any] | None = None

    def __check_init__(self) -> None:
        check_at_least("num_samples", self.num_samples, 1)
        is_mc = self.fisher == "mc"
        if is_mc and self.key is None:
            raise ValueError(
                "`fisher='mc'` draws random vectors: give it a `key`, such as "
                "`jax.random.key(0)`; got `key=None`."
            )
        # A setting that nothing reads would be ignored without a word.
        for name, is_passed in (
            ("key", self.key is not None),
            ("sampler", self.sampler is not None),
            ("num_samples", self.num_samples != 1),
        ):
            if is_passed and not is_mc:
                raise ValueError(
                    f"`{name}` is for `fisher='mc'`, as nothing is drawn otherwise; "
                    f"got it with `fisher={self.fisher!r}`. Leave it out."
                )

    def keys_of(self, blocks: Blocks | None) -> UInt32[Array, "n words"] | None:
        """The key of each example of a batch, if anything is drawn at random."""
        if self.key is None or blocks is None:
            return None
        # The numbers that the key of each example is made from. By the numbers of the
        # examples, keys do not depend on how many examples there are.
        passes = current_passes()
        start = 0 if passes is None else passes.start
        numbers = start + jnp.arange(blocks.total, dtype=jnp.int32)
        return jr.key_data(jax.vmap(jr.fold_in, (None, 0))(self._typed_key, numbers))

    @property
    def _typed_key(self) -> Key[Array, ""]:
        key = self.key
        assert key is not None
        # An old key is an array of numbers.
        is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        return key if is_typed else jr.wrap_key_data(key)

    def keys_of_samples(self, example: Rows) -> Key[Array, " samples"]:
        """The keys of all samples of an example."""
        key = self._typed_key
        if example.keys is not None:
            key = jr.wrap_key_data(example.keys, impl=jr.key_impl(key))
        return jr.split(key, self.num_samples)


# How far below zero eigenvalues may be, in units of the rounding error.
_ROUNDING = 8.0


def root(
    matrix: Real[Array, "outputs outputs"], terms: Real[Array, "outputs outputs"]
) -> Real[Array, "outputs outputs"]:
    """An array `x` with `x.T @ x` equal to a positive semidefinite matrix.

    `terms` is as large as what was subtracted to form the matrix: eigenvalues below
    zero by its rounding count as zero.
    """
    eps = float(jnp.finfo(matrix.dtype).eps)
    matrix, terms = widened(matrix), widened(terms)
    lowest = jnp.min(jnp.linalg.eigvalsh(matrix), initial=0)
    largest = jnp.max(jnp.maximum(jnp.abs(matrix), terms), initial=0)
    # Each row is judged by its own size, so that small curvatures beside large ones
    # keep their digits. It is that of the diagonal, which is bounded below by the other
    # entries, as its own digits may have cancelled.
    sizes = jnp.diagonal(matrix)
    sizes = matrix / jnp.where(sizes > 0, sizes, jnp.inf)[None] * matrix
    sizes = jnp.max(sizes, axis=1, initial=0)
    scales = jnp.sqrt(jnp.where(sizes == 0, 1, sizes))
    values, vectors = jnp.linalg.eigh(matrix / scales[:, None] / scales[None])
    message = (
        "`fisher='mc'` takes the square root of the loss's Hessian in what `fun` "
        "returns, but that has a negative eigenvalue: the loss is not convex there. "
        "Use `fisher='exact'`, which needs no root, or pass a `sampler`."
    )
    is_negative = lowest < -_ROUNDING * matrix.shape[0] * eps * largest
    values = error_if(values, (is_negative, message))
    # The root of an eigenvalue that is zero up to rounding would be as large as that of
    # eps. The symmetric root does not depend on the choice of eigenvectors.
    least = 4 * eps * jnp.max(values, initial=0)
    roots = jnp.where(values <= least, 0, jnp.sqrt(jnp.maximum(values, 0)))
    return (vectors * roots[None]) @ vectors.T * scales[None]


def drawn_labels(
    draw: Callable[[PyTree], PyTree],
    out: PyTree,
    args: Sequence[PyTree],
    kwargs: dict[str, Any],
) -> PyTree:
    """A label for an output of the model, to replace the last argument."""
    # Nothing says which of several keyword arguments is the label.
    if kwargs or not args:
        got = f"the keyword arguments {(*kwargs,)}, one of which may be it"
        got = got if kwargs else "a call without arguments after the first"
        raise ValueError(
            "`sampler` draws the label, which replaces the last positional argument; "
            f"got {got}. Pass all arguments by position."
        )
    try:
        # A sampler may compute the label from the output, but the loss takes it as
        # given.
        label = lax.stop_gradient(draw(out))
    except Exception as e:
        e.add_note(
            f"`sampler` is called as `sampler(key, out)`; `out` is {shown(out)}."
        )
        raise
    # A label of another shape might broadcast, and give another loss.
    forms = [
        (jtu.tree_structure(tree), [jnp.shape(x) for x in jtu.tree_leaves(tree)])
        for tree in (label, args[-1])
    ]
    if forms[0] != forms[1]:
        raise ValueError(
            "`sampler` must return a label with the structure and shapes of the last "
            f"positional argument, {described(args[-1])}; got {described(label)}."
        )
    return label
