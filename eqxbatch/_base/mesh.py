"""What arrays say of the mesh of devices that they are on."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    get_abstract_mesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)
from jaxtyping import Array, PyTree


def mesh_axes(x: Any) -> dict[str, tuple[int, AxisType]]:
    """Size and type of the axes of the mesh that an array, or a struct, is on."""
    mesh = getattr(getattr(x, "sharding", None), "mesh", None)
    if mesh is None or mesh.empty:
        return {}
    return {
        name: (mesh.shape[name], kind)
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    }


def is_on_mesh(x: Any) -> bool:
    return bool(mesh_axes(jax.typeof(x)))


def is_explicit(x: Any) -> bool:
    """Whether an array is on a mesh with `jax.sharding.AxisType.Explicit` axes."""
    return AxisType.Explicit in [kind for _, kind in mesh_axes(jax.typeof(x)).values()]


def spec_of(x: Array) -> PartitionSpec:
    """How an array is spread over the explicit axes of a mesh."""
    struct = jax.typeof(x)
    axes = mesh_axes(struct)
    spec = struct.sharding.spec if axes else ()
    is_explicit = lambda name: axes[name][1] == AxisType.Explicit
    return PartitionSpec(
        *(tuple(filter(is_explicit, names_of(entry))) or None for entry in spec)
    )


def names_of(entry: Any) -> tuple[str, ...]:
    """The axes of a mesh that one entry of a `PartitionSpec` names."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def num_parts(arrays: list[Array], axes: tuple[int, ...], total: int) -> int:
    """The number of equal parts in which to see a batch of `total` examples.

    With that many parts, each of them is on one device, however the arrays are spread
    over the meshes that they are on. With `jax.sharding.AxisType.Auto`, only the
    compiler knows how that is, but any way divides the number of devices. (Inside of
    `jax.shard_map`, there is nothing but the rows of one device, and so one part.)
    """
    devices, needed = 1, 1
    for x, axis in zip(arrays, axes, strict=True):
        struct = jax.typeof(x)
        own = mesh_axes(struct)
        sizes = [size for size, kind in own.values() if kind != AxisType.Manual]
        devices = math.lcm(devices, math.prod(sizes))
        if AxisType.Explicit in [kind for _, kind in own.values()]:
            spec = [*struct.sharding.spec, *[None] * struct.ndim][axis]
            shards = [own[name][0] for name in names_of(spec)]
            needed = math.lcm(needed, math.prod(shards))
    return devices if total % devices == 0 else needed


def with_type_of(struct: Any, x: Array) -> Array:
    """`x`, sharded as `struct` says and varying over the mesh as it does."""
    if any(kind == AxisType.Explicit for _, kind in mesh_axes(struct).values()):
        x = jax.sharding.reshard(x, struct.sharding)
    return vary(x, varying(struct))


def vary(x: Array, names: frozenset) -> Array:
    """`x`, as something that varies over mesh axes inside of `jax.shard_map`.

    Its derivative is then that of one device, and not the sum over all of them.
    """
    missing = names - varying(jax.typeof(x))
    if not missing:
        return x
    pcast = getattr(lax, "pcast", None)
    if pcast is not None:
        return pcast(x, tuple(missing), to="varying")
    pvary: Any = getattr(lax, "pvary")  # noqa: B009  # What JAX 0.7 has for it.
    return pvary(x, tuple(missing))


def vary_as(arrays: list[Array], tree: PyTree[Array]) -> PyTree[Array]:
    """`tree`, as something that varies over all mesh axes that some `arrays` do."""
    names = frozenset().union(*(varying(jax.typeof(x)) for x in arrays))
    return jtu.tree_map(lambda x: vary(x, names), tree)


def sum_varying(x: Array, names: frozenset) -> Array:
    """The sum of `x` over the mesh axes that it varies over, other than `names`."""
    missing = varying(jax.typeof(x)) - names
    return lax.psum(x, tuple(missing)) if missing else x


def zeros_like(struct: Any) -> Array:
    """Zeros of the type of `struct`."""
    return with_type_of(struct, jnp.zeros(struct.shape, struct.dtype))


def varying(x: Any) -> frozenset:
    """The mesh axes over which an array varies, inside of `jax.shard_map`."""
    # JAX 0.10 has another name for it.
    manual = getattr(x, "manual_axis_type", None)
    return getattr(x, "vma", None) or getattr(manual, "varying", None) or frozenset()


def manual_axes() -> frozenset:
    """The axes of the mesh that the `jax.shard_map`s around are over."""
    mesh = get_abstract_mesh()
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in pairs if kind == AxisType.Manual)


def where_it_is(*arrays: Array) -> contextlib.AbstractContextManager:
    """Where the mesh that some arrays are on is around, if there is one."""
    for x in arrays:
        if is_on_mesh(x):
            return use_abstract_mesh(jax.typeof(x).sharding.mesh)
    return contextlib.nullcontext()


def outside_of_mesh() -> contextlib.AbstractContextManager:
    """Where no mesh is around."""
    return use_abstract_mesh(AbstractMesh((), ()))


def on_devices(mesh: AbstractMesh) -> Mesh:
    """A mesh of the same form, outside of any `jax.shard_map`.

    It is to compile for, so that it does not matter which devices are where.
    """
    devices = jax.devices()
    if len(devices) < mesh.size:
        raise ValueError(
            f"A `MemoryBudget` compiles programs for the {mesh.size} devices of the "
            f"mesh, but there are {len(devices)}. Give a size in its place."
        )
    kinds = [AxisType.Auto if x == AxisType.Manual else x for x in mesh.axis_types]
    array = np.array(devices[: mesh.size]).reshape(mesh.axis_sizes)
    return Mesh(array, mesh.axis_names, axis_types=tuple(kinds))


def on_all_devices(
    program: Callable[..., list], args: list[Array]
) -> tuple[Callable[..., list], list[jax.ShapeDtypeStruct]]:
    """`program`, to be compiled for the devices of the `jax.shard_map` around.

    Returns a function that applies it on each device, and the types of its arguments.
    """
    inner = get_abstract_mesh()
    mesh = on_devices(inner)
    order = [name for name in inner.axis_names if name in manual_axes()]
    # What varies over the devices is along a new first axis.
    spread = lambda x: tuple(name for name in order if name in varying(jax.typeof(x)))
    num = lambda names: math.prod(mesh.shape[name] for name in names)
    names = [spread(x) for x in args]
    specs = [PartitionSpec(own or None) for own in names]
    structs = [
        jax.ShapeDtypeStruct(
            (num(own), *x.shape), x.dtype, sharding=NamedSharding(mesh, spec)
        )
        for x, own, spec in zip(args, names, specs, strict=True)
    ]
    found: list[PartitionSpec] = []

    def trace(*args: Array) -> list:
        outs = program(*args)
        found[:] = [PartitionSpec(spread(x) or None) for x in outs]
        return outs

    jax.eval_shape(trace, *args)

    def run(*stacked: Array) -> list:
        return [x[None] for x in program(*(x[0] for x in stacked))]

    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=list(found),
        axis_names=set(order),
    )
    return mapped, structs


def replicated(x: Array, mesh: Mesh) -> Array:
    """`x`, whole on each device."""
    whole = NamedSharding(mesh, PartitionSpec())
    if AxisType.Explicit in mesh.axis_types:
        return jax.sharding.reshard(x, whole)
    return lax.with_sharding_constraint(x, whole)
