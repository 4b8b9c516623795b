"""The base class of all linear operators, and its answers to lineax."""

import abc
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax
from jaxtyping import Array, Inexact

from .dtypes import is_complex
from .tables import AbstractTabular, shape_text, Table


class AbstractTaggedOperator(AbstractTabular, lineax.AbstractLinearOperator):
    """A linear operator with tags that say what is known about its matrix."""

    tags: eqx.AbstractVar[frozenset]

    @abc.abstractmethod
    def diagonal(self) -> Inexact[Array, " n"]:
        """The diagonal of the matrix."""

    @property
    def table(self) -> Table:
        inputs = self.in_structure()
        size = f"{self.out_size()} x {self.in_size()}"
        rows = [(f"{type(self).__name__}, {size}", "shape", "dtype")]
        rows += [
            (jtu.keystr(path) or "vector", shape_text(x.shape), str(x.dtype))
            for path, x in jtu.tree_leaves_with_path(inputs)
        ]
        tags = sorted(str(tag).removesuffix("_tag") for tag in self.tags)
        notes = [f"tags: {', '.join(tags)}"] if tags else []
        return Table(rows, num_texts=3, notes=notes)


_Operator = AbstractTaggedOperator


def as_tags(tags: Any) -> frozenset:
    """One tag, or several of them, as a set."""
    is_many = isinstance(tags, (tuple, list, set, frozenset))
    return frozenset(tags if is_many else (tags,))


@lineax.linearise.register(_Operator)
def _linearise(operator: _Operator) -> _Operator:
    return operator


@lineax.diagonal.register(_Operator)
def _diagonal_of(operator: _Operator) -> Array:
    return operator.diagonal()


@lineax.tridiagonal.register(_Operator)
def _tridiagonal(operator: _Operator) -> tuple[Array, Array, Array]:
    """The main, lower and upper diagonal, as lineax returns them."""
    matrix = operator.as_matrix()
    main, lower, upper = (jnp.diagonal(matrix, offset) for offset in (0, -1, 1))
    return main, lower, upper


def _answer_by_tag(question: Any, *tags: object) -> None:
    # Nothing is computed: a tag is a promise of whoever made the operator.
    question.register(_Operator)(lambda operator: not operator.tags.isdisjoint(tags))


_answer_by_tag(lineax.is_tridiagonal, lineax.tridiagonal_tag, lineax.diagonal_tag)


_answer_by_tag(lineax.has_unit_diagonal, lineax.unit_diagonal_tag)


_answer_by_tag(lineax.is_lower_triangular, lineax.lower_triangular_tag)


_answer_by_tag(lineax.is_upper_triangular, lineax.upper_triangular_tag)


_answer_by_tag(lineax.is_positive_semidefinite, lineax.positive_semidefinite_tag)


_answer_by_tag(lineax.is_negative_semidefinite, lineax.negative_semidefinite_tag)


@lineax.is_diagonal.register(_Operator)
def _is_diagonal(operator: _Operator) -> bool:
    # A matrix of one entry has none beside its diagonal.
    sizes = operator.in_size(), operator.out_size()
    return lineax.diagonal_tag in operator.tags or sizes == (1, 1)


@lineax.is_symmetric.register(_Operator)
def _is_symmetric(operator: _Operator) -> bool:
    if operator.tags & {lineax.symmetric_tag, lineax.diagonal_tag}:
        return True
    leaves = jtu.tree_leaves(operator.in_structure())
    # A complex matrix that is semidefinite is Hermitian.
    return not any(map(is_complex, leaves)) and (
        lineax.is_positive_semidefinite(operator)
        or lineax.is_negative_semidefinite(operator)
    )
