"""Stacks that loops read in a narrower type, as weights in float32 of which each layer is rounded to bfloat16.

    while { %w = dynamic_slice %stack, ...; %n = convert %w }

While layouts are chosen they are rounded in front of the loop, so that one that is gathered there is sent, and held,
in the narrower type:

    %narrow = convert %stack
    while { %n = dynamic_slice %narrow, ... }

Where nothing moves it before the loop, its layers are rounded inside again, and no second stack is held.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.operations import is_used
from sdy_jax.ir.stored_shardings import LISTS, store_results
from sdy_jax.ir.tensor_types import itemsize
from sdy_jax.lowering.analysis.fusion import moves
from sdy_jax.lowering.analysis.trip_counts import trips
from sdy_jax.lowering.strategies.registry import PARTIAL_ACCESS

_CONVERT = "stablehlo.convert"
_FORWARDING = "stablehlo.optimization_barrier"
_MARK = "sdy_jax.narrowed"


@dataclass(eq=False)
class _Read:
    """A layer that a loop takes of a stack: the values of it in the wide type, and what makes them narrow."""

    slice: Op
    loop: Op
    wide: list[Value] = field(default_factory=list)
    converts: list[Op] = field(default_factory=list)


def narrow_stacks(graph: Graph) -> Graph:
    """Rounds stacks before the loops that read each layer rounded. Returns the graph of what there is then."""
    found: dict[tuple[Value, str], list[_Read]] = {}
    for op in graph.ops:
        if PARTIAL_ACCESS.get(op.name) == "read" and (read := _narrow_read(op)):
            found.setdefault((op.operands[0], read.converts[0].results[0].dtype), []).append(read)
    for (stack, _), reads in found.items():
        _narrow(stack, reads)
    return Graph(graph.module) if found else graph


def narrowed(graph: Graph) -> list[Op]:
    """The ops that round stacks before loops."""
    return [op for op in graph.ops if op.name == _CONVERT and _MARK in op.mlir.attributes]


def widen_stacks(converts: Iterable[Op]) -> list[Op]:
    """Lets loops round the layers of stacks that nothing has moved since `narrow_stacks`. Returns those of the ops that
    nobody needs any more."""
    unused = []
    for op in converts:
        made = op.mlir.results[0]
        del op.mlir.attributes[_MARK]
        for user in [use.owner.operation for use in made.uses]:
            if PARTIAL_ACCESS.get(user.name) == "read" and user.parent != op.mlir.parent:
                _round_layer(user, op.mlir)
        if not is_used(made):
            unused.append(op)
    return unused


def _narrow_read(op: Op) -> _Read | None:
    """What a read takes of a stack from outside of its loop, of which all layers are read, and are rounded before they
    are anything else; None where it is no such read."""
    stack, loop = op.operands[0], _loop_around(op, op.operands[0])
    if loop is None or trips(loop) * math.prod(op.results[0].shape or ()) < math.prod(stack.shape or ()):
        return None
    read = _Read(op, loop)
    waiting = [op.results[0]]
    while waiting:
        value = waiting.pop()
        read.wide.append(value)
        for user, index in value.uses:
            if user.name == _CONVERT:
                read.converts.append(user)
            elif user.name == _FORWARDING:
                waiting.append(user.results[index])
            elif moves(user) and len(user.operands) == len(user.results) == 1:
                waiting.append(user.results[0])
            else:
                return None
    made = {convert.results[0].dtype for convert in read.converts}
    return read if len(made) == 1 and _is_narrower(made.pop(), stack.dtype) else None


def _is_narrower(dtype: str, other: str) -> bool:
    """Whether both are floating-point types, of which the first takes fewer bytes."""
    return dtype.startswith(("f", "bf")) and other.startswith("f") and itemsize(dtype) < itemsize(other)


def _loop_around(op: Op, stack: Value) -> Op | None:
    """The outermost loop around an op in the block in which a value is made; None where there is none."""
    block = stack.owner if isinstance(stack.owner, Block) else stack.owner.block
    around = op
    while around.block is not None and around.block is not block:
        around = around.block.parent
    return around if around is not op and around.block is block and around.name == "stablehlo.while" else None


def _narrow(stack: Value, reads: list[_Read]) -> None:
    """Rounds a stack before the first loop that reads it."""
    element = ir.RankedTensorType(reads[0].converts[0].results[0].type).element_type
    made = ir.Operation.create(
        _CONVERT,
        [_of(element, stack.mlir)],
        [stack.mlir],
        {_MARK: ir.UnitAttr.get()},
        loc=reads[0].converts[0].mlir.location,
        ip=ir.InsertionPoint(reads[0].loop.mlir),
    )
    if stack.sharding is not None:
        store_results(made, [stack.sharding])
    for read in reads:
        read.slice.mlir.operands[0] = made.results[0]
        for value in read.wide:
            value.mlir.set_type(_of(element, value.mlir))
        for convert in read.converts:
            convert.mlir.results[0].replace_all_uses_with(convert.operands[0].mlir)
            convert.mlir.erase()


def _round_layer(read: ir.Operation, convert: ir.Operation) -> None:
    """Lets a loop read a layer of the wide stack, and round it."""
    narrow = read.results[0].type
    read.operands[0] = convert.operands[0]
    layer = read.results[0]
    layer.set_type(_of(ir.RankedTensorType(convert.operands[0].type).element_type, layer))
    uses = [(use.owner.operation, use.operand_number) for use in layer.uses]
    attributes = {name: read.attributes[name] for name in LISTS if name in read.attributes}
    made = ir.Operation.create(
        _CONVERT, [narrow], [layer], attributes, loc=convert.location, ip=ir.InsertionPoint.after(read)
    )
    for user, index in uses:
        user.operands[index] = made.results[0]


def _of(element: ir.Type, value: ir.Value) -> ir.Type:
    """The type of an array of the shape of a value."""
    return ir.RankedTensorType.get(ir.RankedTensorType(value.type).shape, element)
