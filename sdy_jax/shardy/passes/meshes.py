"""The meshes of a module: inline ones named, one in place of several over the same devices, devices renumbered."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.base.errors import ShardingError, UnsupportedError
from sdy_jax.ir.attributes import (
    manual_axes_to_attribute,
    mesh_from_attribute,
    mesh_to_attribute,
    shardings_from_attribute,
)
from sdy_jax.ir.collectives import COLLECTIVE_OPS
from sdy_jax.ir.device_orders import can_express, cut_at, device_ids, expressed, rewritten
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.meshes import AxisRef, Mesh, merge_neighbours
from sdy_jax.ir.new_ops import declare_mesh
from sdy_jax.ir.operations import body_of, manual_axes, module_meshes, named, pre_order, top_level
from sdy_jax.ir.shardings import DimensionSharding, TensorSharding
from sdy_jax.ir.stored_shardings import (
    LISTS,
    SINGLE,
    function_shardings,
    map_shardings,
    mesh_of,
    set_function_shardings,
)
from sdy_jax.shardy.passes.calls import UniqueNames

# Meshes of a module: inline ones get a symbol, axes of size one disappear from shardings.


def lift_meshes(module: ir.Operation) -> None:
    """One symbol per mesh: equal `sdy.mesh` ops are unified, and inline meshes refer to an op."""
    symbols, renamed = _unify(module)
    _rename_in_groups(module, renamed)
    names = UniqueNames(module)

    def lifted(sharding: TensorSharding) -> TensorSharding:
        mesh = sharding.mesh
        if isinstance(mesh, str):
            return replace(sharding, mesh=renamed[mesh]) if mesh in renamed else sharding
        if mesh not in symbols:
            symbols[mesh] = _create(module, mesh, names)
        return replace(sharding, mesh=symbols[mesh])

    map_shardings(module, lifted)


def _unify(module: ir.Operation) -> tuple[dict[Mesh, str], dict[str, str]]:
    """Removes repeated mesh ops. Returns the symbol of each mesh, and the new name of each removed symbol."""
    symbols: dict[Mesh, str] = {}
    renamed: dict[str, str] = {}
    for op in top_level(module, "sdy.mesh"):
        name = str(ir.StringAttr(op.attributes["sym_name"]).value)
        kept = symbols.setdefault(mesh_from_attribute(op.attributes["mesh"]), name)
        if kept != name:
            renamed[name] = kept
            op.erase()
    return symbols, renamed


_GROUPS_MESH = re.compile(r"(?<=mesh = @)[^,]+")


def _rename_in_groups(module: ir.Operation, renamed: dict[str, str]) -> None:
    """The groups of StableHLO's collectives name a mesh, too (`#stablehlo.replica_group_mesh_axes`)."""
    if not renamed:
        return
    for op in pre_order(module):
        text = str(op.attributes["replica_groups"]) if "replica_groups" in op.attributes else ""
        changed = _GROUPS_MESH.sub(lambda match: renamed.get(match[0], match[0]), text)
        if changed != text:
            op.attributes["replica_groups"] = ir.Attribute.parse(changed, module.context)


def _create(module: ir.Operation, mesh: Mesh, names: UniqueNames) -> str:
    """A new mesh op after the last one, or at the start of the module."""
    name = names.new(_base_name(mesh))
    block = body_of(module)
    existing = top_level(module, "sdy.mesh")
    ip = ir.InsertionPoint.after(existing[-1]) if existing else ir.InsertionPoint.at_block_begin(block)
    attributes = {
        "sym_name": ir.StringAttr.get(name, module.context),
        "mesh": mesh_to_attribute(mesh, module.context),
    }
    ir.Operation.create("sdy.mesh", attributes=attributes, loc=module.location, ip=ip)
    return name


def _base_name(mesh: Mesh) -> str:
    if mesh.is_maximal:
        return f"maximal_mesh_{mesh.device_ids[0]}"
    return "empty_mesh" if mesh.is_empty else "mesh"


def inline_meshes(module: ir.Operation) -> None:
    """Writes each mesh into the shardings that refer to it, and removes the mesh ops."""
    meshes = module_meshes(module)
    map_shardings(module, lambda sharding: replace(sharding, mesh=mesh_of(meshes, sharding)))
    for op in top_level(module, "sdy.mesh"):
        op.erase()


def drop_shardings_and_meshes(module: ir.Operation) -> None:
    """Removes all `sdy.sharding` attributes and the meshes.

    Raises:
      ShardingError: an op of the sdy dialect, whose sharding is a part of it, is left.
    """
    for op in pre_order(module):
        own = next((name for name in (*SINGLE, *LISTS[1:]) if op.name.startswith("sdy.") and name in op.attributes), "")
        if own:
            raise ShardingError(
                f"{op.name} at {source_line(op.location)} has {own}, which cannot be dropped; "
                "to fix: remove such ops before shardings and meshes are dropped"
            )
    for op in pre_order(module):
        if op.name == "func.func":
            drop_border(op)
        elif "sdy.sharding" in op.attributes:
            del op.attributes["sdy.sharding"]
    for op in top_level(module, "sdy.mesh"):
        op.erase()


def drop_border(function: ir.Operation) -> None:
    """Removes the shardings of a function's arguments and results."""
    for name in ("arg_attrs", "res_attrs"):
        set_function_shardings(function, name, dict.fromkeys(range(len(function_shardings(function, name)))))


def remove_size_one_axes(module: ir.Operation) -> None:
    """Drops axes of size one from all shardings; the meshes keep them."""
    meshes = module_meshes(module)
    if not any(axis.size == 1 for mesh in meshes.values() for axis in mesh.axes):
        return

    def without(sharding: TensorSharding) -> TensorSharding:
        mesh = mesh_of(meshes, sharding)
        dimensions = tuple(_shortened(d, mesh) for d in sharding.dimensions)
        return replace(
            sharding,
            dimensions=dimensions,
            replicated_axes=_larger(sharding.replicated_axes, mesh),
            unreduced_axes=_larger(sharding.unreduced_axes, mesh),
        )

    map_shardings(module, without)


def _larger(axes: tuple[AxisRef, ...], mesh: Mesh) -> tuple[AxisRef, ...]:
    """The other axes; parts of one axis that stand side by side now are one part."""
    return merge_neighbours((axis for axis in axes if axis.size(mesh) > 1), mesh)


def _shortened(dimension: DimensionSharding, mesh: Mesh) -> DimensionSharding:
    axes = _larger(dimension.axes, mesh)
    priority = None if dimension.is_closed and not axes else dimension.priority
    return DimensionSharding(axes, dimension.is_closed, priority)


# Shardings on several meshes over the same devices, on one of them: so that propagation goes from one to the other.
#
# A manual computation is along whole axes. Where one is on a mesh that cuts those of the function's mesh, as `a=2,
# b=2, c=2` cuts `x=4, y=2`, the program is on a mesh of the parts, whose axes have the names of these: `x:(1)2=2,
# x:(2)2=2, y=2`.


def put_on_mesh(module: ir.Operation, name: str) -> None:
    """Writes shardings in axes of one mesh wherever all axes of their own mesh are lists of axes of that one.

    On `x=2, y=4`, the axis `p` of a mesh `p=4, q=2` of the same devices is `x, y:(1)2`. So are the axes that a manual
    computation is manual on, where each is a list of whole axes, as `r` of `r=8` is `x, y`: devices have numbers in its
    collectives. Meshes of other manual computations stay as they are.
    """
    meshes = module_meshes(module)
    if len(meshes) == 1:
        return
    base = meshes[name]
    others = {n: mesh for n, mesh in meshes.items() if mesh != base and mesh.axes and can_express(mesh, base)}
    computations = [(op, n) for op in pre_order(module) for n in _manual_meshes(op)]
    kept = {n for op, n in computations if n in others and not _is_on_whole_axes(op, others[n], base)}
    others = {n: mesh for n, mesh in others.items() if n not in kept}

    def changed(sharding: TensorSharding) -> TensorSharding:
        own = others.get(str(sharding.mesh))
        return sharding if own is None else rewritten(sharding, own, base, name)

    for op, n in computations:
        if n in others:
            axes = [axis.name for axis in _in_axes_of(manual_axes(op), others[n], base)]
            op.attributes["manual_axes"] = manual_axes_to_attribute(tuple(axes), op.context)
            _rewrite_groups(op, n, others[n], name, base)
    if others:
        map_shardings(module, changed)


def mesh_of_whole_axes(module: ir.Operation, base: Mesh) -> Mesh:
    """The mesh along whose whole axes all manual computations of a module are; its own where that is one.

    Raises:
        UnsupportedError: it has collectives of SDY as well, which are written in the function's axes.
    """
    axes, meshes = list[AxisRef](), module_meshes(module)
    for op in pre_order(module):
        for own in (meshes[name] for name in _manual_meshes(op) if name in meshes):
            if own != base and own.axes and can_express(own, base):
                axes += _in_axes_of(manual_axes(op), own, base)
    finer = cut_at(axes, base)
    if finer != base and (written := named(module, *COLLECTIVE_OPS)):
        raise UnsupportedError(
            f"{source_line(written[0].location)}: {written[0].name} is on the mesh {base}, and a jax.shard_map on one "
            "that cuts its axes; to fix: use one mesh for both, or sdy_jax.reshard in its place"
        )
    return finer


def declare_finer(module: ir.Operation, finer: Mesh) -> str:
    """The symbol of a finer mesh than a module's own, on which the module is put."""
    lift_meshes(module)  # groups of devices may name a mesh by a symbol of its own
    name = declare_mesh(module, finer)
    put_on_mesh(module, name)
    return name


_GROUP_AXIS = re.compile(r'#stablehlo\.axis_ref<name = "([^"]+)">')


def _rewrite_groups(computation: ir.Operation, name: str, own: Mesh, base_name: str, base: Mesh) -> None:
    """Groups of devices that are given by whole axes (`#stablehlo.replica_group_mesh_axes`) in axes of the base."""

    def listed(match: re.Match[str]) -> str:
        axes = _in_axes_of([match[1]], own, base)
        return ", ".join(f'#stablehlo.axis_ref<name = "{axis.name}">' for axis in axes)

    for op in pre_order(computation):
        text = str(op.attributes["replica_groups"]) if "replica_groups" in op.attributes else ""
        if f"mesh = @{name}," in text:
            text = _GROUP_AXIS.sub(listed, text.replace(f"mesh = @{name},", f"mesh = @{base_name},"))
            op.attributes["replica_groups"] = ir.Attribute.parse(text, op.context)


def _manual_meshes(op: ir.Operation) -> set[str]:
    """The symbols of the meshes of a manual computation; none for other ops."""
    if not manual_axes(op):
        return set()
    sides = (op.attributes[side] for side in ("in_shardings", "out_shardings"))
    return {str(sharding.mesh) for side in sides for sharding in shardings_from_attribute(side)}


def _in_axes_of(names: Iterable[str], own: Mesh, base: Mesh) -> list[AxisRef]:
    return [axis for name in names for axis in expressed(AxisRef(name), own, base) or ()]


def _is_on_whole_axes(op: ir.Operation, own: Mesh, base: Mesh) -> bool:
    return all(axis.sub_axis is None for axis in _in_axes_of(manual_axes(op), own, base))


# The devices of a module by other numbers.


def renumber_devices(module: ir.Operation, ids: Sequence[int]) -> None:
    """Gives the device `ids[n]` the number `n`, in all meshes of a module.

    A mesh with the devices `ids` has them in order afterwards: with `ids = (1, 0)`, `<["a"=2], device_ids=[1, 0]>`
    becomes `<["a"=2]>`, and the other way round. Meshes with devices that are not among `ids` stay as they are.
    """
    numbers = {device: number for number, device in enumerate(ids)}

    def renumbered(mesh: Mesh) -> Mesh:
        devices = device_ids(mesh)
        if mesh.is_empty or not numbers.keys() >= {*devices}:
            return mesh
        new = tuple(numbers[device] for device in devices)
        return replace(mesh, device_ids=() if mesh.axes and new == tuple(range(len(new))) else new)

    def moved(sharding: TensorSharding) -> TensorSharding:
        return replace(sharding, mesh=renumbered(sharding.mesh)) if isinstance(sharding.mesh, Mesh) else sharding

    for op in top_level(module, "sdy.mesh"):
        mesh = mesh_from_attribute(op.attributes["mesh"])
        op.attributes["mesh"] = mesh_to_attribute(renumbered(mesh), module.context)
    map_shardings(module, moved)
