"""What the rules know besides the op that they are about, and the rules that most ops share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jax.extend.mlir import ir

from sdy_jax.representation.mesh import Mesh
from sdy_jax.shard.op_meshes import DeviceMesh
from sdy_jax.shard.result_shapes import DynamicShape
from sdy_jax.shard.view import DialectOp, sizes_of

_ON_MEMREFS = ("all_reduce", "update_halo")


@dataclass(frozen=True, slots=True)
class MeshScope:
    """What is known in the module around an op.

    Attributes:
        meshes: those of the dialects, by dialect and symbol.
        declared: those of SDY, by symbol.
        symbols: what defines each of the other symbols.
    """

    meshes: Mapping[tuple[str, str], DeviceMesh]
    declared: Mapping[str, Mesh]
    symbols: Mapping[str, ir.Operation]

    def mesh(self, op: DialectOp) -> DeviceMesh:
        """The mesh that an op is about."""
        mesh = self.meshes.get((op.dialect, op.mesh))
        if mesh is None:
            op.fail(f"no {op.noun} named @{op.mesh}")
        return mesh


Rule = Callable[[DialectOp, MeshScope], None]
"""Raises a `RuleError` for an op that breaks a rule; must not change it."""


def shape_of(op: DialectOp, value: ir.Value, least_rank: int = 0) -> DynamicShape:
    """The shape of a tensor, or of a memref where the op takes one."""
    type_ = value.type
    allowed = (ir.RankedTensorType, ir.MemRefType) if op.name in _ON_MEMREFS else (ir.RankedTensorType,)
    if not isinstance(type_, allowed) or type_.rank < least_rank:
        what = f" of rank at least {least_rank}" if least_rank else ""
        op.fail(f"needs a ranked tensor{what}, got {type_}")
    return sizes_of(type_)


def element_type(value: ir.Value) -> ir.Type:
    return ir.ShapedType(value.type).element_type


def first_operand(op: DialectOp) -> ir.Value:
    """The tensor that the op works on."""
    return op.operation.operands[0]


def check_result(op: DialectOp, expected: Sequence[int | None]) -> None:
    """The result has these sizes. It may leave any of them open, but none may be stated that is not known."""
    for number, (got, want) in enumerate(zip(shape_of(op, op.result), expected, strict=True)):
        if got is None or got == want:
            continue
        if want is None:
            unknown = "the operand's size or the number of devices is known in the run only"
            op.fail(f"result dimension {number} is {got}, expected ? because {unknown}")
        op.fail(f"result dimension {number} is {got}, expected {want}")
