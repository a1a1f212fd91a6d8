"""Small collectives of one kind, group of devices and element type run as one, in buckets.

    %1 = sdy.all_gather %w1          %1 = sdy.all_gather %w1 {sdy_jax.bucket = 0}
    %2 = dot %x, %1                  %3 = sdy.all_gather %w2 {sdy_jax.bucket = 0}
    %3 = sdy.all_gather %w2    ->    %2 = dot %x, %1
    %4 = dot %2, %3                  %4 = dot %2, %3

A step over a program whose collectives are all there. Members of a bucket follow each other in one block, none waits
for another, and each has its place after what makes its operand and before its first user; ops that only compute
element by element, or on few bytes, go with them. What makes values larger is bucketed in the order of its first
users and runs as late as it may, all else in the order of its operands and as early as it may: so a bucket holds
neighbours, and adds no more than its own bytes to what is live. Nothing moves across loops, branches, effects and
collectives that the program holds itself.
Source: spec of the planner, section 15.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jax.extend.mlir import ir

from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.operations import replace_contents
from sdy_jax.lowering.emission.lax_collectives import has_native_all_reduce, permutation_pairs
from sdy_jax.lowering.emission.packed import PACKED
from sdy_jax.lowering.emission.reemitted import numpy_dtype
from sdy_jax.lowering.placement.dead_code import has_effect
from sdy_jax.lowering.placement.fusion import fuses
from sdy_jax.lowering.placement.live_bytes import LocalBytes, peak_of
from sdy_jax.lowering.placement.policy import Policy
from sdy_jax.lowering.placement.report import CollectiveRecord, PartitionReport
from sdy_jax.lowering.reshard.cost import CostModel
from sdy_jax.lowering.strategies.manual import apart_along, manual_axes_around
from sdy_jax.lowering.strategies.registry import SENT
from sdy_jax.op_rules.dataflow import is_data_flow
from sdy_jax.representation.attributes import reduction_from_attributes
from sdy_jax.representation.axes import sort_and_merge
from sdy_jax.representation.mesh import Axes, AxisRef, Mesh
from sdy_jax.representation.sdy_collectives import (
    BUCKET,
    KINDS,
    PREFETCHED,
    REDUCING,
    RING,
    collective_from_attributes,
)
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.mesh import RefinedMesh

BUCKET_BYTES = 4 * 2.0**20
"""What a bucket sends at most where the cost model knows no latency."""

_SHARE_OF_MEMORY = 1 / 8
"""The share of what a device holds that a bucket's blocks may have."""

_SMALL = 1 / 64
"""The share of a bucket's bytes up to which a member is small, and an op that goes with members. Small members have
buckets of their own: a fusion that reads a small part of a bucket, such as a bias, keeps all of it in memory until it
runs. GPT's step with FSDP weights on eight CPU devices took 1.29 of its memory without that, 1.10 with it (2026-11)."""

_FIXED = ("stablehlo.custom_call", "stablehlo.rng")
"""Ops that stay where they are: what they do is not known, or depends on when they do it."""

_BLOCKS = 4
"""The bytes of the blocks of a bucket of stated size, over what it sends: none has more."""

_TRIED = (1, 1 / 4, 1 / 16)
"""Parts of a bucket's size that are tried until the program keeps within its memory."""

_COLLECTIVES = frozenset(f"sdy.{kind}" for kind in KINDS)
_HIDDEN = frozenset((RING, PREFETCHED))
_COMBINED = (*PACKED, "all_reduce")


class BucketSize(NamedTuple):
    """What a bucket sends at most, per kind of collective and group of devices, and the bytes of its blocks."""

    costs: CostModel
    sent: float | None
    held: float

    def sends(self, record: CollectiveRecord, mesh: Mesh) -> float:
        """The bytes that a bucket of such collectives sends at most."""
        if self.sent is not None:
            return self.sent
        return self.costs.bucket_bytes(record.kind, _axes(record, mesh), mesh) or BUCKET_BYTES

    def gains(self, record: CollectiveRecord, held: float, mesh: Mesh) -> bool:
        """Whether a bucket with a collective saves more of its latency than it takes to read and write copies of its
        blocks."""
        if record.wire_bytes >= self.sends(record, mesh):
            return False
        if self.sent is not None or record.kind not in PACKED or self.costs.is_default:
            return True
        return 2 * self.costs.memory * held <= self.costs.rate(record.kind, _axes(record, mesh), mesh).fixed


def _axes(record: CollectiveRecord, mesh: Mesh) -> Axes:
    """The axes over which a collective runs; devices that are permuted may send along any."""
    return record.axes or tuple(AxisRef(axis.name) for axis in mesh.axes)


@dataclass(frozen=True, slots=True)
class _Member:
    """A collective that may run with others of its `key`."""

    op: Op
    record: CollectiveRecord
    key: object
    before: float
    after: float

    @property
    def held(self) -> float:
        return self.before + self.after

    @property
    def grows(self) -> bool:
        """Whether its result is larger than its operand."""
        return self.after > self.before


def combine_collectives(
    module: ir.Operation,
    inserted: Mapping[ir.Operation, CollectiveRecord],
    report: PartitionReport,
    mesh: Mesh,
    costs: CostModel,
    policy: Policy,
) -> None:
    """Forms buckets in a partitioned module, in place, such that it keeps within the policy's memory.

    Args:
        module: a `builtin.module` whose collectives are all there.
        inserted: those that the partitioner made.
        report: where each bucket becomes one record.
        mesh: the program's.
        costs: what collectives cost, which says how large buckets are.
        policy: whether collectives are combined, and what a device may hold.
    """
    if not policy.combine:
        return
    graph = Graph(module)
    records = {n: inserted[op.mlir] for n, op in enumerate(graph.ops) if op.mlir in inserted}
    if len(records) < 2:
        return
    before = peak_of(graph, products_fuse=policy.products_fuse)
    peak, live = before.total, {id(op): held + before.total - before.bytes for op, held in before.at}
    stated = None if policy.combine is True else float(policy.combine)
    held = _SHARE_OF_MEMORY * peak if stated is None else _BLOCKS * stated
    for smaller in _TRIED:
        copy = Graph(module.clone().operation)
        size = BucketSize(costs, stated, held * smaller)
        most = policy.memory or policy.device_memory or math.inf
        limit = max(min(peak + size.held, most), peak)
        room = {copy.ops[n]: limit - live[id(op.mlir)] for n, op in enumerate(graph.ops) if id(op.mlir) in live}
        buckets = combine(copy, {copy.ops[n]: record for n, record in records.items()}, mesh, size, room)
        if not buckets:
            return
        if peak_of(Graph(copy.module), products_fuse=policy.products_fuse).total <= limit:
            replace_contents(module, copy.module)
            report.combine(buckets)
            return


Buckets = list[list[CollectiveRecord]]


def combine(
    graph: Graph,
    records: Mapping[Op, CollectiveRecord],
    mesh: Mesh,
    size: BucketSize,
    room: Mapping[Op, float],
) -> Buckets:
    """Forms buckets in a partitioned module, in place.

    Args:
        graph: that of the module; its blocks keep their order of ops, the module's changes.
        records: of the collectives that may move.
        mesh: the program's.
        size: that of buckets.
        room: the bytes that may be live beside what is while an op runs.

    Returns:
        The records of each bucket's members, by the bucket's number.
    """
    candidates = _Candidates(graph, records, mesh)
    found: Buckets = []
    for block in dict.fromkeys(op.block for op in records):
        assert block is not None
        for bucket in _BlockOrder(block, candidates, size, mesh, room).buckets():
            for member in bucket:
                member.op.mlir.attributes[BUCKET] = ir.IntegerAttr.get(_integers(graph.context), len(found))
            found.append([member.record for member in bucket])
    return found


def _integers(context: ir.Context) -> ir.Type:
    return ir.IntegerType.get_signless(64, context)


class _Candidates:
    """The collectives of a program that may run with others."""

    def __init__(self, graph: Graph, records: Mapping[Op, CollectiveRecord], mesh: Mesh):
        self._graph, self._records, self._mesh, self._bytes = graph, records, mesh, LocalBytes(graph)

    def of(self, block: Block) -> Iterator[_Member]:
        for op in block.ops:
            record = self._records.get(op)
            key = self._key(op, record) if record is not None and record.wire_bytes else None
            if record is not None and key is not None:
                yield _Member(op, record, key, *map(self._bytes.of, (op.operands[0], op.results[0])))

    def is_barrier(self, op: Op) -> bool:
        """Whether nothing may move from one side of an op to the other."""
        is_users = op.name in SENT or (op.name in _COLLECTIVES and op not in self._records)
        return is_users or is_data_flow(op) or has_effect(op) or op is (op.block and op.block.terminator)

    def moves(self, op: Op, small: float) -> bool:
        """Whether an op may go with a collective: one that computes element by element, or on few bytes."""
        if fuses(op):
            return True
        if not op.name.startswith("stablehlo.") or op.name in _FIXED or self.is_barrier(op):
            return False
        return sum(map(self._bytes.of, (*op.operands, *op.results))) <= small

    def _key(self, op: Op, record: CollectiveRecord) -> object:
        """Equal for collectives that can run as one; None for those that run alone."""
        value, sharding = op.operands[0], op.results[0].sharding
        if record.kind not in _COMBINED or op.name not in _COLLECTIVES or _HIDDEN.intersection(op.attributes):
            return None
        if sharding is None or not _is_in_bytes(value):
            return None
        reduction = reduction_from_attributes(op.attributes) if record.kind in REDUCING else ""
        if record.kind == "all_reduce" and not has_native_all_reduce(reduction, numpy_dtype(value.dtype)):
            return None
        return record.kind, sharding.mesh, self._group(op, sharding), value.dtype, reduction

    def _group(self, op: Op, target: TensorSharding) -> object:
        """The devices that exchange something: those along axes, or pairs."""
        said = collective_from_attributes(op.name.removeprefix("sdy."), op.attributes)
        if said.kind != "collective_permute":
            return sort_and_merge(said.all_axes, self._mesh)
        source = op.operands[0].sharding or TensorSharding.replicated(target.mesh, target.rank)
        apart = manual_axes_around(op)
        axes = [axis for s in (source, target) for dim in (*s.axes, s.unreduced_axes, apart) for axis in dim]
        refined = RefinedMesh.of(self._mesh, axes).with_meshes(self._graph.meshes)
        return tuple(permutation_pairs(apart_along(source, apart), apart_along(target, apart), refined))


def _is_in_bytes(value: Value) -> bool:
    """Whether every element has whole bytes: others travel as bytes, each in its own way."""
    dtype = numpy_dtype(value.dtype)
    return dtype == np.bool_ or not any(bits in dtype.name for bits in ("int2", "int4", "float4", "float6"))


class _BlockOrder:
    """The ops of a block in an order that changes as buckets are formed."""

    def __init__(self, block: Block, candidates: _Candidates, size: BucketSize, mesh: Mesh, room: Mapping[Op, float]):
        self._block, self._size, self._mesh, self._room = block, size, mesh, dict(room)
        self._waiting: dict[object, list[_Member]] = {}
        for member in candidates.of(block):
            if size.gains(member.record, member.held, mesh):
                is_small = member.record.kind in PACKED and member.held <= _SMALL * size.held
                alike = (member.key, member.grows, is_small)
                self._waiting.setdefault(alike, []).append(member)
        self._order = list(block.ops)
        self._is_barrier = {op: candidates.is_barrier(op) for op in block.ops}
        self._moves = {op: candidates.moves(op, _SMALL * size.held) for op in block.ops}
        self._users = {op: list(dict.fromkeys(self._users_of(op))) for op in block.ops}
        self._number()

    def _users_of(self, op: Op) -> Iterator[Op]:
        """The ops of the block that use an op's results, or hold an op that does."""
        for result in op.results:
            for user, _ in result.uses:
                while user.block is not self._block:
                    assert user.parent is not None
                    user = user.parent
                yield user

    def buckets(self) -> list[list[_Member]]:
        """Forms the block's buckets, and orders the module's ops accordingly."""
        found = []
        for waiting in self._waiting.values():
            while len(waiting) > 1:
                waiting.sort(key=self._rank)
                bucket, place = self._filled(waiting)
                if len(bucket) > 1:
                    self._place(bucket, place)
                    found.append(bucket)
                for member in bucket:
                    waiting.remove(member)
        if found:
            self._reorder()
        return found

    # Positions.

    def _number(self) -> None:
        """Numbers the ops, and says of each after which op it can run at the earliest, and before which at the
        latest."""
        self._position = {op: n for n, op in enumerate(self._order)}
        self._barriers = [n for n, op in enumerate(self._order) if self._is_barrier[op]]
        self._earliest, self._latest = dict[Op, int](), dict[Op, int]()
        for op in self._order:
            self._earliest[op] = self._low(op) if self._moves[op] else self._position[op]
        for op in reversed(self._order):
            self._latest[op] = self._high(op) if self._moves[op] else self._position[op]

    def _low(self, op: Op) -> int:
        """The last op that has to run before an op."""
        before = bisect_left(self._barriers, self._position[op]) - 1
        made = (self._earliest[maker] for maker in self._makers(op))
        return max(self._barriers[before] if before >= 0 else -1, *made, -1)

    def _high(self, op: Op) -> int:
        """The first op that has to run after an op."""
        after = self._barriers[bisect_right(self._barriers, self._position[op])]
        return min(after, *(self._latest[user] for user in self._users[op]), after)

    def _makers(self, op: Op) -> Iterator[Op]:
        """The ops of the block that make what an op takes."""
        return (v.owner for v in op.operands if isinstance(v.owner, Op) and v.owner.block is self._block)

    def _rank(self, member: _Member) -> tuple[int, int]:
        """The order in which members are taken: as they can run last where they make more of less, else first."""
        place = self._high(member.op) if member.grows else self._low(member.op)
        return place, self._position[member.op]

    # Buckets.

    def _filled(self, waiting: Sequence[_Member]) -> tuple[list[_Member], int]:
        """The first of those that wait, and all that can run with it; and before which op they are to run."""
        first, *others = waiting
        bucket, low, high = [first], self._low(first.op), self._high(first.op)
        for member in others:
            sent = sum(each.record.wire_bytes for each in (*bucket, member))
            held = sum(each.held for each in (*bucket, member))
            if sent > self._size.sends(first.record, self._mesh) or held > self._size.held:
                break
            lower, higher = max(low, self._low(member.op)), min(high, self._high(member.op))
            if lower < higher and self._is_independent(member, bucket):
                place = higher if first.grows else lower + 1
                if self._has_room(held, place, (*bucket, member)):
                    bucket.append(member)
                    low, high = lower, higher
        return bucket, high if first.grows else low + 1

    def _has_room(self, held: float, place: int, bucket: Sequence[_Member]) -> bool:
        """Whether there is room for a bucket from when it runs to when its last member would have run, or from when its
        first member would have run."""
        return all(self._room.get(op, math.inf) >= held for op in self._spanned(place, bucket))

    def _spanned(self, place: int, bucket: Sequence[_Member]) -> list[Op]:
        ends = [place, *(self._position[member.op] for member in bucket)]
        return self._order[min(ends) : max(ends) + 1]

    def _is_independent(self, member: _Member, bucket: Sequence[_Member]) -> bool:
        behind = self._closure(member.op, self._makers)
        return not any(m.op in behind or member.op in self._closure(m.op, self._makers) for m in bucket)

    def _closure(self, op: Op, neighbours: Callable[[Op], Iterable[Op]]) -> set[Op]:
        """The ops before or after an op through others that move with it, the first ones that do not included."""
        found, waiting = set[Op](), [op]
        while waiting:
            new = [other for other in neighbours(waiting.pop()) if other not in found]
            found.update(new)
            waiting += [other for other in new if self._moves[other]]
        return found

    def _place(self, bucket: Sequence[_Member], place: int) -> None:
        """Moves a bucket right before the op at a place, with what has to run before and after it."""
        members = [member.op for member in bucket]
        makers = set().union(*(self._closure(op, self._makers) for op in members))
        users = set().union(*(self._closure(op, self._users.__getitem__) for op in members))
        before, after = self._order[:place], self._order[place:]
        early = [op for op in after if op in makers and op not in members]
        late = [op for op in before if op in users and op not in members]
        gone = {*members, *early, *late}
        held = sum(member.held for member in bucket)
        self._room.update({op: self._room.get(op, math.inf) - held for op in self._spanned(place, bucket)})
        kept = ([op for op in part if op not in gone] for part in (before, after))
        self._order = [*next(kept), *early, *members, *late, *next(kept)]
        self._number()

    def _reorder(self) -> None:
        """Gives the module's block the order of this one."""
        *ops, terminator = self._order
        for op in ops:
            op.mlir.move_before(terminator.mlir)
