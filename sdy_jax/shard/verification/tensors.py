"""The rules about types of operands and results, and about what an op does to a shape."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.shard.result_shapes import CHANGED_DIMENSIONS, result_shape
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


def redivided(op: DialectOp, scope: MeshScope) -> None:
    """One dimension is divided among the devices of the group, or another is as many times longer, or both."""
    shape, on = shape_of(op, first_operand(op)), scope.mesh(op)
    shorter, longer = CHANGED_DIMENSIONS[op.name]
    for name in filter(None, (shorter, longer)):
        check_dimension(len(shape), op[name], name)
    if shorter and (not longer or op[shorter] == op[longer] or shape_of(op, op.result)[op[shorter]] is not None):
        check_divides(on, op[shorter], shape[op[shorter]], op.axes)
    check_result(op, result_shape(op, shape, on.group_size(op.axes)))


def reduction(op: DialectOp, scope: MeshScope) -> None:
    """The kind works on what the terms are converted to. `generic` is valid, but names nothing that could be run."""
    check_element("reduction", op["reduction"], str(element_type(op.result)))
