"""Trip counts of loops, so the executions of the ops inside, and the stacks that loops fill.

See docs/explanation/planner.md#loops-and-branches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.ir.operations import COMPUTATIONS
from sdy_jax.lowering.ops.elementwise import are_computed_alike, known_scalar
from sdy_jax.lowering.ops.re_emission import numpy_dtype
from sdy_jax.lowering.ops.registry import PARTIAL_ACCESS, is_forwarding

# Trip counts of loops, as far as the module shows them, and so the executions of the ops inside.
#
# A loop is counted if its condition compares a counter with a constant and its body adds a constant to the counter,
# which starts from a constant: `scan`, `fori_loop` and counted `while_loop`s, up or down. Where a count is unknown,
# the cost model takes a guess, and what is reported says that it is unknown. See
# docs/explanation/planner.md#loops-and-branches.

UNKNOWN = 10
"""The number of iterations that the cost model assumes where the count is unknown. Guessed: with 1, what a loop does
counts as if it were outside; with thousands, everything is moved out of it, whatever it holds."""


class Executions(NamedTuple):
    """How often an op runs per call of the program: `times` or, unless that is `known`, more often: `estimate`, with a
    guess for loops whose count is unknown.

    `depth` is the number of loops around it; `branches` are the blocks of conditionals that it is in, outermost first,
    without those that `times` counts.
    """

    times: int
    estimate: int
    known: bool
    depth: int
    branches: tuple[Block, ...]


def executions(op: Op) -> Executions:
    """How often an op runs if all branches around it are taken, but for those of which it is known in which trips of
    the loop around they are.

    A loop with an unknown count is taken for one trip; its condition is tested once more.
    """
    times, estimate, known, depth, branches = 1, 1, True, 0, list[Block]()
    block = op.block
    while block is not None:
        around = block.parent
        if around.name == "stablehlo.while":
            count = trip_count(around)
            is_condition = block is around.blocks[0]
            times *= (1 if count is None else count) + is_condition
            estimate *= _estimated(count) + is_condition
            known, depth = known and count is not None, depth + 1
        elif (taken := _trips_with(block)) is not None:
            loop, count = taken
            times, estimate, depth, around = times * count, estimate * count, depth + 1, loop
        elif around.name in ("stablehlo.case", "stablehlo.if"):
            branches.insert(0, block)
        block = around.block
    return Executions(times, estimate, known, depth, tuple(branches))


def times_as_often(op: Op, value: Value) -> int:
    """The executions of an op per execution of its operand's producer: 1 unless loops lie between. An estimate."""
    home = value.owner if isinstance(value.owner, Block) else value.owner.block
    times, block = 1, op.block
    while block is not None and block is not home:
        if block.parent.name == "stablehlo.while":
            times *= trips(block.parent)
        block = block.parent.block
    return times


def trips(loop: Op) -> int:
    """The number of iterations that the cost model takes for a loop, at least one."""
    return _estimated(trip_count(loop))


def _estimated(count: int | None) -> int:
    return UNKNOWN if count is None else max(1, count)


def runs_of(block: Block) -> int:
    """How often a block runs, by the cost model, each time that its op does: a loop's condition once more than its
    body, a branch as if it were always taken."""
    op = block.parent
    return trips(op) + (block is op.blocks[0]) if op.name == "stablehlo.while" else 1


def trip_count(loop: Op) -> int | None:
    """The number of iterations of a `stablehlo.while`; None where the module does not show it."""
    condition, body = loop.blocks
    test = _test(condition.terminator.operands[0])
    if test is None:
        return None
    for counter, direction, end in test:
        bound = _constant(end)
        found = _offset(counter)
        if bound is None or found is None or found[0].owner is not condition:
            continue
        argument, ahead = found
        start = _constant(loop.operands[argument.index])
        step = _step(body, argument.index)
        if start is not None and step is not None:
            count = _count(start + ahead, step, bound, direction)
            return count if count is not None and _holds(argument.dtype, start + count * step) else None
    return None


def numbers_in_trips(loop: Op, value: Value) -> range | None:
    """The numbers that an integer of a loop's body has trip by trip, where it is a counter times 1 or -1, and a
    constant more; None where that is not known. Beside what counts the trips, bodies may carry other counters."""
    trips, found, body = trip_count(loop), _line(value), loop.blocks[1]
    if trips is None or found is None or found[0].owner is not body:
        return None
    counter, sign, ahead = found
    start, step = _constant(loop.operands[counter.index]), _step(body, counter.index)
    if start is None or not step or not _holds(counter.dtype, start + trips * step):
        return None
    first = sign * start + ahead
    return range(first, first + trips * sign * step, sign * step)


def _trips_with(branch: Block) -> tuple[Op, int] | None:
    """The loop around a conditional, and in how many of its trips a branch is taken; None where that is not known."""
    conditional = branch.parent
    if conditional.name != "stablehlo.case" or conditional.block is None:
        return None
    loop, last = conditional.block.parent, len(conditional.blocks) - 1
    if loop.name != "stablehlo.while" or conditional.block is loop.blocks[0]:
        return None
    numbers = _integers_in_trips(loop, conditional.operands[0])
    taken = (number if 0 <= number <= last else last for number in numbers or ())
    return None if numbers is None else (loop, list(taken).count(conditional.blocks.index(branch)))


def _integers_in_trips(loop: Op, value: Value) -> Sequence[int] | None:
    """Like `numbers_in_trips`, also of numbers that are clamped."""
    value = _origin(value)
    op = value.defining_op
    if op is None or op.name != "stablehlo.clamp":
        return numbers_in_trips(loop, value)
    low, numbers, high = _constant(op.operands[0]), _integers_in_trips(loop, op.operands[1]), _constant(op.operands[2])
    if low is None or numbers is None or high is None:
        return None
    return [min(max(number, low), high) for number in numbers]


def is_same_integer(one: Value, other: Value) -> bool:
    """Whether two integers are computed alike of the same values."""
    return are_computed_alike(one, other, _origin)


def _holds(dtype: str, number: int) -> bool:
    """Whether an integer type can represent a number: a counter that overflows starts again."""
    limits = jnp.iinfo(numpy_dtype(dtype))
    return bool(limits.min <= number <= limits.max)


_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE", "EQ": "EQ"}
_OPPOSITE = {"LT": "GE", "LE": "GT", "GT": "LE", "GE": "LT", "NE": "EQ", "EQ": "NE"}


def _test(value: Value) -> list[tuple[Value, str, Value]] | None:
    """Equivalent forms of a comparison, one with each of its operands (one may be the counter) on the left."""
    op = _origin(value).defining_op
    negated = False
    while op is not None and op.name == "stablehlo.not":
        negated, op = not negated, _origin(op.operands[0]).defining_op
    if op is None or op.name != "stablehlo.compare":
        return None
    direction, (left, right) = op.text("comparison_direction"), op.operands
    direction = _OPPOSITE[direction] if negated else direction
    return [(left, direction, right), (right, _MIRRORED[direction], left)]


def _count(start: int, step: int, end: int, direction: str) -> int | None:
    """The iterations of `for (i = start; i <direction> end; i += step)`; None if it never ends."""
    if direction in ("GT", "GE"):
        start, step, end, direction = -start, -step, -end, _MIRRORED[direction]
    if direction == "LE":
        end, direction = end + 1, "LT"
    if direction == "EQ":
        return None if start == end and step == 0 else int(start == end)
    if direction == "LT":
        if start >= end:
            return 0
        return -((start - end) // step) if step > 0 else None
    if step == 0:
        return 0 if start == end else None
    count, rest = divmod(end - start, step)
    return count if rest == 0 and count >= 0 else None


def _step(body: Block, index: int) -> int | None:
    """The constant that a loop's body adds to what the loop carries at an index."""
    found = _offset(body.terminator.operands[index])
    return found[1] if found is not None and found[0] is body.arguments[index] else None


def _offset(value: Value) -> tuple[Value, int] | None:
    """A value as the sum of a block argument and a constant; None where it is not such a sum."""
    found = _line(value)
    return (found[0], found[2]) if found is not None and found[1] == 1 else None


def _line(value: Value) -> tuple[Value, int, int] | None:
    """A value as a block argument times 1 or -1, and a constant more; None where it is no such sum."""
    sign, ahead = 1, 0
    while True:
        value = _origin(value)
        op = value.defining_op
        if op is None:
            return value, sign, ahead
        if op.name not in ("stablehlo.add", "stablehlo.subtract"):
            return None
        signs = (1, 1 if op.name == "stablehlo.add" else -1)
        terms = list(map(_constant, op.operands))
        known = next((index for index in (1, 0) if terms[index] is not None), None)
        if known is None:
            return None
        ahead += sign * signs[known] * (terms[known] or 0)
        sign, value = sign * signs[1 - known], op.operands[1 - known]


_FOLDED: dict[str, Callable[[int, int], int]] = {
    "stablehlo.add": lambda a, b: a + b,
    "stablehlo.subtract": lambda a, b: a - b,
    "stablehlo.multiply": lambda a, b: a * b,
    "stablehlo.maximum": max,
    "stablehlo.minimum": min,
}


def _constant(value: Value) -> int | None:
    """The value of an integer scalar; None where it is not known."""
    value = _origin(value)
    known = known_scalar(value)
    if known is not None:
        return int(known) if known.dtype.kind in "iu" else None
    op = value.defining_op
    if op is None or op.name not in _FOLDED:
        return None
    left, right = map(_constant, op.operands)
    return None if left is None or right is None else _FOLDED[op.name](left, right)


def _origin(value: Value) -> Value:
    """The value that this one is equal to: before conversions, reshards, and being carried into a region unchanged."""
    while True:
        source = _source(value)
        if source is None:
            return value
        value = source


def _source(value: Value) -> Value | None:
    op = value.defining_op
    if op is None:
        return _passed_in(value)
    if op.name == "stablehlo.optimization_barrier":
        return op.operands[value.index]
    if is_forwarding(op) or (op.name in ("stablehlo.convert", "stablehlo.reshape") and _is_integer(op.operands[0])):
        return op.operands[0]
    return None


def _passed_in(argument: Value) -> Value | None:
    """The outer value that a region's argument is equal to: a computation's operand, or a loop's invariant."""
    block = argument.owner
    assert isinstance(block, Block)
    op = block.parent
    if op.name in COMPUTATIONS:
        return op.operands[argument.index]
    if op.name != "stablehlo.while":
        return None
    body, index = op.blocks[1], argument.index
    return op.operands[index] if body.terminator.operands[index] is body.arguments[index] else None


def _is_integer(value: Value) -> bool:
    return value.rank == 0 and value.dtype.lstrip("s").startswith(("i", "ui"))


# Stacks that a loop fills: each of its trips writes an entry, together all of them, and none is read.


def filled_stacks(loop: Op) -> Iterator[tuple[int, int]]:
    """The numbers of what a loop carries that its trips fill, with the dimension along which entries lie. What a stack
    holds before does not matter."""
    condition, body = loop.blocks
    for number, stack in enumerate(body.arguments):
        write = stack.only_user
        if condition.arguments[number].uses or write is None or PARTIAL_ACCESS.get(write.name) != "write":
            continue
        if write.operands[0] is not stack or write.results[0].uses != [(body.terminator, number)]:
            continue
        dim = _entry_dim(write)
        numbers = None if dim is None else numbers_in_trips(loop, write.operands[2 + dim])
        if dim is not None and numbers is not None and sorted(numbers) == list(range((stack.shape or ())[dim])):
            yield number, dim


def _entry_dim(write: Op) -> int | None:
    """The dimension along which an op writes one entry, whole along all others; None where it is no such write."""
    whole, entry = write.operands[0].shape or (), write.operands[1].shape or ()
    dims = [dim for dim, sizes in enumerate(zip(whole, entry, strict=True)) if sizes[0] != sizes[1]]
    return dims[0] if len(dims) == 1 and entry[dims[0]] == 1 else None
