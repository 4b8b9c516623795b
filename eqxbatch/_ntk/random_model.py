"""Random models, and models with state."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .._base.cpu import in_opaque_branch, opaque_true
from .._base.jaxprs import evaluate_jaxpr
from .._base.mistakes import no_arrays_remedy
from .._base.trees import described, shown, type_of
from .._batch.derivative import Selection


class RandomModel(eqx.Module):
    """One sample of a model.

    - `model`, `state`: the drawn model, and its state or None.
    - `index`: the index of the sample, which is folded into the keys of calls.
    """

    model: Any
    state: Any
    index: Any

    def __call__(self, x: PyTree, *, key: Any = None, **kwargs: Any) -> PyTree:
        if key is not None:
            kwargs["key"] = jr.fold_in(key, self.index)
        if self.state is None:
            return self.model(x, **kwargs)
        return self.model(x, self.state, **kwargs)[0]


class ModelWithState(eqx.Module):
    """A model with its `equinox.nn.State`, as a function of an example."""

    model: Any
    state: Any

    def __call__(self, x: PyTree, **kwargs: Any) -> PyTree:
        return self.model(x, self.state, **kwargs)[0]


def as_callable(model: Any) -> Any:
    """A model, or a pair of a model and its state, as a function of an example."""
    own = model[0] if _has_state(model) else model
    if not callable(own):
        raise TypeError(
            "`model` must be callable, or a pair of that and an `equinox.nn.State`; "
            f"got {own!r} of type {type(own).__name__}."
        )
    return ModelWithState(*model) if _has_state(model) else model


def selection_of(model: Any, where: Callable | None, filter_spec: PyTree) -> Selection:
    """The parameters of a model as a callable; those of its state do not count."""
    both = as_callable(model)
    if both is model:
        return Selection(model, where, filter_spec)
    of_model = lambda both: both.model if where is None else where(both.model)
    # A callable is a valid prefix, too.
    spec = ModelWithState(filter_spec, False)
    return Selection(both, of_model, spec)


class RandomModels(eqx.Module):
    """A distribution of models, and which of their leaves are parameters."""

    init: Callable
    key: Array
    where: Callable | None
    filter_spec: PyTree

    def draw(self, index: Array) -> RandomModel:
        """Draws the model with this index.

        It is drawn in a separate step: otherwise, XLA for CPUs would draw its numbers
        on one core, and again for each use.
        """
        # Outside of the condition: in JAX 0.7, its derivative would raise because only
        # one of the keys is batched.
        key = jr.fold_in(self.key, index)
        closed, structs, static = eqx.filter_make_jaxpr(self.init)(key)
        evaluate = functools.partial(evaluate_jaxpr, closed.jaxpr, closed.consts)
        # Keys and weakly typed numbers cannot be passed through a condition.
        avals: list[Any] = list(closed.out_avals)
        is_random = [
            jnp.issubdtype(aval.dtype, jnp.inexact) and not aval.weak_type
            for aval in avals
        ]
        pick = lambda leaves: list(itertools.compress(leaves, is_random))
        run = lambda key: pick(evaluate([key]))
        bits = jr.key_data(self.key).astype(jnp.float32)
        numbers = in_opaque_branch(run, opaque_true(bits))(key)
        leaves = [
            numbers.pop(0) if is_number else x
            for x, is_number in zip(evaluate([key]), is_random, strict=True)
        ]
        treedef = jtu.tree_structure(structs)
        found = eqx.combine(jtu.tree_unflatten(treedef, leaves), static)
        model, state = found if _has_state(found) else (found, None)
        return RandomModel(model, state, index)

    def selection(self, model: RandomModel) -> Selection:
        where = self.where
        # A callable is a valid prefix, too.
        spec = RandomModel(self.filter_spec, False, False)
        of_model = lambda sample: sample.model if where is None else where(sample.model)
        return Selection(model, of_model, spec)


def _has_state(drawn: Any) -> bool:
    return (
        isinstance(drawn, tuple)
        and len(drawn) == 2
        and isinstance(drawn[1], eqx.nn.State)
    )


def check_models(models: RandomModels) -> None:
    """Raises if `init` returns no models, or models of different structures."""
    if not callable(models.init):
        raise TypeError(
            "`init` must be a function from a key to a model; got "
            f"{described(models.init)}."
        )
    found = []
    drawn: Any = None
    for _ in range(2):
        drawn = eqx.filter_eval_shape(models.init, models.key)
        model = drawn[0] if _has_state(drawn) else drawn
        if not callable(model):
            raise TypeError(
                "`init` must return a callable model, or a pair of it and an "
                f"`equinox.nn.State`; got {described(model)}."
            )
        found.append(
            {
                jtu.keystr(path): type_of(x)
                for path, x in jtu.tree_leaves_with_path(drawn)
                if hasattr(x, "dtype")
            }
        )
    if not found[0]:
        raise ValueError(
            f"`init` must return a model with arrays in it; got {shown(drawn)}, which "
            f"is the same for all keys.{no_arrays_remedy(drawn)}"
        )
    if found[0] != found[1]:
        differing = [
            f"{path}: {found[0].get(path)} and {found[1].get(path)}"
            for path in {**found[0], **found[1]}
            if found[0].get(path) != found[1].get(path)
        ]
        raise ValueError(
            "`init` must return models of the same structure for all keys; got "
            f"different arrays for two keys at {'; '.join(differing)}. Only the values "
            "of arrays may depend on the key, and nothing on earlier calls."
        )
