"""The rules about types of operands and results, and about what an op does to a shape."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.shard.semantics.checks import check_dimension, check_divides, check_element
from sdy_jax.shard.verification.scope import MeshScope, check_result, element_type, first_operand, shape_of
from sdy_jax.shard.view import DialectOp


def tensors(op: DialectOp, scope: MeshScope) -> None:
    for value in (first_operand(op), op.result):
        shape_of(op, value)


def rank_one(op: DialectOp, scope: MeshScope) -> None:
    shape_of(op, first_operand(op), 1)
    shape_of(op, op.result)


def same_rank(op: DialectOp, scope: MeshScope) -> None:
    given, made = (len(shape_of(op, value)) for value in (first_operand(op), op.result))
    if given != made:
        op.fail(f"input has rank {given}, result {made}")


def same_element_type(op: DialectOp, scope: MeshScope) -> None:
    given, made = element_type(first_operand(op)), element_type(op.result)
    if given != made:
        op.fail(f"input has element type {given}, result {made}")


def same_type(op: DialectOp, scope: MeshScope) -> None:
    given, made = first_operand(op).type, op.result.type
    if given != made:
        op.fail(f"result type {made} differs from {given}")


def same_shape(op: DialectOp, scope: MeshScope) -> None:
    same_rank(op, scope)
    operand = first_operand(op)
    if isinstance(operand.type, ir.MemRefType) != isinstance(op.result.type, ir.MemRefType):
        same_type(op, scope)
    check_result(op, shape_of(op, operand))


def gathered(op: DialectOp, scope: MeshScope) -> None:
    """One dimension is as many times longer as the group has devices."""
    sizes, axis = [*shape_of(op, first_operand(op))], _tensor_axis(op, "gather_axis")
    sizes[axis] = _product(sizes[axis], scope.mesh(op).group_size(op.axes))
    check_result(op, sizes)


def sliced(op: DialectOp, scope: MeshScope) -> None:
    """One dimension is divided among the devices of the group."""
    axis = _tensor_axis(op, "slice_axis" if op.name == "all_slice" else "scatter_axis")
    sizes, on = [*shape_of(op, first_operand(op))], scope.mesh(op)
    check_divides(on, axis, sizes[axis], op.axes)
    sizes[axis] = _quotient(sizes[axis], on.group_size(op.axes))
    check_result(op, sizes)


def exchanged(op: DialectOp, scope: MeshScope) -> None:
    """One dimension is divided, and another one is longer; or one is both."""
    sizes, on = [*shape_of(op, first_operand(op))], scope.mesh(op)
    group = on.group_size(op.axes)
    split, concat = _tensor_axis(op, "split_axis"), _tensor_axis(op, "concat_axis")
    if split == concat or shape_of(op, op.result)[split] is not None:
        check_divides(on, split, sizes[split], op.axes)
    if split != concat:
        sizes[concat] = _product(sizes[concat], group)
        sizes[split] = _quotient(sizes[split], group)
    check_result(op, sizes)


def _tensor_axis(op: DialectOp, name: str) -> int:
    axis: int = op[name]
    check_dimension(len(shape_of(op, first_operand(op))), axis, name)
    return axis


def _product(size: int | None, group: int | None) -> int | None:
    return None if size is None or group is None else size * group


def _quotient(size: int | None, group: int | None) -> int | None:
    return None if size is None or group is None or size % group else size // group


def reduction(op: DialectOp, scope: MeshScope) -> None:
    """The kind works on what the terms are converted to. `generic` is valid, but names nothing that could be run."""
    check_element("reduction", op["reduction"], str(element_type(op.result)))
