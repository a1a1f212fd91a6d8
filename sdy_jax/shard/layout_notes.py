"""What annotations of the mesh and shard dialects say of local buffers, which a partitioned program does not keep."""

from __future__ import annotations

from collections.abc import Iterator

from jax.extend.mlir import ir

from sdy_jax.ir.operations import pre_order
from sdy_jax.lowering.placement.report import Note
from sdy_jax.shard.passes.mesh_shards import LAYOUT
from sdy_jax.text.kinds import GAP

_REASONS = {
    "halo_sizes": "are not kept: an op that needs its neighbours' elements asks for them itself",
    "sharded_dims_offsets": "are not kept: blocks are of one length",
    "partial": "is not kept: SDY has no partial averages, so devices hold the value itself",
}


def layout_notes(module: ir.Operation) -> Iterator[Note]:
    """A note for each annotation of which only the axes are kept; results do not depend on the rest."""
    for op in pre_order(module):
        if op.name == "sdy.sharding_constraint" and LAYOUT in op.attributes:
            message = "; ".join(_messages(ir.DictAttr(op.attributes[LAYOUT])))
            yield Note.at("shard", op.location, message)


def _messages(layout: ir.DictAttr) -> Iterator[str]:
    for name in ("halo_sizes", "sharded_dims_offsets"):
        if name in layout:
            sizes = ", ".join("?" if size == GAP else str(size) for size in ir.DenseI64ArrayAttr(layout[name]))
            yield f"{name} = [{sizes}] {_REASONS[name]}"
    if "partial_type" in layout:
        kind = ir.StringAttr(layout["partial_type"]).value
        axes = list(ir.DenseI16ArrayAttr(layout["partial_axes"]))
        yield f"partial = {kind} {axes} {_REASONS['partial']}"
