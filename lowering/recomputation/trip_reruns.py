"""Ops of forward loops that run again where entries of the loops' stacks were read."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.ir.new_ops import Place
from sdy_jax.lowering.recomputation.clones import Clones
from sdy_jax.lowering.recomputation.forward_loops import ForwardLoop
from sdy_jax.lowering.recomputation.loop_stacks import read_entry, with_stacks, without
from sdy_jax.lowering.recomputation.segments import Segment

_Read = tuple[Op, Value]
"""An op that reads an entry of a stack, and what the loop wrote there."""


def run_trips_again(forward: ForwardLoop, segment: Segment, again: Collection[Op]) -> None:
    """Lets ops of a loop's body run again for those that read what they made, instead of holding it."""
    held, entries = segment.held(again), forward.entries
    further = [value for value in held if value not in entries]
    loop, stacks = with_stacks(forward, further)
    kept = dict(zip(further, stacks, strict=True))
    kept.update({value: loop.results[entries[value].index] for value in held if value in entries})
    for (block, place), reads in _by_trip(forward, kept).items():

        def entry(value: Value, location: ir.Location, point: ir.InsertionPoint, at: ir.Value = place.mlir) -> ir.Value:
            return read_entry(kept[value], value, at, Place(point, location))

        clones = Clones(segment, again, {forward.place.mlir: place.mlir}, entry)
        _replace(reads, block, clones)
    without(loop, {stack.index for stack in forward.stacks if stack.entry not in kept})


def _by_trip(forward: ForwardLoop, kept: Collection[Value]) -> dict[tuple[Block, Value], list[_Read]]:
    """The reads of what is not kept, by block and place."""
    found = dict[tuple[Block, Value], list[_Read]]()
    for stack in forward.stacks:
        for read in stack.reads if stack.entry not in kept else ():
            assert read.block is not None
            found.setdefault((read.block, read.operands[1]), []).append((read, stack.entry))
    return found


def _replace(reads: Sequence[_Read], block: Block, clones: Clones) -> None:
    """Makes what is read just before the first op that takes it."""
    positions = {op: number for number, op in enumerate(block.ops)}

    def first(read: Op) -> int:
        users = [user.ancestor_in(block) for user, _ in read.results[0].uses]
        return min([positions[user] for user in users], default=positions[read])

    for read, entry in sorted(reads, key=lambda pair: first(pair[0])):
        made = clones.make(entry, ir.InsertionPoint(block.ops[first(read)].mlir))
        read.mlir.results[0].replace_all_uses_with(made)
        read.mlir.erase()
