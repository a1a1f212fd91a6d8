"""Loops that carry other stacks: of further values, with an entry per trip, and some no more."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.operations import any_number, rank, read_attributes, replace_op, terminator_of
from sdy_jax.ir.statements import STATED
from sdy_jax.ir.stored_shardings import list_of, set_list, store_results
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
    shardings = [_stacked(sharding_in_loop(value)) for value in values]
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


def sharding_in_loop(value: Value) -> TensorSharding | None:
    """The sharding of a value of a loop's body; what the loop carries has that of its result."""
    owner = value.owner
    return value.sharding if isinstance(owner, Op) else owner.parent.results[value.index].sharding


def read_entry(
    stack: ir.Value,
    value: Value,
    place: ir.Value,
    location: ir.Location,
    point: ir.InsertionPoint,
) -> ir.Value:
    """What a stack holds of a value of a loop's body, in the shape of the value."""
    sharding = sharding_in_loop(value)
    shape = (1, *ir.RankedTensorType(stack.type).shape[1:])
    made = ir.Operation.create(
        "stablehlo.dynamic_slice",
        [_type_of(shape, stack)],
        [stack, place, *_zero_places(place, len(shape) - 1, location, point)],
        {"slice_sizes": ir.DenseI64ArrayAttr.get(shape, stack.context)},
        loc=location,
        ip=point,
    )
    if value.shape == shape:
        store_results(made, [sharding])
        return made.results[0]
    store_results(made, [_stacked(sharding)])
    return _reshaped(made.results[0], value.shape or (), sharding, location, point)


def _another(
    loop: ir.Operation,
    kept: Sequence[int],
    starts: Sequence[ir.Value],
    shardings: Sequence[TensorSharding | None],
) -> ir.Operation:
    """A loop with the regions of another one, which carries some of what that does, and more."""
    operands = [*(loop.operands[index] for index in kept), *starts]
    attributes = {name: found for name, found in read_attributes(loop).items() if name not in (_SHARDING, STATED)}
    types, point, count = [value.type for value in operands], ir.InsertionPoint(loop), len(loop.regions)
    made = ir.Operation.create(loop.name, types, operands, attributes, regions=count, loc=loop.location, ip=point)
    before = list_of(loop, _SHARDING)
    set_list(made, _SHARDING, [*(before[index] for index in kept), *shardings])
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
    loop = forward.loop.mlir
    type_ = _type_of((forward.trips, *(value.shape or ())), value.mlir)
    made = any_number(type_, ir.InsertionPoint(loop), loop.location)
    store_results(made.owner, [sharding])
    return made


def _write(forward: ForwardLoop, stack: ir.Value, value: Value, sharding: TensorSharding | None) -> ir.Value:
    """Writes the entry of a trip at the end of a body."""
    place, end = forward.place.mlir, terminator_of(stack.owner)
    location, point = end.location, ir.InsertionPoint(end)
    entry = _reshaped(value.mlir, (1, *(value.shape or ())), sharding, location, point)
    operands = [stack, entry, place, *_zero_places(place, value.rank, location, point)]
    made = ir.Operation.create("stablehlo.dynamic_update_slice", [stack.type], operands, loc=location, ip=point)
    store_results(made, [sharding])
    return made.results[0]


def _reshaped(
    value: ir.Value,
    shape: Sequence[int],
    sharding: TensorSharding | None,
    location: ir.Location,
    point: ir.InsertionPoint,
) -> ir.Value:
    made = ir.Operation.create("stablehlo.reshape", [_type_of(shape, value)], [value], loc=location, ip=point)
    store_results(made, [sharding])
    return made.results[0]


def _zero_places(place: ir.Value, count: int, location: ir.Location, point: ir.InsertionPoint) -> list[ir.Value]:
    """Zeros of the type of a place, for as many dimensions."""
    return [any_number(place.type, point, location)] * count if count else []


def _type_of(shape: Sequence[int], value: ir.Value) -> ir.Type:
    """That of an array of this shape, of elements like those of a value."""
    element = ir.RankedTensorType(value.type).element_type
    return ir.RankedTensorType.get(shape, element, loc=ir.Location.unknown(value.context))


def _stacked(sharding: TensorSharding | None) -> TensorSharding | None:
    """The sharding of a stack whose entries have one; partial sums are not held."""
    if sharding is None:
        return None
    return replace(sharding, dimensions=(CLOSED, *sharding.dimensions), unreduced_axes=(), reduction="sum")
