"""Forward passes of scans: loops that leave stacks behind, with other stacks, and ops of their trips that run again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jax.extend.mlir import ir

from sdy_jax.ir.attributes import shardings_from_attribute, shardings_to_attribute
from sdy_jax.ir.graph import STATED, Block, Graph, Op, Value
from sdy_jax.ir.new_ops import (
    Place,
    entry_of,
    new_loop,
    reshaped,
    sharding_as_carried,
    tensor_type,
    unwritten,
    with_entry,
)
from sdy_jax.ir.operations import rank, read_attributes, replace_op, terminator_of
from sdy_jax.ir.shardings import CLOSED, TensorSharding
from sdy_jax.ir.stored_shardings import list_of
from sdy_jax.lowering.ops.registry import PARTIAL_ACCESS
from sdy_jax.lowering.planner.facts.loops import numbers_in_trips, trip_count
from sdy_jax.lowering.planner.rewrites.loop_rewrites import is_outside
from sdy_jax.lowering.planner.rewrites.segments import Clones, Segment

# Loops that leave stacks behind, with an entry per trip, from which later ops read single ones: a scan's forward
# pass.
#
# %s = while (%i from 0, %stack) { %v = ... %u = reshape %v                                  an entry: 1 x ... %n =
# dynamic_update_slice %stack, %u, %i, 0, ... } while (...) { %e = dynamic_slice %s, %j, 0, ... }  the backward pass

LOOP = "stablehlo.while"


@dataclass(frozen=True, eq=False)
class Stack:
    """What a loop leaves behind as its result `index`: the op that writes the entry of a trip, and those that read
    single entries."""

    index: int
    update: Op
    reads: tuple[Op, ...]

    @property
    def entry(self) -> Value:
        """What is written in a trip: one row of the stack."""
        return self.update.operands[1]

    @property
    def place(self) -> Value:
        """Where a trip writes its entry."""
        return self.update.operands[2]


@dataclass(frozen=True, eq=False)
class ForwardLoop:
    """A loop with stacks. `place`: where its body writes the entries of a trip."""

    loop: Op
    trips: int
    place: Value
    stacks: tuple[Stack, ...]

    @property
    def reads(self) -> list[Op]:
        """The ops that read single entries of its stacks."""
        return [read for stack in self.stacks for read in stack.reads]

    @property
    def entries(self) -> Mapping[Value, Stack]:
        """The stacks by what is written in a trip; one of those that hold the same."""
        return {stack.entry: stack for stack in self.stacks}

    def segment(self, entry_bytes: Mapping[Value, float]) -> Segment:
        """The body, of which entries of stacks are needed, with the bytes that these take."""
        updates = {stack.update for stack in self.stacks}
        ops = tuple(op for op in self.loop.blocks[1].ops[:-1] if op not in updates)
        return Segment(ops, entry_bytes, self.is_at_hand)

    def is_at_hand(self, value: Value) -> bool:
        """Whether a value is there later in the layout of a trip: it is made before the loop, or is the place of the
        trip's entries."""
        return value is self.place or is_outside(value, self.loop)

    def depends_on_place(self, op: Op) -> bool:
        """Whether an op takes the place of a trip's entries otherwise than as that of an entry of a stack that has one
        per trip: a later op may ask for a place that there is not, and read the nearest one."""
        return any(
            value is self.place and not (inner is op and self._is_place(op, index))
            for inner in op.walk()
            for index, value in enumerate(inner.operands)
        )

    def _is_place(self, op: Op, index: int) -> bool:
        return index == 1 and is_read_of_entry(op, self.trips)


def forward_loops(graph: Graph) -> list[ForwardLoop]:
    """The loops of a program with stacks that are read entry by entry later, and of which each trip writes one; not
    those that read such stacks themselves, which change where these are recomputed."""
    found = list(_forward_loops(graph))
    reading = {around for forward in found for read in forward.reads for around in _loops_around(read)}
    return [forward for forward in found if forward.loop not in reading]


def _loops_around(op: Op) -> Iterator[Op]:
    around = op.parent
    while around is not None:
        if around.name == LOOP:
            yield around
        around = around.parent


def _forward_loops(graph: Graph) -> Iterator[ForwardLoop]:
    for loop in graph.ops:
        trips = trip_count(loop) if loop.name == LOOP else None
        if trips is None or trips < 2:
            continue
        stacks = list(_stacks(loop, trips))
        for place in dict.fromkeys(stack.place for stack in stacks[:1]):
            yield ForwardLoop(loop, trips, place, tuple(stack for stack in stacks if stack.place is place))


def is_read_of_entry(op: Op, entries: int) -> bool:
    """Whether an op takes one of so many entries of a stack, whole."""
    return PARTIAL_ACCESS.get(op.name) == "read" and _is_entry(op.results[0], op.operands[0], entries)


def _is_entry(entry: Value, stack: Value, entries: int) -> bool:
    if not stack.shape or entry.shape is None:
        return False
    return stack.shape[0] == entries and entry.shape == (1, *stack.shape[1:])


def _stacks(loop: Op, trips: int) -> Iterator[Stack]:
    condition, body = loop.blocks
    for index, (argument, returned) in enumerate(zip(body.arguments, body.terminator.operands, strict=True)):
        update, uses = returned.defining_op, loop.results[index].uses
        if update is None or PARTIAL_ACCESS.get(update.name) != "write" or condition.arguments[index].uses:
            continue
        into, entry, place, *_ = update.operands
        is_written = into is argument and _is_entry(entry, argument, trips) and _is_each_once(loop, place, trips)
        is_alone = argument.only_user is update and returned.only_user is body.terminator
        is_read = all(is_read_of_entry(op, trips) and operand == 0 for op, operand in uses)
        if is_written and is_alone and is_read and uses:
            yield Stack(index, update, tuple(op for op, _ in uses))


def _is_each_once(loop: Op, place: Value, trips: int) -> bool:
    """Whether a number of a loop's body is that of each entry of a stack once."""
    found = numbers_in_trips(loop, place)
    return found is not None and sorted((found[0], found[-1])) == [0, trips - 1]


# Loops that carry other stacks: of further values, with an entry per trip, and some no more.

_SHARDING = "sdy.sharding"


def with_stacks(forward: ForwardLoop, values: Sequence[Value]) -> tuple[ir.Operation, list[ir.Value]]:
    """Replaces a loop by one that keeps values of its body, too; by none if there are none.

    Returns:
        The loop, and the stacks.
    """
    loop = forward.loop.mlir
    if not values:
        return loop, []
    shardings = [_stacked(sharding_as_carried(value)) for value in values]
    starts = [_start(forward, value, sharding) for value, sharding in zip(values, shardings, strict=True)]
    count = len(loop.results)
    wider = _another(loop, range(count), starts, shardings)
    arguments = [block.add_argument(start.type, loop.location) for block in _blocks(wider) for start in starts]
    stacks = arguments[len(starts) :]
    written = [_write(forward, *each) for each in zip(stacks, values, shardings, strict=True)]
    _return(wider, [*_returned(wider), *written])
    results = list(wider.results)
    replace_op(loop, results[:count])
    return wider, results[count:]


def without_unread(graph: Graph) -> Graph:
    """Replaces loops by ones that do not carry what nobody reads. Returns the graph of what there is then."""
    unread = [(op.mlir, indices) for op in graph.ops if op.name == LOOP and (indices := list(_unread(op)))]
    for loop, indices in reversed(unread):  # what is in a loop comes after it
        without(loop, indices)
    return Graph(graph.module) if unread else graph


def _unread(loop: Op) -> Iterator[int]:
    """The numbers of what a loop carries, unchanged, for nobody."""
    condition, body = loop.blocks
    for index, returned in enumerate(body.terminator.operands):
        is_passed = returned is body.arguments[index] and returned.only_user is body.terminator
        if is_passed and not condition.arguments[index].uses and not loop.results[index].uses:
            yield index


def without(loop: ir.Operation, gone: Collection[int]) -> None:
    """Replaces a loop by one that does not carry some values that nobody reads, but what makes them."""
    if not gone:
        return
    kept = [index for index in range(len(loop.results)) if index not in gone]
    narrower = _another(loop, kept, (), ())
    returned = _returned(narrower)
    _return(narrower, [returned[index] for index in kept])
    for index in sorted(gone, reverse=True):
        if not isinstance(returned[index], ir.BlockArgument):
            returned[index].owner.erase()
        for block in _blocks(narrower):
            block.erase_argument(index)
    for index, result in zip(kept, narrower.results, strict=True):
        loop.results[index].replace_all_uses_with(result)
    loop.erase()


def read_entry(stack: ir.Value, value: Value, at: ir.Value, place: Place) -> ir.Value:
    """What a stack holds of a value of a loop's body, in the shape of the value."""
    sharding, shape = sharding_as_carried(value), value.shape or ()
    is_entry = shape == (1, *ir.RankedTensorType(stack.type).shape[1:])
    entry = entry_of(stack, at, 0, place, sharding if is_entry else _stacked(sharding))
    return reshaped(entry, shape, place, sharding)


def _another(
    loop: ir.Operation,
    kept: Sequence[int],
    starts: Sequence[ir.Value],
    shardings: Sequence[TensorSharding | None],
) -> ir.Operation:
    """A loop with the regions of another one, which carries some of what that does, and more."""
    operands = [*(loop.operands[index] for index in kept), *starts]
    attributes = {name: found for name, found in read_attributes(loop).items() if name not in (_SHARDING, STATED)}
    before = list_of(loop, _SHARDING)
    carried = [*(before[index] for index in kept), *shardings]
    made = new_loop(operands, carried, Place.before(loop), attributes)
    if STATED in loop.attributes:
        stated = shardings_from_attribute(loop.attributes[STATED])
        nothing = (TensorSharding.fully_open(stated[0].mesh, rank(start)) for start in starts)
        both = (*(stated[index] for index in kept), *nothing)
        made.attributes[STATED] = shardings_to_attribute(both, loop.context)
    for old, new in zip(loop.regions, made.regions, strict=True):
        old.blocks[0].append_to(new)
    return made


def _blocks(loop: ir.Operation) -> list[ir.Block]:
    """The condition and the body."""
    return [region.blocks[0] for region in loop.regions]


def _returned(loop: ir.Operation) -> list[ir.Value]:
    """What the body returns."""
    return list(terminator_of(_blocks(loop)[1]).operands)


def _return(loop: ir.Operation, values: Sequence[ir.Value]) -> None:
    """Lets the body return other values."""
    end = terminator_of(_blocks(loop)[1])
    ir.Operation.create(end.name, [], values, loc=end.location, ip=ir.InsertionPoint(end))
    end.erase()


def _start(forward: ForwardLoop, value: Value, sharding: TensorSharding | None) -> ir.Value:
    """A stack for the entries of a value, before the loop writes them."""
    type_ = tensor_type((forward.trips, *(value.shape or ())), value.mlir)
    return unwritten(type_, Place.before(forward.loop.mlir), sharding)


def _write(forward: ForwardLoop, stack: ir.Value, value: Value, sharding: TensorSharding | None) -> ir.Value:
    """Writes the entry of a trip at the end of a body."""
    place = Place.before(terminator_of(stack.owner))
    return with_entry(stack, value.mlir, forward.place.mlir, 0, place, sharding)


def _stacked(sharding: TensorSharding | None) -> TensorSharding | None:
    """The sharding of a stack whose entries have one; partial sums are not held."""
    if sharding is None:
        return None
    return replace(sharding, dimensions=(CLOSED, *sharding.dimensions), unreduced_axes=(), reduction="sum")


# Ops of forward loops that run again where entries of the loops' stacks were read.

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
