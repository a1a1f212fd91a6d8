"""Buffers on a device: their bytes, when they are live, which are reused, and the order in which ops run."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from sdy_jax.ir.attributes import reduction_from_attributes
from sdy_jax.ir.collectives import BUCKET, REDUCING_OPS
from sdy_jax.ir.custom_ops import Share, Uneven
from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.meshes import axes_size
from sdy_jax.ir.operations import COMPUTATIONS
from sdy_jax.ir.shardings import OpShardingRule, TensorSharding
from sdy_jax.ir.stored_shardings import entries_of
from sdy_jax.lowering.ops.emit import value_shardings
from sdy_jax.lowering.planner.facts.factors import split_factors
from sdy_jax.lowering.planner.facts.fusion import fuses, is_product, values_kept_rounded
from sdy_jax.lowering.targets.family import Arrays
from sdy_jax.shardy.propagation.data_flow import is_data_flow

# The bytes of a partitioned program's values on one device.


class LocalBytes:
    """Bytes of values on one device. `arrays`: how they lie there; what products alone read is kept, and sent, as these
    round it."""

    def __init__(self, graph: Graph, arrays: Arrays = Arrays()):  # noqa: B008 - immutable
        self._meshes, self._shardings = graph.meshes, value_shardings(graph)
        self._known: dict[object, float] = {}
        self._arrays = arrays
        self._rounded = values_kept_rounded(graph) if arrays.rounds else frozenset()

    def share_of(self, op: Op, rule: OpShardingRule, whole: float, uneven: Uneven = ()) -> float:
        """What one device has of a whole that the factors of an op's rule share out, some of them unevenly."""
        shardings = [self._shardings.get(value) for value in (*op.operands, *op.results)]
        mesh = next((self._meshes.get(str(s.mesh)) for s in shardings if s is not None), None)
        if mesh is None:
            return whole
        split = split_factors(rule, shardings, mesh)
        shards = [axes_size(split.get(factor, ()), mesh) for factor in range(len(rule.factor_sizes))]
        return Share(whole, rule.factor_sizes, uneven)(shards)

    def of(self, value: Value) -> float:
        sharding, rounded = self._shardings.get(value), value in self._rounded
        key = value.type, sharding, rounded
        if key not in self._known:
            self._known[key] = self._arrays.bytes(self.shape(value), value.itemsize, rounded)
        return self._known[key]

    def shape(self, value: Value) -> tuple[int, ...]:
        """A value's shape on one device."""
        sharding = self._shardings.get(value)
        if value.shape is None:
            return (0,)
        mesh = self._meshes.get(str(sharding.mesh)) if sharding is not None else None
        return value.shape if sharding is None or mesh is None else sharding.local_shape(value.shape, mesh)


# Buffers on a device: from when to when they are live, which take over the memory of others, and the most of them.


class HeldBuffer(NamedTuple):
    """A temporary on one device: its value, its bytes, and the first and last op while which it is live, by their place
    in `Peak.at`, or in a group of ops."""

    value: Value
    bytes: float
    first: int
    last: int


def live_at(count: int, held: Iterable[HeldBuffer]) -> list[float]:
    """The bytes that are live while each of so many ops runs."""
    changes = [0.0] * (count + 1)
    for _, size, first, last in held:
        changes[first] += size
        changes[last + 1] -= size
    return list(accumulate(changes[:-1]))


@dataclass(slots=True)
class Buffer:
    """The memory of a value, from when to when it is live, both included; `counts`: it is a temporary."""

    value: Value
    bytes: float
    start: float
    end: float
    counts: bool
    takes_over: bool
    is_taken: bool = False


def most_live(buffers: Sequence[Buffer]) -> tuple[list[Buffer], float]:
    """The buffers that are live when most bytes are, and these bytes."""
    _take_over(buffers)
    live, now, most, at = list[tuple[float, bool, int]](), 0.0, 0.0, -math.inf
    counted = [b for b in sorted(buffers, key=lambda b: b.start) if b.counts]
    for number, buffer in enumerate(counted):
        while live and (live[0][0] < buffer.start or (live[0][0] == buffer.start and not live[0][1])):
            now -= counted[heapq.heappop(live)[2]].bytes
        now += buffer.bytes
        heapq.heappush(live, (buffer.end, not buffer.is_taken, number))
        if now > most:
            most, at = now, buffer.start
    return [b for b in counted if b.start <= at and (b.end > at or (b.end == at and not b.is_taken))], most


def _take_over(buffers: Sequence[Buffer]) -> None:
    """Marks the buffers that another value takes over at their end."""
    dying: dict[tuple[float, float], list[Buffer]] = {}
    for buffer in buffers:
        if buffer.counts:
            dying.setdefault((buffer.end, buffer.bytes), []).append(buffer)
    for buffer in buffers:
        given = dying.get((buffer.start, buffer.bytes), []) if buffer.takes_over else []
        old = next((b for b in given if b.start < buffer.start and not b.is_taken), None)
        if old is not None:
            old.is_taken = True


# Arguments whose memory results may take over: those that are donated.
#
# Jax says so of an argument by `jax.buffer_donor`, or by `tf.aliasing_output` where it knows the result.

DONATED = "jax.buffer_donor"
_ALIASED = "tf.aliasing_output"


def in_donated_memory(graph: Graph) -> list[tuple[Value, Value]]:
    """The results that lie in the memory of donated arguments, with these: as many of each type and layout as there are
    of both."""
    entries = entries_of(graph.main.mlir, "arg_attrs")
    given = [v for v, entry in zip(graph.arguments, entries, strict=True) if DONATED in entry or _ALIASED in entry]
    if not given:
        return []
    left, found = defaultdict[object, list[Value]](list), list[tuple[Value, Value]]()
    for value in reversed(given):
        left[_key(value, value.sharding)].append(value)
    for value, sharding in zip(graph.outputs, graph.result_shardings(graph.main), strict=True):
        if same := left[_key(value, sharding)]:
            found.append((value, same.pop()))
    return found


def _key(value: Value, sharding: TensorSharding | None) -> tuple[object, ...]:
    return value.type, None if sharding is None or sharding.is_fully_replicated else sharding.layout


# Which all_reduces of a partitioned program run as one where a compiler merges them, whatever their buckets.
#
# It makes one of those over the same devices of which none waits for another, when the last operand is there:
#
#     a = all_reduce(f)          f lives until g is there
#     h = all_reduce(g)          both run here

ALL_REDUCE = "sdy.all_reduce"

_MOST_BYTES, _MOST_OPERANDS = 120 * 2**20, 256
"""What is one all_reduce at most. Published (the options of XLA in libtpu 0.0.52)."""


def run_together(block: Block, bytes_of: Callable[[Value], float]) -> Mapping[Op, Op]:
    """The all_reduces of a block, each with the last of those that are one with it."""
    found: dict[Op, Op] = {}
    for group in _groups(block, bytes_of):
        found.update(dict.fromkeys(group.ops, group.ops[-1]))
    return found


@dataclass(slots=True)
class _Group:
    """All_reduces that run as one; `bit` says that a value waits for them."""

    bit: int
    room: float = _MOST_BYTES
    ops: list[Op] = field(default_factory=list)

    def may_have(self, waits: int, size: float) -> bool:
        return not waits & self.bit and size <= self.room and len(self.ops) < _MOST_OPERANDS


def _groups(block: Block, bytes_of: Callable[[Value], float]) -> list[_Group]:
    """The groups of a block. Each value has the bits of all groups that it waits for."""
    waits, latest, groups = defaultdict[Value, int](int), dict[object, _Group](), list[_Group]()
    for op in block.ops:
        before = 0
        for value in _taken(op):
            before |= waits[value]
        if op.name == ALL_REDUCE:
            key, size = _kind(op), bytes_of(op.operands[0])
            group = latest.get(key)
            if group is None or not group.may_have(before, size):
                group = latest[key] = _Group(1 << len(groups))
                groups.append(group)
            group.ops.append(op)
            group.room -= size
            before |= group.bit
        if before:
            waits.update(dict.fromkeys(op.results, before))
    return groups


def _kind(op: Op) -> object:
    """What those have in common that may run as one."""
    return str(op.attribute("reduction_axes")), op.results[0].dtype, reduction_from_attributes(op.attributes)


def _taken(op: Op) -> Iterator[Value]:
    """What an op takes, or those in its regions."""
    for inner in op.walk():
        yield from inner.operands


# Products that run later than in the program, where a compiler looks for work beside collectives.
#
# One whose result another product takes, or is computed of, runs just before that. Gradients of weights, which no
# product takes, run at any time from then on until the end: a third of what they are computed of counts until then.

SHARE = 1 / 3
"""Measured (2026-11, XLA of jax 0.10 for H100): of what MLPs' gradients are computed of, 0.44 to 0.81 was live at the
end of the backward pass, in Llama-3-8B with 32 and 8 unrolled layers, and all of it in loops over layers. With 0 the
estimate for the former is 0.76 of the compiler's figure, with a third 0.96, with a half 1.16."""


def unawaited(ops: Iterable[Op]) -> dict[Op, None]:
    """The products, in order, of which no other one takes what is computed of their results element by element, moved
    or reduced."""
    return dict.fromkeys(op for op in ops if is_product(op) and not any(map(is_product, _users_of(op))))


def operands_until_end(products: Iterable[Op]) -> dict[Value, Op]:
    """What products read, each with the last op of the block that they are in."""
    return {
        value: op.block.terminator
        for op in products
        if op.block is not None
        for value in op.operands
        if value.defining_op is not None
    }


def _users_of(op: Op) -> Iterator[Op]:
    """The ops that take an op's results, or what is computed of these so."""
    waiting, seen = list(op.results), set[Op]()
    while waiting:
        for user, _ in waiting.pop().uses:
            if user in seen:
                continue
            seen.add(user)
            yield user
            if fuses(user) or user.name in REDUCING_OPS:
                waiting += user.results


# The order in which a program's ops are numbered, which values share a buffer, and which collectives run together.

LOOP, BARRIER = "stablehlo.while", "stablehlo.optimization_barrier"

STEP = 2.0**-10
"""Given: less than the time between two ops of the program order, which is 1; what is moved runs this much before or
after another op. A power of two, so that sums of it are exact."""


class ProgramOrder:
    """The ops of a program in order, those of regions inside of the op that they belong to.

    Attributes:
        ops: all ops.
        position, end: per op, its place and that of the last op inside of it.
        loop: per block, the innermost loop around it.
        inlined: the block in which a computation's body runs, which is a part of the program around it.
        same: the value whose buffer another one is.
        buckets: the first and the last of the collectives with which one runs.
        together: all_reduces, each with the last of those that run as one with it, where compilers merge them.
    """

    def __init__(self, main: Block, sizes: LocalBytes, merges: bool):
        self._sizes, self._merges = sizes, merges
        self.ops: list[Op] = []
        self.position: dict[Op, float] = {}
        self.end: dict[Op, float] = {}
        self.loop: dict[Block, Op | None] = {}
        self.inlined: dict[Block, Block] = {}
        self.same: dict[Value, Value] = {}
        self.buckets: dict[Op, tuple[Op, Op]] = {}
        self.together: dict[Op, Op] = {}
        self._number(main, None)

    def loops_around(self, op: Op) -> list[Op]:
        """The loops that an op is in, from inside."""
        found, loop = list[Op](), self.loop[op.block] if op.block is not None else None
        while loop is not None:
            found.append(loop)
            loop = self.loop[loop.block] if loop.block is not None else None
        return found

    def _number(self, block: Block, loop: Op | None) -> None:
        self._number_buckets(block)
        if self._merges:
            self.together.update(run_together(block, self._sizes.of))
        parent = block.parent
        self.loop[block] = loop
        self.inlined[block] = self.inlined[parent.block] if parent.name in COMPUTATIONS and parent.block else block
        for op in block.ops:
            self.position[op] = float(len(self.ops))
            self.ops.append(op)
            if is_data_flow(op):
                self._number_regions(op, loop)
            self.end[op] = float(len(self.ops) - 1)

    def _number_buckets(self, block: Block) -> None:
        """Notes where buckets of collectives begin and end."""
        buckets: dict[int, list[Op]] = {}
        for op in block.ops:
            if op.name.startswith("sdy.") and op.attribute(BUCKET) is not None:
                buckets.setdefault(op.int(BUCKET), []).append(op)
        for ops in buckets.values():
            self.buckets.update(dict.fromkeys(ops, (ops[0], ops[-1])))

    def _number_regions(self, op: Op, loop: Op | None) -> None:
        if op.name == LOOP:
            self._join_unchanged(op)
        if op.name in COMPUTATIONS:
            self._join(op.blocks[0].arguments, op.operands)
        for block in op.blocks:
            self._number(block, op if op.name == LOOP else loop)
        if op.name in COMPUTATIONS:
            self._join(op.results, op.blocks[0].terminator.operands)
        if op.name == BARRIER:
            self._join(op.results, op.operands)

    def _join_unchanged(self, loop: Op) -> None:
        """What a loop carries unchanged is what it was before the loop."""
        condition, body = loop.blocks
        for i, returned in enumerate(body.terminator.operands):
            if returned in (body.arguments[i], loop.operands[i]):
                self._join((condition.arguments[i], body.arguments[i], loop.results[i]), (loop.operands[i],) * 3)

    def _join(self, values: Sequence[Value], sources: Sequence[Value]) -> None:
        self.same.update(zip(values, map(self.root, sources), strict=True))

    def root(self, value: Value) -> Value:
        return self.same.get(value, value)

    def made(self, value: Value) -> float:
        """When a value is made; an argument of the program before its first op."""
        if isinstance(value.owner, Op):
            return self.position[value.owner]
        return self.position.get(value.owner.parent, -1.0) + STEP

    def inlined_block(self, op: Op) -> Block | None:
        return self.inlined[op.block] if op.block is not None else None
