"""Local programs made ready to run: memrefs become tensors, and open sizes are resolved by devices and arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
from jax.extend.mlir import ir

from sdy_jax.base.errors import ShardingError, UnsupportedError
from sdy_jax.ir.jax_shardings import mesh_from_jax
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.operations import copied, main_function, pre_order, update_function_type
from sdy_jax.ir.verification import verify_module
from sdy_jax.mesh_dialects.emitters import parts_of
from sdy_jax.mesh_dialects.meshes import DeviceMesh, device_meshes, mesh_of, resolved_sizes
from sdy_jax.mesh_dialects.view import DynamicShape, dialect_ops, is_dialect_op, result_shape, sizes_of, view
from sdy_jax.runtime.devices import mesh_on_devices
from sdy_jax.runtime.meshes import RefinedMesh
from sdy_jax.shardy.rules.elementwise import ELEMENTWISE

# Sizes that a program in text leaves open, resolved from the devices and from the arguments.
#
# `?` in a mesh becomes the size of the devices' axis. `?` in tensor types becomes what the arguments have, by the
# arithmetic of the ops. What is known then is checked again.

ValueShape = tuple[int, ...]


def used_meshes(module: ir.Operation) -> list[DeviceMesh]:
    """The meshes that the ops of a local program are about, in the order of the ops."""
    known = device_meshes(module)
    keys = dict.fromkeys((op.dialect, op.values.get("mesh", "")) for op in dialect_ops(main_function(module)))
    return [known[key] for key in keys if key in known]


def program_mesh(module: ir.Operation) -> DeviceMesh:
    """The first of the meshes that the ops of a local program are about: the one that says what the devices form.

    Raises:
        ShardingError: there is none.
    """
    used = used_meshes(module)
    if not used:
        raise ShardingError("the program has no mesh; a local program names its devices by mesh.mesh or shard.grid")
    return used[0]


def mesh_to_run_on(named: DeviceMesh, mesh: jax.sharding.Mesh | None = None) -> jax.sharding.Mesh:
    """The jax mesh on which a program runs: the given one, if it fits, or one on the first devices.

    Raises:
        ShardingError: the sizes are not those of the program's mesh.
    """
    if mesh is None:
        return mesh_on_devices(mesh_of(resolved_sizes(named, jax.device_count())))
    if not named.has_the_sizes_of(mesh_from_jax(mesh)):
        raise ShardingError(named.unlike(mesh.axis_sizes))
    return mesh


def refined_mesh(module: ir.Operation, mesh: Mesh) -> RefinedMesh:
    """The mesh of a local program without `?`, cut so that all meshes that its ops are about have their axes.

    Raises:
        SdyError: a mesh has another number of devices, or axes that are no parts of the devices'.
    """
    cuts: list[AxisRef] = []
    for named in used_meshes(module):
        count, parts = math.prod(size or 1 for size in named.shape), parts_of(named, mesh)
        if count != mesh.size:
            raise ShardingError(
                f"@{named.symbol} has {count} devices, the program's mesh {mesh.size}; "
                "one program runs on one set of devices"
            )
        if parts is None:
            raise UnsupportedError(f"{named.unlike(mesh.sizes.values())}: no axes of one are parts of the other's")
        cuts += [ref for refs in parts for ref in refs]
    return RefinedMesh.of(mesh, cuts)


def without_unknown_sizes(module: ir.Operation, mesh: jax.sharding.Mesh, shapes: Sequence[ValueShape]) -> ir.Operation:
    """A local program without `?`: a copy, if it has any.

    Args:
        module: the program, without calls.
        mesh: the devices.
        shapes: the local shapes of the arguments.

    Raises:
        SdyError: the arguments do not fit the program, or an op breaks a rule now that its sizes are known.
    """
    _check_arguments(module, shapes)
    if not _has_gaps(module):
        return module
    module = copied(module)
    with module.context, ir.Location.unknown():
        fill_meshes(module, tuple(mesh.axis_sizes))
        _fill_types(module, shapes)
    verify_module(module)
    return module


def _check_arguments(module: ir.Operation, shapes: Sequence[ValueShape]) -> None:
    arguments = main_function(module).regions[0].blocks[0].arguments
    for number, (value, shape) in enumerate(zip(arguments, shapes, strict=True)):
        wanted = _sizes(value) or ()
        fits = len(wanted) == len(shape) and all(w in (None, n) for w, n in zip(wanted, shape, strict=True))
        if not fits:
            raise ShardingError(f"argument {number} has shape {shape} on each device, expected {value.type}")


def _has_gaps(module: ir.Operation) -> bool:
    if any(None in mesh.shape for mesh in used_meshes(module)):
        return True
    main = main_function(module)
    values = [*main.regions[0].blocks[0].arguments, *(result for op in pre_order(main) for result in op.results)]
    return any(None in (_sizes(value) or ()) for value in values)


def _sizes(value: ir.Value) -> DynamicShape | None:
    """The shape of a tensor, None where the text has `?`; None for what is no tensor."""
    return sizes_of(value.type) if isinstance(value.type, ir.RankedTensorType) else None


def fill_meshes(module: ir.Operation, sizes: ValueShape) -> None:
    """The program's own mesh has the devices' sizes; others fill as many devices."""
    used = used_meshes(module)
    for op in pre_order(module):
        if is_dialect_op(op) and (call := view(op)).name == "mesh" and None in call["shape"]:
            named = DeviceMesh(call.dialect, call["sym_name"], call["shape"])
            if named in used:
                found = sizes if named == used[0] else resolved_sizes(named, math.prod(sizes))
                op.attributes["shape"] = ir.DenseI64ArrayAttr.get(list(found))


def _fill_types(module: ir.Operation, shapes: Sequence[ValueShape]) -> None:
    main, meshes = main_function(module), device_meshes(module)
    for value, shape in zip(main.regions[0].blocks[0].arguments, shapes, strict=True):
        _set_shape(value, shape)
    for op in pre_order(main):
        if any(None in (_sizes(result) or ()) for result in op.results):
            computed = _computed(op, meshes)
            if computed is not None:
                _set_shape(op.results[0], computed)
    update_function_type(main)


def _set_shape(value: ir.Value, shape: ValueShape) -> None:
    """Fills the gaps of a tensor's type; what the text says stays, for the checks to compare."""
    sizes = _sizes(value)
    if sizes is None or None not in sizes:
        return
    filled = [new if size is None else size for size, new in zip(sizes, shape, strict=True)]
    type_ = ir.RankedTensorType(value.type)
    value.set_type(ir.RankedTensorType.get(filled, type_.element_type, type_.encoding))


def _computed(op: ir.Operation, meshes: Mapping[tuple[str, str], DeviceMesh]) -> ValueShape | None:
    """The shape of an op's result by those of its operands; None where it is not known how."""
    shapes = [sizes for operand in op.operands if (sizes := _sizes(operand)) is not None]
    if not shapes or any(None in sizes for sizes in shapes):
        return None
    if is_dialect_op(op):
        call = view(op)
        group = meshes[call.dialect, call.mesh].group_size(call.values.get("mesh_axes", ())) or 1
        return result_shape(call, shapes[0], group)  # type: ignore[return-value]
    if op.name not in ELEMENTWISE:
        return None
    rank = ir.RankedTensorType(op.results[0].type).rank
    return next((sizes for sizes in shapes if len(sizes) == rank), None)  # type: ignore[return-value]


# Local programs on memrefs, as programs on tensors.
#
# An op that updates a memref in place makes a new value here, which is what all later uses of the memref see. Memory
# of the caller stays as it is.


def memrefs_to_tensors(module: ir.Operation) -> None:
    """Replaces the memrefs of the main function by tensors.

    Args:
      module: a verified module without calls, edited in place.

    Raises:
      UnsupportedError: a memref with a layout or memory space, one that is updated inside of an op that it comes into
        from outside, such as a loop, or another op on memrefs than those of the mesh and shard dialects.
    """
    main = main_function(module)
    block = main.regions[0].blocks[0]
    ops = [op for op in dialect_ops(main) if any(map(_is_memref, op.operation.operands))]
    if not ops and not any(map(_is_memref, block.arguments)):
        return
    _check_users(main, {op.operation for op in ops})
    for op in ops:
        if op.name == "update_halo":
            _update(op.operation)
    for value in [*block.arguments, *(op.result for op in ops)]:
        if _is_memref(value):
            value.set_type(_tensor_type(value))
    update_function_type(main)


def _is_memref(value: ir.Value) -> bool:
    return isinstance(value.type, ir.MemRefType)


def _check_users(main: ir.Operation, known: set[ir.Operation]) -> None:
    for op in pre_order(main):
        if op not in known and op.name != "func.return" and any(map(_is_memref, (*op.operands, *op.results))):
            raise UnsupportedError(f"{op.name} at {source_line(op.location)} works on memrefs; use tensors")


def _update(op: ir.Operation) -> None:
    """Makes all uses of the memref that follow uses of the result."""
    given = op.operands[0]
    block = given.owner if isinstance(given, ir.BlockArgument) else given.owner.operation.block
    if block != op.block:
        place = source_line(op.location)
        raise UnsupportedError(f"{op.name} at {place} updates a memref of the code around; use tensors")
    inside = [inner.operation for inner in block.operations]
    for later in inside[inside.index(op) + 1 :]:
        for user in pre_order(later):
            for number, operand in enumerate(user.operands):
                if operand == given:
                    user.operands[number] = op.results[0]


def _tensor_type(value: ir.Value) -> ir.Type:
    type_ = ir.MemRefType(value.type)
    if type_.memory_space is not None or "strided" in str(type_) or "affine_map" in str(type_):
        raise UnsupportedError(f"a memref of type {type_} cannot be run; arrays have no layouts and memory spaces")
    sizes = [ir.ShapedType.get_dynamic_size() if type_.is_dynamic_dim(d) else n for d, n in enumerate(type_.shape)]
    return ir.RankedTensorType.get(sizes, type_.element_type, loc=ir.Location.unknown(type_.context))
