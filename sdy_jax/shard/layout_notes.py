"""What annotations of the mesh and shard dialects say of local buffers, which a partitioned program does not keep."""

from __future__ import annotations

from collections.abc import Iterator

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op
from sdy_jax.ir.operations import pre_order
from sdy_jax.lowering.interface.notes import Note
from sdy_jax.shard.passes.mesh_shards import LAYOUT
from sdy_jax.shard.stated_blocks import OFFSETS, held_ops, stated_blocks
from sdy_jax.text.kinds import GAP

_REASONS = {
    "halo_sizes": "are not kept: an op that needs its neighbours' elements asks for them itself",
    "sharded_dims_offsets": "are not kept: no element-wise op takes the value, and blocks of others are of one length",
    "partial": "is not kept: SDY has no partial averages, so devices hold the value itself",
}


def layout_notes(module: ir.Operation) -> Iterator[Note]:
    """A note for each annotation of which not only the axes are kept, or these alone; results do not depend on it."""
    if not any(_is_stated(op) for op in pre_order(module)):
        return
    for op in Graph(module).ops:
        if _is_stated(op.mlir):
            message = "; ".join(_messages(ir.DictAttr(op.attributes[LAYOUT]), _kept(op)))
            yield Note.at("shard", op.mlir.location, message)


def _is_stated(op: ir.Operation) -> bool:
    return op.name == "sdy.sharding_constraint" and LAYOUT in op.attributes


def _kept(op: Op) -> str | None:
    """What keeps the blocks that an annotation states, if any op does."""
    blocks = stated_blocks(op)
    if blocks is None or op.block is None:
        return None
    count = sum(other == blocks for other in held_ops(op.block).values())
    if not count:
        return None
    ops = "an element-wise op" if count == 1 else f"{count} element-wise ops"
    longest = ", ".join(map(str, blocks.longest))
    return f"are kept by {ops}, which every device runs on {longest} elements; blocks of other ops are of one length"


def _messages(layout: ir.DictAttr, kept: str | None) -> Iterator[str]:
    for name in ("halo_sizes", OFFSETS):
        if name in layout:
            sizes = ", ".join("?" if size == GAP else str(size) for size in ir.DenseI64ArrayAttr(layout[name]))
            yield f"{name} = [{sizes}] {kept or _REASONS[name]}"
    if "partial_type" in layout:
        kind = ir.StringAttr(layout["partial_type"]).value
        axes = list(ir.DenseI16ArrayAttr(layout["partial_axes"]))
        yield f"partial = {kind} {axes} {_REASONS['partial']}"
