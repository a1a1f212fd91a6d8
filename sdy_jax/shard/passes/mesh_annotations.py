"""Annotations of the mesh and shard dialects become those of SDY: what propagation and partitioning understand.

| mesh | SDY |
|---|---|
| `mesh.mesh` | `sdy.mesh` of the same name |
| `mesh.shard` | an `sdy.sharding_constraint` without uses, and the sharding of the value itself where it can have one |
| `mesh.shard .. annotate_for_users` | an `sdy.sharding_constraint` for the uses of the result |
| `mesh.mesh_shape`, `mesh.shard_shape` | constants, lookups in a table of constants |
| `mesh.sharding`, `mesh.get_sharding` | nothing: they say what the others mean |

A partial tensor is unreduced. That is about the terms that devices hold, and the value is the value: what comes into a
function and goes out of it is whole. Halos and offsets are about buffers, which a program on whole tensors does not
show; they stay at the constraint in the attribute `sdy_jax.layout`. Element-wise ops run on blocks with these offsets
(`stated_blocks.py`); the plan says by how many ops offsets are kept, and that halos are not.

Ops that communicate, and those that tell where a device is, are of programs on local arrays and stay as they are.

Source: the mesh dialect reference, `mesh.shard` and `mesh.sharding`.
"""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.errors import ShardingError
from sdy_jax.ir.operations import is_used, module_meshes, module_of, pre_order
from sdy_jax.passes.inline_calls import inline_functions
from sdy_jax.representation.attributes import mesh_to_attribute
from sdy_jax.representation.mesh import Mesh
from sdy_jax.shard.annotated_meshes import Devices, MeshError, annotated_meshes
from sdy_jax.shard.op_meshes import device_meshes
from sdy_jax.shard.passes.mesh_shards import PLACES, replace_annotations
from sdy_jax.shard.verification import verify_ops
from sdy_jax.shard.view import SHARDING_TYPES, DialectOp, dialect_ops


def import_mesh_annotations(
    module: ir.Operation, *, axis_names: str = "", devices: str = "", strict: bool = True
) -> None:
    """The pass: `import_annotations` with options as text.

    Args:
      module: a `builtin.module`, edited in place.
      axis_names: `data,model`: what the axes of meshes with as many axes are called.
      devices: how many there are, for a mesh with a size that is not known.
      strict: whether shards of shards that say something else are refused; else each reshards.
    """
    names = tuple(name.strip() for name in axis_names.split(",") if name.strip())
    if devices and not devices.isdecimal():
        raise ShardingError(f"option devices of import-mesh-annotations is {devices!r}; expected a number")
    import_annotations(module, Devices(axis_names=names, count=int(devices) if devices else None), strict)


def import_annotations(module: ir.Operation, devices: Devices | None = None, strict: bool = True) -> None:
    """Turns the annotations of a module into those of SDY.

    Args:
      module: a `builtin.module`, edited in place: before propagation, or after it, when `get_sharding` knows the
        sharding of every value. Modules that work on local arrays alone are left as they are.
      devices: what meshes are laid over; needed where a size is `?`.
      strict: whether shards of shards that say something else are refused; else each reshards.

    Raises:
      RuleError: an op breaks a rule of its dialect, or says what cannot be said of whole tensors; or a mesh does not
        fit the devices.
    """
    if not module.context.allow_unregistered_dialects:
        return
    modules = [op for op in pre_order(module) if op.name == "builtin.module" and not _is_local(_ops_of(op))]
    for inside in modules:
        inline_functions(inside, _passes_shardings)
        _resolve_meshes(inside, devices or Devices())
    verify_ops(module, strict)
    for inside in modules:
        ops = _ops_of(inside)
        replace_annotations(inside, ops)
        _drop_unused(inside, ops)


def annotated_mesh(module: ir.Operation, devices: Devices) -> tuple[Mesh, str]:
    """The mesh that a module is annotated with, and its symbol: the given one, if it is among them, else that of the
    first sharding. An empty one if there is no sharding, or the mesh's size is not known.

    Raises:
      RuleError: a mesh does not fit the devices.
    """
    ops = _ops_of(module)
    used = next((op.mesh for op in ops if op.name == "sharding"), "")
    meshes = [op for op in ops if op.name == "mesh"]
    is_open = devices.mesh is None and devices.count is None and any(None in op["shape"] for op in meshes)
    if is_open or used not in {op["sym_name"] for op in meshes}:
        return Mesh(()), ""
    resolved = _resolved(module, ops, devices)
    name = next((name for name in (used, *resolved) if resolved[name] == devices.mesh), used)
    return resolved[name], name


def drop_mesh_annotations(module: ir.Operation) -> None:
    """Takes the annotations out of a module. Meshes stay where their sizes are asked for."""
    for inside in [op for op in pre_order(module) if op.name == "builtin.module"]:
        ops = _ops_of(inside)
        for op in (op for op in ops if op.name == "shard"):
            op.result.replace_all_uses_with(op.operation.operands[0])
            op.operation.erase()
        _drop_unused(inside, ops)


def _ops_of(module: ir.Operation) -> list[DialectOp]:
    """The mesh and shard ops of a module; those of modules inside have other meshes."""
    if not module.context.allow_unregistered_dialects:
        return []
    return [op for op in dialect_ops(module) if module_of(op.operation) == module]


def _is_local(ops: list[DialectOp]) -> bool:
    """A program on local arrays: devices communicate, and nothing is annotated."""
    names = {op.name for op in ops}
    return "shard" not in names and any(op.declaration.communicates or op.name in PLACES for op in ops)


def _passes_shardings(function: ir.Operation) -> bool:
    """Whether a function takes or returns a sharding. What it says of its tensors is known where it is called."""
    type_ = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    return any(str(part) in SHARDING_TYPES for part in (*type_.inputs, *type_.results))


# Meshes ---------------------------------------------------------------------------------------------------------------


def _resolve_meshes(module: ir.Operation, devices: Devices) -> None:
    """Writes their sizes into the dialects' meshes, and declares them as meshes of SDY."""
    ops, declared = _ops_of(module), module_meshes(module)
    resolved = _resolved(module, ops, devices)
    for op in (op for op in ops if op.name == "mesh"):
        name, context = op["sym_name"], module.context
        sizes = [axis.size for axis in resolved[name].axes]
        op.operation.attributes["shape"] = ir.DenseI64ArrayAttr.get(sizes, context)
        if name in declared:
            continue
        attributes = {
            "sym_name": ir.StringAttr.get(name, context),
            "mesh": mesh_to_attribute(resolved[name], context),
        }
        ip = ir.InsertionPoint(op.operation)
        ir.Operation.create("sdy.mesh", attributes=attributes, loc=op.operation.location, ip=ip)
        declared[name] = resolved[name]


def _resolved(module: ir.Operation, ops: list[DialectOp], devices: Devices) -> dict[str, Mesh]:
    try:
        return annotated_meshes(device_meshes(module).values(), module_meshes(module), devices)
    except MeshError as error:
        named = [op for op in ops if op.name == "mesh" and op["sym_name"] == error.symbol]
        op = next(iter(named), next(op for op in ops if op.name == "mesh"))
        op.fail(error.message)


def _drop_unused(module: ir.Operation, ops: list[DialectOp]) -> None:
    """Removes shardings that nothing has any more, and the dialects' meshes, except for those that ops are about."""
    for op in reversed(ops):
        if op.name in ("sharding", "get_sharding") and not is_used(op.result):
            op.operation.erase()
    left = _ops_of(module)
    used = {(op.dialect, op.mesh) for op in left if "mesh" in op.values}
    for op in left:
        if op.name == "mesh" and (op.dialect, op["sym_name"]) not in used:
            op.operation.erase()
