"""Layers of a stack that a loop changes in part, as the keys and values of a model that decodes token by token.

A scan reads such a stack and makes another one. Its compilers copy a layer out of the one, write the few elements into
the copy, and the copy into the other:

    while (%new = 0) { %layer = dynamic_slice %old, %i;  %next = dynamic_update_slice %layer, %token, %position
                       ... reads %next ...;              %new = dynamic_update_slice %new, %next, %i }

If a trip reads the layer that it writes, and all layers are written, they can be changed in the stack itself:

    while (%new = %old) { %new = dynamic_update_slice %new, %token, %i, %position
                          %next = dynamic_slice %new, %i;  ... reads %next ... }

So are those of a stack that a loop carries, whichever it reads. Any op that changes a few elements of a layer may do so
(`LAYER_UPDATES`), as a scatter of tokens, each at the position of its sequence. What was there is read once less and
written twice less; if nobody needs the old stack, there is one of them. Steps of decoding, Llama-3-8B, took 0.38 (batch
split) and 0.43 (heads split) of the time and 2 GiB less on 16 chips of v5e (libtpu 0.0.51, 2026-11).
"""

from __future__ import annotations

from typing import NamedTuple

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.new_ops import Place, entry_of, reshaped, shape_of
from sdy_jax.ir.operations import RESHAPING
from sdy_jax.lowering.analysis.trip_counts import is_same_integer, numbers_in_trips
from sdy_jax.lowering.prepare.loop_invariants import is_outside
from sdy_jax.lowering.strategies.registry import LAYER_UPDATES, PARTIAL_ACCESS, LayerOfStack


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
