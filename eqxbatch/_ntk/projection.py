"""Random projections of gradients, which are metrics whose mean is another metric."""

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Integer, Key, PyTree, UInt32

from .._base.checks import check_at_least
from .._base.types import check_fields
from .._sites.features import AbstractFeatures, AbstractProjection
from .directions import DenseDirections, Directions, SparseDirections


# How a projection draws its directions for each array.
Kind = Literal["dense", "sparse", "auto"]


# The operations of one signed entry, as long as its reads from memory.
ENTRY_COST = 8


class Projection(AbstractProjection):
    """A random projection of gradients, as a `metric` of [`eqxbatch.EmpiricalNTK`][].

    It is also what `features` of [`eqxbatch.filter_micro_grad`][] takes, for the
    projected gradients of examples while training.

    Each gradient becomes `dim` numbers, whose inner products estimate those of the
    gradients without bias. With a `metric`, gradients are preconditioned first: the
    inner products estimate `J M J^T`.

    A dense projection multiplies an entry of a matrix by a random sign for its row and
    one for its column, so that for layers, the projection is one of inputs and one of
    gradients of outputs: no gradient is formed, and no large random matrix. The other
    axes of a weight count as one. A sparse projection forms the gradient of one example
    after the other, and adds each of its numbers to a few of the results. The variance
    of both falls as `1 / dim`. That of a sparse one is at most
    `(|g|^2 |h|^2 + (g . h)^2) / dim` for gradients `g` and `h`, and that of a dense one
    up to four times as large if these are outer products.

    **Arguments:**

    - `dim`: the number of random directions, at least 1.
    - `key`: the random key. The same key has the same directions for all examples.
    - `metric`: a positive semidefinite matrix `M` over the parameters, as for
        [`eqxbatch.EmpiricalNTK`][], but no other projection; None for the identity.
        Directions are drawn in its eigenvectors. The projection of Kronecker factors is
        multiplied by them once for a block of examples, and costs each example what it
        does without a metric. Other eigenvalues need the gradient.
    - `kind`: `"dense"` or `"sparse"` for all arrays, or `"auto"` for what takes fewer
        operations for each array. That depends on nothing but the array, `dim`,
        `entries` and the metric, so that features of different examples match.
    - `entries`: how many of the `dim` results a number of a gradient is added to if the
        projection is sparse: a divisor of `dim`. More make large errors rarer, with the
        same variance.

    **Raises:**

    `ValueError` for a `dim` or `entries` below 1, for `entries` that do not divide
    `dim`, for an unknown `kind`, and for a `metric` that is another projection. An
    estimator raises the errors of its `metric`.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, "scalar", 32, 2, key=jax.random.key(0))
        >>> sketch = eqxbatch.Projection(256, jax.random.key(1))
        >>> eqxbatch.EmpiricalNTK(model, metric=sketch)(jnp.ones((5, 2))).shape
        (5, 5)

        ```

        Features whose inner products estimate influences:

        ```python
        >>> x = jnp.ones((5, 2))
        >>> factors = eqxbatch.filter_kfac(
        ...     lambda model, x: model(x), lambda out, x: out**2 / 2
        ... )(model, x)
        >>> inverse = factors.operator(damping=0.1, factored=True).inverse()
        >>> sketch = eqxbatch.Projection(256, jax.random.key(1), metric=inverse)
        >>> eqxbatch.EmpiricalNTK(model, metric=sketch).features(x).shape
        (5, 256)

        ```

    ??? cite

        Projected gradients as features of examples are those of Park et al., "TRAK:
        attributing model behavior at scale",
        [arXiv:2303.14186](https://arxiv.org/abs/2303.14186), and projections of the
        two factors of a layer those of Choe et al., "What is your data worth to GPT?",
        [arXiv:2405.13954](https://arxiv.org/abs/2405.13954), who precondition, too.
        Random directions that are products are due to Rakhshan and Rabusseau,
        "Tensorized random projections",
        [arXiv:2003.05101](https://arxiv.org/abs/2003.05101). Sparse ones are those in
        blocks of Kane and Nelson, "Sparser Johnson-Lindenstrauss transforms",
        [arXiv:1012.1577](https://arxiv.org/abs/1012.1577), except that neighbours never
        meet.
    """

    dim: int = eqx.field(static=True)
    key: Key[Array, ""] | UInt32[Array, "2"]
    _: dataclasses.KW_ONLY
    metric: Any = None
    kind: Kind = eqx.field(static=True, default="dense")
    entries: int = eqx.field(static=True, default=1)

    def __check_init__(self) -> None:
        check_fields(self)
        check_at_least("dim", self.dim, 1)
        check_at_least("entries", self.entries, 1)
        if self.dim % self.entries:
            raise ValueError(
                "`entries` must divide `dim`, as each of that many blocks of results "
                f"has one; got `dim={self.dim}` and `entries={self.entries}`. Take "
                "powers of two for both."
            )
        if isinstance(self.metric, Projection):
            raise ValueError(
                "The `metric` of a `Projection` must be the matrix itself; got another "
                "`Projection`. Pass the `metric` of that one."
            )

    def drawn(self, parameters: PyTree[Any]) -> AbstractFeatures:
        # A metric may have a projection.
        from .metric import metric_of

        projected = metric_of(self, parameters).projected
        assert projected is not None
        return projected

    def directions(self, arrays: "Sequence[Projected]") -> list[Directions]:
        """The directions of each of several arrays."""
        # From the number of an array alone, so that all examples have the same signs.
        split = lambda number: jr.split(jr.fold_in(self.key, number), 2)
        keys = jax.lax.map(split, jnp.arange(len(arrays)))
        width = self.dim // self.entries
        are_sparse = [self.is_sparse(x.shape, is_formed=x.is_formed) for x in arrays]
        sizes: dict[tuple[int, int], int] = {}
        for number, (x, is_sparse) in enumerate(zip(arrays, are_sparse, strict=True)):
            if is_sparse:
                sizes[number, 0] = -(-math.prod(x.shape) // width)
                continue
            # Matrices have signs for their rows and columns, and vectors for entries.
            *batch, rows, columns = x.shape if len(x.shape) > 1 else (*x.shape, None)
            sizes[number, 0] = math.prod(batch) * rows
            if columns is not None:
                sizes[number, 1] = math.prod(batch) * columns
        signs = self._signs(keys, sizes)

        def of_array(number: int, x: Projected) -> Directions:
            if not are_sparse[number]:
                batch = math.prod(x.shape[:-2])
                sides = [
                    signs[number, i].reshape(batch, size, self.dim)
                    for i, size in enumerate(x.shape[-2:])
                ]
                return DenseDirections(*sides)
            num = sizes[number, 0]
            shape = num, self.entries
            places = jr.randint(keys[number, 1], shape, 0, width)
            return SparseDirections(signs[number, 0].reshape(*shape, width), places)

        return [of_array(number, x) for number, x in enumerate(arrays)]

    def _signs(
        self, keys: Array, sizes: dict[tuple[int, int], int]
    ) -> dict[tuple[int, int], Integer[Array, "size dim"]]:
        """Random signs from some of the keys."""
        # Those of equal sizes in one loop: many draws would take long to compile.
        by_size: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
        for place, size in sizes.items():
            by_size[size].append(place)
        signs: dict[tuple[int, int], Array] = {}
        for size, places in by_size.items():
            numbers, sides = np.array(places).T
            draw = functools.partial(self._random_signs, size=size)
            drawn = jax.lax.map(draw, keys[numbers, sides])
            signs.update(zip(places, drawn, strict=True))
        return signs

    def _random_signs(self, key: Array, size: int) -> Integer[Array, "size dim"]:
        if size == 0:
            return jnp.zeros((0, self.dim), jnp.int8)
        # One for each random bit.
        numbers = jr.bits(key, (size, -(-self.dim // 8)), jnp.uint8)
        bits = jnp.unpackbits(numbers, axis=1, count=self.dim)
        return 2 * bits.astype(jnp.int8) - 1

    def is_sparse(self, shape: tuple[int, ...], *, is_formed: bool = False) -> bool:
        """Whether an array of this shape has a sparse projection.

        - `is_formed`: whether it has no factors, whatever the model is.
        """
        if self.kind != "auto":
            return self.kind == "sparse"
        # Nothing about the examples or the model may count here: two sides that chose
        # differently would have a wrong product.
        size, operations = math.prod(shape), ENTRY_COST * self.entries
        if len(shape) < 2 or is_formed:
            return operations < 2 * self.dim
        # Factors that meet `dim` directions each, against a product for each entry.
        *batch, rows, columns = shape
        num = math.prod(batch) * (rows + columns)
        return size * (2 + operations) < 2 * num * self.dim


class Projected(NamedTuple):
    """An array that is projected.

    - `shape`: that of a vector, or of a batch of matrices.
    - `is_formed`: as for `Projection.is_sparse`.
    """

    shape: tuple[int, ...]
    is_formed: bool = False
