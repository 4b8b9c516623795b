"""A random program with its parameters and examples, and its dense derivatives."""

import dataclasses
import functools
import random
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqxbatch
from ..experts import masked_products
from .program_draw import Program


@dataclasses.dataclass(frozen=True)
class Subject:
    """A program with its parameters and examples, as traced or concrete arrays."""

    program: Program
    leaves: list
    examples: tuple
    others: tuple

    def tree(self, leaves: list) -> Any:
        diff, rest = eqx.partition(self.program.parameters, eqx.is_inexact_array_like)
        treedef = jax.tree.structure(diff)
        return eqx.combine(jax.tree.unflatten(treedef, leaves), rest)

    @property
    def parameters(self) -> Any:
        return self.tree(self.leaves)

    @property
    def is_complex(self) -> bool:
        return any(map(jnp.iscomplexobj, self.leaves))

    def loss(self, leaves: list, x: Any, t: Any) -> Any:
        return self.program.loss(self.tree(leaves), x, t)

    def outputs(self, leaves: list, x: Any, t: Any) -> list:
        return jax.tree.leaves(self.program.fun(self.tree(leaves), x, t))

    @property
    def num(self) -> int:
        return self.examples[0].shape[0]

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """How examples are cut and added up, which has no part in what is wrong."""
        rng = random.Random(self.program.seed)
        kind = rng.choice((eqxbatch.Mean, eqxbatch.Sum))
        weights = rng.choice((None, jnp.arange(1.0, self.num + 1) / 2))
        size = rng.choice((None, None, None, 1, 2))
        return {"accumulator": kind(weights=weights), "microbatch_size": size}

    @property
    def scales(self) -> Any:
        """What each example counts."""
        accumulator = self.settings["accumulator"]
        weights = accumulator.weights
        weights = jnp.ones(self.num) if weights is None else weights
        is_mean = isinstance(accumulator, eqxbatch.Mean)
        return weights / jnp.sum(weights) if is_mean else weights

    @masked_products()
    def total(self, leaves: list) -> Any:
        losses = jax.vmap(self.loss, (None, 0, 0))(leaves, *self.examples)
        return jnp.sum(losses * self.scales)

    @functools.cached_property
    @masked_products()
    def gradients(self) -> list:
        return jax.vmap(jax.grad(self.loss), (None, 0, 0))(self.leaves, *self.examples)

    def ravelled(self, arrays: list) -> Any:
        return jnp.concatenate([x.ravel().astype(jnp.float64) for x in arrays])

    def unravelled(self, vector: Any) -> list:
        ends = np.cumsum([x.size for x in self.leaves])
        return [
            vector[end - x.size : end].reshape(x.shape).astype(x.dtype)
            for x, end in zip(self.leaves, ends, strict=True)
        ]

    @functools.cached_property
    @masked_products()
    def hessian(self) -> Any:
        value = lambda vector: self.total(self.unravelled(vector))
        gradient = jax.grad(value)
        vector = self.ravelled(self.leaves)
        try:
            return jax.jacfwd(gradient)(vector)
        except TypeError:  # What has a custom derivative in reverse mode only.
            return jax.jacrev(gradient)(vector)

    @functools.cached_property
    @masked_products()
    def gauss_newton(self) -> Any:
        """Of real and imaginary parts of all outputs."""

        def one(x: Any, t: Any) -> Any:
            outs = lambda vector: self.outputs(self.unravelled(vector), x, t)
            split = lambda vector: [np_split(out) for out in outs(vector)]
            structs = jax.eval_shape(outs, self.ravelled(self.leaves))
            ravelled = lambda vector: jnp.concatenate(
                [o.ravel() for o in split(vector)]
            )
            vector = self.ravelled(self.leaves)

            def value(flat: Any) -> Any:
                return self.program.loss_of(np_joined(flat, structs))

            jacobian = jax.jacrev(ravelled)(vector)
            return jacobian.T @ jax.hessian(value)(ravelled(vector)) @ jacobian

        return jnp.tensordot(self.scales, jax.vmap(one)(*self.examples), 1)

    @functools.cached_property
    def jacobians(self) -> list[list]:
        return _jacobians(self, self.examples)

    @functools.cached_property
    def other_jacobians(self) -> list[list]:
        return _jacobians(self, self.others)


def np_split(x: Any) -> Any:
    """Real and imaginary part along a new first axis."""
    parts = [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
    return jnp.stack([part.astype(jnp.float64) for part in parts])


def np_joined(flat: Any, structs: list) -> list:
    outs, start = [], 0
    for struct in structs:
        is_complex = jnp.issubdtype(struct.dtype, jnp.complexfloating)
        size = struct.size * (1 + is_complex)
        part = flat[start : start + size].reshape(-1, *struct.shape)
        outs.append(part[0] + 1j * part[1] if is_complex else part[0])
        start += size
    return outs


@masked_products()
def _jacobians(s: "Subject", examples: tuple) -> list[list]:
    """For each output and leaf, those of real and imaginary parts by the same."""
    parts = [np_split(x) for x in s.leaves]

    def join(part: Any, like: Any) -> Any:
        x = part[0] + 1j * part[1] if jnp.iscomplexobj(like) else part[0]
        return x.astype(like.dtype)

    def one(x: Any, t: Any) -> Any:
        outs = lambda parts: [
            np_split(out) for out in s.outputs([*map(join, parts, s.leaves)], x, t)
        ]
        return jax.jacrev(outs)(parts)

    return jax.vmap(one)(*examples)
