"""What depends on the order of a sort and is so for any block of the rows: proofs that devices may sort their own."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from sdy_jax.ir.graph import Op, Value
from sdy_jax.lowering.ops.elementwise import returns_new
from sdy_jax.lowering.ops.index_folds import are_rows_read, are_rows_written
from sdy_jax.lowering.ops.products import group_sizes_operand
from sdy_jax.lowering.planner.facts.row_numbers import MOST, Numbers, RowFacts, evaluated, step_of
from sdy_jax.lowering.planner.rewrites.blocking_groups import (
    Group,
    RuleOf,
    Span,
    Split,
    blocks_along,
    placed,
    split_along,
    taken_values,
    within_factor,
)
from sdy_jax.lowering.planner.rewrites.group_counts import GroupCounts

# Tokens that are sorted by their experts are sorted so that rows of one expert are one behind the other. What is made
# of a row is made of that row alone, and in the end the order is undone: then nobody can see which rows were sorted
# together, and each device may sort those that it has.
#
# What is known of a value, from the sort on, is one of:
#
#   rows       along a dimension, the row of a place is a function of the place: of its token, and of no other row
#   numbers    so, and the function is known: `order`, `order // k` (`row_numbers.py`)
#   inverse    for each place the row to which it has gone
#   nothing    rows are in their places again, or were summed up
#
#     %order = sort %keys, iota      numbers     %y = ragged_dot %x, %w, %sizes    rows, if sizes are counts of keys
#     %x = gather %tokens, %order    rows        %z = gather %y, %inverse          in their places
#     %inverse = sort %order, iota   inverse     %g = ragged_dot %x, %dy, %sizes   a sum over rows
#
# An op that does anything else with what depends on the order, as to add the rows of two neighbours, ends the proof.


@dataclass(frozen=True, eq=False, slots=True)
class _InOrder:
    """What is known of a value.

    Attributes:
        dim: the dimension of rows, or of places.
        numbers: the function of places, if it is known, of a value that is made of nothing else.
        is_inverse: whether it says where places have gone.
    """

    dim: int = 0
    numbers: Numbers | None = None
    is_inverse: bool = False


class _Known(NamedTuple):
    """How an op runs on blocks, and what is known of its results."""

    split: Split
    results: tuple[_InOrder | None, ...]


@dataclass(frozen=True, eq=False)
class SortRegions:
    """What depends on the order of a sort.

    Attributes:
        root: the sort.
        regions: its ops in groups: what a later one takes of an earlier one is in order, or is complete.
        counted: the ops that count the rows of groups, which each region does for its own.
    """

    root: Op
    regions: tuple[Group, ...]
    counted: Mapping[Op, Split]


def local_sort(root: Op, blocks: int, rule_of: RuleOf, rows: RowFacts) -> SortRegions | None:
    """What depends on the order of a sort of one dimension, if that can be told from no sort of blocks."""
    size = (root.results[0].shape or (0,))[0]
    is_sort = root.name == _SORT and all(value.rank == 1 for value in root.results)
    if not is_sort or size % blocks or not 1 < blocks < size <= MOST:
        return None
    return _Proof(root, size, blocks, rule_of, rows).found()


_SORT, _IOTA = "stablehlo.sort", "stablehlo.iota"
_MOVING = frozenset(("stablehlo.broadcast_in_dim", "stablehlo.reshape"))


class _Proof:
    """Follows what depends on the order of a sort through its block."""

    def __init__(self, root: Op, size: int, blocks: int, rule_of: RuleOf, rows: RowFacts):
        self._root, self._size, self._blocks, self._rule_of, self._rows = root, size, blocks, rule_of, rows
        self._known: dict[Value, _InOrder] = {}
        self._splits: dict[Op, Split] = {}
        self._counts = GroupCounts(root, blocks, rule_of, rows)

    def found(self) -> SortRegions | None:
        for op in self._dependent():
            known = self._of(op) if set(taken_values(op)) == set(op.operands) else None
            if known is None:
                return None
            self._splits[op] = known.split
            self._known.update({v: each for v, each in zip(op.results, known.results, strict=True) if each is not None})
        if len(self._splits) < 2:
            return None
        return SortRegions(self._root, tuple(self._regions()), self._counts.ops)

    def _dependent(self) -> Iterator[Op]:
        """The sort, and the ops that take what is known by then, in order."""
        positions = {op: number for number, op in enumerate(self._ops)}
        waiting, seen = [positions[self._root]], {self._root}
        while waiting:
            op = self._ops[heapq.heappop(waiting)]
            yield op
            users = [user.ancestor_in(op.block) for v in op.results if v in self._known for user, _ in v.uses]
            for user in dict.fromkeys(users):
                if user not in seen:
                    seen.add(user)
                    heapq.heappush(waiting, positions[user])

    @property
    def _ops(self) -> list[Op]:
        assert self._root.block is not None
        return self._root.block.ops

    def _regions(self) -> Iterator[Group]:
        """The ops by how many regions have to be done before them."""
        before, block = dict[Op, int](), self._root.block
        assert block is not None
        first, last = (self._ops.index(op) for op in (self._root, list(self._splits)[-1]))

        def is_complete(value: Value) -> bool:
            return value.owner in self._splits and value not in self._known

        for op in self._ops[first : last + 1]:
            makers = [(v.owner, is_complete(v)) for v in taken_values(op) if isinstance(v.owner, Op)]
            before[op] = max((before.get(maker, 0) + complete for maker, complete in makers), default=0)
        for number in sorted({before[op] for op in self._splits}):
            yield Group(block, {op: split for op, split in self._splits.items() if before[op] == number})

    # What is known of the results of an op.

    def _of(self, op: Op) -> _Known | None:
        ways: list[Callable[[Op], _Known | None]] = [self._sorted, self._numbered, self._read, self._written]
        found = next(filter(None, (way(op) for way in ways)), None)
        return found or (self._grouped(op) if group_sizes_operand(op) is not None else self._row_by_row(op))

    def _block(self, value: Value, dim: int = 0) -> Span:
        """The blocks along a dimension."""
        return blocks_along(value, self._blocks, dim)

    def _is_divided(self, value: Value) -> bool:
        """Whether the first dimension of a value that is in no order is one block behind the other."""
        return bool(value.rank) and value not in self._known and not (value.shape or ())[0] % self._blocks

    def _sorted(self, op: Op) -> _Known | None:
        if op.name != _SORT:
            return None
        split = Split(tuple(map(self._block, op.operands)), tuple(map(self._block, op.results)))
        if op is self._root:
            return _Known(split, tuple(_InOrder(0, self._counted(value)) for value in op.operands))
        keys, *others = op.operands
        is_inverted = self._are_places(keys) and len(others) == 1 and self._counted(others[0]) is not None
        if not is_inverted or not is_ascending(op) or op.results[0].uses:
            return None
        return _Known(split, (None, _InOrder(is_inverse=True)))

    def _counted(self, value: Value) -> Numbers | None:
        """The places, of a value that counts them."""
        is_iota = value.defining_op is not None and value.defining_op.name == _IOTA and value.shape == (self._size,)
        return np.arange(self._size) if is_iota and value not in self._known else None

    def _are_places(self, value: Value) -> bool:
        """Whether a value says of each row from which place it is."""
        known = self._known.get(value)
        is_number = known is not None and known.numbers is not None and known.numbers.ndim == 1
        return is_number and np.array_equal(known.numbers, np.arange(self._size))  # type: ignore[union-attr, arg-type]

    def _numbered(self, op: Op) -> _Known | None:
        """Of numbers alone."""
        known = [self._known.get(value) for value in op.operands]
        ordered = next(each for each in known if each is not None)
        if len(op.results) != 1 or any(each is not None and each.dim != ordered.dim for each in known):
            return None
        if op.name in _MOVING:
            return self._laid_out(op, ordered)
        numbers = [self._rows.one.of(v) if k is None else k.numbers for v, k in zip(op.operands, known, strict=True)]
        given = [each for each in numbers if each is not None]
        found = evaluated(op, given) if len(given) == len(numbers) else None
        if found is None:
            return None
        spans = tuple(self._block(v, ordered.dim) if v.rank else None for v in op.operands)
        return _Known(Split(spans, (self._block(op.results[0], ordered.dim),)), (replace(ordered, numbers=found),))

    def _laid_out(self, op: Op, known: _InOrder) -> _Known | None:
        """Of numbers, or of where places have gone, that get other dimensions of size one."""
        result, is_of_places = op.results[0], known.is_inverse or known.numbers is not None
        dim = next((dim for dim, n in enumerate(result.shape or ()) if n == self._size), None)
        if dim is None or not is_of_places or math.prod(result.shape or ()) != self._size:
            return None
        split = Split((self._block(op.operands[0], known.dim),), (self._block(result, dim),))
        return _Known(split, (replace(known, dim=dim),))

    def _read(self, op: Op) -> _Known | None:
        """Rows that are looked up, of tokens in their places, or back in these."""
        if op.name != "stablehlo.gather" or not are_rows_read(op, self._size):
            return None
        rows, indices = op.operands
        split = Split((self._block(rows), self._block(indices)), (self._block(op.results[0]),))
        at, of = self._known.get(indices), self._known.get(rows)
        if at is None:
            return None
        if at.is_inverse:
            return _Known(split, (None,)) if of is not None and of.dim == 0 and self._speaks_of_rows(of) else None
        return _Known(split, (_InOrder(),)) if self._finds(at, rows) else None

    def _finds(self, at: _InOrder, rows: Value) -> bool:
        """Whether the rows of a block are found in the same block of a value in its places."""
        if not self._is_divided(rows) or at.numbers is None or not at.numbers.ndim:
            return False
        each = (rows.shape or ())[0] // self._blocks
        first = at.numbers[: self._size // self._blocks]
        return step_of(at.numbers, self._blocks) == each and first.min() >= 0 and bool(first.max() < each)

    def _written(self, op: Op) -> _Known | None:
        """Rows that are put, or added, in their places; or places whose rows are put in order."""
        if op.name != "stablehlo.scatter" or len(op.results) != 1 or not are_rows_written(op, self._size):
            return None
        into, indices, rows = op.operands
        at, of, result = self._known.get(indices), self._known.get(rows), op.results[0]
        split = Split(tuple(map(self._block, op.operands)), (self._block(result),))
        if at is None or not self._is_divided(into):
            return None
        if at.is_inverse:
            is_new = of is None and self._rows.are_alike(into, 0) and (into.shape or ())[0] == self._size
            return _Known(split, (_InOrder(),)) if is_new else None
        if of is None:
            is_inverse = self._are_places(indices) and self._counted(rows) is not None and returns_new(op.blocks[0])
            return _Known(split, (_InOrder(is_inverse=True),)) if is_inverse and into.shape == rows.shape else None
        is_row = not of.is_inverse and of.dim == 0 and self._speaks_of_rows(of)
        return _Known(split, (None,)) if is_row and self._finds(at, into) else None

    def _speaks_of_rows(self, known: _InOrder | None) -> bool:
        """Whether a block of rows is the same if places are counted from the block's first one."""
        if known is None or known.is_inverse:
            return False
        return known.numbers is None or step_of(known.numbers, self._blocks) == 0

    def _grouped(self, op: Op) -> _Known | None:
        """Products of rows with their groups' matrices, or of rows with rows, a sum for each group."""
        sizes, rule = group_sizes_operand(op), self._rule_of(op)
        row = next((i for i, v in enumerate(op.operands) if v in self._known), None)
        if sizes is None or rule is None or row is None or not is_ascending(self._root):
            return None
        within = within_factor(rule, row, self._block(op.operands[row], self._known[op.operands[row]].dim))
        if within is None:
            return None
        spans = [placed(rule, mapping, *within) for mapping in rule.mappings]
        count = len(op.operands)
        operands, results = tuple(spans[:count]), tuple(spans[count:])
        for value, span in zip(op.operands, operands, strict=True):
            known = self._known.get(value)
            is_row = self._speaks_of_rows(known) and known is not None and span == self._block(value, known.dim)
            if not (is_row if span is not None else known is None):
                return None
        if not self._counts.are_of(op.operands[sizes]):
            return None
        if any(s is not None and s != self._block(v, s.dim) for v, s in zip(op.results, results, strict=True)):
            return None
        kind = "" if all(results) else "sum"
        made = tuple(_InOrder(span.dim) if span is not None else None for span in results)
        return None if kind and any(results) else _Known(Split(operands, results, kind), made)

    def _row_by_row(self, op: Op) -> _Known | None:
        """Whatever is independent along rows, or sums them up."""
        tensor = next(i for i, v in enumerate(op.operands) if v in self._known)
        split = split_along(op, self._rule_of(op), tensor, self._row(op.operands[tensor]))
        if split is None or split.kind not in ("", "sum"):
            return None
        for value, span in zip(op.operands, split.operands, strict=True):
            known = self._known.get(value)
            if known is not None and (not self._speaks_of_rows(known) or span != self._row(value)):
                return None
            if known is None and span is not None and not self._rows.are_alike(value, span.dim):
                return None
        if any(span is not None and (span.outer, span.inner) != (1, 1) for span in (*split.operands, *split.results)):
            return None
        operands = tuple(s and self._block(v, s.dim) for v, s in zip(op.operands, split.operands, strict=True))
        results = tuple(s and self._block(v, s.dim) for v, s in zip(op.results, split.results, strict=True))
        made = tuple(_InOrder(span.dim) if span is not None else None for span in results)
        return _Known(Split(operands, results, split.kind), made)

    def _row(self, value: Value) -> Span:
        """Each row of a value."""
        return Span(self._known[value].dim, 1, self._size, 1)


def is_ascending(op: Op) -> bool:
    """Whether a sort is by its first operand, the least first."""
    body = op.blocks[0]
    compare = body.terminator.operands[0].defining_op
    return (
        compare is not None
        and compare.name == "stablehlo.compare"
        and compare.text("comparison_direction") == "LT"
        and compare.operands == body.arguments[:2]
    )
