"""The choice of blocking: which groups of a program run in parts, along which factor, and in how many."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.meshes import Mesh, axes_size
from sdy_jax.ir.new_ops import sharding_as_carried
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.planner.facts.fusion import can_fuse, is_constant
from sdy_jax.lowering.planner.memory.buffers import HeldBuffer, live_at
from sdy_jax.lowering.planner.rewrites.blocking_groups import Cut, Group, Growth, RuleOf, Span, spans_of
from sdy_jax.lowering.planner.rewrites.recomputation_prices import ProgramPrices
from sdy_jax.lowering.targets.family import Fusion

# Groups that share a large value are told apart: the later one recomputes it, so that neither needs all of it.
#
# %s = dot %q, %k                      %s = dot %q, %k
# %o = dot (softmax %s), %v    ->      %o = dot (softmax %s), %v
# ...                                  ...
# %d = f(softmax %s, %g)               %t = dot %q, %k
#                                      %d = f(softmax %t, %g)        %g is not there before %o is


class Sizes:
    """What values of a program take on a device, of which ops were cloned since it was placed.

    Args:
        graph, prices: the program before, and by a placement what its values take.
        origins: the ops of which others are clones.
    """

    def __init__(self, graph: Graph, prices: ProgramPrices, origins: Mapping[ir.Operation, Op]):
        self._prices, self._known = prices, dict[ir.Value, Value]()
        self._ops = {op.mlir: op for op in graph.ops}
        for op in graph.ops:
            values = (*op.results, *(argument for block in op.blocks for argument in block.arguments))
            self._known.update((value.mlir, value) for value in values)
        for clone, op in origins.items():
            self._known.update(zip(clone.results, op.results, strict=True))

    def bytes_of(self, value: Value) -> float:
        """The bytes of a value, in the layout in which it is made."""
        return self._prices.bytes_of(self._known[value.mlir])

    def layout_of(self, value: Value) -> TensorSharding | None:
        """That layout, where it is known."""
        return self._prices.layout_of(self._known[value.mlir])

    def most_live(self, ops: Iterable[Op]) -> float:
        """The most bytes that are live while one of some ops runs, those that are clones apart."""
        known = (self._ops.get(op.mlir) for op in ops)
        return max([self._prices.live_at(op) for op in known if op is not None], default=0.0)


@dataclass(frozen=True)
class _Shared:
    """A group with the uses of its large values after what needs all of what the group makes."""

    group: Group
    uses: list[tuple[Value, Op, int]]
    is_large: Callable[[Value], bool]

    def made_again(self) -> Iterator[Op]:
        """The ops that make these values, and large ones that they are made of."""
        found, waiting = set[Op](), [value for value, _, _ in self.uses]
        while waiting:
            op = waiting.pop().owner
            if isinstance(op, Op) and op in self.group.splits and op not in found:
                found.add(op)
                waiting += [value for value in op.operands if self.is_large(value)]
        return (op for op in self.group.ops if op in found)


def tell_apart(graph: Graph, growth: Growth, size: float) -> dict[ir.Operation, Op]:
    """Lets later groups make what they share with others again, where that takes more than so many bytes. An op is in
    one group, that of the largest value: a gradient of weights along the vocabulary takes no logits from a loss.

    Returns:
        What was made, and of what it is a clone.
    """
    values = [value for op in graph.ops if not op.blocks for value in op.results if value.rank]
    large = [value for value in values if growth.size_of(value) > size]
    found, seen = dict[ir.Operation, Op](), set[Op]()
    for value in sorted(large, key=growth.size_of, reverse=True):
        if value.owner in seen:
            continue
        shared = _shared(value, growth)
        if shared is not None and seen.isdisjoint(shared.group.splits):
            seen.update(shared.group.ops)
            seen.update(user for _, user, _ in shared.uses)
            found.update(_make_again(shared))
    return found


def _shared(value: Value, growth: Growth) -> _Shared | None:
    """The largest group around a value that is first made there; one that shares nothing, if there is."""
    least = growth.connected(value)

    def is_large(other: Value) -> bool:
        return growth.size_of(other) >= least and other not in growth.nothing

    groups = list[_Shared]()
    for span in spans_of(value):
        first, whole = growth.grown(value, span, least)
        uses = [
            (each, *use) for each in first.left if is_large(each) for use in each.uses if use[0] not in first.splits
        ]
        if value.owner in first.splits:
            if not uses:
                return _Shared(first, [], is_large)
            groups.append(_Shared(first, [use for use in uses if use[1] in whole.splits], is_large))
    return max(groups, key=lambda shared: len(shared.group.splits), default=None)


def _make_again(shared: _Shared) -> Iterator[tuple[ir.Operation, Op]]:
    again, made = list(shared.made_again()), dict[ir.Value, ir.Value]()
    users = _first_users(again, shared)
    for op in again:
        clone = op.mlir.clone(ir.InsertionPoint(users[op].mlir)).operation
        for index, operand in enumerate(op.operands):
            clone.operands[index] = made.get(operand.mlir, operand.mlir)
        made.update(zip(op.mlir.results, clone.results, strict=True))
        yield clone, op
    for value, user, index in shared.uses:
        user.mlir.operands[index] = made[value.mlir]


def _first_users(again: Sequence[Op], shared: _Shared) -> Mapping[Op, Op]:
    """The op before which each clone stands: the first one for which it is made, by itself or by other clones."""
    numbers = {op: number for number, op in enumerate(shared.group.block.ops)}
    found = dict[Op, Op]()

    def state(value: Value, user: Op) -> None:
        if isinstance(value.owner, Op):
            found[value.owner] = min(found.get(value.owner, user), user, key=numbers.__getitem__)

    for value, user, _ in shared.uses:
        state(value, user)
    for op in reversed(again):
        for value in op.operands:
            state(value, found[op])
    return found


# Which groups of a program run in parts, along which factor, and in how many.

_LARGE = 1 / 2
"""The share of its largest value from which on nothing is won where a value that a group makes or takes is whole.
Guessed: with less, groups are refused that would help; with more, loops are made that hold about as much as before."""

_MOST = 256
"""The parts that a group is cut into at most. Guessed: each part is a trip of a loop that starts its ops anew; with
fewer, what needs more parts does not fit."""

_TOGETHER = 4
"""How many values as large as its largest are live together in a group, about: a gated MLP's gradient holds four.
Guessed: with fewer, groups of many equal values are left whole; with more, groups are cut that hold little."""

_ALIKE = 1.25
"""What is held within this factor of what may be held counts as the same. Guessed: nearer to 1, plans that move more
win for some bytes held less; farther, what just fits is taken for too much."""


@dataclass(frozen=True, eq=False)
class BlockingCandidate:
    """A group that could run in parts of a factor.

    Attributes:
        value: the largest value that is whole only in parts then.
        span: where the factor is in it.
        inside: the bytes of the group's own values that are live together, at most.
        moved: the bytes that all trips read or write beside the values that they take and make parts of.
    """

    group: Group
    value: Value
    span: Span
    shards: int
    inside: float
    moved: float

    def cut(self, size: float) -> Cut | None:
        """The least number of parts of which the group's own values take so many bytes; as many as may be, else."""
        block = self.span.size // self.shards
        wanted = min(_MOST, self.inside / size) if size > 0 else _MOST
        counts = [count for count in range(2, min(block, _MOST) + 1) if not block % count]
        enough = (count for count in counts if count >= wanted)
        parts = next(enough, counts[-1] if counts else 1)
        return Cut(self.shards, parts) if parts > 1 else None


class BlockingCandidates:
    """Those of a program.

    Args:
        graph: the program before it is partitioned.
        prices: what its values take on a device.
        mesh: the program's.
        rule_of: the rules of ops.
        fusion: what products compute as they read it.
        limit: the bytes that a device may hold.
    """

    def __init__(self, graph: Graph, prices: Sizes, mesh: Mesh, rule_of: RuleOf, fusion: Fusion, limit: float):
        self._limit = limit
        self._graph, self._prices, self._mesh, self._fusion = graph, prices, mesh, fusion
        self._growth = Growth(rule_of, prices.bytes_of)
        self._group = cache(self._growth.group)
        """Asked for again for each size."""
        self._number = {op: number for number, op in enumerate(graph.ops)}
        self._seen = set[Op]()

    def above(self, size: float) -> list[BlockingCandidate]:
        """The groups whose own values take more than so many bytes while too much is live, in order; no two of a block
        in one stretch."""
        found, used, self._seen = list[BlockingCandidate](), set[Op](), set[Op]()
        for value, held in self._largest:
            if held * _TOGETHER < size:
                break
            found += self._found(value, used, size)
        return sorted(found, key=lambda each: self._number[each.group.ops[0]])

    @property
    def most(self) -> float:
        """The most bytes that the own values of a group take while too much is live."""
        most, used, self._seen = 0.0, set[Op](), set[Op]()
        for value, held in self._largest:
            if held * _TOGETHER < most:
                break
            most = max([most, *(each.inside for each in self._found(value, used, 0.0))])
        return most

    def _found(self, value: Value, used: set[Op], size: float) -> list[BlockingCandidate]:
        """The best group around a value, if it counts; its stretch is used then."""
        best = self._best(value, used, size)
        if best is None or best.inside <= size or self._prices.most_live(best.group.stretch) <= self._limit:
            return []
        used.update(best.group.stretch)
        return [best]

    @cached_property
    def _largest(self) -> list[tuple[Value, float]]:
        """The values that ops make, the largest first."""
        values = [value for op in self._graph.ops if _may_be_large(op) for value in op.results if value.shape]
        return sorted(((value, self._prices.bytes_of(value)) for value in values), key=lambda pair: -pair[1])

    def _best(self, value: Value, used: set[Op], size: float) -> BlockingCandidate | None:
        """The best way to hold no more than so much of a value and what is connected with it."""
        around = list(self._around(value, used))
        most = max([each.inside for each in around], default=0.0)
        return min(around, key=lambda each: _rank(each, most, size), default=None)

    def _around(self, value: Value, used: set[Op]) -> Iterator[BlockingCandidate]:
        if value.owner in used or value.owner in self._seen:
            return
        for span in spans_of(value):
            group = self._group(value, span)
            if group is None or used.intersection(group.stretch):
                continue
            self._seen.update(group.ops)
            shards = self._shards(group)
            if shards is not None and not self._is_at_edge(group, value):
                yield self._candidate(group, value, span, shards)

    def _is_at_edge(self, group: Group, value: Value) -> bool:
        """Whether a value that is about as large as a group's largest stays whole, as others make or need it."""
        size, least = self._prices.bytes_of, _LARGE * self._prices.bytes_of(value)
        left = (each for each in group.left if group.span_of(each))
        made = (each for each, span in group.taken if span and each.defining_op is not None)
        taken = (each for each in made if each not in self._growth.nothing)
        return any(size(each) >= least for each in chain(left, taken))

    def _candidate(self, group: Group, value: Value, span: Span, shards: int) -> BlockingCandidate:
        size = self._prices.bytes_of
        whole = sum([size(each) for each, at in dict.fromkeys(group.taken) if at is None])
        reduced = sum([2 * size(each) for each in group.left if not group.span_of(each)])
        return BlockingCandidate(group, value, span, shards, self._live(group), whole + reduced)

    def _shards(self, group: Group) -> int | None:
        """In how many blocks the factor may lie on devices; None where it is split otherwise somewhere."""
        found = {1}
        for value, span in _spans(group):
            for sharding in (sharding_as_carried(value), self._prices.layout_of(value)):
                found.add(1 if sharding is None else _shards_of(sharding, span, self._mesh))
        most, size = max(found), next(span.size for _, span in _spans(group))
        return most if all(count and not most % count for count in found) and not size % most else None

    def _live(self, group: Group) -> float:
        """The most bytes of a group's own values that are live together."""
        return max(live_at(len(group.ops), self._held(group)))

    def _held(self, group: Group) -> Iterator[HeldBuffer]:
        """A group's own values, from the op that makes each to the last that reads it."""
        read = self._last_reads(group)
        for number, op in enumerate(group.ops):
            for value in op.results:
                if group.span_of(value) and group.is_inside(value) and not can_fuse(op, self._fusion):
                    yield HeldBuffer(value, self._prices.bytes_of(value), number, read.get(value, number))

    def _last_reads(self, group: Group) -> dict[Value, int]:
        """The last op of a group that reads each value, or what is computed of it as it is read."""
        found = dict[Value, int]()
        for number, op in reversed([*enumerate(group.ops)]):
            is_fused = can_fuse(op, self._fusion)
            time = found.get(op.results[0], number) if is_fused else number
            for value in op.operands:
                found[value] = max(time, found.get(value, time))
        return found


def _spans(group: Group) -> Iterator[tuple[Value, Span]]:
    """The values that a group takes or makes in parts, and where the factor is in them."""
    yield from ((value, span) for value, span in group.taken if span is not None)
    for op, split in group.splits.items():
        yield from ((value, span) for value, span in zip(op.results, split.results, strict=True) if span is not None)


def _shards_of(sharding: TensorSharding, span: Span, mesh: Mesh) -> int:
    """In how many blocks a sharding has a factor; 0 if these are not equal, or not its own."""
    count = axes_size(sharding.axes[span.dim], mesh)
    if not span.outer % count:
        return 1
    blocks, rest = divmod(count, span.outer)
    return 0 if rest or span.size % blocks else blocks


def _may_be_large(op: Op) -> bool:
    return not op.blocks and not is_constant(op) and op.block is not None


def _rank(candidate: BlockingCandidate, most: float, size: float) -> tuple[float, float]:
    """What is less is better: what is held of large values, of so many bytes in all, if so much may be, about; then
    what is moved for it."""
    cut = candidate.cut(size)
    if cut is None or not candidate.inside:
        return math.inf, math.inf
    held = most - candidate.inside + candidate.inside / cut.parts
    return math.ceil(held / (_ALIKE * max(size, most / _MOST))), candidate.moved * cut.parts
