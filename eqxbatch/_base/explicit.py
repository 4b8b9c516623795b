"""Meshes with explicit axes, where the type of an array says how it is spread."""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import (
    AbstractMesh,
    AxisType,
    get_abstract_mesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    reshard,
    use_abstract_mesh,
)
from jaxtyping import Array, PyTree

from .jaxprs import inner_jaxprs
from .mesh import is_explicit, is_on_mesh, names_of, on_devices, spec_of


def explicit_mesh(tree: PyTree) -> AbstractMesh | None:
    """The mesh with explicit axes that some array is on, if there is one."""
    for x in jtu.tree_leaves(tree):
        if eqx.is_array(x) and is_explicit(x):
            return jax.typeof(x).sharding.mesh
    return None


def examples_spec(arrays: list[Array], axes: Sequence[int]) -> PartitionSpec:
    """How the examples are spread, for arrays that have them along axis 0."""
    for x, axis in zip(arrays, axes, strict=True):
        entry = [*spec_of(x), *[None] * x.ndim][axis]
        if entry is not None:
            return PartitionSpec(entry)
    return PartitionSpec()


def on_one_mesh(tree: PyTree) -> PyTree:
    """`tree` with all arrays on the mesh with explicit axes that some are on.

    JAX multiplies what is on no mesh with what is on one, but cannot differentiate that
    with respect to it.
    """
    return _moved(tree, lambda x: not is_on_mesh(x))


def gathered(tree: PyTree, mesh: Mesh | None = None) -> PyTree:
    """`tree` with all arrays whole on each device, if a mesh has explicit axes.

    They go to another `mesh` if there is one, unless they are traced: then, they are
    where they are.
    """
    is_elsewhere = lambda x: not is_on_mesh(x) or any(spec_of(x))
    return _moved(tree, lambda x: mesh is not None or is_elsewhere(x), mesh)


def _moved(
    tree: PyTree, is_moved: Callable[[Array], bool], to: Mesh | None = None
) -> PyTree:
    mesh = explicit_mesh(tree)
    if mesh is None:
        return tree
    arrays = [x for x in jtu.tree_leaves(tree) if eqx.is_array(x)]
    is_traced = any(isinstance(x, Tracer) for x in arrays)
    # Of arrays that are there already, the mesh has devices.
    meshes = [] if is_traced else [x.sharding.mesh for x in arrays if is_explicit(x)]

    def put(x: Any) -> Any:
        if not eqx.is_array(x) or not is_moved(x):
            return x
        if is_traced:
            return reshard(x, NamedSharding(mesh, PartitionSpec()))
        return jax.device_put(x, NamedSharding(to or meshes[0], PartitionSpec()))

    return jtu.tree_map(put, tree)


def within_mesh(tree: PyTree) -> contextlib.AbstractContextManager:
    """Where new arrays are on the mesh with explicit axes that some of `tree` are on.

    They meet those in the carries of loops and in updates, which ask for one type.
    """
    mesh = explicit_mesh(tree)
    return contextlib.nullcontext() if mesh is None else use_abstract_mesh(mesh)


def on_mesh_around(tree: PyTree[Array]) -> PyTree[Array]:
    """New arrays, made `within_mesh`. JAX 0.7 makes them on no mesh."""
    if AxisType.Explicit not in get_abstract_mesh().axis_types:
        return tree
    put = lambda x: x if is_on_mesh(x) else reshard(x, PartitionSpec())
    return jtu.tree_map(put, tree)


def structs_on_devices(arrays: list) -> list[jax.ShapeDtypeStruct]:
    """The types of arrays, also NumPy's, to compile a program for them.

    Of those on a mesh with explicit axes, the mesh has devices; others are on none.
    """

    def struct(x: Any) -> jax.ShapeDtypeStruct:
        own = explicit_mesh(x)
        if own is None:
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        sharding = NamedSharding(on_devices(own), jax.typeof(x).sharding.spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return [*map(struct, arrays)]


def needs_explicit_axes(fun: Callable[..., PyTree], operands: tuple) -> bool:
    """Whether `fun(*operands)` only works where axes of a mesh are explicit.

    It is so if it names them itself, as `reshard` and `out_sharding` do, or closes over
    an array on such a mesh. The function is traced for operands that are whole on each
    device, so that nothing in it is spread for another reason.
    """
    mesh = explicit_mesh(operands)
    if mesh is None:
        return False
    dynamic, static = eqx.partition(operands, eqx.is_array)
    leaves, treedef = jtu.tree_flatten(dynamic)

    def arrays_to_arrays(*leaves: Array) -> list:
        own = eqx.combine(jtu.tree_unflatten(treedef, leaves), static)
        return jtu.tree_leaves(eqx.filter(fun(*own), eqx.is_array))

    whole = NamedSharding(mesh, PartitionSpec())
    struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
    structs = [struct(x) if explicit_mesh(x) else jax.typeof(x) for x in leaves]
    closed = jax.make_jaxpr(arrays_to_arrays)(*structs)
    return explicit_mesh(closed.consts) is not None or _names_axes(closed.jaxpr)


def _names_axes(jaxpr: Any) -> bool:
    is_sharding = lambda x: isinstance(x, NamedSharding)
    return any(
        any(
            is_sharding(x) and AxisType.Explicit in x.mesh.axis_types and any(x.spec)
            for x in jtu.tree_leaves([*eqn.params.values()], is_leaf=is_sharding)
        )
        or any(map(_names_axes, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def with_auto_axes(
    fun: Callable[..., PyTree], operands: tuple, specs: Callable[[PyTree], PyTree]
) -> PyTree:
    """`fun(*operands)`, where the compiler decides how arrays are spread over a mesh.

    A product of what is spread along explicit axes must be told how it is spread
    itself. That is neither known nor of interest on the way from the operands to the
    result, so explicit axes are automatic for the time. `fun` must not need explicit
    axes: see `needs_explicit_axes`.

    `specs` takes what `fun` returns, and gives a PyTree prefix of its arrays that says
    how they are spread, as `spec_of` does. Axes that do not divide an array, or occur
    twice, are left out.
    """
    mesh = explicit_mesh(operands)
    if mesh is None:
        return fun(*operands)
    auto = {AxisType.Explicit: AxisType.Auto}
    kinds = tuple(auto.get(kind, kind) for kind in mesh.axis_types)
    inner = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)
    with use_abstract_mesh(inner):
        enter = lambda x: reshard(x, PartitionSpec()) if eqx.is_array(x) else x
        out = fun(*jtu.tree_map(enter, operands))
    arrays, static = eqx.partition(out, eqx.is_array)

    def leave(spec: PartitionSpec, part: PyTree) -> PyTree:
        sharding = lambda x: NamedSharding(mesh, _fitting(x.shape, spec, mesh))
        return jtu.tree_map(lambda x: reshard(x, sharding(x)), part)

    is_spec = lambda x: isinstance(x, PartitionSpec)
    arrays = jtu.tree_map(leave, specs(out), arrays, is_leaf=is_spec)
    return eqx.combine(arrays, static)


def auto_sharded(
    fun: Callable[..., PyTree],
    operands: tuple,
    like: tuple,
    specs: Callable[[PyTree], PyTree],
) -> Callable[..., PyTree]:
    """`fun` with its first arguments, with automatic axes if it does not need others.

    `like` stands for the other arguments; only their shapes and dtypes matter.
    """
    if explicit_mesh(operands) is None or needs_explicit_axes(fun, (*operands, *like)):
        return functools.partial(fun, *operands)
    return lambda *args: with_auto_axes(fun, (*operands, *args), specs)


def _fitting(
    shape: tuple[int, ...], spec: PartitionSpec, mesh: AbstractMesh
) -> PartitionSpec:
    used: set[str] = set()
    fitting: list[Any] = [None] * len(shape)
    for axis, entry in enumerate([*spec][: len(shape)]):
        names = names_of(entry)
        num = math.prod(mesh.shape[name] for name in names)
        if names and used.isdisjoint(names) and shape[axis] % num == 0:
            used.update(names)
            fitting[axis] = names
    return PartitionSpec(*fitting)
