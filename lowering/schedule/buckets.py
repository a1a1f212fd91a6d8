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
See docs/explanation/schedule.md#buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op
from sdy_jax.ir.operations import copied, replace_contents
from sdy_jax.lowering.interface.collective_record import CollectiveRecord
from sdy_jax.lowering.interface.setting import Setting
from sdy_jax.lowering.memory.peak import Peak, peak_of
from sdy_jax.lowering.proposal.proposal import Proposal
from sdy_jax.lowering.schedule.bucket_members import BucketCandidates, BucketSize
from sdy_jax.lowering.schedule.bucket_order import BlockOrder
from sdy_jax.lowering.schedule.marks import Inserted
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.sdy_collectives import BUCKET, PACKED

_SHARE_OF_MEMORY = 1 / 8
"""The share of what a device holds that a bucket's blocks may have. Guessed: with more, a bucket becomes what is
largest in memory; with less, latency is paid more often."""

_BLOCKS = 4
"""The bytes of the blocks of a bucket of stated size, over what it sends: none has more. Guessed: gathered blocks are
larger than what is sent by the group's size, and should not be held all at once."""

_STACKS = 1 / 64
"""The share of what a device holds by which stacks that nobody asked for may add to it. Guessed: what saves time by
default must not cost memory that one sees."""

_TRIED = (1, 1 / 4, 1 / 16)
"""Parts of a bucket's size that are tried until the program keeps within its memory. Guessed: each is one more pass
over the program; without the last ones nothing is combined where little memory is left."""


def combine_collectives(
    proposal: Proposal, inserted: Inserted, setting: Setting, held: Callable[[], Peak]
) -> Peak | None:
    """Forms buckets in a partitioned module, in place, such that it keeps within the memory that there is.

    Args:
        proposal: the module, whose collectives are all there; each bucket becomes one record of its report.
        inserted: those that nothing hides.
        setting: what collectives cost, which says how large buckets are; whether they are combined, and what a device
            may hold.
        held: says what a device holds at most while it runs the module.

    Returns:
        What a device holds with the buckets; None where there are none.
    """
    combining, target = setting.policy.combine, setting.target
    if not combining.kinds:
        return None
    graph = proposal.partitioned
    records = {n: inserted[op.mlir] for n, op in enumerate(graph.ops) if op.mlir in inserted}
    if len(records) < 2:
        return None
    before = held()
    peak, live = before.total, {id(op): size + before.total - before.bytes for op, size in before.at}
    bucket = _SHARE_OF_MEMORY * peak if combining.sent is None else _BLOCKS * combining.sent
    added = _STACKS * peak if combining.stacked and combining.sent is None else math.inf
    for smaller in _TRIED:
        copy = Graph(copied(proposal.module))
        size = BucketSize(setting.costs, combining, bucket * smaller)
        limit = max(min(peak + min(size.held, added), setting.limit), peak)
        room = {copy.ops[n]: limit - live[id(op.mlir)] for n, op in enumerate(graph.ops) if id(op.mlir) in live}
        buckets = combine(copy, {copy.ops[n]: record for n, record in records.items()}, proposal.mesh, size, room)
        if not buckets:
            return None
        found = peak_of(Graph(copy.module), target)
        if found.total <= limit:
            replace_contents(proposal.module, copy.module)
            proposal.report.combine(buckets)
            return found
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
