"""Meshes of devices: shardings of arrays, and support for explicit axes."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
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

from .jaxpr_types import Aval, Eqn, JaxprAndConsts, Value
from .jaxprs import constants, dependent_equations, equations_in, inner_programs
from .primitives import name_of, parameters
from .structs import vary
from .trees import safe_zip
from .versions import partitions, varying


def mesh_axes(x: object) -> dict[str, tuple[int, AxisType]]:
    """Size and type of the axes of the mesh of an array or struct."""
    mesh = getattr(getattr(x, "sharding", None), "mesh", None)
    if mesh is None or mesh.empty:
        return {}
    return {
        name: (mesh.shape[name], kind)
        for name, kind in safe_zip(mesh.axis_names, mesh.axis_types)
    }


def is_on_mesh(x: Any) -> bool:
    return bool(mesh_axes(jax.typeof(x)))


def is_explicit(x: Any) -> bool:
    """Whether an array is on a mesh with `jax.sharding.AxisType.Explicit` axes."""
    return has_explicit_axes(jax.typeof(x))


def has_explicit_axes(struct: object) -> bool:
    return AxisType.Explicit in [kind for _, kind in mesh_axes(struct).values()]


def is_reduction(eqn: Eqn) -> bool:
    """Whether an equation has arrays that are unreduced or reduced over a mesh axis.

    The sum over devices is then a part of its derivative.
    """
    atoms = (*eqn.invars, *eqn.outvars)
    return any(
        spec.unreduced or spec.reduced
        for spec in (x.aval.sharding.spec for x in atoms if has_explicit_axes(x.aval))
    )


def spec_of(x: Array) -> PartitionSpec:
    """The sharding of each axis of an array over the explicit axes of a mesh."""
    struct = jax.typeof(x)
    axes = mesh_axes(struct)
    spec = partitions(struct.sharding.spec) if axes else ()
    # A specification may be shorter than the array has axes.
    spec = [*spec, *[None] * struct.ndim]
    is_explicit = lambda name: axes[name][1] == AxisType.Explicit
    names = (names_of(entry) for entry in spec[: struct.ndim])
    return PartitionSpec(*(tuple(filter(is_explicit, x)) or None for x in names))


def names_of(entry: Any) -> tuple[str, ...]:
    """The axes of a mesh that one entry of a `PartitionSpec` names."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def num_parts(arrays: list[Array], axes: tuple[int, ...], total: int) -> int:
    """The number of equal parts into which to divide a batch of `total` examples.

    With this many parts, each part is on one device, however the arrays are sharded.
    With `jax.sharding.AxisType.Auto`, only the compiler knows the sharding, but the
    number of shards divides the number of devices. (Inside `jax.shard_map`, there are
    only the rows of one device, and therefore one part.)
    """
    devices, needed = 1, 1
    for x, axis in safe_zip(arrays, axes):
        struct = jax.typeof(x)
        named = mesh_axes(struct)
        # Axes of any kind but manual ones may shard the rows.
        sizes = [size for size, kind in named.values() if kind != AxisType.Manual]
        devices = math.lcm(devices, math.prod(sizes))
        if AxisType.Explicit in [kind for _, kind in named.values()]:
            spec = [*partitions(struct.sharding.spec), *[None] * struct.ndim][axis]
            shards = [named[name][0] for name in names_of(spec)]
            needed = math.lcm(needed, math.prod(shards))
    # Without a remainder, there is a part for each device. Otherwise, the parts are
    # those that the types of the arrays need.
    return devices if total % devices == 0 else needed


def with_type_of(struct: Aval, x: Array) -> Array:
    """`x`, with the sharding of `struct`, and varying over the same mesh axes."""
    if has_explicit_axes(struct):
        x = jax.sharding.reshard(x, struct.sharding)
    return vary(x, varying(struct))


def vary_as(arrays: list[Array], tree: PyTree[Array]) -> PyTree[Array]:
    """Marks `tree` as varying over all mesh axes over which some `arrays` vary."""
    names = frozenset().union(*(varying(jax.typeof(x)) for x in arrays))
    return jtu.tree_map(lambda x: vary(x, names), tree)


def sum_except(x: Array, names: frozenset) -> Array:
    """The sum of `x` over the mesh axes that it varies over, other than `names`."""
    missing = varying(jax.typeof(x)) - names
    return lax.psum(x, tuple(missing)) if missing else x


def check_shared(what: str, vectors: Sequence[Aval], shared: Sequence[Aval]) -> None:
    """Raises for vectors that vary over axes which what they meet does not vary over.

    Devices would add up the products of one matrix with different vectors.
    """
    for vector, other in safe_zip(vectors, shared):
        names = varying(vector) - varying(other)
        if names:
            raise ValueError(
                f"Inside of `jax.shard_map`, {what} differ between devices that share "
                f"one matrix, along the axes {sorted(names)} of the mesh. Gather them "
                "first, such as with `jax.lax.all_gather`."
            )


def zeros_like(struct: Aval) -> Array:
    """Zeros of the type of `struct`."""
    return with_type_of(struct, jnp.zeros(struct.shape, struct.dtype))


def manual_axes() -> frozenset:
    """The mesh axes of the enclosing `jax.shard_map`s."""
    mesh = get_abstract_mesh()
    pairs = safe_zip(mesh.axis_names, mesh.axis_types)
    return frozenset(name for name, kind in pairs if kind == AxisType.Manual)


def coupled_axes(closed: JaxprAndConsts, inputs: Sequence[bool]) -> frozenset:
    """The axes of `jax.shard_map`s over which devices exchange what a program computes.

    This is about what depends on marked inputs.
    """
    names: set = set()
    for outer in dependent_equations(closed.jaxpr, inputs):
        inner = (eqn for part in inner_programs(outer) for eqn in equations_in(part))
        for eqn in (outer, *inner):
            if name_of(eqn) not in _OF_ONE_DEVICE:
                params = parameters(eqn)
                for key in ("axes", "axis_name"):
                    # Axes of an array are numbers, and those of a mesh have names.
                    named = params.get(key, ())
                    names.update(named if isinstance(named, tuple) else (named,))
    return manual_axes() & names


# Primitives that name axes, but exchange nothing.
_OF_ONE_DEVICE = ("axis_index", "pcast", "pvary")


def variation_is_known() -> bool:
    """Whether JAX knows over which axes arrays vary, as `check_vma=True` says."""
    # With `check_vma=False`, arrays that are marked as varying are not.
    names = manual_axes()
    return varying(jax.typeof(vary(jnp.zeros(()), names))) == names


def where_it_is(*arrays: Array) -> contextlib.AbstractContextManager:
    """A context in which the mesh of some arrays is set, if there is one."""
    meshes = (jax.typeof(x).sharding.mesh for x in filter(is_on_mesh, arrays))
    mesh = next(meshes, None)
    return contextlib.nullcontext() if mesh is None else use_abstract_mesh(mesh)


def outside_of_mesh() -> contextlib.AbstractContextManager:
    """A context in which no mesh is set."""
    return use_abstract_mesh(AbstractMesh((), ()))


def mesh_of_devices(mesh: AbstractMesh) -> Mesh:
    """A mesh of the same shape, outside of any `jax.shard_map`.

    It is only used for compilation, so the order of devices does not matter.
    """
    devices = jax.devices()
    if len(devices) < mesh.size:
        raise ValueError(
            f"A `MemoryBudget` compiles programs for the {mesh.size} devices of the "
            f"mesh, but there are {len(devices)}. Give a size in its place."
        )
    # Outside of `jax.shard_map`, no axis is manual.
    kinds = [AxisType.Auto if x == AxisType.Manual else x for x in mesh.axis_types]
    array = np.array(devices[: mesh.size]).reshape(mesh.axis_sizes)
    return Mesh(array, mesh.axis_names, axis_types=tuple(kinds))


class DeviceProgram(NamedTuple):
    """A function that runs a program on each device, and the types of its arguments."""

    run: Callable[..., list[Array]]
    structs: list[jax.ShapeDtypeStruct]


def on_all_devices(program: Callable[..., list], args: list[Array]) -> DeviceProgram:
    """`program` for the devices of the enclosing `jax.shard_map`, to be compiled."""
    inner = get_abstract_mesh()
    mesh = mesh_of_devices(inner)
    order = [name for name in inner.axis_names if name in manual_axes()]
    # Arrays that vary over the devices get a new first axis.
    spread = lambda x: tuple(name for name in order if name in varying(jax.typeof(x)))
    num = lambda names: math.prod(mesh.shape[name] for name in names)
    specs_of = lambda xs: [PartitionSpec(spread(x) or None) for x in xs]
    specs = specs_of(args)
    structs = [
        jax.ShapeDtypeStruct(
            (num(spread(x)), *x.shape), x.dtype, sharding=NamedSharding(mesh, spec)
        )
        for x, spec in safe_zip(args, specs)
    ]
    out_specs = eqx.filter_eval_shape(lambda *xs: specs_of(program(*xs)), *args)

    def run(*stacked: Array) -> list:
        # Each device has its own entry of the new axis.
        return [x[None] for x in program(*(x[0] for x in stacked))]

    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=tuple(specs), out_specs=out_specs, axis_names={*order}
    )
    return DeviceProgram(mapped, structs)


def whole_rows(x: Array, axis: int) -> Array:
    """`x`, of which each device has all rows, if the axes of a mesh are explicit."""
    if not is_explicit(x) or spec_of(x)[axis] is None:
        return x
    spec = [*spec_of(x)]
    spec[axis] = None
    mesh = jax.typeof(x).sharding.mesh
    return reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))


def spread_rows(x: Array, axis: int, parts: int) -> Array:
    """`x`, with parts of its rows on all devices of a mesh with automatic axes.

    Fewer parts than devices are on as many of these as divide their number.
    """
    names, num = [], 1
    for name, (size, kind) in mesh_axes(jax.typeof(x)).items():
        if kind == AxisType.Auto and parts % (num * size) == 0:
            names.append(name)
            num *= size
    if num == 1:
        return x
    # Where the other axes are is up to the compiler.
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
    spec[axis] = tuple(names)
    mesh = jax.typeof(x).sharding.mesh
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def replicated(x: Array, mesh: Mesh) -> Array:
    """`x`, replicated on all devices."""
    whole = NamedSharding(mesh, PartitionSpec())
    if AxisType.Explicit in mesh.axis_types:
        # Arrays on no mesh are replicated by `jax.shard_map`. Within a `jax.vmap` whose
        # examples are on devices, JAX fails if their type says so before.
        return jax.sharding.reshard(x, whole) if is_on_mesh(x) else x
    return lax.with_sharding_constraint(x, whole)


def explicit_mesh(tree: PyTree) -> AbstractMesh | None:
    """The mesh with explicit axes that any array is on, if there is one."""
    arrays = filter(eqx.is_array, jtu.tree_leaves(tree))
    return next((jax.typeof(x).sharding.mesh for x in arrays if is_explicit(x)), None)


def examples_spec(arrays: list[Array], axes: Sequence[int]) -> PartitionSpec:
    """The sharding of the examples, for arrays that have them along axis 0."""
    for x, axis in safe_zip(arrays, axes):
        entry = spec_of(x)[axis]
        if entry is not None:
            return PartitionSpec(entry)
    return PartitionSpec()


def on_one_mesh(tree: PyTree) -> PyTree:
    """Moves all arrays of `tree` to the mesh with explicit axes that some are on.

    JAX can multiply an array on no mesh by one on a mesh, but cannot differentiate this
    with respect to the former. Arrays that are reduced over axes become replicated.
    """
    return _moved_to(tree, lambda x: not is_on_mesh(x))


def gathered(tree: PyTree, mesh: Mesh | None = None) -> PyTree:
    """Replicates all arrays of `tree` on all devices, if a mesh has explicit axes.

    They are moved to another `mesh` if one is given, unless they are traced.
    """
    is_elsewhere = lambda x: not is_on_mesh(x) or any(spec_of(x))
    return _moved_to(tree, lambda x: mesh is not None or is_elsewhere(x), mesh)


def put_on(tree: PyTree, mesh: Mesh) -> PyTree:
    """Replicates all arrays of `tree` on the devices of a mesh."""
    whole = NamedSharding(mesh, PartitionSpec())
    put = lambda x: jax.device_put(x, whole) if eqx.is_array(x) else x
    return jtu.tree_map(put, tree)


def _pending(x: Array) -> PartitionSpec:
    """The sharding of an array with the axes over which it is unreduced or reduced."""
    return jax.typeof(x).sharding.spec if is_explicit(x) else PartitionSpec()


def check_reduced(tree: PyTree, name: str = "") -> None:
    """Raises `ValueError` for arrays that are yet to be summed over devices.

    JAX has rules for linear functions of them, and not in all versions an error for
    others, which are then applied to the summand of one device.
    """
    for path, x in jtu.tree_leaves_with_path(tree):
        names = _pending(x).unreduced if eqx.is_array(x) else ()
        if names:
            over = " and ".join(map(repr, sorted(names)))
            which = f"`{name}{jtu.keystr(path)}`" if name else "An array"
            raise ValueError(
                f"{which} is unreduced over the mesh axis {over}: each device has one "
                f"summand of {jax.typeof(x)}, which is for linear functions only. Sum "
                "it before: `jax.sharding.reshard(x, jax.sharding.PartitionSpec())`."
            )


def _moved_to(
    tree: PyTree, is_moved: Callable[[Array], bool], to: Mesh | None = None
) -> PyTree:
    mesh = explicit_mesh(tree)
    if mesh is None:
        return tree
    check_reduced(tree)
    arrays = [x for x in jtu.tree_leaves(tree) if eqx.is_array(x)]
    is_traced = any(isinstance(x, Tracer) for x in arrays)
    # The mesh of a concrete array has devices.
    meshes = [] if is_traced else [x.sharding.mesh for x in arrays if is_explicit(x)]

    def put(x: Any) -> Any:
        if not eqx.is_array(x):
            return x
        if is_moved(x):
            spec = PartitionSpec()
        elif _pending(x).reduced:
            # Each device has all of it, as if it were replicated.
            spec = spec_of(x)
        else:
            return x
        # Only the type of a traced array can change: it is on no device yet.
        if is_traced:
            return reshard(x, NamedSharding(mesh, spec))
        return jax.device_put(x, NamedSharding(to or meshes[0], spec))

    return jtu.tree_map(put, tree)


def within_mesh(tree: PyTree) -> contextlib.AbstractContextManager:
    """A context in which new arrays are on the explicit mesh of `tree`, if any.

    New arrays meet those of `tree` in the carries of loops and in updates, which
    require equal types.
    """
    mesh = explicit_mesh(tree)
    return contextlib.nullcontext() if mesh is None else use_abstract_mesh(mesh)


def mesh_of_results(closed: JaxprAndConsts, arrays: Sequence[Value]) -> Mesh | None:
    """The mesh with explicit axes on which a program has its results, if there is one.

    `arrays` are those that the program closes over. They know the devices of the mesh,
    as do the shardings that the program names.
    """
    meshes = [x.sharding.mesh for x in closed.out_avals if has_explicit_axes(x)]
    if not meshes:
        return None
    shardings = [x.sharding for x in arrays if eqx.is_array(x) and is_explicit(x)]
    for sharding in [*shardings, *_shardings(closed)]:
        if isinstance(sharding.mesh, Mesh) and sharding.mesh.abstract_mesh == meshes[0]:
            return sharding.mesh
    return mesh_of_devices(meshes[0])


def structs_on_devices(arrays: Sequence[Value]) -> list[jax.ShapeDtypeStruct]:
    """The types of arrays (including NumPy arrays), to compile a program for them.

    For arrays on a mesh with explicit axes, the mesh has devices; others have no mesh.
    """

    def struct(x: Any) -> jax.ShapeDtypeStruct:
        mesh = explicit_mesh(x)
        if mesh is None:
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        sharding = NamedSharding(mesh_of_devices(mesh), jax.typeof(x).sharding.spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return [*map(struct, arrays)]


def needs_explicit_axes(
    fun: Callable[..., PyTree], operands: tuple[PyTree, ...]
) -> bool:
    """Whether `fun(*operands)` only works with explicit mesh axes.

    This is so if it names these axes itself, as with `reshard` and `out_sharding`, or
    closes over an array on such a mesh. The function is traced for replicated operands,
    so that nothing in it is sharded for another reason.
    """
    mesh = explicit_mesh(operands)
    if mesh is None:
        return False
    whole = NamedSharding(mesh, PartitionSpec())

    def struct(x: Any) -> Any:
        if explicit_mesh(x) is None:
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)

    # Not of `fun` itself, whose arrays would be arguments of the program.
    run = lambda *operands: fun(*operands)
    try:
        closed, *_ = eqx.filter_make_jaxpr(run)(*jtu.tree_map(struct, operands))
    except Exception as e:
        # The class is not public. The function names axes of arrays that are not
        # replicated, as for an unreduced product.
        if type(e).__name__ != "ShardingTypeError":
            raise
        return True
    names_axes = any(
        AxisType.Explicit in x.mesh.axis_types
        and any((*partitions(x.spec), x.spec.unreduced, x.spec.reduced))
        for x in _shardings(closed)
    )
    return names_axes or explicit_mesh([*constants(closed)]) is not None


def _shardings(closed: JaxprAndConsts) -> Iterator[NamedSharding]:
    """The shardings that a program names."""
    is_sharding = lambda x: isinstance(x, NamedSharding)
    for eqn in equations_in(closed):
        leaves = jtu.tree_leaves([*parameters(eqn).values()], is_leaf=is_sharding)
        yield from filter(is_sharding, leaves)


def with_auto_axes(
    fun: Callable[..., PyTree],
    operands: tuple[PyTree, ...],
    specs: Callable[[PyTree], PyTree],
) -> PyTree:
    """`fun(*operands)`, where the compiler decides how arrays are sharded.

    With explicit axes, the sharding of each product must be specified. Intermediate
    results have no natural sharding, so explicit axes are automatic inside `fun`. `fun`
    must not need explicit axes: see `needs_explicit_axes`.

    `specs` takes the output of `fun` and returns a PyTree prefix of its arrays with
    their shardings, as `spec_of` does. Axes that do not divide an array, or occur
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


def in_this_mesh(fun: Callable[..., Array]) -> Callable[..., Array]:
    """A function of arrays that runs with the mesh that is set now.

    This is for parts of a traced program, whose equations belong to the mesh of the
    trace, also if they run inside `with_auto_axes`.
    """
    mesh = get_abstract_mesh()

    def run(*args: Array) -> Array:
        now = get_abstract_mesh()
        if now == mesh or AxisType.Explicit not in mesh.axis_types:
            return fun(*args)
        # Arrays of this mesh meet those of the trace: replicated, they fit all of them.
        whole = NamedSharding(mesh, PartitionSpec())
        with use_abstract_mesh(mesh):
            out = fun(*(reshard(x, whole) for x in args))
        return reshard(out, NamedSharding(now, PartitionSpec()))

    return run


def auto_sharded(
    fun: Callable[..., PyTree],
    operands: tuple[PyTree, ...],
    like: tuple[PyTree, ...],
    specs: Callable[[PyTree], PyTree],
) -> Callable[..., PyTree]:
    """Applies `fun` to its first arguments, with automatic axes if possible.

    `like` stands for the other arguments; only their shapes and dtypes matter.
    """
    if explicit_mesh(operands) is None:
        return functools.partial(fun, *operands)
    if needs_explicit_axes(fun, (*operands, *like)):
        return lambda *args: _as_written(fun, (*operands, *args))
    return lambda *args: with_auto_axes(fun, (*operands, *args), specs)


def _as_written(fun: Callable[..., PyTree], operands: tuple[PyTree, ...]) -> PyTree:
    """`fun(*operands)`, with a note if JAX cannot differentiate a sum over devices."""
    try:
        return fun(*operands)
    except Exception as e:
        # JAX's messages have this word, or a type such as `float32[3]{U:x}`.
        if "unreduced" in str(e) or "{U:" in str(e):
            e.add_note(
                "An array in the function is unreduced, or reduced, over a mesh axis. "
                "The sum over devices is then a part of derivatives, and JAX has none "
                "for each of several examples that are spread over the same axis. Sum "
                "unreduced arrays with `jax.sharding.reshard` before functions that "
                "are not linear, and leave parameters replicated."
            )
        raise


def _fitting(
    shape: tuple[int, ...], spec: PartitionSpec, mesh: AbstractMesh
) -> PartitionSpec:
    # Each axis of a mesh shards one axis of an array at most, into equal parts.
    used: set[str] = set()
    fitting: list[Any] = [None] * len(shape)
    for axis, entry in enumerate([*spec][: len(shape)]):
        names = names_of(entry)
        num = math.prod(mesh.shape[name] for name in names)
        if names and used.isdisjoint(names) and shape[axis] % num == 0:
            used.update(names)
            fitting[axis] = names
    return PartitionSpec(*fitting)
