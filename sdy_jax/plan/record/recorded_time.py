"""The timeline and the roofline of a plan as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from sdy_jax.ir.graph import Op
from sdy_jax.ir.meshes import Mesh
from sdy_jax.lowering.ops.products import pace
from sdy_jax.lowering.planner.report import CollectiveRecord
from sdy_jax.lowering.planner.schedule.timeline import Repeated, TimeSlice
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.target import machines
from sdy_jax.plan.estimates import flops
from sdy_jax.plan.questions import Answers
from sdy_jax.plan.record.program import RecordedHostMemory
from sdy_jax.plan.record.recorded_ops import OpRecords
from sdy_jax.plan.record.timeline import (
    RecordedLane,
    RecordedLoop,
    RecordedResource,
    RecordedRoofline,
    RecordedSlice,
    RecordedTimeline,
)

# The timeline.

COMPUTE, HOST = RecordedLane("compute"), RecordedLane("host")


def timeline_record(plan: Answers, ops: OpRecords | None, phases: Mapping[Op, str]) -> RecordedTimeline:
    """When ops compute and collectives are sent; `phases`: those of ops."""
    placed, index = plan.placed_in_time, ops.index if ops is not None else {}
    of_links = [links_of(record, plan.program.mesh) for record in plan.collectives]
    lanes = lanes_of({of_links[each.collective] for each in placed.slices if each.collective is not None})
    number = {lane: n for n, lane in enumerate(lanes)}

    def recorded(each: TimeSlice) -> RecordedSlice:
        lane = 0 if each.collective is None else number[of_links[each.collective]]
        phase, op = ("", None) if each.op is None else (phases.get(each.op, ""), index.get(each.op))
        times = max(1, round(each.times))
        return RecordedSlice(lane, each.start, each.duration, times, op, each.collective, each.is_hidden, phase)

    slices = tuple(map(recorded, placed.slices))
    loops = (_loop(each, index) for each in placed.loops if each.op in index)
    starts = tuple(_starts(ops.order, placed.starts)) if ops is not None else ()
    return RecordedTimeline(lanes, slices, tuple(loops), starts)


def lanes_of(used: Iterable[RecordedLane]) -> tuple[RecordedLane, ...]:
    """Compute, and the links that are used, those of fewer axes first."""
    return COMPUTE, *sorted(set(used), key=lambda lane: (len(lane.axes), lane.axes))


def _loop(each: Repeated, index: Mapping[Op, int]) -> RecordedLoop:
    return RecordedLoop(index[each.op], each.start, each.duration, max(1, round(each.trips)))


def _starts(order: Sequence[Op], known: Mapping[Op, float]) -> Iterator[float]:
    """When ops begin; those of blocks that take no time when what is before them does."""
    at = 0.0
    for op in order:
        at = known.get(op, at)
        yield at


def links_of(record: CollectiveRecord, mesh: Mesh) -> RecordedLane:
    """The links over which a collective runs: of whole axes, in mesh order. Devices that are permuted may send along
    any."""
    names = {axis.name for axis in record.axes} or set(mesh.axis_names)
    axes = tuple(name for name in mesh.axis_names if name in names)
    return RecordedLane(", ".join(axes), axes)


# What moves from and to the host.


def with_host(timeline: RecordedTimeline, host: Sequence[RecordedHostMemory], costs: CostModel) -> RecordedTimeline:
    """With what moves from and to the memory of the host on a lane of its own, at the rate of the host's link: in each
    direction one after the other, as soon as the op is there beside which it moves."""
    moving = [(number, each) for number, each in enumerate(host) if each.times]
    if not moving:
        return timeline
    known = machines().get(costs.machine)
    rate, lane = (known.links.host if known is not None and costs.unit == "seconds" else 0.0), len(timeline.lanes)
    ends = {each.op: each.end for each in timeline.slices if not each.lane}
    free, found = [0.0, 0.0], list[RecordedSlice]()
    for asked, number, each in sorted((_asked(each, timeline, ends), number, each) for number, each in moving):
        start, duration = max(asked, free[each.leaves]), each.total / rate if rate else 0.0
        free[each.leaves] = start + duration
        found.append(RecordedSlice(lane, start, duration, each.times, each.op, hidden=True, host=number))
    slices = sorted([*timeline.slices, *found], key=lambda each: each.start)
    return replace(timeline, lanes=(*timeline.lanes, HOST), slices=tuple(slices))


def _asked(each: RecordedHostMemory, timeline: RecordedTimeline, ends: Mapping[int | None, float]) -> float:
    """When something may begin to move."""
    if each.op is None:
        return timeline.total if each.leaves else 0.0
    start = timeline.starts[each.op]
    return ends.get(each.op, start) if each.leaves else start


# The roofline.

_PER_PRODUCT = 2
"""Given: a multiplication with an addition is one operation of the cost model, and two that people count."""


def roofline_record(plan: Answers, timeline: RecordedTimeline) -> RecordedRoofline | None:
    """What a step uses beside what a device can do; None where the cost model knows no time."""
    costs = plan.costs
    if costs.unit != "seconds" or "partitioned" not in plan.stages:
        return None
    all_flops, resources = flops(plan.work), list[RecordedResource]()
    if costs.flop:
        paced = flops(tuple(replace(done, flops=done.flops * pace(op, costs)) for op, done in plan.work_by_op.items()))
        mixed = all_flops / paced if paced else 1.0  # of the peaks of its types, as often as each is used
        resources.append(RecordedResource("compute", all_flops, mixed * _PER_PRODUCT / costs.flop))
    if costs.memory:
        resources.append(RecordedResource("memory", _traffic(plan), 1 / costs.memory))
    resources += _of_links(plan, timeline.lanes[1:])
    return RecordedRoofline(tuple(resources), plan.time.total, all_flops - plan.repeated_flops)


def _traffic(plan: Answers) -> float:
    """The bytes that a device reads from its memory and writes to it."""
    placed = plan.placed_in_time
    return math.fsum(each.traffic for each in placed.slices)


def _of_links(plan: Answers, lanes: Sequence[RecordedLane]) -> Iterator[RecordedResource]:
    """What is sent over the links of each set of axes, at the rate of those that it runs over."""
    mesh, sent = plan.program.mesh, {lane: list[tuple[float, float]]() for lane in lanes}
    for record in plan.collectives:
        if record.wire_bytes and (lane := links_of(record, mesh)) in sent:
            wire = record.estimated_times * record.wire_bytes
            sent[lane].append((wire, wire / plan.costs.speed(record.kind, record.axes, mesh)))
    for lane, found in sent.items():
        wire, seconds = (math.fsum(each) for each in zip(*found, strict=True))
        yield RecordedResource(lane.name, wire, wire / seconds)
