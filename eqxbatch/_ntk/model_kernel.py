"""Kernels of a model, from factors of its examples."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, PyTree

from .._batch.accumulators import Concat
from .._batch.loop import accumulated, Rows
from .._kernels.kernel import AbstractBlockKernel, KernelLeaf, Plan, SAMPLE
from .._sites.factors import Factor
from .pairings import AbstractPairing
from .request import TracedModel


# By kind and index of the output: a kernel, or an estimate and its standard error.
Found = dict[tuple[str, int], list]


def by_name(names: list[tuple[str, int]], kernels: list) -> Found:
    """Kernels by name; a name can stand for several kernels."""
    found: Found = {}
    for name, kernel in zip(names, kernels, strict=True):
        found.setdefault(name, []).append(kernel)
    return found


def _flat(factors: PyTree[Factor]) -> tuple[list[Factor], Any]:
    return jtu.tree_flatten(factors, is_leaf=lambda x: isinstance(x, Factor))


@dataclasses.dataclass(frozen=True)
class _Kept:
    """The structure of the factors of a side, and which of them differ by example."""

    treedef: Any
    has_examples: list[bool]

    def factors(self, rows: Rows) -> PyTree[Factor]:
        factors = map(Factor, rows.arrays, self.has_examples)
        return jtu.tree_unflatten(self.treedef, list(factors))


class ModelKernel(AbstractBlockKernel):
    """Kernels of a model, in blocks."""

    def __init__(
        self,
        plan: Plan,
        rows: tuple[Rows, Rows],
        pairing: AbstractPairing,
        names: list[tuple[str, int]],
        assemble: Callable[[Found], PyTree],
    ):
        self.plan, self.rows, self.pairing = plan, rows, pairing
        of = lambda kernels: assemble(by_name(names, kernels))
        # The order of the kernels in the output.
        self._order: list[int] = jtu.tree_leaves(of([*range(len(names))]))
        shapes = [axes.arranged_shape(SAMPLE) for axes in pairing.axes]
        structs = [
            jax.ShapeDtypeStruct(shape, axes.dtype)
            for shape, axes in zip(shapes, pairing.axes, strict=True)
        ]
        self.out = of(structs)
        paths = [jtu.keystr(p) for p, _ in jtu.tree_leaves_with_path(self.out)]
        self.leaves = [
            KernelLeaf(path, pairing.axes[i].example_axes, shapes[i], structs[i].dtype)
            for path, i in zip(paths, self._order, strict=True)
        ]
        self._sides = [0] if self.is_same else [0, 1]
        self._kept: list[_Kept] = []
        self._shared: list[list[Array]] = []
        sizes = []
        for side in self._sides:
            structs = self.structs((1, 1))[side]
            factors, treedef = _flat(
                eqx.filter_eval_shape(pairing.factors, side, structs)
            )
            has_examples = [factor.has_examples for factor in factors]
            self._kept.append(_Kept(treedef, has_examples))
            kept = [factor.array for factor in factors if factor.has_examples]
            sizes.append(sum(x.size * x.dtype.itemsize for x in kept))
        self.bytes_kept = sizes[0], sizes[-1]

    def prepare(self) -> None:
        self._shared = [self._shared_by(side) for side in self._sides]

    def _shared_by(self, side: int) -> list[Array]:
        """The factors that all examples of a side share."""
        if all(self._kept[side].has_examples):
            return []
        factors, _ = _flat(self.pairing.factors(side, self.rows[side].one()))
        return [factor.array for factor in factors if not factor.has_examples]

    def keep(self, side: int, rows: Rows, size: int) -> Rows:
        side = min(side, len(self._sides) - 1)

        def run(arrays: list, num: int) -> list[Array]:
            factors, _ = _flat(self.pairing.factors(side, arrays))
            of_examples = [factor.array for factor in factors if factor.has_examples]
            # A dummy array, because a loop needs at least one.
            return of_examples or [jnp.zeros(num)]

        of_examples = list(accumulated(run, rows, size, Concat()))
        shared = [*(self._shared[side] if self._shared else self._shared_by(side))]
        has_examples = self._kept[side].has_examples
        arrays = [(of_examples if has else shared).pop(0) for has in has_examples]
        axes = tuple(0 if has else None for has in has_examples)
        return Rows(arrays, axes, rows.total)

    def factors(self, side: int, rows: Rows) -> PyTree[Factor]:
        """The factors that `keep` returns, in the form that the pairing uses."""
        return self._kept[min(side, len(self._sides) - 1)].factors(rows)

    def block(
        self, first: Rows, second: Rows | None, always: Bool[Array, ""] | bool = True
    ) -> list[Array]:
        del always
        second = first if second is None else second
        num = first.total, second.total
        sides = self.factors(0, first), self.factors(1, second)
        kernels = self.pairing.kernels(*sides, num)
        arranged = _arranged(self.pairing, kernels)
        return [arranged[i] for i in self._order]

    def tile(self, first: list, second: list | None) -> list[Array]:
        kept = []
        for side, arrays in enumerate((first, second)):
            if arrays is not None:
                axes = self.rows[side].axes
                size = arrays[0].shape[axes[0]]
                kept.append(self.keep(side, Rows(arrays, axes, size), size))
        return self.block(kept[0], kept[1] if second is not None else None)


def whole(model: TracedModel, pairing: AbstractPairing) -> list[Array]:
    """All kernels at once. They are exactly symmetric if both sides are the same."""
    rows = [side.rows for side in model.sides]
    factors = [pairing.factors(side, x.arrays) for side, x in enumerate(rows)]
    num = rows[0].total, rows[-1].total
    kernels = pairing.kernels(factors[0], factors[-1], num)
    if len(rows) == 1:
        pairs = zip(kernels, pairing.axes, strict=True)
        kernels = [(kernel + axes.mirrored(kernel)) / 2 for kernel, axes in pairs]
    return _arranged(pairing, kernels)


def each(model: TracedModel, pairing: AbstractPairing, size: int | None) -> list[Array]:
    """The kernels of each example of one side with the same example of the other."""
    first, *others = [side.rows for side in model.sides]
    num = len(first.arrays)

    def run(arrays: list, size: int) -> list[Array]:
        factors = [pairing.factors(0, arrays[:num])]
        if others:
            factors.append(pairing.factors(1, arrays[num:]))
        return pairing.kernels(factors[0], factors[-1], (size, size))

    both = [first, *others]
    arrays = [x for rows in both for x in rows.arrays]
    axes = tuple(axis for rows in both for axis in rows.axes)
    kernels = accumulated(run, Rows(arrays, axes, first.total), size, Concat())
    return _arranged(pairing, kernels)


def _arranged(pairing: AbstractPairing, kernels: list[Array]) -> list[Array]:
    return [axes.arranged(x) for axes, x in zip(pairing.axes, kernels, strict=True)]
