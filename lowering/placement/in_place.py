"""Layers of a stack that a loop changes in part, as the keys and values of a model that decodes token by token.

A scan reads such a stack and makes another one. Its compilers copy a layer out of the one, write the few elements into
the copy, and the copy into the other:

    while (%new = 0) { %layer = dynamic_slice %old, %i;  %next = dynamic_update_slice %layer, %token, %position
                       ... reads %next ...;              %new = dynamic_update_slice %new, %next, %i }

If a trip reads the layer that it writes, and all layers are written, they can be changed in the stack itself:

    while (%new = %old) { %new = dynamic_update_slice %new, %token, %i, %position
                          %next = dynamic_slice %new, %i;  ... reads %next ... }

What was there is read once less and written twice less; if nobody needs the old stack, there is one of them. Steps of
decoding, Llama-3-8B, took 0.38 (batch split) and 0.43 (heads split) of the time and 2 GiB less on 16 chips of v5e
(libtpu 0.0.51, 2026-11).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.new_ops import Place, created, entry_of, reshaped, shape_of
from sdy_jax.lowering.placement.invariants import is_outside
from sdy_jax.lowering.placement.trips import numbers_in_trips
from sdy_jax.lowering.strategies.registry import PARTIAL_ACCESS
from sdy_jax.representation.sharding import CLOSED, TensorSharding

_RESHAPING = frozenset(("stablehlo.reshape", "stablehlo.broadcast_in_dim"))


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
    found = [change for op in graph.ops if _is_write(op) and (change := _change(op)) is not None]
    for change in found:
        _make(change)
    return Graph(graph.module) if found else graph


def _is_write(op: Op) -> bool:
    return PARTIAL_ACCESS.get(op.name) == "write"


def _change(write: Op) -> _Change | None:
    """The change that a write of a layer ends; None where it is no such write."""
    argument, block = write.operands[0], write.block
    if block is None or block.parent.name != "stablehlo.while" or not _only_carries(argument, write):
        return None
    update = _made_by(write.operands[1])
    if update is None or not _is_write(update) or update.block is not block:
        return None
    read = _made_by(update.operands[0], only=True)
    if read is None or PARTIAL_ACCESS.get(read.name) != "read" or read.block is not block:
        return None
    change = _Change(block.parent, argument, read, update, write)
    return change if _is_of_layers(change) and _is_read_once(change) else None


def _only_carries(argument: Value, write: Op) -> bool:
    """Whether a loop's body does nothing with what it carries but write into it, and return that."""
    if argument.owner is not write.block or argument.uses != [(write, 0)]:
        return False
    return write.results[0].uses == [(write.block.terminator, argument.index)]


def _made_by(layer: Value, *, only: bool = False) -> Op | None:
    """The op that makes a layer, before it has or loses a dimension of size one; None where `only` its user needs what
    it makes, and others do, too."""
    while not (only and len(layer.uses) != 1):
        op = layer.defining_op
        if op is None or op.name not in _RESHAPING or _without_ones(op.operands[0]) != _without_ones(layer):
            return op
        layer = op.operands[0]
    return None


def _without_ones(value: Value) -> list[int]:
    return [size for size in value.shape or () if size != 1]


def _is_of_layers(change: _Change) -> bool:
    """Whether whole layers are taken of one stack from outside of the loop, and put into one like it."""
    stack, layer = change.read.operands[0], change.update.results[0].shape
    if not is_outside(stack, change.loop) or stack.type != change.argument.type or not stack.shape or layer is None:
        return False
    taken = change.read.results[0].shape, change.write.operands[1].shape
    return stack.shape[1:] == layer and taken == ((1, *layer), (1, *layer))


def _is_read_once(change: _Change) -> bool:
    """Whether each trip writes the layer that it reads, and all layers are written."""
    read = numbers_in_trips(change.loop, change.read.operands[1])
    written = numbers_in_trips(change.loop, change.write.operands[2])
    layers = (change.argument.shape or ())[0]
    return read is not None and read == written and sorted(read) == list(range(layers))


def _make(change: _Change) -> None:
    loop, argument, read, update, write = change
    loop.mlir.operands[argument.index] = read.operands[0].mlir
    place = Place.before(update.mlir)
    at, sharding = read.operands[1].mlir, write.results[0].sharding
    stack = created(write.name, write.results[0].mlir.type, _operands(change, at, place), place, sharding)
    entry = entry_of(stack, at, 0, place, read.results[0].sharding)
    layer = reshaped(entry, shape_of(update.results[0].mlir), place, update.results[0].sharding)
    update.results[0].mlir.replace_all_uses_with(layer)
    write.results[0].mlir.replace_all_uses_with(stack)


def _operands(change: _Change, at: ir.Value, place: Place) -> list[ir.Value]:
    """Those of the write of a few elements into the stack."""
    few = change.update.operands[1]
    starts = [value.mlir for value in change.update.operands[2:]]
    first = at if not starts or starts[0].type == at.type else created("stablehlo.convert", starts[0].type, [at], place)
    few_of_stack = reshaped(few.mlir, [1, *shape_of(few.mlir)], place, _of_stack(few.sharding))
    return [change.argument.mlir, few_of_stack, first, *starts]


def _of_stack(sharding: TensorSharding | None) -> TensorSharding | None:
    """That of a layer's elements with a leading dimension."""
    return None if sharding is None else replace(sharding, dimensions=(CLOSED, *sharding.dimensions))
