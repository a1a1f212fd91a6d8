"""Buckets: small collectives of one kind, group of devices and element type run as one."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jax.extend.mlir import ir

from sdy_jax.ir.attributes import reduction_from_attributes
from sdy_jax.ir.collectives import (
    BUCKET,
    COLLECTIVE_OPS,
    PACKED,
    PREFETCHED,
    REDUCING,
    RING,
    SdyCollective,
    collective_from_attributes,
)
from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.meshes import Axes, AxisRef, Mesh, sort_and_merge
from sdy_jax.ir.operations import copied, pre_order, replace_contents
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.collectives.movement import permutation_pairs
from sdy_jax.lowering.ops.collectives.packing import stacks
from sdy_jax.lowering.ops.collectives.reductions import has_native_all_reduce
from sdy_jax.lowering.ops.control_flow import apart_along, manual_axes_around
from sdy_jax.lowering.ops.emit import value_shardings
from sdy_jax.lowering.ops.re_emission import numpy_dtype
from sdy_jax.lowering.ops.registry import SENT
from sdy_jax.lowering.planner.facts.fusion import fuses
from sdy_jax.lowering.planner.memory.buffers import LocalBytes
from sdy_jax.lowering.planner.memory.live_ranges import Peak, peak_of
from sdy_jax.lowering.planner.problem.layout_plan import PlacedProgram
from sdy_jax.lowering.planner.report import CollectiveRecord
from sdy_jax.lowering.planner.rewrites.preparation import has_effect
from sdy_jax.lowering.planner.schedule.hidden_time import Inserted
from sdy_jax.lowering.planner.setting import Combining, Setting
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.rates import LANES, in_lanes
from sdy_jax.runtime.meshes import RefinedMesh
from sdy_jax.shardy.propagation.data_flow import is_data_flow

# The collectives of a program that may run with others, and how large buckets are.

_RELAID = 12.0
"""The bytes of memory that take as long as to copy one into another layout there. Measured (2026-11, XLA for v5e): 10.5
to 21 for the stacks of weights that are gathered in blocks which fill no lanes. With less, stacks are made that take
longer than the latency they save."""

BUCKET_BYTES = 4 * 2.0**20
"""What a bucket sends at most where the cost model knows no latency. Guessed (0.1 ms at 45 GB/s): less leaves more
collectives, more holds more blocks at once; no bytes on the wire change."""

_FIXED = ("stablehlo.custom_call", "stablehlo.rng")
"""Ops that stay where they are: what they do is not known, or depends on when they do it."""

_HIDDEN = frozenset((RING, PREFETCHED))


class BucketSize(NamedTuple):
    """What a bucket sends at most, per kind of collective and group of devices, and the bytes of its blocks."""

    costs: CostModel
    combining: Combining
    held: float

    def sends(self, record: CollectiveRecord, mesh: Mesh) -> float:
        """The bytes that a bucket of such collectives sends at most."""
        if self.combining.sent is not None:
            return self.combining.sent
        return self.costs.bucket_bytes(record.kind, _axes(record, mesh), mesh) or BUCKET_BYTES

    def packs(self, record: CollectiveRecord) -> bool:
        """Whether the operands of such collectives are copied side by side."""
        return record.kind in self.combining.packed

    def gains(self, member: BucketMember, mesh: Mesh) -> bool:
        """Whether a bucket with a collective saves more of its latency than it takes to read and write copies of its
        blocks; what is taken from a stack needs none, but where it is in another layout."""
        record = member.record
        if record.kind not in self.combining.kinds or record.wire_bytes >= self.sends(record, mesh):
            return False
        if self.combining.sent is not None or not self.packs(record) or self.costs.is_default:
            return True
        copied = member.before if record.kind in self.combining.stacked else member.held
        relaid = member.after * record.costs(self.costs).moved if member.is_relaid and self.costs.lanes else 0.0
        copying = self.costs.memory * (2 * copied + _RELAID * relaid)
        return copying <= self.costs.rate(record.kind, _axes(record, mesh), mesh).fixed


def _axes(record: CollectiveRecord, mesh: Mesh) -> Axes:
    """The axes over which a collective runs; devices that are permuted may send along any."""
    return record.axes or tuple(AxisRef(axis.name) for axis in mesh.axes)


@dataclass(frozen=True, slots=True)
class BucketMember:
    """A collective that may run with others of its `key`; its result `is_relaid` where arrays lie in tiles."""

    op: Op
    record: CollectiveRecord
    key: object
    before: float
    after: float
    is_relaid: bool = False

    @property
    def held(self) -> float:
        return self.before + self.after

    @property
    def grows(self) -> bool:
        """Whether its result is larger than its operand."""
        return self.after > self.before


class BucketCandidates:
    """The collectives of a program that may run with others; of the `stacked` kinds with those of their shape."""

    def __init__(
        self,
        graph: Graph,
        records: Mapping[Op, CollectiveRecord],
        mesh: Mesh,
        stacked: Collection[str] = (),
    ):
        self._graph, self._records, self._mesh, self._bytes = graph, records, mesh, LocalBytes(graph)
        self._stacked = stacked
        self._shardings = value_shardings(graph)

    def of(self, block: Block) -> Iterator[BucketMember]:
        for op in block.ops:
            record = self._records.get(op)
            key = self._key(op, record) if record is not None and record.wire_bytes else None
            if record is not None and key is not None:
                before, after = map(self._bytes.of, (op.operands[0], op.results[0]))
                yield BucketMember(op, record, key, before, after, self._is_relaid(op))

    def is_barrier(self, op: Op) -> bool:
        """Whether nothing may move from one side of an op to the other."""
        is_users = op.key in SENT or (op.name in COLLECTIVE_OPS and op not in self._records)
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
        if op.name not in COLLECTIVE_OPS or _HIDDEN.intersection(op.attributes):
            return None
        if sharding is None or not _is_in_bytes(value):
            return None
        reduction = reduction_from_attributes(op.attributes) if record.kind in REDUCING else ""
        if record.kind == "all_reduce" and not has_native_all_reduce(reduction, numpy_dtype(value.dtype)):
            return None
        shape = self._shape(op) if record.kind in self._stacked else ()
        if shape is None:
            return None
        return record.kind, sharding.mesh, self._group(op, sharding), value.dtype, reduction, shape

    def _shape(self, op: Op) -> object:
        """What blocks have in common that are stacked: their shapes before and after, and what is said of their
        dimensions."""
        said = _said(op)
        return (*map(self._bytes.shape, (op.operands[0], op.results[0])), said) if stacks(said) else None

    def _is_relaid(self, op: Op) -> bool:
        """Whether the dimension that is in lanes is joined from blocks that fill none: what is taken from a stack of
        such results is copied."""
        before, after = (self._bytes.shape(value) for value in (op.operands[0], op.results[0]))
        dim = in_lanes(after)
        return bool(after) and before[dim] < after[dim] and before[dim] % LANES != 0

    def _group(self, op: Op, target: TensorSharding) -> object:
        """The devices that exchange something: those along axes, or pairs."""
        said = _said(op)
        if said.kind != "collective_permute":
            return sort_and_merge(said.all_axes, self._mesh)
        source = self._shardings.get(op.operands[0]) or TensorSharding.replicated(target.mesh, target.rank)
        apart = manual_axes_around(op)
        axes = [axis for s in (source, target) for dim in (*s.axes, s.unreduced_axes, apart) for axis in dim]
        refined = RefinedMesh.of(self._mesh, axes).with_meshes(self._graph.meshes)
        return tuple(permutation_pairs(apart_along(source, apart), apart_along(target, apart), refined))


def _said(op: Op) -> SdyCollective:
    return collective_from_attributes(op.name, op.attributes)


def _is_in_bytes(value: Value) -> bool:
    """Whether every element has whole bytes: others travel as bytes, each in its own way."""
    dtype = numpy_dtype(value.dtype)
    return dtype == np.bool_ or not any(bits in dtype.name for bits in ("int2", "int4", "float4", "float6"))


# The order of a block's ops, as buckets of collectives are formed in it.

_SMALL = 1 / 64
"""The share of a bucket's bytes up to which a member is small, and an op that goes with members. Small members have
buckets of their own: a fusion that reads a small part of a bucket, such as a bias, keeps all of it in memory until it
runs. Measured (2026-11, `scripts/bench_bytes`, eight CPU devices): GPT's step with FSDP weights took 1.29 of its memory
without, 1.10 with it."""


_Neighbours = Mapping[Op, Sequence[Op]]
"""Per op, the ops of its block that make what it takes, or that take what it makes."""


class BlockOrder:
    """The ops of a block in an order that changes as buckets are formed."""

    def __init__(
        self, block: Block, candidates: BucketCandidates, size: BucketSize, mesh: Mesh, room: Mapping[Op, float]
    ):
        self._block, self._size, self._mesh, self._room = block, size, mesh, dict(room)
        self._waiting: dict[object, list[BucketMember]] = {}
        self._members = set[Op]()
        self._awaited: dict[Op, set[Op]] = {}
        """Per member that was asked for, the members for which it waits."""
        for member in candidates.of(block):
            if size.gains(member, mesh):
                is_small = size.packs(member.record) and member.held <= _SMALL * size.held
                alike = (member.key, member.grows, is_small)
                self._waiting.setdefault(alike, []).append(member)
                self._members.add(member.op)
        self._order = list(block.ops)
        self._is_barrier = {op: candidates.is_barrier(op) for op in block.ops}
        self._moves = {op: candidates.moves(op, _SMALL * size.held) for op in block.ops}
        self._makers = {op: list(dict.fromkeys(self._makers_of(op))) for op in block.ops}
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

    def buckets(self) -> list[list[BucketMember]]:
        """Forms the block's buckets, and orders the module's ops accordingly."""
        found = []
        for waiting in self._waiting.values():
            in_order = False
            while len(waiting) > 1:
                if not in_order:
                    waiting.sort(key=self._rank)
                bucket, place = self._filled(waiting)
                in_order = len(bucket) == 1
                if not in_order:
                    self._place(bucket, place)
                    found.append(bucket)
                for member in bucket:
                    waiting.remove(member)
        if found:
            self._reorder()
        return found

    # Positions.

    def _number(self) -> None:
        """Numbers the ops. After which op each can run at the earliest, and before which at the latest, is found for
        those that are asked for: of thousands a bucket concerns a few."""
        self._position = {op: n for n, op in enumerate(self._order)}
        self._barriers = [n for n, op in enumerate(self._order) if self._is_barrier[op]]
        self._earliest, self._latest = dict[Op, int](), dict[Op, int]()

    def _low(self, op: Op) -> int:
        """The last op that has to run before an op."""
        before = bisect_left(self._barriers, self._position[op]) - 1
        self._settle(self._makers, op, self._earliest, self._low)
        made = (self._earliest.get(maker, self._position[maker]) for maker in self._makers[op])
        return max(self._barriers[before] if before >= 0 else -1, *made, -1)

    def _high(self, op: Op) -> int:
        """The first op that has to run after an op."""
        after = self._barriers[bisect_right(self._barriers, self._position[op])]
        self._settle(self._users, op, self._latest, self._high)
        return min(after, *(self._latest.get(user, self._position[user]) for user in self._users[op]), after)

    def _settle(self, around: _Neighbours, op: Op, known: dict[Op, int], bound: Callable[[Op], int]) -> None:
        """Finds the bounds of those next to an op that move, those next to them first."""
        waiting = [other for other in around[op] if self._moves[other] and other not in known]
        while waiting:
            op = waiting[-1]
            before = [other for other in around[op] if self._moves[other] and other not in known]
            if before:
                waiting += before
            else:
                known.setdefault(op, bound(op))
                waiting.pop()

    def _makers_of(self, op: Op) -> Iterator[Op]:
        """The ops of the block that make what an op takes."""
        return (v.owner for v in op.operands if isinstance(v.owner, Op) and v.owner.block is self._block)

    def _rank(self, member: BucketMember) -> tuple[int, int]:
        """The order in which members are taken: as they can run last where they make more of less, else first."""
        place = self._high(member.op) if member.grows else self._low(member.op)
        return place, self._position[member.op]

    # Buckets.

    def _filled(self, waiting: Sequence[BucketMember]) -> tuple[list[BucketMember], int]:
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

    def _has_room(self, held: float, place: int, bucket: Sequence[BucketMember]) -> bool:
        """Whether there is room for a bucket from when it runs to when its last member would have run, or from when its
        first member would have run."""
        return all(self._room.get(op, math.inf) >= held for op in self._spanned(place, bucket))

    def _spanned(self, place: int, bucket: Sequence[BucketMember]) -> list[Op]:
        ends = [place, *(self._position[member.op] for member in bucket)]
        return self._order[min(ends) : max(ends) + 1]

    def _is_independent(self, member: BucketMember, bucket: Sequence[BucketMember]) -> bool:
        awaited = self._awaited_by(member.op)
        return not any(m.op in awaited or member.op in self._awaited_by(m.op) for m in bucket)

    def _awaited_by(self, op: Op) -> set[Op]:
        """The members that a member takes something from through ops that move with it. No order changes that, and it
        is asked for each pair: without a memory it took half of the time of planning 12 layers for TPUs (2026-11)."""
        if op not in self._awaited:
            self._awaited[op] = self._closure(op, self._makers) & self._members
        return self._awaited[op]

    def _closure(self, op: Op, around: _Neighbours) -> set[Op]:
        """The ops before or after an op through others that move with it, the first ones that do not included."""
        found, waiting = set[Op](), [op]
        while waiting:
            new = [other for other in around[waiting.pop()] if other not in found]
            found.update(new)
            waiting += [other for other in new if self._moves[other]]
        return found

    def _place(self, bucket: Sequence[BucketMember], place: int) -> None:
        """Moves a bucket right before the op at a place, with what has to run before and after it."""
        members = [member.op for member in bucket]
        makers = set().union(*(self._closure(op, self._makers) for op in members))
        users = set().union(*(self._closure(op, self._users) for op in members))
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


# Small collectives of one kind, group of devices and element type run as one, in buckets.
#
#     %1 = sdy.all_gather %w1          %1 = sdy.all_gather %w1 {sdy_jax.bucket = 0}
#     %2 = dot %x, %1                  %3 = sdy.all_gather %w2 {sdy_jax.bucket = 0}
#     %3 = sdy.all_gather %w2    ->    %2 = dot %x, %1
#     %4 = dot %2, %3                  %4 = dot %2, %3
#
# A step over a program whose collectives are all there. Members of a bucket follow each other in one block, none
# waits for another, and each has its place after what makes its operand and before its first user; ops that only
# compute element by element, or on few bytes, go with them. What makes values larger is bucketed in the order of its
# first users and runs as late as it may, all else in the order of its operands and as early as it may: so a bucket
# holds neighbours, and adds no more than its own bytes to what is live. Nothing moves across loops, branches, effects
# and collectives that the program holds itself. See docs/explanation/schedule.md#buckets.

_SHARE_OF_MEMORY = 1 / 8
"""The share of what a device holds that a bucket's blocks may have. Guessed: with more, a bucket becomes what is
largest in memory; with less, latency is paid more often."""

_SHARE_OF_DEVICE = 1 / 1024
"""The share of what a device may hold that a bucket's blocks may have in any program. Measured (2026-11, decoding
steps of four small layers by the prices of H100s): without, what programs of some MiB gather stays apart, and takes
1.06 of the time of layouts that gather nothing, for 0.93 with it. Large programs come to more by the other share."""

_BLOCKS = 4
"""The bytes of the blocks of a bucket of stated size, over what it sends: none has more. Guessed: gathered blocks are
larger than what is sent by the group's size, and should not be held all at once."""

_STACKS = 1 / 64
"""The share of what a device holds by which stacks that nobody asked for may add to it. Guessed: what saves time by
default must not cost memory that one sees."""

_TRIED = (1, 1 / 4, 1 / 16)
"""Parts of a bucket's size that are tried until the program keeps within its memory. Guessed: each is one more pass
over the program; without the last ones nothing is combined where little memory is left."""


class Combined(NamedTuple):
    """A module with buckets: what a device holds, and the new numbers of the ops in pre-order."""

    held: Peak
    order: Sequence[int]


def combine_collectives(
    placed: PlacedProgram, inserted: Inserted, setting: Setting, held: Callable[[], Peak]
) -> Combined | None:
    """Forms buckets in a partitioned module, in place, such that it keeps within the memory that there is.

    Args:
        placed: the module, whose collectives are all there; each bucket becomes one record of its report.
        inserted: those that nothing hides.
        setting: what collectives cost, which says how large buckets are; whether they are combined, and what a device
            may hold.
        held: says what a device holds at most while it runs the module.

    Returns:
        What became of the module; None where there are no buckets.
    """
    combining, target = setting.policy.combine, setting.target
    if not combining.kinds:
        return None
    graph = placed.partitioned
    records = {n: inserted[op.mlir] for n, op in enumerate(graph.ops) if op.mlir in inserted}
    if len(records) < 2:
        return None
    before = held()
    peak, live = before.total, {id(op): size + before.total - before.bytes for op, size in before.at}
    usual = max(_SHARE_OF_MEMORY * peak, _SHARE_OF_DEVICE * setting.available)
    bucket = usual if combining.sent is None else _BLOCKS * combining.sent
    added = _STACKS * peak if combining.stacked and combining.sent is None else math.inf
    for smaller in _TRIED:
        copy = Graph(copied(placed.module))
        ops = pre_order(copy.module)
        size = BucketSize(setting.costs, combining, bucket * smaller)
        limit = max(min(peak + min(size.held, added), setting.limit), peak)
        room = {copy.ops[n]: limit - live[id(op.mlir)] for n, op in enumerate(graph.ops) if id(op.mlir) in live}
        buckets = combine(copy, {copy.ops[n]: record for n, record in records.items()}, placed.mesh, size, room)
        if not buckets:
            return None
        found = peak_of(Graph(copy.module), target)
        if found.total <= limit:
            now = {op: number for number, op in enumerate(pre_order(copy.module))}
            replace_contents(placed.module, copy.module)
            placed.report.combine(buckets)
            return Combined(found, [now[op] for op in ops])
    return None


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
    candidates = BucketCandidates(graph, records, mesh, size.combining.stacked)
    found: Buckets = []
    for block in dict.fromkeys(op.block for op in records):
        assert block is not None
        for bucket in BlockOrder(block, candidates, size, mesh, room).buckets():
            for member in bucket:
                attributes = member.op.mlir.attributes
                attributes[BUCKET] = ir.IntegerAttr.get(_integers(graph.context), len(found))
                if size.packs(member.record):
                    attributes[PACKED] = ir.UnitAttr.get(graph.context)
            found.append([member.record for member in bucket])
    return found


def _integers(context: ir.Context) -> ir.Type:
    return ir.IntegerType.get_signless(64, context)
