"""`filter_kfac`: Kronecker factors of Gauss-Newton and Fisher matrices."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .._base.compile import num_bytes
from .._base.mesh import sum_except
from .._base.platforms import exact_products, platform, products_of
from .._base.trees import safe_zip
from .._base.versions import varying
from .._batch.loop import accumulated
from .._batch.rows import Rows
from .._batch.sums import Sum
from .._batch.transform import also_decorator, Model, Out, P, run_compiled
from .._sites.factors import Factors
from .._sites.kronecker import kronecker_program, multiplied, parts_of
from .._sites.program import Directions, Program
from .._sites.table import SiteTable
from .fisher import AbstractFisher
from .functions import GaussNewtonCurvature
from .jacobian import AbstractReplicated
from .kronecker_blocks import KroneckerBlock
from .kronecker_factors import KroneckerFactors
from .kronecker_sums import (
    finished,
    moment_sums,
    part_sums,
    VECTOR,
    Weighing,
    WeightSharing,
)
from .pytree import leaves_of_parts, Unravel


# There is always a batch here.
_IF_WHOLE = "Give the function of one example."


class KFAC(AbstractFisher[Model, P, Out], AbstractReplicated):
    """Kronecker factors (K-FAC) of a Gauss-Newton or Fisher matrix.

    The block of a weight in [`eqxbatch.filter_ggn`][] is the second moment of `d a^T`,
    where `a` is the input of its layer and `d` the gradient of its output. K-FAC
    approximates it by the Kronecker product of the second moments of `d` and of `a`.
    These are found for every matrix product, convolution and embedding in any program:
    inside `scan`s, in custom layers, for weights that are used several times, for
    stacked layers, and for derivatives of a network in its inputs.

    **Arguments:**

    - `fun`, `loss`: a model, and a loss of its output for one example, as for
        [`eqxbatch.filter_ggn`][]. Pass `loss` by keyword if you use this as a
        decorator.
    - `fisher`, `key`, `num_samples`, `sampler`: the exact matrix, or an estimate that
        needs fewer backward passes, as for [`eqxbatch.filter_ggn`][].
    - `weight_sharing`: how to treat a weight that is used at several positions of one
        example, such as those of an image or a sequence, the steps of a `scan`, several
        calls, or derivatives along directions. `"expand"` treats positions as separate
        examples. `"reduce"` uses the mean of the inputs and the sum of the gradients
        over the positions, which suits models that average over positions before the
        loss. Embeddings are always expanded.
    - `corrected`: whether to correct the eigenvalues (EK-FAC). A second pass over the
        examples computes the second moments of per-example gradients along the
        eigenvectors of each Kronecker product. The result is the best approximation of
        the exact block with these eigenvectors.
    - `is_block`: a predicate on parts of the first argument: whether the part is one
        block. A weight with its bias, or a weight alone, has Kronecker factors; any
        other part gets its exact block. By default, a bias that is added to products
        with a weight, and to nothing else, counts as one more input of the layer, which
        is 0 in products without it. Every other array is a block of its own.
        `is_block=equinox.is_array` separates biases.
    - `in_axes`: the batch axes of the arguments after the first, as for
        [`eqxbatch.filter_micro_value_and_grad`][]: axis 0 of all arrays by default.
    - `where`, `filter_spec`, `microbatch_size`, `accumulator`: as for
        [`eqxbatch.filter_hessian`][].

    **Returns:**

    A function with the arguments of `fun` that returns
    [`eqxbatch.results.KroneckerFactors`][]. Arrays that do not enter by a matrix
    product, such as the scales of a normalisation layer, have an exact block if they
    have at most 512 entries, and a diagonal block otherwise. So do arrays that are
    reshaped, sliced or masked first, and all arrays if JAX can differentiate `fun` in
    forward mode only. To see the structure of each block, print the factors or an
    [`eqxbatch.explain_sites`][] report.

    The function is compiled on the first call; repeated calls with the same function
    and shapes are not retraced.

    **Raises:**

    The errors of [`eqxbatch.filter_ggn`][], and:

    - `ValueError` for `in_axes=None`, for an unknown `weight_sharing`, and for
        parameters that are multiplied with each other before they meet an example,
        unless `is_block` is given.

    !!! example

        A natural-gradient step:

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, 3, 8, 1, key=jax.random.key(0))
        >>> predict = lambda model, x, label: model(x)
        >>> loss = lambda logits, x, label: -jax.nn.log_softmax(logits)[label]
        >>> x, labels = jnp.ones((10, 2)), jnp.arange(10) % 3
        >>> factors = eqxbatch.filter_kfac(
        ...     predict,
        ...     loss,
        ...     fisher="mc",
        ...     key=jax.random.key(1),
        ...     sampler=jax.random.categorical,
        ... )(model, x, labels)
        >>> gradient = eqxbatch.filter_micro_grad(
        ...     lambda model, x, label: loss(predict(model, x, label), x, label)
        ... )(model, x, labels)
        >>> step = factors.operator(damping=1e-2).inverse().mv(gradient)
        >>> model = eqx.apply_updates(model, jax.tree.map(jnp.negative, step))

        ```

    ??? cite

        Martens and Grosse, "Optimizing neural networks with Kronecker-factored
        approximate curvature", [arXiv:1503.05671](https://arxiv.org/abs/1503.05671);
        Grosse and Martens, "A Kronecker-factored approximate Fisher matrix for
        convolution layers", [arXiv:1602.01407](https://arxiv.org/abs/1602.01407);
        Eschenhagen et al., "Kronecker-factored approximate curvature for modern neural
        network architectures", [arXiv:2311.00636](https://arxiv.org/abs/2311.00636),
        for `weight_sharing`; Dangel, Müller and Zeinhofer, "Kronecker-factored
        approximate curvature for physics-informed neural networks",
        [arXiv:2405.15603](https://arxiv.org/abs/2405.15603), for derivatives; George et
        al., "Fast approximate natural gradient descent in a Kronecker-factored
        eigenbasis", [arXiv:1806.03884](https://arxiv.org/abs/1806.03884), for
        `corrected`.
    """

    _: dataclasses.KW_ONLY
    weight_sharing: WeightSharing = "expand"
    corrected: bool = False
    is_block: Callable[[Any], bool] | None = None

    def __call__(
        self, x: Model, /, *args: P.args, **kwargs: P.kwargs
    ) -> KroneckerFactors:
        return run_compiled(self, x, *args, **kwargs)

    def __check_init__(self) -> None:
        if self.in_axes is None:
            raise ValueError(
                "`in_axes` must say which axes of the arguments after the first are "
                "the batch, as Kronecker factors are means over examples; got None. "
                "Use `in_axes=0`, with `x[None]` for a single example."
            )

    def apply(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        fun = self.in_microbatches(args, kwargs)
        diff, keys = fun.diff, self.keys_of(fun.blocks)
        curvature = GaussNewtonCurvature(
            fun, self.loss, fisher=self, if_whole=_IF_WHOLE
        )
        # Without reverse mode, all Jacobians are formed, and no leaf has Kronecker
        # factors.
        program = kronecker_program(curvature.program, curvature.formed)
        # By default, the sites say what is a block: a weight, and the bias that joins
        # it.
        chosen = None
        if self.is_block is None:
            _check_not_multiplied(program.table, diff)
        else:
            chosen = [x for x in leaves_of_parts(diff, self.is_block) if x]
        parts = parts_of(program.table, chosen)
        # Sums stay apart only over the mesh axes over which all leaves differ.
        axes = [varying(jax.typeof(x)) for x in jtu.tree_leaves(diff)]
        mesh_axes = frozenset.intersection(*axes)

        def totals(sums: Callable[[Factors, Weighing], list]) -> list:
            # `self.total` adds up lists of arrays. What they are the leaves of comes
            # out with the first trace.
            treedefs: list = []

            def flat(factors: Factors, weighing: Weighing) -> list[Array]:
                arrays, treedef = jtu.tree_flatten(sums(factors, weighing))
                treedefs.append(treedef)
                return arrays

            of_rows = functools.partial(_sums, curvature, program, flat)
            traced = curvature.program
            with exact_products(), products_of(traced.closed):
                of_all, _ = self.total(fun, traced, of_rows, curvature.aux, keys)
            # A sum over examples, like a gradient. It also sums over devices, which
            # have different examples but the same parameters.
            of_all = [sum_except(x, mesh_axes) for x in of_all]
            return jtu.tree_unflatten(treedefs[0], of_all)

        # The first pass over the examples: second moments of operands and cotangents.
        of_parts = totals(
            lambda factors, weighing: [
                part_sums(program.table, part, factors, weighing, self.weight_sharing)
                for part in parts
            ]
        )
        blocks = [
            KroneckerBlock(part, *finished(part, of_part))
            for part, of_part in safe_zip(parts, of_parts)
        ]
        # The second one needs the eigenvectors of the whole sums, so it cannot be
        # joined with the first.
        if self.corrected:
            bases = {
                block.part: [basis for _, basis in block.eigenvectors()]
                for block in blocks
                if block.part.structure == "kronecker"
            }
            # Second moments along the eigenvectors.
            moments = totals(
                lambda factors, weighing: [
                    moment_sums(program.table, part, factors, weighing, basis)
                    for part, basis in bases.items()
                ]
            )
            # Eigenvalues are replaced by the moments, and the factors stay as they are.
            known = dict(safe_zip(bases, moments))
            blocks = [
                KroneckerBlock(part, x.outputs, x.inputs, known[part], *bases[part])
                if (part := x.part) in bases
                else x
                for x in blocks
            ]
        # Sums of squares are positive semidefinite, unless a weight is negative.
        is_squared = self.fisher != "exact"
        is_semidefinite = is_squared and self.accumulator.weights is None
        return KroneckerFactors(tuple(blocks), Unravel(diff), is_semidefinite)


def _check_not_multiplied(table: SiteTable, diff: PyTree) -> None:
    paths = [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(diff)]
    for leaf, path in enumerate(paths):
        other = multiplied(table, leaf)
        if other is not None:
            raise ValueError(
                f"The parameters `{path}` and `{paths[other]}` are multiplied with "
                "each other before they meet an example, so neither has Kronecker "
                "factors. Multiply them with the example one after the other, as in `a "
                "@ (b @ x)`; or leave them out with `filter_spec` or `where`; or pass "
                "`is_block=equinox.is_array` for exact blocks (diagonals of large "
                "ones), with separate biases."
            )


def _sums(
    curvature: GaussNewtonCurvature,
    program: Program,
    sums: Callable[[Factors, Weighing], list[Array]],
    rows: Rows,
) -> list[Array]:
    """Adds up what `sums` returns for the factors of some examples at a time."""
    num_vectors = curvature.num_vectors
    directions = Directions(curvature.of_outputs, (VECTOR,))

    def of_rows(rows: Rows) -> list[Array]:
        # The factors of the sites, with as many cotangents as there are vectors.
        factors = program.factors(rows, directions)
        weighing = Weighing(factors.num, num_vectors, rows.weights, factors.curve)
        return sums(factors, weighing)

    # As many examples at a time as have factors of the size that the platform allows.
    kept = _bytes(program.table, num_vectors)
    size = max(1, 4 * platform().factor_bytes // max(kept, 1))
    return accumulated(of_rows, rows, size, Sum())


def _bytes(table: SiteTable, num_vectors: int) -> int:
    """The bytes kept for one example, with the largest operand as its site uses it.

    The patches of a convolution are several times as large as its input.
    """
    # One operand, and one cotangent for each vector.
    structs = [*table.operands, *(num_vectors * [*table.perturbations])]
    size = lambda site, axes: math.prod(site.sizes[name] for name in axes)
    expanded = [
        size(site, site.a_axes) * table.operands[site.operand].dtype.itemsize
        for site in table.sites
        if site.operand is not None
    ]
    # Both factors are separate for each group.
    expanded += [
        site.sizes[str(site.rule.group)]
        * (size(site, site.a_axes) + num_vectors * size(site, site.d_axes))
        * table.perturbations[site.perturbation].dtype.itemsize
        for site in table.sites
        if site.which is not None
    ]
    return num_bytes(structs) + max(expanded, default=0)


filter_kfac = also_decorator("filter_kfac", KFAC)
