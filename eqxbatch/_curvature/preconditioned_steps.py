"""Conjugate gradients of one column: its state, and the next step."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, Real

from .._base.dtypes import common_power_of_two, widened, widest
from .._base.mesh import with_type_of
from .._base.trees import safe_zip


class _Product(NamedTuple):
    """A vector in the dtypes of the parameters, and its image, all in wide dtypes."""

    vector: list[Array]
    image: list[Array]


class State(eqx.Module):
    """Everything that the next step of a column depends on.

    - `right`: the right-hand side, divided by `size`, a power of two: squares of its
        entries neither vanish nor overflow.
    - `solution`, `residual`, `direction`: vectors of conjugate gradients.
    - `whole`, `norm`: the norms of the right-hand side and of the residual.
    - `energy`: the product of the residual with the preconditioned residual.
    - `start`: the norm of the residual at the last restart.
    - `num_products`: the number of products so far.
    - `is_exact`: whether the residual is from a product with the solution instead of
        the recurrence. The next step is then the first one after a restart.
    - `is_indefinite`, `is_stuck`: whether the iteration has to end, because of a
        direction without positive curvature, or of a true residual that does not fall.
    """

    right: list[Array]
    size: Array
    solution: list[Array]
    residual: list[Array]
    direction: list[Array]
    whole: Array
    norm: Array
    energy: Array
    start: Array
    num_products: Array
    is_exact: Array
    is_indefinite: Array
    is_stuck: Array

    def but(self, **changes: Any) -> "State":
        return dataclasses.replace(self, **changes)


# If a recomputed residual is not below this fraction of the previous one, it will not
# decrease any further.
_STAGNATION = 0.5


class System(eqx.Module):
    """The conjugate gradients of one column: `matrix + damping`, and when to stop."""

    operator: Any
    preconditioner: Any
    damping: Array
    rtol: Array
    max_steps: Array

    def initial(self, right: list[Array]) -> State:
        """The state of a solution of zeros, whose residual is the right-hand side."""
        wide = [widened(x) for x in right]
        size = _size(wide)
        wide = _over(wide, size)
        zeros = [jnp.zeros_like(x) for x in wide]
        norm = jnp.sqrt(_inner(wide, wide))
        no = jnp.zeros_like(norm, bool)
        return State(
            right=wide,
            size=size,
            solution=zeros,
            residual=wide,
            direction=zeros,
            whole=norm,
            norm=norm,
            energy=norm,
            start=norm,
            num_products=jnp.zeros_like(norm, jnp.int32),
            is_exact=~no,
            is_indefinite=no,
            is_stuck=no,
        )

    def is_small(self, norm: Array, state: State) -> Bool[Array, ""]:
        # The norms of infinities are equal.
        is_below = norm <= self.rtol.astype(norm.dtype) * state.whole
        return is_below & jnp.isfinite(norm)

    def is_solved(self, state: State) -> Bool[Array, ""]:
        """Whether the solution is found, and its residual exact."""
        return state.is_exact & self.is_small(state.norm, state)

    def is_open(self, state: State) -> Bool[Array, ""]:
        """Whether the column needs another step, and can make one."""
        is_done = self.is_solved(state) | state.is_indefinite | state.is_stuck
        has_steps = state.num_products < self.max_steps
        return ~is_done & has_steps & jnp.isfinite(state.norm)

    def step(self, state: State) -> State:
        """The state after one more product; the same if the column is done."""
        # Where the recurrence says that the column is solved, the product is that with
        # the solution, for the true residual.
        is_check = self.is_small(state.norm, state)
        conditioned = state.residual
        if self.preconditioner is not None:
            conditioned = _product(self.preconditioner, state.residual).image
        energy = _inner(state.residual, conditioned)
        # After a restart, the recurrence knows nothing of earlier directions.
        share = jnp.where(state.is_exact, 0, energy / state.energy)
        direction = _plus(conditioned, share, state.direction)
        returned = self._as_returned(state)
        product = _product(self.operator, _where(is_check, returned, direction))
        # The damping is that of the vector which the matrix was multiplied with.
        image = _plus(product.image, self.damping, product.vector)
        product = product._replace(image=image)
        checked = self._checked(state, product)
        moved = self._moved(state, energy, product)
        new = _where(is_check, checked, moved)
        new = new.but(num_products=state.num_products + 1)
        return _where(self.is_open(state), new, state)

    def _as_returned(self, state: State) -> list[Array]:
        """The solution, without what underflows in the dtypes of the parameters."""
        structs = jtu.tree_leaves(self.operator.in_structure())
        solution = []
        for x, struct in safe_zip(state.solution, structs):
            size = state.size.astype(x.dtype)
            rounded = (x * size).astype(struct.dtype).astype(x.dtype) / size
            # What overflows has not converged in any case.
            solution.append(jnp.where(jnp.isfinite(rounded), rounded, x))
        return solution

    def _checked(self, state: State, product: _Product) -> State:
        """The state with the true residual, from the product with the solution."""
        residual = _plus(state.right, -jnp.ones_like(state.norm), product.image)
        norm = jnp.sqrt(_inner(residual, residual))
        is_stuck = ~self.is_small(norm, state) & ~(norm < _STAGNATION * state.start)
        return state.but(
            # In half precision, the residual is that of the rounded solution.
            solution=product.vector,
            residual=residual,
            norm=norm,
            start=norm,
            is_exact=jnp.ones_like(is_stuck),
            is_stuck=is_stuck,
        )

    def _moved(self, state: State, energy: Array, product: _Product) -> State:
        """The state after a step along a direction, if it has positive curvature."""
        # Squares of what a preconditioner returns may be out of range.
        size = _size(product.vector)
        vector, image = (_over(x, size) for x in product)
        curvature = _inner(vector, image)
        # Not for NaN, which is no sign of an indefinite matrix.
        is_indefinite = (energy <= 0) | (curvature <= 0)
        length = energy / size / curvature
        residual = _plus(state.residual, -length, image)
        moved = state.but(
            solution=_plus(state.solution, length, vector),
            residual=residual,
            direction=product.vector,
            norm=jnp.sqrt(_inner(residual, residual)),
            energy=energy,
            is_exact=jnp.zeros_like(state.is_exact),
        )
        return _where(is_indefinite, state.but(is_indefinite=is_indefinite), moved)

    def residual(self, state: State) -> Real[Array, ""]:
        return state.norm / jnp.where(state.whole > 0, state.whole, 1)


def _product(operator: Any, vector: list[Array]) -> _Product:
    """The product of an operator with a vector, in the dtypes of its parameters.

    The operator meets numbers in the range of half precision.
    """
    structs, treedef = jtu.tree_flatten(operator.in_structure())
    size = _size(vector)
    pairs = safe_zip(_over(vector, size), structs)
    rounded = [x.astype(struct.dtype) for x, struct in pairs]
    image = jtu.tree_leaves(operator.mv(jtu.tree_unflatten(treedef, rounded)))
    times = lambda xs: [widened(x) * size.astype(widened(x).dtype) for x in xs]
    return _Product(times(rounded), times(image))


def _size(vector: list[Array]) -> Real[Array, ""]:
    """The power of two that is next to the largest entry, by which nothing is rounded.

    It is 1 for vectors of zeros, and for those with NaNs or infinities.
    """
    largest = [jnp.max(jnp.abs(x), initial=0) for x in vector]
    return common_power_of_two(largest)


def _over(vector: list[Array], size: Array) -> list[Array]:
    return [x / size.astype(x.dtype) for x in vector]


def _inner(x: list[Array], y: list[Array]) -> Real[Array, ""]:
    terms = [jnp.sum(a * b) for a, b in safe_zip(x, y)]
    dtype = widest(*(term.dtype for term in terms))
    return sum((term.astype(dtype) for term in terms), jnp.zeros((), dtype))


def _plus(x: list[Array], factor: Array, y: list[Array]) -> list[Array]:
    """`x + factor * y`."""
    return [a + factor.astype(a.dtype) * b for a, b in safe_zip(x, y)]


def _where(condition: Array, x: Any, y: Any) -> Any:
    def chosen(a: Array, b: Array) -> Array:
        # Within `jax.vmap`, on a mesh with explicit axes, the condition must have the
        # type of the arrays.
        spread = condition | ((a != a) & False)
        return jnp.where(spread, a, b)

    return jtu.tree_map(chosen, x, y)


def begun(system: System, block: list[Array]) -> State:
    """The states of a block of columns."""
    # On a mesh with explicit axes, products are where the parameters are, and inside of
    # `jax.shard_map`, they may differ between devices. So do all states then.
    product = lambda vector: _product(system.operator, [widened(x) for x in vector])
    images = jax.eval_shape(jax.vmap(product), block).image
    typed = lambda vectors: jtu.tree_map(with_type_of, images, vectors)
    state = jax.vmap(system.initial)(typed(block))
    # JAX makes new arrays on no device in particular.
    zeros = typed(state.solution)
    return state.but(solution=zeros, direction=zeros)
