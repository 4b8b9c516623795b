"""What differs between the versions of JAX that are supported, and when it can go.

No other file asks which version there is, or looks in JAX for what only some versions
have; a test sees to that. The first line of a comment says from which lowest supported
version on a function can go, or a line of it. Names of primitives that some versions
have are in the table of `primitives.py`.

Some code elsewhere is as it is for older versions:

- `_reshape` in `blocks.py` names the sharding of each result. Before JAX 0.10, it has
  to be named where an axis is split and another one has size one.
- `_full_and_rest` in `blocks.py` makes no empty piece, and `_drawn` in `average.py`
  folds in a key outside of a condition: JAX 0.7 cannot differentiate these.
- `run_blocks` in `loop.py` asks again for the types of results on a mesh. Before JAX
  0.10, `jax.make_jaxpr` does not say how they are sharded.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TYPE_CHECKING

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, get_abstract_mesh, PartitionSpec, reshard
from jaxtyping import Array, PyTree

from .trees import safe_zip


# Can be `jex.Jaxpr` once JAX >= 0.11 is the lowest. From then on, a jaxpr has its
# constants, and the older class is another name of it, which is to be removed
# (https://github.com/jax-ml/jax/pull/39009).
_HAS_CONSTS = hasattr(jex.Jaxpr, "with_consts")
if TYPE_CHECKING:
    Closed = jex.Jaxpr
else:
    Closed = jex.Jaxpr if _HAS_CONSTS else jex.ClosedJaxpr


def with_consts(jaxpr: Any, consts: Sequence[Any]) -> Closed:
    """A jaxpr with the values of its constants."""
    # Can be `jaxpr.with_consts(consts)` once JAX >= 0.11 is the lowest, as above.
    consts = [*consts]
    return jaxpr.with_consts(consts) if _HAS_CONSTS else Closed(jaxpr, consts)


class ScanSizes(NamedTuple):
    """How many constants a scan has, and how many arrays it carries."""

    consts: int
    carry: int


def scan_sizes(eqn: Any) -> ScanSizes:
    """How many constants a scan has, and how many arrays it carries."""
    # The first two lines can go once JAX >= 0.11 is the lowest. A scan then has trees:
    # of constants, of what it carries, and of slices.
    if "num_consts" in eqn.params:
        return ScanSizes(eqn.params["num_consts"], eqn.params["num_carry"])
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return ScanSizes(len(consts.vals), len(carry.vals))


def varying(x: Any) -> frozenset:
    """The mesh axes over which an array varies inside `jax.shard_map`."""
    # `vma` can go once JAX >= 0.10 is the lowest: the attribute got another name.
    manual = getattr(x, "manual_axis_type", None)
    return getattr(x, "vma", None) or getattr(manual, "varying", None) or frozenset()


def made_varying(x: Array, names: tuple[str, ...]) -> Array:
    """Marks an array as varying over mesh axes over which it does not vary yet."""
    # Can be `lax.pcast` once JAX >= 0.8.2 is the lowest, which deprecates `pvary`
    # (https://docs.jax.dev/en/latest/changelog.html).
    if hasattr(lax, "pcast"):
        return lax.pcast(x, names, to="varying")
    return getattr(lax, "pvary")(x, names)  # noqa: B009


def is_ref(x: Any) -> bool:
    """Whether this is a mutable array."""
    # The first of these can go once JAX >= 0.8 is the lowest. Before, a tracer of one
    # was no instance.
    is_traced = isinstance(x, Tracer) and is_type_of_ref(jax.typeof(x))
    return is_traced or isinstance(x, jax.Ref)


def is_type_of_ref(aval: Any) -> bool:
    """Whether an array of a type is mutable."""
    # This stays: the class of these types is not public.
    return hasattr(aval, "inner_aval")


def on_mesh_around(tree: PyTree[Array]) -> PyTree[Array]:
    """Moves new arrays to the mesh with explicit axes that is set, if there is one."""
    # Can go once JAX >= 0.8.2 is the lowest, which creates them there.
    if AxisType.Explicit not in get_abstract_mesh().axis_types:
        return tree
    is_there = lambda x: not jax.typeof(x).sharding.mesh.empty
    put = lambda x: x if is_there(x) else reshard(x, PartitionSpec())
    return jtu.tree_map(put, tree)


def as_array(x: Any) -> Array:
    """`jax.numpy.asarray`, inside `jax.vmap` on a mesh."""
    # Can be `jnp.asarray` once JAX >= 0.11 is the lowest. Before, it may give an array
    # the mesh axes of another one.
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def with_barrier(leaves: Sequence[Array]) -> list[Array]:
    """`jax.lax.optimization_barrier` of arrays that vary over other axes of a mesh."""
    # Can be `lax.optimization_barrier` once JAX >= 0.11 is the lowest. Before, all of
    # them vary over the devices that any of them does.
    kinds = [varying(jax.typeof(x)) for x in leaves]
    results = [*leaves]
    for kind in dict.fromkeys(kinds):
        which = [i for i, other in enumerate(kinds) if other == kind]
        barred = lax.optimization_barrier([leaves[i] for i in which])
        for i, x in safe_zip(which, barred):
            results[i] = x
    return results


def partitions(spec: PartitionSpec) -> tuple:
    """How the axes of an array are sharded, as a `PartitionSpec` says.

    Where arrays are unreduced or reduced, it cannot be iterated over.
    """
    # Can be `spec.partitions` once JAX >= 0.10.2 is the lowest.
    return spec.partitions if hasattr(spec, "partitions") else (*spec,)


@functools.cache
def is_compiler_option(name: str, value: Any) -> bool:
    """Whether the compiler knows an option: it compiles nothing with others."""
    # Can go once jaxlib >= 0.8.1 is the lowest, which knows the one that is used. There
    # is no list of them, so the smallest program is compiled, in milliseconds.
    try:
        jax.jit(lambda: ()).lower().compile(compiler_options={name: value})
    except Exception as e:
        if "No such compile option" not in str(e):
            raise
        return False
    return True
