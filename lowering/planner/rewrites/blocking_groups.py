"""Blocking: groups of ops around a value too large to be whole on a device, which run part by part along a factor.

A group of ops around such a value that share a factor, as heads, queries or tokens, and are independent along it but
for sums at the end, becomes a loop over parts of the factor. It is partitioning over time where the rest of the
planner partitions over devices: the same rules of the ops say what each part takes and makes.

    %s = dot %q, %k            while (%i from 0 to parts) {
    %p = softmax %s      ->      %qi = part %i of %q; %si = dot %qi, %k; %pi = softmax %si; %oi = dot %pi, %v
    %o = dot %p, %v              part %i of %o = %oi }

Source: loop blocking (strip-mining) of compilers; Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory" (2021),
for what comes of it with attention.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.ir.shardings import OpShardingRule
from sdy_jax.lowering.ops.elementwise import is_identity
from sdy_jax.lowering.ops.registry import PART_BY_PART, is_forwarding, pass_through_factors, strategies_of
from sdy_jax.lowering.planner.facts.fusion import UPDATES, computes, fuses, is_constant, is_sum
from sdy_jax.lowering.planner.placement.collectives import is_user_collective
from sdy_jax.lowering.planner.rewrites.loop_rewrites import widens
from sdy_jax.lowering.planner.rewrites.segments import outside_values
from sdy_jax.shardy.rules.slicing import PADDINGS

# Where a factor that is worked on in parts lies in a value, and how the rule of an op carries it to other values.

RuleOf = Callable[[Op], OpShardingRule | None]
"""The rules of ops, without factors along which a part of the result is not computed of one part of each operand."""


class Span(NamedTuple):
    """A factor of `size` in dimension `dim` of a value, which is `outer` x `size` x `inner`."""

    dim: int
    outer: int
    size: int
    inner: int


@dataclass(frozen=True, slots=True)
class Cut:
    """How the factor of a span is worked on: in each of `shards` equal blocks, which devices may hold, part by part."""

    shards: int
    parts: int

    def view(self, span: Span) -> tuple[int, int, int]:
        """A dimension as what is before the parts, the parts, and what is in a part.

        >>> Cut(shards=2, parts=4).view(Span(dim=0, outer=3, size=16, inner=5))
        (6, 4, 10)
        """
        return span.outer * self.shards, self.parts, span.size // (self.shards * self.parts) * span.inner

    def part(self, shape: Sequence[int], span: Span | None) -> list[int]:
        """The shape of a part of a value of some shape; all of it if it has no span."""
        return [size // self.parts if span and dim == span.dim else size for dim, size in enumerate(shape)]


def blocks_along(value: Value, blocks: int, dim: int = 0) -> Span:
    """So many blocks along a dimension of a value."""
    return Span(dim, 1, blocks, (value.shape or ())[dim] // blocks)


class Split(NamedTuple):
    """How an op runs on parts of a factor: where that is in operands and results. `kind`: how the results of parts
    combine, if these do not have the factor; else empty."""

    operands: tuple[Span | None, ...]
    results: tuple[Span | None, ...]
    kind: str = ""


def split_along(
    op: Op, rule: OpShardingRule | None, tensor: int, span: Span, known: Container[str] = PART_BY_PART
) -> Split | None:
    """How an op runs on parts of the span of one of its tensors, operands first; None if it cannot. `known`: the names
    of ops that do."""
    if is_forwarding(op) and not is_user_collective(op) and len(op.operands) == len(op.results) == 1:
        return Split((span,), (span,))  # it says how a value lies
    found = within_factor(rule, tensor, span) if rule is not None and op.name in known else None
    if found is None or rule is None:
        return None
    factor, within = found
    spans = [placed(rule, mapping, factor, within) for mapping in rule.mappings]
    count = len(op.operands)
    split = Split(tuple(spans[:count]), tuple(spans[count:]))
    if factor in pass_through_factors(rule):
        return split if _is_computed_in_parts(op, split) else None
    kind = _kind_of_partial(op, rule, factor)
    return split._replace(kind=kind) if kind and not any(split.results) else None


def within_factor(rule: OpShardingRule, tensor: int, span: Span) -> tuple[int, Span] | None:
    """The factor that a span lies in, and where it lies there."""
    factors, outer = rule.mappings[tensor][span.dim], 1
    for number, factor in enumerate(factors):
        size = rule.factor_sizes[factor]
        inner = math.prod(rule.factor_sizes[other] for other in factors[number + 1 :])
        if size > 1 and not span.outer % outer and not span.inner % inner:
            within = Span(0, span.outer // outer, span.size, span.inner // inner)
            if within.outer * within.size * within.inner == size:
                return factor, within
        outer *= size
    return None


def placed(rule: OpShardingRule, mapping: tuple[tuple[int, ...], ...], factor: int, within: Span) -> Span | None:
    """Where a part of a factor lies in a tensor."""
    sizes = rule.factor_sizes
    for dim, factors in enumerate(mapping):
        if factor in factors:
            at = factors.index(factor)
            before, behind = (math.prod(sizes[f] for f in some) for some in (factors[:at], factors[at + 1 :]))
            return Span(dim, before * within.outer, within.size, within.inner * behind)
    return None


def _is_computed_in_parts(op: Op, split: Split) -> bool:
    """Whether all results have the factor, with its elements where they are in the operands; and, if an op puts one
    value into another, both of these."""
    if not all(split.results) or _shifts(op, split.operands[0]):
        return False
    return op.name not in UPDATES or sum(map(bool, split.operands)) > len(op.results)


def _shifts(op: Op, span: Span | None) -> bool:
    """Whether an op cuts off as many elements of a dimension as it adds."""
    return op.name == "stablehlo.pad" and span is not None and any(op.ints(name)[span.dim] for name in PADDINGS)


def _kind_of_partial(op: Op, rule: OpShardingRule, factor: int) -> str:
    """How partial results along a factor that an op reduces combine; empty where that is not known."""
    strategy = strategies_of(op, rule)[0]
    if not computes(op) or factor not in strategy.partial:
        return ""
    starts = (value for value in op.operands if not value.rank)
    return strategy.reduction if all(is_identity(value, strategy.reduction) for value in starts) else ""


def spans_of(value: Value) -> Iterator[Span]:
    """The whole dimensions of a value."""
    for dim, size in enumerate(value.shape or ()):
        if size > 1:
            yield Span(dim, 1, size, 1)


# Groups of ops around a large value that run part by part of a factor, independently but for what they reduce.
#
# The state of a group while it grows: each op with how it runs on parts. Where one takes what another one makes, both
# agree on where the factor is. In the end nothing that the group takes depends on what it makes.

_CONNECTED = 1 / 8
"""The share of a group's largest value from which on values belong to it whole: softmax's masks take a quarter of its
scores. Guessed: with less, groups grow over half a program; with more, masks and sums of a group are made whole."""

SplitOf = Callable[[Op, int, Span], Split | None]
"""How an op runs on parts of the span of one of its tensors, operands first; None if it cannot."""


@dataclass(frozen=True, eq=False)
class Group:
    """Ops of a block, in order, with how each runs on parts."""

    block: Block
    splits: Mapping[Op, Split]

    @property
    def ops(self) -> list[Op]:
        return list(self.splits)

    def among(self, ops: Mapping[Op, Op]) -> Group:
        """The same group of a copy of the program; `ops`: those of the copy, by the program's own."""
        splits = {ops[op]: split for op, split in self.splits.items()}
        block = next(iter(splits)).block
        assert block is not None
        return Group(block, splits)

    @property
    def stretch(self) -> list[Op]:
        """The ops of the block from the first of the group to the last."""
        places = [self.block.ops.index(op) for op in (*self.ops[:1], *self.ops[-1:])]
        return self.block.ops[min(places, default=0) : max(places, default=-1) + 1]

    def span_of(self, value: Value) -> Span | None:
        """Where the factor is in what an op of the group makes."""
        assert isinstance(value.owner, Op)
        return self.splits[value.owner].results[value.index]

    @property
    def taken(self) -> Iterator[tuple[Value, Span | None]]:
        """The values from elsewhere that its ops take, with where the factor is in each; some several times."""
        for op, split in self.splits.items():
            for value, span in zip(op.operands, split.operands, strict=True):
                if value.owner not in self.splits:
                    yield value, span

    def is_inside(self, value: Value) -> bool:
        """Whether nobody else needs what an op of the group makes."""
        return all(user in self.splits for user, _ in value.uses)

    @property
    def left(self) -> list[Value]:
        """What its ops make that others need and do not soon make themselves."""
        made = (op for op in self.splits if not self.stays(op))
        return [value for op in made for value in op.results if not self.is_inside(value)]

    def stays(self, op: Op) -> bool:
        """Whether an op stays for others, as it makes much of little that the group does not make."""
        return widens(op) and all(value.owner not in self.splits for value in op.operands)


class Growth:
    """Groups of one program.

    Args:
        rule_of: the rules of ops.
        size_of: the bytes of values.
    """

    def __init__(self, rule_of: RuleOf, size_of: Callable[[Value], float]):
        self.size_of, self.nothing = cache(size_of), MadeOfNothing()
        self._positions: dict[Block, dict[Op, int]] = {}
        # All are asked for again by the groups around each value that an op is connected with.
        self._split = cache(lambda op, tensor, span: split_along(op, rule_of(op), tensor, span))
        self._makers = cache(lambda op: frozenset(v.owner for v in taken_values(op) if isinstance(v.owner, Op)))
        self._joins = cache(lambda op: fuses(op) or is_sum(op))

    def connected(self, value: Value) -> float:
        """The bytes from which on values belong to the group of a value, what makes them and what takes them."""
        return _CONNECTED * self.size_of(value)

    def group(self, value: Value, span: Span) -> Group | None:
        """The group around a value of which a span is worked on in parts: what makes or takes large values that are
        connected with it, and small ops between these. None if the op that makes the value is not in it."""
        first, whole = self.grown(value, span, self.connected(value))
        if value.owner in first.splits:
            return first
        last = _needed(whole)
        return Group(whole.block, last) if value.owner in last else None

    def grown(self, value: Value, span: Span, least: float) -> tuple[Group, Group]:
        """All that makes or takes values of so many bytes that are connected with a value, and small ops between; and
        before that, what of it waits for no other op to be done with all parts."""
        maker = value.defining_op
        assert maker is not None and maker.block is not None
        growing = _Growing(
            maker.block,
            self._positions_in(maker.block),
            self._split,
            self._makers,
            self._joins,
            lambda other: self.size_of(other) >= least,
            self.nothing,
        )
        growing.grow(maker, len(maker.operands) + value.index, span)
        growing.join()
        return Group(maker.block, growing.independent()), Group(maker.block, growing.splits())

    def _positions_in(self, block: Block) -> dict[Op, int]:
        if block not in self._positions:
            self._positions[block] = {op: number for number, op in enumerate(block.ops)}
        return self._positions[block]


class _Growing:
    """A group while it grows. `positions`: of the block's ops; `joins`: of small ops that may join what they are
    between; `is_large`: of values whose makers and users belong to it; `nothing`: values that each part makes for
    itself."""

    def __init__(
        self,
        block: Block,
        positions: Mapping[Op, int],
        split: SplitOf,
        makers: Callable[[Op], frozenset[Op]],
        joins: Callable[[Op], bool],
        is_large: Callable[[Value], bool],
        nothing: MadeOfNothing,
    ):
        self._block, self._positions, self._split, self._makers = block, positions, split, makers
        self._joins, self._is_large, self._nothing = joins, is_large, nothing
        self._splits: dict[Op, Split] = {}
        self._refused = set[Op]()

    def grow(self, op: Op, tensor: int, span: Span) -> None:
        """Adds an op, and all that is connected with it by large values."""
        waiting = deque([(op, tensor, span)])
        while waiting:
            op, tensor, span = waiting.popleft()
            if op not in self._splits and op not in self._refused and self._add(op, tensor, span):
                waiting += self._neighbours(op)

    def _add(self, op: Op, tensor: int, span: Span) -> bool:
        can_be = op.block is self._block and not any(value in self._nothing for value in op.results)
        split = self._split(op, tensor, span) if can_be else None
        if split is None or not self._agrees(op, split):
            self._refused.add(op)
            return False
        self._splits[op] = split
        return True

    def _agrees(self, op: Op, split: Split) -> bool:
        """Whether what an op would take and make is cut as others of the group make and take it."""
        for value, span in zip(op.operands, split.operands, strict=True):
            made = self._splits.get(value.owner) if isinstance(value.owner, Op) else None
            if made is not None and (span is None or made.results[value.index] != span):
                return False
        return all(
            self._splits[user].operands[index] == span and span is not None
            for value, span in zip(op.results, split.results, strict=True)
            for user, index in value.uses
            if user in self._splits
        )

    def _neighbours(self, op: Op) -> Iterator[tuple[Op, int, Span]]:
        split = self._splits[op]
        for value, span in zip(op.operands, split.operands, strict=True):
            made = value.defining_op
            if made is not None and span is not None and self._is_large(value):
                yield made, len(made.operands) + value.index, span
        for value, span in zip(op.results, split.results, strict=True):
            if span is not None and self._is_large(value) and not widens(op):
                yield from ((user, index, span) for user, index in value.uses)

    def join(self) -> None:
        """Adds small ops through which what the group makes comes back to it, as sums of rows of which each element is
        divided."""
        after, before = self._behind(), set[Op]()
        for op in reversed(after):
            users = (user for value in op.results for user, _ in value.uses)
            if any(user in self._splits or user in before for user in users):
                before.add(op)
        for op in after:
            if op in before and (found := next(self._taken_from(op, {}), None)):
                self._add(op, *found)

    def _behind(self) -> dict[Op, tuple[int, Span]]:
        """The small ops that take what the group makes in parts, or what others of them make, in order, up to the last
        op of the group. They alone are visited: the groups around all values of a program would else go through all of
        it each."""
        found, last = dict[Op, tuple[int, Span]](), max(map(self._positions.__getitem__, self._splits), default=-1)
        waiting, seen = list[tuple[int, Op]](), set[int]()

        def wait(op: Op) -> None:
            for user, _ in (use for value in op.results for use in value.uses):
                position = self._positions.get(user, last + 1)
                if position <= last and position not in seen and user not in self._splits:
                    seen.add(position)
                    heapq.heappush(waiting, (position, user))

        for op in self._splits:
            wait(op)
        while waiting:
            _, op = heapq.heappop(waiting)
            taken = next(self._taken_from(op, found), None) if op not in self._refused and self._joins(op) else None
            if taken is not None:
                found[op] = taken
                wait(op)
        return found

    def _stretch(self) -> list[Op]:
        """The ops of the block from the first of the group to the last."""
        places = [self._positions[op] for op in self._splits]
        return self._block.ops[min(places, default=0) : max(places, default=-1) + 1]

    def _taken_from(self, op: Op, others: Mapping[Op, tuple[int, Span]]) -> Iterator[tuple[int, Span]]:
        """The operands of an op that the group makes in parts, or some other ops."""
        for index, value in enumerate(op.operands):
            if not isinstance(value.owner, Op):
                continue
            if value.owner in others:
                yield others[value.owner]
            elif (split := self._splits.get(value.owner)) and (span := split.results[value.index]):
                yield index, span

    def independent(self) -> dict[Op, Split]:
        """The ops of the group, in order, but for those that depend on what is complete only when all parts are done:
        what ops of the group reduce, and what others make of what the group makes."""
        found, complete = dict[Op, Split](), set[Op]()
        for op in self._stretch():
            takes = self._makers(op)
            waits = not complete.isdisjoint(takes) or any(maker in found and found[maker].kind for maker in takes)
            if op in self._splits and not waits:
                found[op] = self._splits[op]
            elif waits or not found.keys().isdisjoint(takes):
                complete.add(op)
        return found

    def splits(self) -> dict[Op, Split]:
        """All ops of the group, in order."""
        return {op: self._splits[op] for op in sorted(self._splits, key=self._positions.__getitem__)}


def _needed(group: Group) -> dict[Op, Split]:
    """The ops of a group, in order, but for those of which others depend only when all parts are done."""
    found, awaited = dict[Op, Split](), set[Op]()
    for op in reversed(group.stretch):
        users = [user.ancestor_in(group.block) for value in op.results for user, _ in value.uses]
        split, waits = group.splits.get(op), any(user in awaited for user in users)
        is_taken = any(user in found for user in users)
        if split is not None and not waits and not (split.kind and is_taken):
            found[op] = split
        elif waits or is_taken:
            awaited.add(op)
    return {op: found[op] for op in reversed(found)}


def taken_values(op: Op) -> Collection[Value]:
    """The values that an op takes, or something in its regions."""
    return op.operands if not op.blocks else [*op.operands, *outside_values(op)]


def later_ops(group: Group) -> list[Op]:
    """The ops between those of a group that need what it makes, in order."""
    found = dict[Op, None]()
    for op in group.stretch:
        if op not in group.splits and any(v.owner in group.splits or v.owner in found for v in taken_values(op)):
            found[op] = None
    return list(found)


class MadeOfNothing:
    """Whether values are computed of nothing but scalars, as masks of positions are: each part is as soon made."""

    def __init__(self) -> None:
        self._known: dict[Op, bool] = {}

    def __contains__(self, value: Value) -> bool:
        op = value.defining_op
        if op is None or len(op.results) != 1 or not value.rank:
            return False
        if op not in self._known:
            self._known[op] = is_constant(op) or (
                fuses(op) and bool(op.operands) and all(not v.rank or v in self for v in op.operands)
            )
        return self._known[op]
