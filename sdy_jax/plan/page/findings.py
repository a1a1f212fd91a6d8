"""The sections on what the planner chose and found: meshes, automatic layouts, moves at the border, layouts that
differ from propagation, padding, repeated work, notes; and pipelines.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from sdy_jax.ir.jax_shardings import amount_text, bytes_text, count_text, flops_text
from sdy_jax.plan.page.text import Section, aligned
from sdy_jax.plan.record.program import RecordedHostMemory, RecordedPipeline, RecordedTried
from sdy_jax.plan.record.record import PlanRecord
from sdy_jax.plan.record.recorded_plan import (
    RecordedAutomatic,
    RecordedChange,
    RecordedComparedMesh,
    RecordedLayouts,
    RecordedMeasured,
    RecordedNote,
)

# The sections on what the planner chose and found: meshes, automatic layouts, moves at the border, layouts that
# differ from propagation, padding, repeated work, and notes.

_STATED, _TABLE = 8.0, 10.0
"""Lines of what `AUTO` chose, and of tables that compare, beside those of other sections. Chosen: one pastes the one,
and the others are short."""

_OTHER_WORK = 0.01
"""The share of its work from which on a plan says that it does another amount than the baseline. Chosen: it prints as a
percent."""

_REPEATED, _REPEATED_SHARE = 1e6, 0.01
"""The least repeated operations that a page lists, and their least share of all that a device performs. Chosen: less is
no reader's concern."""

_SAME = 0.005
"""The share by which amounts differ at least. Given: less prints as 1.00."""

_NONE = Section("")


def automatic_sections(record: PlanRecord) -> list[Section]:
    """The layouts that were chosen for arguments and results, as they can be stated; and what the usual ones cost."""
    automatic = record.automatic
    if automatic is None:
        return []
    stated = [line.removeprefix("  ") for each in automatic.stated for line in each.split("\n")]
    rows = [(each.name, *_measured(record, each, automatic)) for each in automatic.measured]

    def left_out(hidden: int) -> str:
        return f"and {hidden} more lines: plan.input_specs and plan.output_specs have all"

    chosen = Section("automatic layouts", [(line,) for line in stated], weight=_STATED, rest=left_out)
    return [chosen, Section("automatic layouts beside the usual ones", rows, weight=_TABLE)]


def _measured(record: PlanRecord, each: RecordedMeasured, beside: RecordedAutomatic) -> tuple[str, str, str]:
    """What a plan sends, holds, and costs beside the chosen one, which comes first."""
    limit, chosen = beside.limit, beside.measured[0]
    too_much = ", too much" if limit is not None and each.peak > limit else ""
    takes = "time" if record.time.unit == "seconds" else "cost"
    share = f"{each.cost / chosen.cost:.2f} of the {takes}" if chosen.cost else ""
    return f"sends {amount_text(record.time.unit, each.sent)}", f"holds {bytes_text(each.peak)}{too_much}", share


def meshes_section(record: PlanRecord) -> Section:
    """What plans take on the meshes of which one was chosen."""
    rows = [mesh_columns(record, each) for each in record.meshes]
    return Section("meshes", rows, weight=_TABLE) if rows else _NONE


def mesh_columns(record: PlanRecord, each: RecordedComparedMesh) -> tuple[str, ...]:
    """A mesh with what the plan on it takes, sends and holds, and its share of what the chosen one takes."""
    if each.time is None:
        return each.mesh, "no plan fits", "", f"holds {bytes_text(each.peak)} at least", ""
    takes, chosen = "takes" if record.time.unit == "seconds" else "costs", record.time.total
    remarks = [] if each.fits else ["too much"]
    remarks += ["chosen"] if each.chosen else [f"{each.time / chosen:.2f} of that"] if chosen else []
    return (
        each.mesh,
        f"{takes} {amount_text(record.time.unit, each.time)}",
        f"sends {bytes_text(each.wire_bytes)}",
        f"holds {bytes_text(each.peak)}",
        ", ".join(remarks),
    )


def moves_section(record: PlanRecord) -> Section:
    """Arguments that come in another layout than they are taken in."""
    rows = [
        (each.path, f"{each.move} -> {each.tensor.type}", bytes_text(each.moved_bytes))
        for each in (*record.closed_over, *record.arguments)
        if each.move
    ]
    return Section("moves at the border (bytes that a device receives, at least)", rows) if rows else _NONE


def host_section(record: PlanRecord) -> Section:
    """What lies in the memory of the host, and what moves from and to it, when."""
    rows = [host_columns(each) for each in record.host]
    return Section("host memory (bytes of a device's block)", rows, {2}) if rows else _NONE


def host_columns(each: RecordedHostMemory) -> tuple[str, ...]:
    """What it is, its type, its bytes, when it moves, and at which line."""
    size = bytes_text(each.bytes) if each.bytes else ""
    if each.path:
        return each.path, each.type, size, f"{each.what} that lies there", ""
    trips = f"{each.times} trips" if each.times > 1 else ""
    trips = trips if each.times_known else f"{trips} ? trips".strip()
    return each.what, each.type, size, trips, f"{each.line}{' (backward)' if each.backward else ''}"


def layouts_section(record: PlanRecord) -> Section:
    """What the choice of layouts saves beside the plan op by op, which of the user's splits it does not use, and the
    largest values that it lays out otherwise."""
    layouts = record.layouts
    if layouts is None or not layouts.sent or (not layouts.changed and layouts.bound is None):
        return _NONE
    changed = sorted(layouts.changed, key=lambda change: -change.bytes)
    rows: list[tuple[str, ...]] = [(line,) for line in _unused(record, changed)]
    rows += [(change.chosen, f"instead of {change.baseline}{_of_many(change)}", change.line) for change in changed]
    return Section(f"layouts: {layout_choice(record.time.unit, layouts)}", rows, weight=0.5)


def _of_many(change: RecordedChange) -> str:
    stated = f", stated {change.stated}" if change.stated else ""
    return f", {change.count} values{stated}" if change.count > 1 else stated


def layout_choice(unit: str, layouts: RecordedLayouts) -> str:
    """What the choice saves beside the plan op by op around the propagated layouts, by the planner's model; and the
    bound, where that is known soon."""
    saved, verb = layouts.baseline_sent - layouts.sent, "takes" if unit == "seconds" else "sends"
    of_that = f" ({layouts.sent / layouts.baseline_sent:.2f} of that)" if layouts.baseline_sent else ""
    amount = f"{amount_text(unit, abs(saved))} {'less' if saved > 0 else 'more'}"
    to_send = " to send" if unit == "seconds" else ""
    beside = f"{amount}{to_send} than the propagated ones op by op{of_that}"
    if abs(saved) <= _SAME * layouts.sent:
        beside = f"as {'long to send' if unit == 'seconds' else 'much'} as the propagated ones op by op"
    work, baseline_work = layouts.cost - layouts.sent, layouts.baseline_cost - layouts.baseline_sent
    if abs(work - baseline_work) > _OTHER_WORK * baseline_work > 0:
        beside += f", with {work / baseline_work:.2f} of the work"
    return f"chosen for the whole program, which {verb} {beside}{_bound(layouts)}"


def _bound(layouts: RecordedLayouts) -> str:
    """What no other choice sends less than."""
    if layouts.bound is None or not layouts.sent:
        return ""
    share = layouts.bound / layouts.sent
    return "; none send less" + (f" than {share:.2f} of it" if share < 1 - _SAME else "")


def _unused(record: PlanRecord, changed: Sequence[RecordedChange]) -> Iterator[str]:
    """For each mesh axis along which the user split something, in how many values it does not split what propagation
    made of that; and how to have it so."""
    said = False
    for axis in (axis.name for axis in record.mesh.axes):
        found = [change for change in changed if axis in change.unused]
        if found and _is_stated(record, axis):
            count, largest, said = sum(change.count for change in found), found[0], True
            where = f"{largest.baseline} at {largest.line}"
            values = "1 value" if count == 1 else f"{count} values, the largest"
            yield f"your split along {axis!r} is not used as propagated in {values} {where}"
    if said:
        yield "partition(layouts='propagated') keeps every value as propagated"


def _is_stated(record: PlanRecord, axis: str) -> bool:
    """Whether the user split an argument, a result or a value inside along an axis."""
    border = (*record.arguments, *record.closed_over, *record.results)
    stated = [value.stated or (value.tensor.type if value.origin == "passed" else "") for value in border]
    return any(re.search(rf"\b{re.escape(axis)}\b", text) for text in (*stated, *(a.text for a in record.annotations)))


def recomputed_section(record: PlanRecord) -> Section:
    """The values that are not held, and the ops that run once more for them, those of one line together."""
    again = record.recomputed
    if again is None:
        return _NONE
    held = _summed((each.type, each.line, each.bytes) for each in again.values)
    ran = _summed((each.op, each.line, each.flops) for each in again.ops)
    rows = [("not held", what, bytes_text(size), line) for what, line, size in held]
    rows += [("again", what, flops_text(flops) if flops else "", line) for what, line, flops in ran]
    flops = sum(each.flops for each in again.ops)
    title = f"computed again (per device, {flops_text(flops)}, to hold {bytes_text(again.bytes)} less)"
    return Section(title, rows, {2}, 1.0)


def blocked_section(record: PlanRecord) -> Section:
    """The largest values of what is computed part by part, those of one kind and line together."""
    found = (
        (f"{each.type}  {each.parts} parts of dimension {each.dim}", each.line, each.bytes) for each in record.blocked
    )
    rows = [(what, f"{bytes_text(size)} whole", line) for what, line, size in _summed(found)]
    return Section("computed part by part (bytes per device)", rows, {1}, 1.0) if rows else _NONE


def local_sorts_section(record: PlanRecord) -> Section:
    """The sorts of which devices sort their own rows, those of one line together."""
    found = ((f"{each.rows} rows", f"along {', '.join(each.axes)}", each.line) for each in record.local_sorts)
    rows = [(what + count_text(count), axes, line) for (what, axes, line), count in Counter(found).items()]
    return Section("each device sorts its own rows", rows, weight=1.0) if rows else _NONE


def padding_section(record: PlanRecord) -> Section:
    """The largest padded values, one line for those of one type and line of the source."""
    sums = _summed((value.type, value.line, value.bytes) for value in record.padding)
    rows = [(what, bytes_text(size), line) for what, line, size in sums]
    return Section("padding (bytes per device)", rows, {1}, 0.5) if rows else _NONE


def _summed(rows: Iterable[tuple[str, str, float]]) -> list[tuple[str, str, float]]:
    """The sums of those of one kind and line, with their number, the largest first."""
    sums: dict[tuple[str, str], list[float]] = {}
    for what, line, amount in rows:
        sums.setdefault((what, line), []).append(amount)
    found = ((what + count_text(len(each)), line, sum(each)) for (what, line), each in sums.items())
    return sorted(found, key=lambda row: -row[2])


def repeated_section(record: PlanRecord) -> Section:
    """The ops that repeat much, one line for those of one type and line of the source."""
    least = max(_REPEATED, _REPEATED_SHARE * record.flops)
    sums: dict[tuple[str, ...], float] = {}
    for op in record.ops:
        if op.repeated * op.times < least:
            continue
        why = "to split it costs more" if op.is_choice else "nothing around it is split further"
        value = record.value_of.get(op.results[0]) if op.results else None
        type_ = value.tensor.type if value is not None else ""
        key = (op.kind, type_, op.place.line, f"the same on {op.alike} devices; {why}")
        sums[key] = sums.get(key, 0.0) + op.repeated * op.times
    by_work = sorted(sums.items(), key=lambda item: -item[1])
    rows = [(op, type_, flops_text(count), *rest) for (op, type_, *rest), count in by_work]
    title = "repeated work (operations per device that other devices repeat)"
    return Section(title, rows, {2}, 0.5) if rows else _NONE


def notes_section(record: PlanRecord) -> Section:
    """What moves or is computed whole because it cannot be split, and constraints that cost much; those of layers that
    are alike in one line."""
    counts: dict[str, list[RecordedNote]] = {}
    for note in dict.fromkeys((*record.notes, *record.dear)):
        counts.setdefault(_without_numbers(str(note)), []).append(note)
    rows = [(" ".join(str(each[0]).split("\n")) + count_text(len(each)),) for each in counts.values()]
    rows += [(record.layouts.repeating,)] if record.layouts is not None and record.layouts.repeating else []
    return Section("notes", rows) if rows else _NONE


def _without_numbers(text: str) -> str:
    """A note without the indices of layers: of paths, and of name scopes."""
    return re.sub(r"\[\d+\]|(?<=_)\d+", "*", text)


# The section, and the table, on pipelines.

_WEIGHT = 3.0
"""Lines of pipelines beside those of other sections. Chosen: a line per stage, of which there are few."""


class PipelineRow(NamedTuple):
    """A stage of a pipeline: its layers, the microbatches that it holds at most, the bytes of its part of stacks, and
    those that it carries from trip to trip."""

    pipeline: str
    stage: str
    layers: str
    microbatches: str
    bytes: float
    held: float
    line: str


def pipelines_section(record: PlanRecord) -> Section:
    """What each pipeline sends, and its bubble; a line per stage."""
    rows = [(line,) for each in record.pipelines for line in _lines(record, each)] + [(row,) for row in _tried(record)]
    rest = lambda hidden: f"and {hidden} more lines: plan.table('pipelines')"  # noqa: E731
    return Section("pipelines" if rows else "", rows, weight=_WEIGHT, rest=rest)


def _lines(record: PlanRecord, each: RecordedPipeline) -> Iterator[str]:
    passes = "" if len(each.kinds) > 1 else f", {each.kinds[0]} rows"
    yield (
        f"{_name(each)}{passes}{count_text(each.times)}: {each.layers} layers on {each.stages} stages, "
        f"{each.microbatches} microbatches, {each.trips} trips, bubble {each.bubble:.0%}  {each.place.lines}"
    )
    yield f"  a boundary  {_boundary(each)}"
    yield f"  a device    holds {_holds(each)}{_takes(each, record.time.unit)}"
    yield from aligned([(f"stage {row.stage}", f"layers {row.layers or '-'}", _held(row)) for row in _of(each)])
    if reason := held_reason(each):
        yield f"  {reason}"


def held_reason(each: RecordedPipeline) -> str:
    """Why the first stage holds more microbatches than there are stages, if that is the schedule's doing."""
    hops = each.stages - 1
    if not hops or each.rounds > 1 or each.held[:1] != (2 * hops + 1,) or each.microbatches <= 2 * hops + 1:
        return ""
    return (
        f"{2 * hops + 1} microbatches on stage 0 of {each.stages}: in every trip all stages run a forward and a "
        f"backward row, so a microbatch enters per trip, and is back after {hops} trips on and {hops} back"
    )


def _tried(record: PlanRecord) -> Iterator[str]:
    """The numbers of microbatches of which one was taken, and why."""
    taken = next((each for each in record.tried if each.chosen), None)
    if taken is None:
        return
    why = "takes least of what fits" if taken.fits else "none fits, and it holds least"
    yield f"microbatches: {_numbers(taken)} {why}, of {len(record.tried)} that were planned  {', '.join(taken.lines)}"
    yield from aligned([(_numbers(each), *_figures(each, record.time.unit)) for each in record.tried])


def _numbers(each: RecordedTried) -> str:
    return ", ".join(map(str, each.microbatches))


def _figures(each: RecordedTried, unit: str) -> tuple[str, str]:
    takes = "" if each.time is None else f"takes {amount_text(unit, each.time)}"
    return takes, f"holds {bytes_text(each.peak)}" + ("" if each.fits else ", does not fit")


def _name(each: RecordedPipeline) -> str:
    rounds = f" in {each.rounds} rounds" if each.rounds > 1 else ""
    return f"{each.schedule}{rounds} over {each.axis!r}"


def _boundary(each: RecordedPipeline) -> str:
    """What a device sends to its neighbours."""
    directions = ("on", each.forward_bytes), ("back", each.backward_bytes)
    sent = " and ".join(f"{bytes_text(size)} {way}" for way, size in directions if size)
    return f"{sent} per microbatch, {bytes_text(each.sent)} in all trips" if sent else "sends nothing"


def _holds(each: RecordedPipeline) -> str:
    kept = " and activations" if each.kinds[0] != "forward" else ""
    return f"{bytes_text(each.stacks)} of weights{kept}, and carries {bytes_text(each.carried)} from trip to trip"


def _takes(each: RecordedPipeline, unit: str) -> str:
    """What its rows take, where times are known."""
    if unit != "seconds" or not each.durations:
        return ""
    rows = (f"{amount_text(unit, time)} a {kind} row" for kind, time in zip(each.kinds, each.durations, strict=True))
    return f"; takes {', '.join(rows)}"


def _held(row: PipelineRow) -> str:
    several = "" if row.microbatches == "1" else "es"
    return f"holds {row.microbatches} microbatch{several} at most" if row.microbatches else ""


def pipeline_rows(record: PlanRecord) -> Iterator[PipelineRow]:
    """A row per stage."""
    for each in record.pipelines:
        yield from _of(each)


def _of(each: RecordedPipeline) -> Iterator[PipelineRow]:
    for stage, layers in enumerate(each.groups):
        held = str(each.held[stage]) if each.held else ""
        yield PipelineRow(_name(each), str(stage), layers, held, each.stacks, each.carried, each.place.lines)
