"""Local programs on memrefs, as programs on tensors.

An op that updates a memref in place makes a new value here, which is what all later uses of the memref see. Memory of
the caller stays as it is.
"""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.errors import UnsupportedError
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.operations import main_function, pre_order, update_function_type
from sdy_jax.shard.view import dialect_ops


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
