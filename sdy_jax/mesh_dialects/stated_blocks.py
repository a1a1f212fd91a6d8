"""Blocks that annotations state by `sharded_dims_offsets`, and the notes of a plan on what annotations lose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jax.extend.mlir import ir

from sdy_jax.ir.attributes import shardings_to_attribute
from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.operations import pre_order
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.text.mesh_dialects import GAP
from sdy_jax.lowering.ops.registry import folds
from sdy_jax.lowering.ops.slicing import attributes
from sdy_jax.lowering.planner.report import Note
from sdy_jax.lowering.reshard.strip_reads import Piece
from sdy_jax.mesh_dialects.mesh_annotations import LAYOUT
from sdy_jax.shardy.rules.elementwise import ELEMENTWISE

# Blocks that annotations state by `sharded_dims_offsets`, in programs on whole tensors.
#
# SDY's blocks of a dimension have one length. Element-wise ops on annotated values run on blocks as they are stated
# all the same: on tensors in which every block is filled up to the longest one, so that equal blocks hold the stated
# ones.
#
#     shard %x to offsets [0, 3, 8]            %x = a b c d e f g h
#     tanh of it runs on blocks of 5           %p = a b c - - d e f g h
#
# `sdy_jax.pieces` makes the one of the other; devices send each other strips where their blocks differ. Results stay
# in the stated blocks while element-wise ops alone take them.

OFFSETS = "sharded_dims_offsets"
_STATING = ("sdy.sharding_constraint", "sdy.reshard")
_CONSTANTS = ("stablehlo.constant", "sdy.constant")
_BROADCAST = "stablehlo.broadcast_in_dim"
_ONES = (("i1", "true"), ("complex", "(1.0, 0.0)"), ("f", "1.0"), ("bf", "1.0"))
"""How the number one begins to be written in an element type, and is: what fills blocks."""


@dataclass(frozen=True, slots=True)
class StatedBlocks:
    """The sharding of a value, and per split dimension where its blocks start, and its size."""

    sharding: TensorSharding
    starts: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def longest(self) -> list[int]:
        """The length of the longest block of each split dimension."""
        return [max(end - start for start, end in pairwise(starts)) for _, starts in self.starts]


def stated_blocks(op: Op) -> StatedBlocks | None:
    """The blocks that an annotation states; None if it states none, or they are not known before the run."""
    layout = op.attribute(LAYOUT) if op.name in _STATING else None
    sharding = op.results[0].sharding if layout is not None else None
    if layout is None or sharding is None or sharding.unreduced_axes or OFFSETS not in ir.DictAttr(layout):
        return None
    offsets = list(ir.DenseI64ArrayAttr(ir.DictAttr(layout)[OFFSETS]))
    dims = [dim for dim, axes in enumerate(sharding.axes) if axes]
    ends = [i for i, (a, b) in enumerate(pairwise([*offsets, 0])) if b == 0 and a != 0]
    if GAP in offsets or len(ends) != len(dims):
        return None
    starts = [tuple(offsets[a:b]) for a, b in pairwise([0, *(end + 1 for end in ends)])]
    return StatedBlocks(sharding, tuple(zip(dims, starts, strict=True)))


def held_ops(block: Block) -> dict[Op, StatedBlocks]:
    """The element-wise ops of a block that run on stated blocks, in order."""
    known: dict[Value, StatedBlocks] = {}
    found: dict[Op, StatedBlocks] = {}
    for op in block.ops:
        stated = stated_blocks(op)
        if stated is not None:
            known[op.results[0]] = stated
            if not op.results[0].uses:  # it is about the value itself
                known[op.operands[0]] = stated
        elif op.name in ELEMENTWISE and (blocks := _common(op, known)) is not None:
            known[op.results[0]] = found[op] = blocks
    return found


def _common(op: Op, known: dict[Value, StatedBlocks]) -> StatedBlocks | None:
    """The blocks that all operands are in, but scalars and tensors of one number."""
    tensors = [value for value in op.operands if value.rank and not _is_splat(value)]
    blocks = {known.get(value) for value in tensors}
    return blocks.pop() if len(blocks) == 1 else None


def _is_splat(value: Value) -> bool:
    op = value.defining_op
    if op is None or op.name not in (*_CONSTANTS, _BROADCAST):
        return False
    if op.name == _BROADCAST:
        return op.operands[0].rank == 0
    return bool(ir.DenseElementsAttr(op.attributes["value"]).is_splat)


@folds("sdy.reshard")
def _hold(op: Op) -> bool:
    """Lets the ops of a block run on stated blocks; the first annotation speaks for all of its block."""
    if op.block is None or stated_blocks(op) is None or LAYOUT not in op.mlir.attributes:
        return False
    held = held_ops(op.block)
    _Holding(held).write()
    for other in op.block.ops:
        if stated_blocks(other) is not None:
            del other.mlir.attributes[LAYOUT]
    return bool(held)


class _Holding:
    """Tensors of filled blocks, and what is computed on them."""

    def __init__(self, held: dict[Op, StatedBlocks]):
        self._held = held
        self._filled: dict[tuple[Value, StatedBlocks], ir.Value] = {}

    def write(self) -> None:
        """Computes the ops on filled blocks; others take the values that these are made of."""
        for op, blocks in self._held.items():
            operands = [self._of(value, blocks, op) if value.rank else value.mlir for value in op.operands]
            result = op.results[0]
            clone = _created(op, op.name, _filled_shape(result, blocks), operands, _attributes(op), blocks.sharding)
            self._filled[result, blocks] = clone
            result.mlir.replace_all_uses_with(_emptied(clone, result, blocks, op))

    def _of(self, value: Value, blocks: StatedBlocks, user: Op) -> ir.Value:
        if (value, blocks) not in self._filled:
            make = _spread if _is_splat(value) else _fill
            self._filled[value, blocks] = make(value, blocks, user)
        return self._filled[value, blocks]


def _filled_shape(value: Value, blocks: StatedBlocks) -> list[int]:
    shape = list(value.shape or ())
    for (dim, starts), longest in zip(blocks.starts, blocks.longest, strict=True):
        shape[dim] = longest * (len(starts) - 1)
    return shape


def _fill(value: Value, blocks: StatedBlocks, before: Op) -> ir.Value:
    """The tensor in which every block is as long as the longest one."""
    x, shape = value.mlir, list(value.shape or ())
    one = _one(value, before)
    for (dim, starts), longest in zip(blocks.starts, blocks.longest, strict=True):
        pieces = [
            piece
            for start, end in pairwise(starts)
            for piece in (Piece(0, start, end - start), Piece(None, 0, longest - end + start))
            if piece.length
        ]
        shape[dim] = longest * (len(starts) - 1)
        x = _pieces(before, x, dim, pieces, shape, one, blocks.sharding)
    return x


def _emptied(x: ir.Value, value: Value, blocks: StatedBlocks, before: Op) -> ir.Value:
    """The value that a tensor of filled blocks holds."""
    shape = _filled_shape(value, blocks)
    sharding = value.sharding or blocks.sharding
    for (dim, starts), longest in zip(blocks.starts, blocks.longest, strict=True):
        pieces = [Piece(0, i * longest, end - start) for i, (start, end) in enumerate(pairwise(starts)) if end > start]
        shape[dim] = starts[-1]
        x = _pieces(before, x, dim, pieces, shape, None, sharding)
    return x


def _pieces(
    before: Op,
    x: ir.Value,
    dim: int,
    pieces: Sequence[Piece],
    shape: Sequence[int],
    fill: ir.Value | None,
    sharding: TensorSharding,
) -> ir.Value:
    operands = [x] if fill is None or all(piece.operand == 0 for piece in pieces) else [x, fill]
    said = attributes(dim, [tuple(pieces)], [False], x.context)
    element = ir.RankedTensorType(x.type).element_type
    return _created(before, "stablehlo.custom_call", shape, operands, said, sharding, element)


def _spread(value: Value, blocks: StatedBlocks, before: Op) -> ir.Value:
    """The same number in a tensor of filled blocks."""
    maker = value.defining_op
    assert maker is not None
    shape, attributes = _filled_shape(value, blocks), _attributes(maker)
    if maker.name == _BROADCAST:
        return _created(before, maker.name, shape, [maker.operands[0].mlir], attributes, blocks.sharding)
    given = ir.DenseElementsAttr(maker.attributes["value"])
    type_ = ir.RankedTensorType.get(shape, given.type.element_type)
    number = ir.DenseElementsAttr.get_splat(type_, given.get_splat_value())
    return _created(before, maker.name, shape, [], {**attributes, "value": number}, blocks.sharding, type_.element_type)


def _one(value: Value, before: Op) -> ir.Value:
    """A scalar of the element type of a value; no op makes an infinity or NaN of it alone."""
    number = next((text for start, text in _ONES if value.dtype.startswith(start)), "1")
    given = ir.Attribute.parse(f"dense<{number}> : tensor<{value.dtype}>", value.mlir.context)
    element = ir.RankedTensorType(value.mlir.type).element_type
    return _created(before, "stablehlo.constant", [], [], {"value": given}, None, element)


def _attributes(op: Op) -> dict[str, ir.Attribute]:
    return {name: attribute for name, attribute in op.attributes.items() if name != "sdy.sharding"}


def _created(
    before: Op,
    name: str,
    shape: Sequence[int],
    operands: Sequence[ir.Value],
    said: Mapping[str, ir.Attribute],
    sharding: TensorSharding | None,
    element: ir.Type | None = None,
) -> ir.Value:
    """The result of a new op before another one, of whose result's element type it is by default."""
    location = before.mlir.location
    element = element or ir.RankedTensorType(before.results[0].mlir.type).element_type
    type_ = ir.RankedTensorType.get(list(shape), element, loc=location)
    ip = ir.InsertionPoint(before.mlir)
    op = ir.Operation.create(name, [type_], list(operands), dict(said), loc=location, ip=ip)
    if sharding is not None:
        op.attributes["sdy.sharding"] = shardings_to_attribute((sharding,), op.context)
    return op.results[0]


# What annotations of the mesh and shard dialects say of local buffers, which a partitioned program does not keep.

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
