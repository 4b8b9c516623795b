"""Kernel-vector products without materialising the kernel."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Inexact, PyTree

from .._base.differentiable import derivative_of_program, pushed
from .._base.mesh import vary_as
from .._batch.accumulators import Concat
from .._batch.loop import accumulated, Rows
from .._batch.moments import Sum
from .request import AbstractTask, TracedModel


class ProductTask(AbstractTask):
    """`J1 (J2^H vector)`, for the Jacobians of a model on its two sides.

    No axis is traced, and entries between different outputs are included.
    """

    vector: PyTree

    def run(self, model: TracedModel) -> PyTree[Inexact[Array, "..."]]:
        vectors = self._checked(model)
        are_complex = [axes.is_complex for axes in model.axes]
        result = _real_product(model, vectors)
        if all(are_complex):
            # The product above treats the kernel as a real-linear map of real and
            # imaginary parts.
            turned = _real_product(
                model, [x * jnp.asarray(-1j, x.dtype) for x in vectors]
            )
            pairs = zip(result, turned, strict=True)
            result = [a + b * jnp.asarray(1j, b.dtype) for a, b in pairs]
        elif any(are_complex):
            raise ValueError(
                "The outputs must be all real or all complex; got the dtypes "
                f"{[str(axes.dtype) for axes in model.axes]}. Take them one by one."
            )
        return jtu.tree_unflatten(jtu.tree_structure(model.out), result)

    def _checked(self, model: TracedModel) -> list[Array]:
        """The arrays of the vector, with the examples along axis 0."""
        total = model.sides[-1].rows.total
        treedef = jtu.tree_structure(model.out)
        if jtu.tree_structure(self.vector) != treedef:
            raise ValueError(
                "`v` must have the structure of what the model returns, "
                f"{treedef}; got {jtu.tree_structure(self.vector)}."
            )
        result = []
        for axes, x in zip(model.axes, jtu.tree_leaves(self.vector), strict=True):
            shape = axes.whole_shape(total)
            if x.shape != shape or x.dtype != axes.dtype:
                raise ValueError(
                    "`v` must be like what the model returns for `x2` (or for `x1`, "
                    f"without `x2`), of shape {shape} and dtype {axes.dtype}; "
                    f"got shape {x.shape} and dtype {x.dtype}."
                )
            lead = x[None] if axes.batch is None else jnp.moveaxis(x, axes.batch, 0)
            result.append(lead)
        examples = [x for side in model.sides for x in side.rows.arrays]
        return vary_as(examples, result)


def _real_product(model: TracedModel, vectors: list[Array]) -> list[Array]:
    """The real-linear product with a kernel of real numbers."""
    tangents = _pulled_back(model, vectors)
    if model.axes[0].is_complex:
        # As in `example_factors.kernel`: a complex parameter counts as two real ones.
        tangents = [x / 2 if jnp.iscomplexobj(x) else x for x in tangents]
    first = model.sides[0].rows
    size, _ = model.block_sizes()

    derivative = derivative_of_program("the model", model.programs[0], first.arrays)
    if derivative == "rows":
        raise TypeError(
            "A product with the kernel needs the model's derivative in forward mode, "
            "but JAX has neither that nor the transpose of its backward pass. Use the "
            "kernel itself, which needs reverse mode only: call the `EmpiricalNTK` on "
            "the examples. A `jax.custom_jvp` instead of a `jax.custom_vjp` has both."
        )

    def push(arrays: list, _: int) -> list[Array]:
        values = lambda leaves: model.programs[0].many(leaves, arrays)
        return pushed(values, model.leaves, tangents, derivative)

    products = accumulated(push, first, size, Concat())
    return [
        x[0] if axes.batch is None else jnp.moveaxis(x, 0, axes.batch)
        for axes, x in zip(model.axes, products, strict=True)
    ]


def _pulled_back(model: TracedModel, vectors: list[Array]) -> list[Array]:
    rows = model.sides[-1].rows
    num = len(rows.arrays)
    _, size = model.block_sizes()

    def pull(arrays: list, _: int) -> list[Array]:
        values = lambda leaves: model.programs[-1].many(leaves, arrays[:num])
        pullback = jax.vjp(values, model.leaves)[1]
        (gradients,) = pullback([jnp.conj(x) for x in arrays[num:]])
        return [jnp.conj(x) for x in gradients]

    arrays, axes = [*rows.arrays, *vectors], (*rows.axes, *(0 for _ in vectors))
    return accumulated(pull, Rows(arrays, axes, rows.total), size, Sum())


class StructTask(AbstractTask):
    """The structure and shapes of vectors that the kernel multiplies."""

    def run(self, model: TracedModel) -> PyTree[Array]:
        """Zeros like the model's output for all examples."""
        total = model.sides[-1].rows.total
        zeros = [jnp.zeros(axes.whole_shape(total), axes.dtype) for axes in model.axes]
        return jtu.tree_unflatten(jtu.tree_structure(model.out), zeros)
