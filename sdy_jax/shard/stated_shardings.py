"""Shardings as mesh and shard ops state them: what a value of type `!mesh.sharding` is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from jax.extend.mlir import ir

from sdy_jax.shard.op_meshes import DeviceMesh
from sdy_jax.shard.semantics.layout import Layout, normalized
from sdy_jax.shard.view import DialectOp, is_dialect_op, view

Size: TypeAlias = int | ir.Value
"""A number, or the value that has it in the run."""


@dataclass(frozen=True, slots=True)
class StatedSharding:
    """What a `sharding` op says: its dialect (`mesh` or `shard`), the symbol of the mesh, and the layout on it."""

    dialect: str
    mesh: str
    layout: Layout

    def normalized(self, on: DeviceMesh) -> StatedSharding:
        """The sharding in its one form."""
        return replace(self, layout=normalized(self.layout, on))

    def means_the_same(self, other: StatedSharding, on: DeviceMesh) -> bool:
        """Whether two shardings are the same, however they are written."""
        return self.normalized(on) == other.normalized(on)


def stated_sharding(value: ir.Value) -> StatedSharding | None:
    """What a value of a sharding type is; None if the program does not say that here.

    Raises:
      RuleError: the op that states it is malformed.
    """
    op = defining(value, "sharding", "get_sharding")
    if op is None:
        return None
    if op.name == "get_sharding":
        shard = defining(op["source"], "shard")
        return stated_sharding(shard["sharding"]) if shard else None
    halos, offsets = (map(folded_size, op[f"static_{name}"]) for name in ("halo_sizes", "sharded_dims_offsets"))
    layout = Layout(op["split_axes"], op["partial_type"], op["partial_axes"], tuple(halos), tuple(offsets))
    return StatedSharding(op.dialect, op.mesh, layout)


def defining(value: ir.Value, *names: str) -> DialectOp | None:
    """The op that makes a value, if it is one of the dialects with one of these names."""
    if isinstance(value, ir.BlockArgument) or not is_dialect_op(value.owner.operation):
        return None
    op = view(value.owner.operation)
    return op if op.name in names else None


def folded_size(size: Size) -> Size:
    """The number that a value is, if it is a constant."""
    if isinstance(size, (int, ir.BlockArgument)):
        return size
    op = size.owner.operation
    if op.name != "arith.constant" or not isinstance(op.attributes["value"], ir.IntegerAttr):
        return size
    return int(ir.IntegerAttr(op.attributes["value"]).value)
