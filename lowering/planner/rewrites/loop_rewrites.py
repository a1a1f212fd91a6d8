"""Rewrites of loops: invariants from outside, values made in every trip, stacks changed in place or read narrower."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.attributes import itemsize
from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.new_ops import Place, entry_of, reshaped, shape_of
from sdy_jax.ir.operations import RESHAPING, is_used
from sdy_jax.ir.stored_shardings import LISTS, store_results
from sdy_jax.lowering.ops.registry import LAYER_UPDATES, PARTIAL_ACCESS, REMATERIALIZABLE, LayerOfStack
from sdy_jax.lowering.planner.facts.fusion import fuses, moves
from sdy_jax.lowering.planner.facts.loops import is_same_integer, numbers_in_trips, trip_count, trips

# Loop invariants: bodies of loops use a value that never changes from outside instead of carrying it.
#
# jax lets a loop carry every value that its body closes over. One that the body returns unchanged is the same in all
# iterations. Used from outside of the loop, it is resharded once, before the loop. What a body returns from outside,
# as masks that the forward pass of a scan keeps for the backward pass, is that value after the first trip.


def use_invariants_from_outside(graph: Graph) -> None:
    """Makes regions of loops use the initial values of what the loops carry unchanged, and so do the loops' users."""
    # Outer loops come first: what they carry may be carried on by inner ones.
    for loop in [op for op in graph.ops if op.name == "stablehlo.while"]:
        condition, body = loop.blocks
        for i, returned in enumerate(body.terminator.operands):
            arguments = body.arguments[i], condition.arguments[i]
            if returned is arguments[0]:
                for value in (*arguments, loop.results[i]):
                    graph.replace_uses(value, loop.operands[i])
            elif not any(value.uses for value in arguments) and is_outside(returned, loop) and trip_count(loop):
                graph.replace_uses(loop.results[i], returned)


def is_outside(value: Value, loop: Op) -> bool:
    """Whether a value that a loop's body takes, or returns, is made before the loop."""
    block = value.owner if isinstance(value.owner, Block) else value.owner.block
    while block is not None and block.parent is not loop:
        block = block.parent.block
    return block is None


# What loops make of little in every trip, instead of holding it for all of them: masks, and constants as arrays.
#
#     %m = broadcast %mask            of 16 MiB, to 512 MiB
#     while { %s = select %m, ... }   holds %m as long as it runs; a broadcast inside is a part of the select
#
# jax moves what no trip changes in front of a loop, whatever its size.

_WIDENING = 4
"""How many times as large a value has to be as what it is made of. Guessed: a mask of positions is thousands of times
as large; with 1, loops would compute again what they could read as fast, and ops that compute much would run again in
each part of a group of ops; with more, broadcasts are held."""


def sink_into_loops(graph: Graph) -> Graph:
    """Makes what is much larger than what it is made of where a loop computes with it, element by element. Returns the
    graph of what there is then."""
    sunk = [_sink(op) for op in graph.ops if widens(op)]
    return Graph(graph.module) if any(sunk) else graph


def widens(op: Op) -> bool:
    """Whether an op makes much of little, as a mask for all heads."""
    if op.name not in REMATERIALIZABLE or len(op.results) != 1:
        return False
    return op.results[0].bytes >= _WIDENING * sum(value.bytes for value in op.operands)


def _sink(op: Op) -> bool:
    """Makes an op's result once more in each block of a loop that uses it. Returns whether there is any."""
    found = dict[Block, list[tuple[Op, int]]]()
    for user, index in op.results[0].uses:
        if user.block is not None and user.block is not op.block and _is_in_loop(user.block, op):
            found.setdefault(user.block, []).append((user, index))
    inside = {block: uses for block, uses in found.items() if all(fuses(user) for user, _ in uses)}
    for uses in inside.values():
        made = op.mlir.clone(ir.InsertionPoint(uses[0][0].mlir)).operation.results[0]
        for user, index in uses:
            user.mlir.operands[index] = made
    return bool(inside)


def _is_in_loop(block: Block, outside: Op) -> bool:
    """Whether a loop lies between an op and a block in which its result is used."""
    while block is not outside.block:
        around = block.parent
        if around.name == "stablehlo.while" or around.block is None:
            return around.block is not None
        block = around.block
    return False


# Layers of a stack that a loop changes in part, as the keys and values of a model that decodes token by token.
#
# A scan reads such a stack and makes another one. Its compilers copy a layer out of the one, write the few elements
# into the copy, and the copy into the other:
#
#     while (%new = 0) { %layer = dynamic_slice %old, %i;  %next = dynamic_update_slice %layer, %token, %position
#                        ... reads %next ...;              %new = dynamic_update_slice %new, %next, %i }
#
# If a trip reads the layer that it writes, and all layers are written, they can be changed in the stack itself:
#
#     while (%new = %old) { %new = dynamic_update_slice %new, %token, %i, %position
#                           %next = dynamic_slice %new, %i;  ... reads %next ... }
#
# So are those of a stack that a loop carries, whichever it reads. Any op that changes a few elements of a layer may
# do so (`LAYER_UPDATES`), as a scatter of tokens, each at the position of its sequence. What was there is read once
# less and written twice less; if nobody needs the old stack, there is one of them. Steps of decoding, Llama-3-8B,
# took 0.38 (batch split) and 0.43 (heads split) of the time and 2 GiB less on 16 chips of v5e (libtpu 0.0.51,
# 2026-11).


class _Change(NamedTuple):
    """What a loop does with a layer of a stack: `read` takes it, `update` changes it, `write` puts it into what the
    loop carries as `argument`."""

    loop: Op
    argument: Value
    read: Op
    update: Op
    write: Op


def change_in_place(graph: Graph) -> Graph:
    """Lets loops change layers in the stacks that they come from. Returns the graph of what there is then."""
    writes = (op for op in graph.ops if PARTIAL_ACCESS.get(op.name) == "write")
    changes = [change for write in writes if (change := _change(write)) is not None]
    made = [_make(change) for change in changes]
    return Graph(graph.module) if any(made) else graph


def _change(write: Op) -> _Change | None:
    """The change that a write of a layer ends; None where it is no such write."""
    argument, block = write.operands[0], write.block
    if block is None or block.parent.name != "stablehlo.while" or argument.owner is not block:
        return None
    update = _made_by(write.operands[1])
    if update is None or update.name not in LAYER_UPDATES or update.block is not block:
        return None
    read = _made_by(update.operands[0], only=True)
    if read is None or PARTIAL_ACCESS.get(read.name) != "read" or read.block is not block:
        return None
    change = _Change(block.parent, argument, read, update, write)
    return change if _is_of_layers(change) and (_is_carried_on(change) or _takes_over(change)) else None


def _made_by(layer: Value, *, only: bool = False) -> Op | None:
    """The op that makes a layer, before it has or loses a dimension of size one; None where `only` its user needs what
    it makes, and others do, too."""
    while not (only and len(layer.uses) != 1):
        op = layer.defining_op
        if op is None or op.name not in RESHAPING or _without_ones(op.operands[0]) != _without_ones(layer):
            return op
        layer = op.operands[0]
    return None


def _without_ones(value: Value) -> list[int]:
    return [size for size in value.shape or () if size != 1]


def _is_of_layers(change: _Change) -> bool:
    """Whether whole layers are taken of one stack, and put into one like it that is carried on."""
    stack, layer = change.read.operands[0], change.update.results[0].shape
    if stack.type != change.argument.type or not stack.shape or layer is None or stack.shape[1:] != layer:
        return False
    taken, terminator = {change.read.results[0].shape, change.write.operands[1].shape}, change.loop.blocks[1].terminator
    return taken == {(1, *layer)} and change.write.results[0].uses == [(terminator, change.argument.index)]


def _is_carried_on(change: _Change) -> bool:
    """Whether a trip reads a layer of what the loop carries, and writes it there."""
    read, write = change.read, change.write
    if read.operands[0] is not change.argument or {*change.argument.uses} != {(read, 0), (write, 0)}:
        return False
    return is_same_integer(read.operands[1], write.operands[2]) or _layers_in_trips(change) is not None


def _takes_over(change: _Change) -> bool:
    """Whether what the loop carries may begin as the stack from outside that trips read: each writes the layer that it
    reads, all layers are written, and nothing else is read of what is carried."""
    if not is_outside(change.read.operands[0], change.loop) or change.argument.uses != [(change.write, 0)]:
        return False
    numbers = _layers_in_trips(change)
    return numbers is not None and sorted(numbers) == list(range((change.argument.shape or ())[0]))


def _layers_in_trips(change: _Change) -> range | None:
    """The numbers of the layers that are read trip by trip, where the same are written."""
    read = numbers_in_trips(change.loop, change.read.operands[1])
    return read if read == numbers_in_trips(change.loop, change.write.operands[2]) else None


def _make(change: _Change) -> bool:
    """Changes the layer in the stack. Returns whether that can be."""
    loop, argument, read, update, write = change
    at, place = read.operands[1].mlir, Place.before(update.mlir)
    layer = LayerOfStack(argument.mlir, at, write.results[0].sharding)
    stack = LAYER_UPDATES[update.name](update, layer)
    if stack is None:
        return False
    if read.operands[0] is not argument:
        loop.mlir.operands[argument.index] = read.operands[0].mlir
    entry = entry_of(stack, at, 0, place, read.results[0].sharding)
    changed = reshaped(entry, shape_of(update.results[0].mlir), place, update.results[0].sharding)
    update.results[0].mlir.replace_all_uses_with(changed)
    write.results[0].mlir.replace_all_uses_with(stack)
    return True


# Stacks that loops read in a narrower type, as weights in float32 of which each layer is rounded to bfloat16.
#
#     while { %w = dynamic_slice %stack, ...; %n = convert %w }
#
# While layouts are chosen they are rounded in front of the loop, so that one that is gathered there is sent, and
# held, in the narrower type:
#
#     %narrow = convert %stack
#     while { %n = dynamic_slice %narrow, ... }
#
# Where nothing moves it before the loop, its layers are rounded inside again, and no second stack is held.

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
