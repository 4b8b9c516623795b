"""`filter_gauss_newton_step`: damped Gauss-Newton steps in the smaller space."""

import dataclasses
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, cast, ClassVar, get_args, Literal, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, Inexact, PyTree

from .._base.dtypes import widened
from .._base.mesh import error_if, spec_of, vary_as
from .._base.shapes import AnyArray, Contract
from .._base.trees import described, log, shown
from .._batch.cut import Blocks
from .._batch.memory import check_size, MemoryBudget
from .._batch.moments import Mean, Sum
from .._batch.objective import Objective
from .._batch.transform import (
    AbstractAutoSharded,
    AbstractOtherArguments,
    also_decorator,
    transformed,
    with_second,
)
from .._batch.weights import check_real, check_weights
from .._curvature.hvp import like_parameters
from .spaces import System
from .terms import Residuals, shares, Term, Terms


if TYPE_CHECKING:
    from .._batch.signatures import Typed
    from .step_signatures import StepSignature


Space = Literal["auto", "sample", "parameter"]


_SOLVERS = ("cholesky", "eigh")


Number = float | Float[AnyArray, ""]


_Parameters = PyTree[Inexact[AnyArray, "?*a"], "parameters"]


STEP = Contract(
    {"x": _Parameters, "previous": _Parameters, "step": _Parameters},
    of=["filter_gauss_newton_step"],
)


class _Step(AbstractAutoSharded, AbstractOtherArguments):
    """The step; `weights` and `accumulators` have one for each term, or one for all."""

    is_compiled: ClassVar[bool] = True
    takes_instance: ClassVar[bool] = True
    objective: Objective
    system: System
    space: Space
    centre: bool
    has_residual: bool
    momentum: Any
    weights: Any
    accumulator: Any

    def __check_init__(self) -> None:
        if self.space not in get_args(Space):
            raise ValueError(
                f"`space` must be one of {get_args(Space)}; got {self.space!r}."
            )
        each = self.accumulator
        for one in each if isinstance(each, (tuple, list)) else [each]:
            if not isinstance(one, (Sum, Mean)):
                raise TypeError(
                    "`accumulator` must be a Sum or a Mean, over the examples, or a "
                    f"tuple with one for each term; got {shown(one)}."
                )

    def specs(self, call: tuple[Callable, tuple, dict], out: PyTree) -> PyTree:
        _, args, kwargs = call
        diff, _ = self.objective.parameters(args, kwargs)
        return jtu.tree_map(spec_of, diff)

    def signature(self, own: inspect.Signature) -> inspect.Signature:
        return own if self.momentum is None else with_second(own, "previous")

    def apply(self, fun: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        previous = None
        if self.momentum is not None:
            if len(args) < 2:
                raise ValueError(
                    "With `momentum`, the first two arguments, by position, are what "
                    "is differentiated and the previous step, or None for the first; "
                    f"got {len(args)} positional arguments."
                )
            args, previous = (args[0], *args[2:]), args[1]
        diff, nondiff = self.objective.parameters(args, kwargs)
        call = STEP.begin()
        call.check("x", diff)
        leaves, treedef = jtu.tree_flatten(diff)
        terms = self._terms(fun, args, kwargs, nondiff, treedef)
        residuals = Residuals(
            terms,
            leaves,
            functools.partial(self._weights, terms),
            centre=self.centre,
            microbatch_size=self.system.microbatch_size,
        )
        last = None
        if previous is not None:
            last = like_parameters("The previous step", previous, diff)
        found = self._step(residuals, last)
        pairs = zip(found, leaves, strict=True)
        step = jtu.tree_unflatten(treedef, [x.astype(leaf.dtype) for x, leaf in pairs])
        call.check("step", step)
        return step

    def _step(self, residuals: Residuals, previous: list | None) -> list[Array]:
        if residuals.num == 0:
            found = [jnp.zeros_like(x) for x in residuals.leaves]
            return found if previous is None else self._kept(previous)
        values = residuals.values()
        if previous is not None:
            given = _at_run_time("momentum", self.momentum)
            momentum = jnp.asarray(given, residuals.dtype)
            tangents = vary_as(residuals.leaves, previous)
            pairs = zip(values, residuals.push(tangents), strict=True)
            values = [x - momentum * y for x, y in pairs]
        damping = _at_run_time("damping", self.system.damping)
        system = dataclasses.replace(self.system, damping=damping)
        if self._is_in_samples(residuals):
            found = system.in_samples(residuals, values)
        else:
            gradient = residuals.pull_by_example(residuals.weighted(values))
            found = system.in_parameters(residuals, gradient)
        if previous is None:
            return found
        pairs = zip(found, self._kept(previous), strict=True)
        return [x + y.astype(x.dtype) for x, y in pairs]

    def _kept(self, previous: list) -> list[Array]:
        """The part of the previous step that is kept."""
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

    def _terms(
        self, fun: Callable, args: tuple, kwargs: dict, nondiff: PyTree, treedef: Any
    ) -> list[Term]:
        if not isinstance(fun, Terms):
            batch = self.objective.batch(fun, args, kwargs)
            return [Term(fun, batch, nondiff, treedef, self.has_residual)]
        model, *batches = args
        functions = fun.functions
        if kwargs or len(batches) != len(functions):
            raise ValueError(
                f"For {len(functions)} terms, the model is followed by one batch for "
                f"each, by position; got {len(batches)} and the keyword arguments "
                f"{tuple(kwargs)}. Give what belongs to a term as one tuple or dict."
            )
        axes = self.objective.in_axes
        if isinstance(axes, dict):
            raise ValueError(
                "For several terms, `in_axes` must be a tuple with a prefix for the "
                f"batch of each, or one prefix for all; got {shown(axes)}."
            )
        each = _for_each("in_axes", axes, len(functions))
        objectives = [
            Objective(self.objective.where, self.objective.filter_spec, (axis,))
            for axis in each
        ]
        triples = zip(functions, objectives, batches, strict=True)
        return [
            Term(
                function,
                objective.batch(function, (model, batch), {}),
                nondiff,
                treedef,
                self.has_residual,
            )
            for function, objective, batch in triples
        ]

    def _weights(self, terms: list[Term], dtype: Any) -> list[Float[Array, " _"]]:
        """For each term, the weights of its examples' squared residuals."""
        num = len(terms)
        numbers = _for_each("weights", self.weights, num)
        accumulators = _for_each("accumulator", self.accumulator, num)
        found = []
        triples = zip(terms, numbers, accumulators, strict=True)
        for term, number, accumulator in triples:
            total, name = term.batch.total(), type(accumulator).__name__
            weights = jnp.ones(total, dtype)
            if accumulator.weights is not None:
                check_weights(name, accumulator.weights, Blocks(total, max(total, 1)))
                check_real(name, accumulator.weights)
                weights = accumulator.weights.astype(dtype)
                weights = error_if(
                    weights,
                    ~jnp.all(weights >= 0),
                    f"{name}(weights=...) must not be negative or NaN here.",
                )
            if isinstance(accumulator, Mean):
                weights = shares(weights)
            found.append(weights * jnp.asarray(_at_run_time("weights", number), dtype))
        return found


def _for_each(name: str, value: Any, num: int) -> Sequence[Any]:
    """Expands a setting to one value for each term."""
    if not isinstance(value, (tuple, list)):
        return [value] * num
    if len(value) != num:
        raise ValueError(
            f"`{name}` must have one entry for each of {num} terms; got {len(value)}."
        )
    return value


def _checked_sizes(**sizes: Any) -> list[int | None]:
    checked = []
    for name, size in sizes.items():
        size = check_size(name, size)
        if isinstance(size, MemoryBudget):
            raise TypeError(
                f"`{name}` must be an int or None; got a MemoryBudget, which cannot be "
                "divided between the two sizes of a step. Give a number."
            )
        checked.append(size)
    return checked


def _check_number(name: str, value: Any) -> Any:
    """Checks a setting that must be a non-negative number or scalar array."""
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        if value.shape == () and jnp.issubdtype(value.dtype, jnp.floating):
            return jnp.asarray(value)
        got = f"an array of shape {value.shape} and dtype {value.dtype}"
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        if 0 <= float(value) < math.inf:
            return float(value)
        raise ValueError(
            f"`{name}` must not be negative, NaN or infinite; got {value}."
        )
    else:
        got = described(value)
    raise TypeError(
        f"`{name}` must be a real number or a floating-point array of shape (); got "
        f"{got}."
    )


def _at_run_time(name: str, value: Any) -> Any:
    """The same check at run time, for values that are traced."""
    if not isinstance(value, jax.Array):
        return value
    message = f"`{name}` must not be negative, NaN or infinite."
    return error_if(value, ~((value >= 0) & jnp.isfinite(value)), message)


def _checked_terms(functions: Sequence[Any]) -> tuple[Callable, ...]:
    if not functions:
        raise ValueError("`residual` must have at least one function; got none.")
    for function in functions:
        if not callable(function):
            raise TypeError(
                "`residual` must have callable functions; got one that is "
                f"{described(function)}."
            )
    return tuple(functions)


def _checked_solver(solver: Any) -> Any:
    if solver in _SOLVERS or (hasattr(solver, "compute") and hasattr(solver, "init")):
        return solver
    raise TypeError(
        f"`solver` must be one of {_SOLVERS}, or a solver of lineax such as "
        f"`lineax.CG(rtol=1e-4, atol=1e-4)`; got {described(solver)}."
    )


@cast("Typed[StepSignature]", also_decorator)
def filter_gauss_newton_step(
    residual: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    *,
    damping: Number,
    space: Space = "auto",
    centre: bool = False,
    has_residual: bool = False,
    momentum: Number | None = None,
    weights: Any = 1.0,
    accumulator: Any = Mean(),
    solver: Any = "cholesky",
    where: Callable[[Any], Any] | None = None,
    filter_spec: PyTree = eqx.is_inexact_array,
    in_axes: PyTree = eqx.if_array(0),
    block_size: int | None = None,
    microbatch_size: int | None = None,
) -> Callable[..., Any]:
    r"""Damped Gauss-Newton steps, solved in sample or parameter space.

    Let `r` be the residuals of all examples and `J` their Jacobian with respect to the
    parameters. The step solves

    $$(J^\top W J + \mathtt{damping}\, I)\, \mathtt{step} = J^\top W r,$$

    where the diagonal matrix `W` has entries `1 / n` for `n` examples. This is the
    gradient of half the mean squared residual, preconditioned by its damped
    Gauss-Newton matrix. By Woodbury's identity, it equals

    $$\mathtt{step} = J^\top W^{1/2}
    (W^{1/2} J J^\top W^{1/2} + \mathtt{damping}\, I)^{-1} W^{1/2} r,$$

    so the linear system has either one row for each parameter (parameter space) or one
    for each residual (sample space). The matrix $J J^\top$ of the latter is the neural
    tangent kernel, computed as in [`eqxbatch.EmpiricalNTK`][].

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
        int, or None for all of them; a memory budget is not supported.
    - `microbatch_size`: the number of examples that run through the model at a time: an
        int, or None for all of them.

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
    - `TypeError` for an unknown `solver`, for a memory budget, for settings of the
        wrong type, and for a `residual` that JAX can differentiate in neither mode.
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
    sizes = _checked_sizes(block_size=block_size, microbatch_size=microbatch_size)
    numbers_of = lambda x: jtu.tree_map(lambda own: _check_number("weights", own), x)
    step = _Step(
        objective=Objective(where, filter_spec, in_axes),
        system=System(
            _check_number("damping", damping), _checked_solver(solver), *sizes
        ),
        space=space,
        centre=centre,
        has_residual=has_residual,
        momentum=None if momentum is None else _check_number("momentum", momentum),
        weights=numbers_of(weights),
        accumulator=accumulator,
    )
    if isinstance(residual, (tuple, list)):
        residual = Terms(_checked_terms(residual))
    elif not callable(residual):
        raise TypeError(
            "`residual` must be callable, or a tuple or list of functions; got "
            f"{described(residual)}."
        )
    return transformed(step, residual, "filter_gauss_newton_step")
