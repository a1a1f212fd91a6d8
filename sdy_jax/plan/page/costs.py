"""The sections on what a device sends, holds and computes in all, and on what costs most."""

from __future__ import annotations

from collections.abc import Iterator

from sdy_jax.plan.page.collectives import grouped
from sdy_jax.plan.page.sections import Section
from sdy_jax.plan.record.program import RecordedMemory
from sdy_jax.plan.record.record import PlanRecord
from sdy_jax.plan.record.recorded_plan import RecordedTime
from sdy_jax.representation.type_text import amount_text, bytes_text, count_text, flops_text

_WEIGHT = 10.0
"""Lines of these sections beside those of others. Chosen: they are what a reader looks for first."""

_SLOWER = 0.01
"""The share of its time by which a plan has to be slower than another one for its page to say so first. Chosen: holding
less is worth a little time in any plan."""

_LONG = 4
"""Collectives, or tenths of ops, beyond which a page says what costs most. Chosen: of fewer a reader sees it."""


def device_section(record: PlanRecord) -> Section:
    """What one device sends, holds, computes, and how long that takes by the cost model."""
    rows: list[tuple[str, ...]] = [("sends", _sends(record))]
    if record.memory is not None:
        rows.append(("holds", _holds(record.memory)))
    if record.flops:
        repeated = f", {flops_text(record.repeated_flops)} of it as others do" if record.repeated_flops else ""
        rows.append(("computes", flops_text(record.flops) + repeated))
    if record.time.unit == "seconds":
        rows.append(("takes", _takes(record.time, record.known)))
    if record.time.origin:
        rows.append((f"costs in {record.time.unit}: {record.time.origin}",))
    return Section("each device", rows, weight=_WEIGHT)


def verdict_section(record: PlanRecord) -> Section:
    """What a reader has to know before all else: that a device has not so much memory, and that other layouts would
    take less time."""
    rows = [*_too_large(record), *_slower(record)]
    return Section(rows[0], [(row,) for row in rows[1:]], weight=_WEIGHT) if rows else Section("")


def _too_large(record: PlanRecord) -> Iterator[str]:
    memory = record.memory
    if memory is not None and memory.available and memory.peak > memory.available:
        largest = next((f", {share} of it {type_} ({line})" for share, _, type_, line in _most_held(record)), "")
        yield (
            f"does not fit: holds {bytes_text(memory.peak)} of {bytes_text(memory.available)}{largest}; no plan found "
            "holds less. To fit: more devices, a smaller batch, or jax.checkpoint"
        )


def _slower(record: PlanRecord) -> Iterator[str]:
    layouts, memory = record.layouts, record.memory
    if layouts is None or layouts.exposed <= (1 + _SLOWER) * layouts.proposed_exposed or memory is None:
        return
    is_over = memory.available and layouts.proposed_held > memory.available
    of = f" of {bytes_text(memory.available)}" if is_over else ""
    yield (
        f"slower than op by op around the propagated layouts, {layouts.exposed / layouts.proposed_exposed:.2f} of the "
        f"time: these would hold {bytes_text(layouts.proposed_held)}{of}, this plan {bytes_text(memory.peak)}"
    )


def _sends(record: PlanRecord) -> str:
    kinds = grouped((each for each in record.counted if each.total_wire_bytes), lambda each: each.kind)
    if not kinds:
        return "nothing"
    least = "" if record.known else "at least "
    parts = [
        f"{bytes_text(group.bytes)} in {sum(m.times for m in group.members)} {group.first.kind}" for group in kinds
    ]
    whole = f"{bytes_text(record.wire_bytes)}: " if len(parts) > 1 else ""
    return f"{least}{whole}{', '.join(parts)}"


def _holds(memory: RecordedMemory) -> str:
    shared = f", {bytes_text(memory.shared)} of them in donated arguments" if memory.shared else ""
    available = f" of {bytes_text(memory.available)}" if memory.available else ""
    return (
        f"{bytes_text(memory.peak)}{available} at most: {bytes_text(memory.arguments)} of arguments, "
        f"{bytes_text(memory.results)} of results{shared}, {bytes_text(memory.temporaries)} in between"
    )


def _takes(time: RecordedTime, known: bool) -> str:
    hidden = f", {amount_text(time.unit, time.hidden)} of it hidden" if time.hidden else ""
    return (
        f"{'' if known else 'at least '}{amount_text(time.unit, time.total)}, estimated: "
        f"{amount_text(time.unit, time.compute)} compute, {amount_text(time.unit, time.communication)} "
        f"communication{hidden}"
    )


def most_section(record: PlanRecord) -> Section:
    """The line that sends most, the value that takes most memory, and the line that computes most; not of programs of
    which one sees that."""
    if len(record.collectives) <= _LONG and len(record.ops) <= 10 * _LONG:
        return Section("")
    rows = [*_most_sent(record), *_most_held(record), *_most_computed(record)]
    return Section("costs most" if rows else "", rows, {0}, weight=_WEIGHT)


def _most_sent(record: PlanRecord) -> Iterator[tuple[str, ...]]:
    if not record.wire_bytes:
        return
    group = grouped(record.counted, lambda each: (each.kind, each.place.lines))[0]
    what = f"{group.first.kind} for {group.first.cause.removeprefix('stablehlo.')}"
    yield f"{group.bytes / record.wire_bytes:.0%}", "of what it sends", what, group.first.place.lines


def _most_held(record: PlanRecord) -> Iterator[tuple[str, ...]]:
    memory = record.memory
    if memory is None or not memory.largest or not memory.peak:
        return
    largest = memory.largest[0]
    value = record.value_of.get(largest.value)
    if value is None:
        return
    alike = [b for b in memory.largest if (v := record.value_of.get(b.value)) and v.tensor.type == value.tensor.type]
    held = sum(buffer.bytes for buffer in alike)
    line = record.ops[value.op].place.lines if value.op is not None else ""
    yield f"{held / memory.peak:.0%}", "of what it holds", f"{value.tensor.type}{count_text(len(alike))}", line


def _most_computed(record: PlanRecord) -> Iterator[tuple[str, ...]]:
    sums: dict[tuple[str, str], float] = {}
    for op in record.ops:
        key = op.title if op.kernel is not None else op.place.primitive or op.kind, op.place.lines
        sums[key] = sums.get(key, 0.0) + op.flops * op.times
    (what, line), most = max(sums.items(), key=lambda item: item[1], default=(("", ""), 0.0))
    if most and record.flops:
        yield f"{min(1.0, most / record.flops):.0%}", "of what it computes", what, line
