"""Names for what calls and PyTrees are made of, as annotations."""

from typing import Any

import jax
from jaxtyping import Array, PyTree


# The positional arguments of a call. Keyword arguments are a `dict[str, Any]`.
Arguments = tuple[Any, ...]


# The arguments of a call, by position and by keyword.
CallArguments = tuple[Arguments, dict[str, Any]]


# The leaves of a PyTree in their order: arrays, structs, or anything else.
Leaves = list[Any]


# The keys from a PyTree to one of its leaves, as `jax.tree_util` has them.
KeyPath = tuple[Any, ...]


# The batched arrays of one example or of a microbatch, or their types.
RowArrays = list[Any]


# The value of a loss for one example or a microbatch, and what it returns beside it.
ValueAndAux = tuple[Array, PyTree]


# The output of such a function, of any type, and what it returns beside it.
OutputAndAux = tuple[PyTree, PyTree]


# The shape and dtype of an array, as it is or as `jax.eval_shape` describes it.
Typed = Array | jax.ShapeDtypeStruct


# What a rule for derivatives takes: operands, and their tangents in the same order.
Primals = tuple[Any, ...]
Tangents = tuple[Any, ...]


# What such a rule returns: a result, and its tangent.
Dual = tuple[Any, Any]


# The dtype of an array. Those of PRNG keys are none of NumPy's.
Dtype = Any
