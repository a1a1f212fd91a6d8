"""Loops that carry other stacks: of further values, with an entry per trip, and some no more."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op, Value
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
from sdy_jax.ir.statements import STATED
from sdy_jax.ir.stored_shardings import list_of
from sdy_jax.lowering.recomputation.forward_loops import LOOP, ForwardLoop
from sdy_jax.representation.attributes import shardings_from_attribute, shardings_to_attribute
from sdy_jax.representation.sharding import CLOSED, TensorSharding

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
