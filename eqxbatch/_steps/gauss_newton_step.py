"""`filter_gauss_newton_step`: damped Gauss-Newton steps in the smaller space."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Concatenate, Generic, Literal

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, PyTree

from .._base.checks import check_callable
from .._base.dtypes import (
    as_complex,
    as_real,
    widened,
)
from .._base.mesh import spec_of, vary_as
from .._base.platforms import exact_products
from .._base.traced_function import TracedFunction
from .._base.trees import described, log, safe_zip, shown
from .._base.types import AnyArray, as_jax
from .._batch.arguments import Arguments, Dtype
from .._batch.derivative import AbstractDerivative, like_parameters
from .._batch.loss import Loss, split_examples
from .._batch.memory import as_block_size, as_microbatch_size, MemoryBudget, Size
from .._batch.slots import is_accumulator
from .._batch.sums import check_adds, Mean, Sum
from .._batch.transform import (
    AbstractSharded,
    also_decorator,
    Model,
    P,
    run_compiled,
    with_second,
)
from .._curvature.matrices import filter_ggn
from .._curvature.pytree import joined, Unravel
from .damped_solver import DampedSolver, DENSE
from .residuals import (
    JoinedTerms,
    Residuals,
    ResidualTerm,
    Vectors,
    weights_of_term,
    without_padding,
)
from .sample_kernel import SampleKernel


# Those of the function, of a setting and of its pair, as for `Loss`.
_NAMES = ("residual", "has_residual", "(output, residual)")


Number = float | Float[AnyArray, ""]


class AbstractGaussNewtonStep(AbstractDerivative, AbstractSharded, Generic[Model, P]):
    """`filter_gauss_newton_step` without another argument for the previous step."""

    residual: Callable[Concatenate[Model, P], Any]
    has_aux: ClassVar[bool] = False
    holomorphic: ClassVar[None] = None
    allows_complex: ClassVar[bool] = True
    _: dataclasses.KW_ONLY
    damping: Number = eqx.field(converter=as_jax)
    space: Literal["auto", "sample", "parameter"] = "auto"
    centre: bool = False
    has_residual: bool = False
    weights: Number | Sequence[Number] = eqx.field(
        default=1.0, converter=lambda weights: jtu.tree_map(as_jax, weights)
    )
    accumulator: Sum | Mean | Sequence[Sum | Mean] = Mean()
    solver: Any = "cholesky"
    in_axes: PyTree = eqx.if_array(0)
    block_size: Size = eqx.field(default=None, converter=as_block_size)
    microbatch_size: Size = eqx.field(default=None, converter=as_microbatch_size)

    def __call__(self, model: Model, /, *args: P.args, **kwargs: P.kwargs) -> Model:
        return run_compiled(self, model, *args, **kwargs)


class GaussNewtonStep(AbstractGaussNewtonStep[Model, P]):
    """Damped Gauss-Newton steps, solved in sample or parameter space.

    Let `r` be the residuals of all examples and `J` their Jacobian with respect to the
    parameters. The step solves

        (J.T @ W @ J + damping * I) @ step = J.T @ W @ r

    where the diagonal matrix `W` has entries `1 / n` for `n` examples. This is the
    gradient of half the mean squared residual, preconditioned by its damped
    Gauss-Newton matrix. By Woodbury's identity, it equals

        step = J.T @ R @ inverse(R @ J @ J.T @ R + damping * I) @ R @ r

    with the root `R` of `W`, so the linear system has either one row for each parameter
    (parameter space) or one for each residual (sample space). The matrix `J @ J.T` of
    the latter is the neural tangent kernel, computed as in [`eqxbatch.EmpiricalNTK`][].

    **Arguments:**

    - `residual`: a function of the model and of one example that returns a PyTree of
        arrays of an inexact dtype. For several terms with separate batches, such as the
        interior and the boundary of a PINN, pass a tuple or list of functions: each
        takes the model and its batch as a single argument.
    - `damping`: a non-negative number or scalar array that is added to the diagonal. It
        is relative to means over the examples, not sums, so it need not change with the
        batch size.
    - `space`: `"sample"` solves with the kernel of the residuals, `"parameter"` with
        the Gauss-Newton matrix, and `"auto"` with the smaller of the two. The step is
        the same in each case. Each works for a `residual` that has a derivative in
        forward mode or in reverse mode only.
    - `centre`: whether to subtract the weighted mean over the examples from `J` and
        `r`, for each term. This is stochastic reconfiguration.
    - `has_residual`: whether `residual` returns a pair `(output, residual)` of the same
        structure. `J` is then the Jacobian of `output`, and `r` is `residual`, which is
        not differentiated. In variational Monte Carlo, these are the logarithm of the
        amplitude and the local energy.
    - `momentum`: a number or a scalar array. The transformed function then takes the
        previous step as its second argument, and returns the step closest to
        `momentum * previous`: it solves the system above for the part of `r` that
        remains after this step, and adds the solution to it. This is SPRING.
    - `weights`: the weights of the squared residuals: a number or scalar array for all
        terms, or a tuple with one for each term.
    - `accumulator`: [`eqxbatch.Mean`][] (the default) or [`eqxbatch.Sum`][], or a tuple
        with one for each term. With `Sum`, `W` has ones instead of `1 / n`. Their
        `weights` weight single examples, for importance sampling in a mean or for
        quadrature in a sum.
    - `solver`: `"cholesky"`; or `"eigh"`, which also handles singular matrices, and
        uses the pseudoinverse if `damping` is 0; or an iterative lineax solver such as
        `lineax.CG(rtol=1e-4, atol=1e-4)`, which only needs matrix-vector products and
        never materialises the matrix. The right-hand side is scaled to about 1, so
        `atol` is relative to its largest entry. In float32, an iterative solver may not
        converge if `damping` is much smaller than 1e-4 times the largest eigenvalue;
        lineax then raises an error, and 64-bit mode (`jax_enable_x64`) helps.
    - `where`, `filter_spec`: which leaves of the model are parameters, as for
        [`eqxbatch.filter_micro_value_and_grad`][].
    - `in_axes`: the batch axes of the arguments after the model, as for
        [`eqxbatch.filter_micro_value_and_grad`][]. For several terms, a tuple with a
        prefix for the batch of each, or one prefix for all.
    - `block_size`: the number of rows and columns of the matrix that are computed at a
        time: in examples for the kernel, in parameters for the Gauss-Newton matrix. An
        [`eqxbatch.MemoryBudget`][] chooses the largest number that fits, and None means
        all of them.
    - `microbatch_size`: the number of examples that run through the model at a time, as
        for `block_size`.

    **Returns:**

    A function with the arguments of `residual`. For several terms, its arguments are
    the model and one batch for each term. With `momentum`, the second argument is the
    previous step, or None at first. The function returns the step, with the structure
    of the model, the dtypes of the parameters, and None for everything that is not a
    parameter.

    The step has the sign of a gradient: it points uphill and can replace the gradient
    in an optax chain. Without optax, subtract it from the parameters.

    A complex residual counts as two real ones. Products of its Jacobian with real
    parameters are therefore real parts of complex products, as usual in stochastic
    reconfiguration. A complex parameter counts as two real ones, too. Its step is the
    direction itself, not the conjugate that JAX returns for gradients. For a function
    that is holomorphic in all parameters, the step is the solution in complex numbers.

    With `centre`, the mean is subtracted from the Jacobian of each example before any
    products, so digits are kept where the mean is much larger than the spread. The
    Jacobian of the examples of a block is then materialised. Iterative solvers subtract
    the mean after products with vectors, which keeps fewer digits.

    Matrices are in at least float32, even if the model is not. In float32, `damping`
    should not be much smaller than 1e-6 times the largest eigenvalue. Inside
    `jax.shard_map`, a step uses the examples of its device only, and is NaN where it
    would otherwise raise an error at run time.

    **Raises:**

    - `ValueError` if there are no parameters, for outputs that are not arrays of an
        inexact dtype, for an unknown `space`, for numbers that are negative, NaN or
        infinite, and for settings or batches that do not match the number of terms.
    - `TypeError` for an unknown `solver`, for settings of the wrong type, and for a
        `residual` that JAX can differentiate in neither mode.
    - `RuntimeError` at run time, for such numbers in JAX arrays, for negative weights
        of an `accumulator` and, with `solver="cholesky"`, for a matrix that is not
        positive definite.
    - `ImportError` for an iterative solver if lineax is not installed.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp, optax
        >>> model = eqx.nn.MLP(1, 1, 32, 2, key=jax.random.key(0))
        >>> x = jnp.linspace(-1.0, 1.0, 20)[:, None]
        >>> gauss_newton_step = eqxbatch.filter_gauss_newton_step(
        ...     lambda model, x: model(x) - x**2, damping=1e-3
        ... )
        >>> step = gauss_newton_step(model, x)
        >>> updates = jax.tree.map(lambda s: -0.5 * s, step)
        >>> model = eqx.apply_updates(model, updates)

        ```

        In an optax chain that clips long steps:

        ```python
        >>> optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.5))
        >>> state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
        >>> updates, state = optimiser.update(gauss_newton_step(model, x), state)
        >>> model = eqx.apply_updates(model, updates)

        ```

        Two terms with separate batches:

        ```python
        >>> slope = lambda model, x: jax.jvp(model, (x,), (jnp.ones(1),))[1] - 2 * x
        >>> ends = lambda model, x: model(x) - 1.0
        >>> two_terms = eqxbatch.filter_gauss_newton_step(
        ...     (slope, ends), damping=1e-3, weights=(1.0, 10.0)
        ... )
        >>> step = two_terms(model, x, jnp.array([[-1.0], [1.0]]))

        ```

    ??? cite

        minSR: Chen and Heyl, "Empowering deep neural quantum states through efficient
        optimization", [arXiv:2302.01941](https://arxiv.org/abs/2302.01941). Also known
        as SR(t): Rende et al., [arXiv:2310.05715](https://arxiv.org/abs/2310.05715).
        SPRING: Goldshlager et al., "A Kaczmarz-inspired approach to accelerate the
        optimization of neural network wavefunctions",
        [arXiv:2401.10190](https://arxiv.org/abs/2401.10190). For PINNs: Guzmán-Cordero
        et al., "Improving energy natural gradient descent through Woodbury, momentum,
        and randomization", [arXiv:2505.12149](https://arxiv.org/abs/2505.12149).
    """

    residual: PyTree[Callable[..., Any]]
    _: dataclasses.KW_ONLY
    momentum: Number | None = eqx.field(default=None, converter=as_jax)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return run_compiled(self, *args, **kwargs)

    def __check_init__(self) -> None:
        check_adds(self.accumulator)
        if isinstance(self.residual, (tuple, list)):
            if not self.residual:
                message = "`residual` must have at least one function; got none."
                raise ValueError(message)
            for function in self.residual:
                check_callable("residual", function, "a sequence of functions")
        for name in ("damping", "momentum", "weights"):
            for number in jtu.tree_leaves(getattr(self, name)):
                if not eqx.is_array(number) and not 0 <= number < math.inf:
                    raise ValueError(
                        f"`{name}` must not be negative, NaN or infinite; got {number}."
                    )
        is_solver = hasattr(self.solver, "compute") and hasattr(self.solver, "init")
        if not is_solver and self.solver not in DENSE:
            raise TypeError(
                f"`solver` must be one of {DENSE}, or a solver of lineax such as "
                "`lineax.CG(rtol=1e-4, atol=1e-4)`; got "
                f"{described(self.solver)}."
            )

    @property
    def __wrapped__(self) -> Callable:
        is_one = not isinstance(self.residual, (tuple, list))
        return self.residual if is_one else JoinedTerms(tuple(self.residual))

    @property
    def __signature__(self) -> inspect.Signature:
        signature = super().__signature__
        if self.momentum is None:
            return signature
        return with_second(signature, "previous")

    def specs(self, args: Arguments, kwargs: dict[str, Any], out: PyTree) -> PyTree:
        # A step is sharded as its parameters are.
        diff, _ = self.parameters(args, kwargs)
        return jtu.tree_map(spec_of, diff)

    def apply(self, args: Arguments, kwargs: dict[str, Any]) -> Any:
        call, previous = (args, kwargs), None
        if self.momentum is not None:
            if len(args) < 2:
                raise ValueError(
                    "With `momentum`, the first two arguments, by position, are what "
                    "is differentiated and the previous step, or None for the first; "
                    f"got {len(args)} positional arguments."
                )
            # `residual` takes all arguments but the previous step.
            args, previous = (args[0], *args[2:]), args[1]
        diff, nondiff = self.parameters(args, kwargs)
        leaves, treedef = jtu.tree_flatten(diff)
        # Each term is a function with its own batch; rows that pad one are replaced, as
        # a weight of 0 removes no NaN.
        terms = self._terms(args, kwargs, diff, nondiff)
        accumulators = _for_terms("accumulator", self.accumulator, len(terms))
        terms = [*map(without_padding, terms, accumulators)]
        residuals = Residuals(
            terms,
            leaves,
            functools.partial(self._weights, terms),
            centre=self.centre,
            microbatch_size=_number(self.microbatch_size),
        )
        # What a budget is for depends on the space, and so on the residuals. With sizes
        # in its place, the call starts again.
        sizes = (self.block_size, self.microbatch_size)
        if any(isinstance(size, MemoryBudget) for size in sizes):
            return self._sized(residuals, *call).apply(*call)
        last = None
        if previous is not None:
            last = like_parameters("The previous step", previous, diff)
        # A system is solved to more digits than products have by default.
        with exact_products():
            step = self._step(residuals, last)
        # Everything is in at least float32 until here.
        pairs = safe_zip(step, leaves)
        return jtu.tree_unflatten(treedef, [x.astype(leaf.dtype) for x, leaf in pairs])

    def _sized(
        self, residuals: Residuals, args: Arguments, kwargs: dict[str, Any]
    ) -> "GaussNewtonStep[Model, P]":
        """The same, with sizes in place of budgets, chosen one after the other."""
        # Blocks are examples of the kernel, or parameters of the Gauss-Newton matrix.
        sized, num = self, max(rows.total for rows in residuals.rows)
        rows = num if self._is_in_samples(residuals) else residuals.num_parameters
        if isinstance(self.microbatch_size, MemoryBudget):
            # Examples come first, because a model that does not fit does not fit with
            # any blocks: meanwhile, these are small.
            if isinstance(self.block_size, MemoryBudget):
                sized = dataclasses.replace(self, block_size=_LEAST_ROWS)
            size = sized.fitting_size("microbatch_size", num, args, kwargs)
            sized = dataclasses.replace(self, microbatch_size=size)
        if isinstance(self.block_size, MemoryBudget):
            size = sized.fitting_size("block_size", rows, args, kwargs)
            sized = dataclasses.replace(sized, block_size=size)
        return sized

    def _step(self, residuals: Residuals, previous: list[Array] | None) -> list[Array]:
        # Of no residuals, the solution closest to the momentum is the momentum.
        if residuals.num == 0:
            zeros = [jnp.zeros_like(x) for x in residuals.leaves]
            return zeros if previous is None else self._momentum_of(previous)
        values = residuals.values()
        # SPRING solves for what the residuals have left after the momentum.
        if previous is not None:
            momentum = jnp.asarray(self.momentum, residuals.dtype)
            tangents = vary_as(residuals.leaves, previous)
            pairs = safe_zip(values, residuals.push(tangents))
            values = [x - momentum * y for x, y in pairs]
        if self._is_in_samples(residuals):
            step = self._in_samples(residuals, values)
        else:
            gradient = residuals.pull_by_example(residuals.weighted(values))
            step = self._in_parameters(residuals, gradient)
        if previous is None:
            return step
        pairs = safe_zip(step, self._momentum_of(previous))
        return [x + y.astype(x.dtype) for x, y in pairs]

    def _momentum_of(self, previous: list[Array]) -> list[Array]:
        """The previous step times `momentum`, in at least float32."""
        wide = map(widened, previous)
        return [jnp.asarray(self.momentum, x.dtype) * x for x in wide]

    def _is_in_samples(self, residuals: Residuals) -> bool:
        num, num_parameters = residuals.num, residuals.num_parameters
        if self.space != "auto":
            return self.space == "sample"
        log.debug(
            "Gauss-Newton step: %d residuals and %d parameters, as real numbers.",
            *(num, num_parameters),
        )
        return num <= num_parameters

    def _in_samples(self, residuals: Residuals, values: Vectors) -> list[Array]:
        """`J^T W (J J^T W + damping)^-1 values`, with weights `W`."""
        # Roots of the weights on both sides keep the system symmetric.
        vector = joined(residuals.weighted(values, 0.5), residuals.dtype)

        def spread(vector: Array) -> list[Array]:
            return residuals.weighted(residuals.unravel.split(vector), 0.5)

        def product(vector: Array) -> Array:
            pushed = residuals.push(residuals.pull(spread(vector)))
            return joined(residuals.weighted(pushed, 0.5), residuals.dtype)

        if self._solver.needs_matrix:
            # The factors of the kernel's examples then give the step, too.
            sizes = map(_number, (self.block_size, self.microbatch_size))
            kernel = SampleKernel(residuals, *sizes)
            return kernel.pull(spread(self._solver.solved(kernel.matrix(), vector)))
        return residuals.pull(spread(self._solver.solved_by_products(product, vector)))

    def _in_parameters(
        self, residuals: Residuals, gradient: list[Array]
    ) -> list[Array]:
        """`(J^T W J + damping)^-1 gradient`, with weights `W`."""
        # A complex parameter counts as two real ones, so that the system is real.
        unravel = Unravel(as_real(gradient))
        flat = lambda leaves: joined(jtu.tree_leaves(as_real(leaves)), residuals.dtype)
        vector = flat(gradient)

        def split(vector: Array) -> list[Array]:
            real = unravel.split(vector)
            return as_complex(jtu.tree_unflatten(unravel.treedef, real))

        def product(vector: Array) -> Array:
            pushed = residuals.weighted(residuals.push(split(vector)))
            return flat(residuals.pull(pushed))

        if self._solver.needs_matrix:
            return split(self._solver.solved(self._matrix(residuals), vector))
        return split(self._solver.solved_by_products(product, vector))

    def _matrix(self, residuals: Residuals) -> Float[Array, "p p"]:
        """The Gauss-Newton matrix of real parameters."""
        total: Any = 0
        # The matrix has the dtype of its parameters.
        parameters = jtu.tree_map(widened, as_real(residuals.leaves))
        dtypes = tuple(x.dtype for x in residuals.leaves)
        terms: Sequence[Callable] = residuals.centred_terms
        if residuals.are_narrow:
            # To cast them to their own dtype would round their derivatives to it.
            terms = [_first_of(program) for program in residuals.centred_programs]
        for term, rows, weights in safe_zip(terms, residuals.rows, residuals.weights):
            if rows.total == 0:
                continue
            matrix = filter_ggn(
                _OfReal(term, dtypes),
                _half_of_squares,
                in_axes=rows.axes,
                flat=True,
                accumulator=Sum(weights=weights),
                block_size=self.block_size,
                microbatch_size=self.microbatch_size,
                # Products add up examples before they subtract the mean.
                method="sites" if residuals.centre else "auto",
            )
            of_term, _ = matrix(parameters, *rows.arrays)
            total = total + of_term.astype(residuals.dtype)
        return total

    @property
    def _solver(self) -> DampedSolver:
        return DampedSolver(self.damping, self.solver, self._wrong_numbers)

    def _terms(
        self, args: Arguments, kwargs: dict[str, Any], diff: PyTree, nondiff: PyTree
    ) -> list[ResidualTerm]:
        fun = self.__wrapped__
        term = lambda fun, batch: ResidualTerm(
            Loss(fun, batch, diff, nondiff, self.has_residual, names=_NAMES)
        )
        # A single function takes any arguments; each of several takes its batch as one.
        if not isinstance(fun, JoinedTerms):
            return [term(fun, self.batch(args, kwargs))]
        model, *batches = args
        num = len(fun.functions)
        if kwargs or len(batches) != num:
            raise ValueError(
                f"For {num} terms, the model is followed by one batch for each, by "
                f"position; got {len(batches)} and the keyword arguments "
                f"{tuple(kwargs)}. Pass what belongs to a term as one tuple or dict."
            )
        # The arguments of the terms are positional, so that they have no names.
        if isinstance(self.in_axes, dict):
            raise ValueError(
                "For several terms, `in_axes` must be a tuple with a prefix for the "
                f"batch of each, or one prefix for all; got {shown(self.in_axes)}."
            )
        in_axes = _for_terms("in_axes", self.in_axes, num)
        triples = safe_zip(fun.functions, in_axes, batches)
        return [
            term(function, split_examples(function, (axes,), (model, batch), {}))
            for function, axes, batch in triples
        ]

    def _weights(
        self, terms: list[ResidualTerm], dtype: Dtype
    ) -> list[Float[Array, " _"]]:
        """For each term, the weights of its examples' squared residuals."""
        # Those of a term multiply those of its examples, which its accumulator has.
        factors = _for_terms("weights", self.weights, len(terms))
        accumulators = _for_terms("accumulator", self.accumulator, len(terms))
        triples = safe_zip(terms, factors, accumulators)
        return [weights_of_term(*triple, dtype) for triple in triples]

    def _wrong_numbers(self) -> list[tuple[Array, str]]:
        """For numbers known at run time: whether one is wrong, and the error."""
        checks = []
        # Python numbers were checked when the transform was made.
        for name in ("damping", "momentum", "weights"):
            message = f"`{name}` must not be negative, NaN or infinite."
            numbers = filter(eqx.is_array, jtu.tree_leaves(getattr(self, name)))
            checks += ((~((x >= 0) & jnp.isfinite(x)), message) for x in numbers)
        for accumulator in jtu.tree_leaves(self.accumulator, is_leaf=is_accumulator):
            name, weights = type(accumulator).__name__, accumulator.weights
            if weights is not None:
                message = f"{name}(weights=...) must not be negative or NaN here."
                checks.append((~(weights >= 0), message))
        return checks


def _number(size: Size) -> int | None:
    # No budget is left where a step is computed.
    return None if isinstance(size, MemoryBudget) else size


# The size of blocks while examples are fitted into a budget.
_LEAST_ROWS = 32


class _OfReal(eqx.Module):
    """A term as a function of real parameters only, in at least float32.

    - `dtypes`: the dtypes in which the term takes its parameters.
    """

    term: Callable
    dtypes: tuple = eqx.field(static=True)

    def __call__(self, leaves: PyTree, *rows: Array) -> Float[Array, " entries"]:
        pairs = safe_zip(as_complex(leaves), self.dtypes)
        return self.term([x.astype(dtype) for x, dtype in pairs], *rows)


def _first_of(program: TracedFunction) -> Callable:
    """The first output of a program of one example."""
    return lambda leaves, *row: program.one(leaves, row)[0]


def _half_of_squares(out: Array, *rows: Array) -> Array:
    # The Hessian in `out` is the identity, so that the matrix is the sum of `J^T J`.
    del rows
    return 0.5 * jnp.sum(out**2)


def _for_terms(name: str, value: object, num: int) -> Sequence[Any]:
    """Expands a setting to one value for each term."""
    if not isinstance(value, (tuple, list)):
        return [value] * num
    if len(value) != num:
        raise ValueError(
            f"`{name}` must have one entry for each of {num} terms; got {len(value)}."
        )
    return value


filter_gauss_newton_step = also_decorator(
    "filter_gauss_newton_step", GaussNewtonStep, AbstractGaussNewtonStep
)
