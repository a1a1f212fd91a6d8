"""Selections and lookups that are decided by what is known of indices: their range, and that they are a permutation."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from sdy_jax.ir.graph import Op, Value
from sdy_jax.lowering.ops.elementwise import constant_value, known_scalar, reduction_kind, returns_new
from sdy_jax.lowering.ops.registry import folds, is_forwarding
from sdy_jax.shardy.rules.op_attributes import gather_dimension_numbers, scatter_dimension_numbers

# jax writes more than an index says: one that may be negative counts from the end, one that may be out of bounds is
# looked up as a NaN, and the gradient of `x.at[order].set(y)` asks which of the rows that were written to one place has
# stayed there. Of a permutation, as `argsort` gives it, none of this is so:
#
#     %i = select(%order < 0, %order + n, %order)            ->  %order
#     %k = maximum(0, %order)                            ->  %order
#     %y = select(0 <= %i && %i < n, gather(%x, %i), NaN)    ->  gather(%x, %i)
#     %z = gather(scatter(%x, %i, %y), %i)                   ->  %y

_MOST = 64
"""How much is asked for one answer. Chosen: jax writes some ten ops between an index and what is made of it; it bounds
the depth of calls."""

_CONSTANTS = frozenset(("stablehlo.constant", "sdy.constant"))
_SELECTING = frozenset(("stablehlo.select", "stablehlo.maximum", "stablehlo.minimum"))
_MOVED = frozenset(("stablehlo.reshape", "stablehlo.broadcast_in_dim", "stablehlo.transpose", "stablehlo.slice"))

_Key = TypeVar("_Key", bound=Hashable)
_Answer = TypeVar("_Answer")


class Range(NamedTuple):
    """The least and the largest number that an element may be."""

    low: int
    high: int


@dataclass(slots=True)
class Known:
    """What is found out for one answer."""

    ranges: dict[Value, Range | None] = field(default_factory=dict)
    conditions: dict[Value, bool | None] = field(default_factory=dict)
    values: dict[Value, Value] = field(default_factory=dict)
    equal: dict[tuple[Value, Value], bool] = field(default_factory=dict)
    asked: int = 0

    def _once(
        self, known: dict[_Key, _Answer], key: _Key, unknown: _Answer, find: Callable[[_Key], _Answer]
    ) -> _Answer:
        """What is found out of something, once; `unknown` where too much was asked before."""
        if key not in known:
            known[key] = unknown
            if self.asked < _MOST:
                self.asked += 1
                known[key] = find(key)
        return known[key]

    def range_of(self, value: Value) -> Range | None:
        """The range of an array of integers; None for other types."""
        limits = _limits(value)
        if limits is None:
            return None
        found = self._once(self.ranges, value, limits, self._range_of)
        return found if found is not None and limits.low <= found.low and found.high <= limits.high else limits

    def _range_of(self, value: Value) -> Range | None:
        op = value.defining_op
        if op is None:
            return None
        if op.name in _CONSTANTS:
            known = constant_value(op)
            return Range(int(known.min()), int(known.max())) if known is not None and known.size else None
        if op.name == "stablehlo.iota":
            return Range(0, max((value.shape or ())[op.int("iota_dimension")] - 1, 0))
        if op.name == "chlo.top_k":
            return Range(0, (op.operands[0].shape or ())[-1] - 1) if value.index == 1 else None
        if op.name in _COMBINED:
            one, other = map(self.range_of, op.operands)
            return _COMBINED[op.name](one, other) if one is not None and other is not None else None
        return self._joined(self._sources(op, value))

    def _sources(self, op: Op, value: Value) -> Sequence[Value]:
        """The values of which one has the elements of another, whatever their order."""
        if op.name in _MOVED or op.name in ("stablehlo.convert", "stablehlo.gather") or is_forwarding(op):
            return op.operands[:1]
        if op.name == "stablehlo.sort":
            return [op.operands[value.index]]
        if op.name == "stablehlo.select":
            number = self.selected(op)
            return op.operands[1:] if number is None else [op.operands[number]]
        if op.name == "stablehlo.scatter" and len(op.results) == 1 and returns_new(op.blocks[0]):
            return op.operands[::2]
        if op.name == "stablehlo.reduce":
            return _selected_from(op, value.index)
        return op.operands if op.name == "stablehlo.concatenate" else ()

    def _joined(self, values: Sequence[Value]) -> Range | None:
        found = [each for each in map(self.range_of, values) if each is not None]
        return Range(min(each.low for each in found), max(each.high for each in found)) if found else None

    def decided(self, condition: Value) -> bool | None:
        """Whether all elements of a condition hold, or none does; None where that is not known."""
        return self._once(self.conditions, condition, None, self._decided)

    def _decided(self, condition: Value) -> bool | None:
        op = condition.defining_op
        if op is None:
            return None
        if op.name in _CONSTANTS:
            known = known_scalar(condition)
            return None if known is None else bool(known)
        if op.name == "stablehlo.compare":
            return self._compared(op)
        if op.name in _MOVED or is_forwarding(op):
            return self.decided(op.operands[0])
        is_reduced = op.name == "stablehlo.reduce" and len(op.results) == 1 and reduction_kind(op.blocks[0]) == "and"
        if op.name != "stablehlo.and" and not is_reduced:
            return None
        found = [self.decided(operand) for operand in op.operands]
        return True if found == [True, True] else (False if False in found else None)

    def _compared(self, op: Op) -> bool | None:
        one, other = map(self.range_of, op.operands)
        if one is None or other is None:
            return None
        direction = op.text("comparison_direction")
        if direction == "EQ" and self._are_equal(*op.operands):
            return True
        if direction in _HOLDS and _HOLDS[direction](one, other):
            return True
        return False if direction in _OPPOSITES and _HOLDS[_OPPOSITES[direction]](one, other) else None

    def _are_equal(self, one: Value, other: Value) -> bool:
        """Whether two values are computed alike, of the same."""
        return self._once(self.equal, (one, other), False, self._is_equal_pair)

    def _is_equal_pair(self, pair: tuple[Value, Value]) -> bool:
        one, other = map(self.settled, pair)
        if one is other:
            return True
        a, b = one.defining_op, other.defining_op
        if a is None or b is None or a.name not in _PLAIN or a.signature != b.signature:
            return False
        return all(self._are_equal(x, y) for x, y in zip(a.operands, b.operands, strict=True))

    def settled(self, value: Value) -> Value:
        """The value that one is, through selections and lookups that are decided."""
        return self._once(self.values, value, value, self._settled)

    def _settled(self, value: Value) -> Value:
        op = value.defining_op
        if op is not None and op.name in _SELECTING:
            number = self.selected(op)
            return value if number is None else self.settled(op.operands[number])
        if op is not None and op.name == "stablehlo.gather":
            writing = self.writing(op)
            return value if writing is None else self.settled(writing.operands[2])
        return value

    def selected(self, op: Op) -> int | None:
        """The number of the operand that a selection is, or the larger or smaller one of two."""
        if op.name != "stablehlo.select":
            return self._extreme(op)
        condition, one, other = op.operands
        holds = True if one is other else self.decided(condition)
        return None if holds is None else (1 if holds else 2)

    def _extreme(self, op: Op) -> int | None:
        """The number of the operand that is the larger, or smaller, one wherever it is."""
        one, other = map(self.range_of, op.operands)
        if one is None or other is None:
            return None
        at_least, at_most = one.low >= other.high, one.high <= other.low
        is_first, is_second = (at_least, at_most) if op.name == "stablehlo.maximum" else (at_most, at_least)
        return 0 if is_first else (1 if is_second else None)

    def writing(self, op: Op) -> Op | None:
        """The scatter that wrote, row by row, what a gather looks up in the same places."""
        scatter = self.settled(op.operands[0]).defining_op
        if scatter is None or scatter.name != "stablehlo.scatter" or len(scatter.results) != 1:
            return None
        if not _are_same_rows(op, scatter) or not returns_new(scatter.blocks[0]):
            return None
        indices, size = op.operands[1], (op.operands[0].shape or ())[0]
        is_same = self._are_equal(indices, scatter.operands[1])
        return scatter if is_same and self._is_permutation(indices, size) else None

    def _is_permutation(self, indices: Value, size: int) -> bool:
        """Whether an array has each number below a size once: as those that were sorted along with others."""
        value = self._moved(indices)
        op = value.defining_op
        if op is None or op.name != "stablehlo.sort" or indices.shape not in ((size,), (size, 1)):
            return False
        numbers = self._moved(op.operands[value.index]).defining_op
        return numbers is not None and numbers.name == "stablehlo.iota" and numbers.results[0].shape == (size,)

    def _moved(self, value: Value) -> Value:
        """The value whose elements one has, each once and in their order."""
        while True:
            value = self.settled(value)
            op = value.defining_op
            is_moved = op is not None and (
                op.name in ("stablehlo.reshape", "stablehlo.broadcast_in_dim") or is_forwarding(op)
            )
            if op is None or not is_moved or math.prod(op.operands[0].shape or ()) != math.prod(value.shape or ()):
                return value
            value = op.operands[0]


def _selected_from(op: Op, index: int) -> Sequence[Value]:
    """The operand, and the start, of which a reduction takes some element as a result, as `argmax` takes an index."""
    body, count = op.blocks[0], len(op.results)
    own, found = (index, count + index), [body.terminator.operands[index]]
    for value in found:  # grows
        made = value.defining_op
        if made is not None and made.name == "stablehlo.select" and len(found) < _MOST:
            found += made.operands[1:]
        elif value.owner is not body or value.index not in own:
            return ()
    return [op.operands[each] for each in own]


_INTEGER = re.compile(r"(u?)i(8|16|32|64)")


def _limits(value: Value) -> Range | None:
    found = _INTEGER.fullmatch(value.dtype)
    if found is None:
        return None
    is_unsigned, bits = bool(found[1]), int(found[2])
    return Range(0, 2**bits - 1) if is_unsigned else Range(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


_COMBINED: Mapping[str, Callable[[Range, Range], Range]] = {
    "stablehlo.add": lambda a, b: Range(a.low + b.low, a.high + b.high),
    "stablehlo.subtract": lambda a, b: Range(a.low - b.high, a.high - b.low),
    "stablehlo.minimum": lambda a, b: Range(min(a.low, b.low), min(a.high, b.high)),
    "stablehlo.maximum": lambda a, b: Range(max(a.low, b.low), max(a.high, b.high)),
}

_HOLDS: Mapping[str, Callable[[Range, Range], bool]] = {
    "LT": lambda a, b: a.high < b.low,
    "LE": lambda a, b: a.high <= b.low,
    "GT": lambda a, b: a.low > b.high,
    "GE": lambda a, b: a.low >= b.high,
    "NE": lambda a, b: a.high < b.low or a.low > b.high,
}
_OPPOSITES = {"LT": "GE", "LE": "GT", "GT": "LE", "GE": "LT", "EQ": "NE"}

_PLAIN = _CONSTANTS | {
    f"stablehlo.{name}" for name in ("iota", "add", "subtract", "convert", "reshape", "broadcast_in_dim")
}
"""Ops of which it is seen whether two compute the same."""


def _are_same_rows(gather: Op, scatter: Op) -> bool:
    """Whether a gather reads whole rows, as a scatter writes them."""
    count = math.prod(gather.operands[1].shape or ())
    is_same = gather.results[0].type == scatter.operands[2].type
    return is_same and are_rows_read(gather, count) and are_rows_written(scatter, count)


def are_rows_read(gather: Op, count: int) -> bool:
    """Whether a gather reads so many whole rows of the first dimension."""
    numbers, (operand, indices) = gather_dimension_numbers(gather), gather.operands
    return (
        numbers.start_index_map == numbers.collapsed_slice_dims == (0,)
        and not numbers.operand_batching_dims
        and numbers.offset_dims == tuple(range(1, operand.rank))
        and _are_one_each(indices, numbers.index_vector_dim, count)
        and gather.ints("slice_sizes")[1:] == (operand.shape or ())[1:]
    )


def are_rows_written(scatter: Op, count: int) -> bool:
    """Whether a scatter writes so many whole rows of the first dimension."""
    numbers, (operand, indices, update) = scatter_dimension_numbers(scatter), scatter.operands
    return (
        numbers.scatter_dims_to_operand_dims == numbers.inserted_window_dims == (0,)
        and not numbers.input_batching_dims
        and numbers.update_window_dims == tuple(range(1, operand.rank))
        and _are_one_each(indices, numbers.index_vector_dim, count)
        and (update.shape or ())[1:] == (operand.shape or ())[1:]
    )


def _are_one_each(indices: Value, vector: int, count: int) -> bool:
    """Whether there is one index for each row."""
    return vector == 1 and indices.shape in ((count,), (count, 1))


@folds(*_SELECTING)
def _fold_select(op: Op) -> bool:
    number = Known().selected(op) if op.results[0].uses else None
    if number is None or op.results[0].type != op.operands[number].type:
        return False
    op.results[0].mlir.replace_all_uses_with(op.mlir.operands[number])  # that of before may be folded
    return True


@folds("stablehlo.gather")
def _fold_lookup_of_what_was_written(op: Op) -> bool:
    writing = Known().writing(op) if op.results[0].uses else None
    if writing is None:
        return False
    op.results[0].mlir.replace_all_uses_with(writing.mlir.operands[2])
    return True
