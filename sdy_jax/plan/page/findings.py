"""The sections on what the planner chose and found: meshes, automatic layouts, moves at the border, layouts that differ
from propagation, padding, repeated work, and notes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sdy_jax.plan.page.sections import Section
from sdy_jax.plan.record.record import PlanRecord
from sdy_jax.plan.record.recorded_plan import (
    RecordedAutomatic,
    RecordedComparedMesh,
    RecordedLayouts,
    RecordedMeasured,
    RecordedNote,
)
from sdy_jax.representation.type_text import amount_text, bytes_text, count_text, flops_text

_STATED, _TABLE = 8.0, 10.0
"""Lines of what `AUTO` chose, and of tables that compare, beside those of other sections. Chosen: one pastes the one,
and the others are short."""

_OTHER_WORK = 0.01
"""The share of its work from which on a plan says that it does another amount than the proposal. Chosen: it prints as a
percent."""

_REPEATED, _REPEATED_SHARE = 1e6, 0.01
"""The least repeated operations that a page lists, and their least share of all that a device performs. Chosen: less is
no reader's concern."""

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


def layouts_section(record: PlanRecord) -> Section:
    """What the plan sends beside the op by op plan and the bound, and the largest values that it lays out otherwise."""
    layouts = record.layouts
    if layouts is None or not layouts.sent or (not layouts.changed and layouts.bound is None):
        return _NONE
    changed = sorted(layouts.changed, key=lambda change: -change.bytes)
    rows = [
        (
            change.chosen,
            f"for {change.proposed}"
            + count_text(change.count)
            + (f", stated {change.stated}" if change.stated else ""),
            change.line,
        )
        for change in changed
    ]
    return Section(_layout_headline(record.time.unit, layouts), rows, weight=0.5)


def _layout_headline(unit: str, layouts: RecordedLayouts) -> str:
    """What the plan sends, what the op by op plan around the propagated layouts does, and the bound, where that is
    known soon; and the devices' own work, where it differs."""
    amounts = [("estimated", layouts.sent), ("propagated", layouts.proposed_sent)]
    if layouts.bound is not None:
        amounts.append(("bound", layouts.bound))
    texts = [f"{name} {amount_text(unit, amount)}" for name, amount in amounts]
    work, proposed_work = layouts.cost - layouts.sent, layouts.proposed_cost - layouts.proposed_sent
    if abs(work - proposed_work) > _OTHER_WORK * proposed_work > 0:
        texts.append(f"{work / proposed_work:.2f} of the work")
    if layouts.bound is None:
        texts.append("plan.bound says the least")
    return f"layouts: global ({', '.join(texts)})"


def recomputed_section(record: PlanRecord) -> Section:
    """The values that are not held, and the ops that run once more for them, those of one line together."""
    again = record.recomputed
    if again is None:
        return _NONE
    held = _summed((each.type, each.line, each.bytes) for each in again.values)
    ran = _summed((each.op, each.line, each.flops) for each in again.ops)
    rows = [("not held", what, bytes_text(size), line) for what, line, size in held]
    rows += [("again", what, flops_text(flops), line) for what, line, flops in ran]
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
    title = "repeated work (operations per device that others perform as well)"
    return Section(title, rows, {2}, 0.5) if rows else _NONE


def notes_section(record: PlanRecord) -> Section:
    """What moves or is computed whole because it cannot be split, and constraints that cost much; those of layers that
    are alike in one line."""
    counts: dict[str, list[RecordedNote]] = {}
    for note in dict.fromkeys((*record.notes, *record.dear)):
        counts.setdefault(_without_numbers(str(note)), []).append(note)
    rows = [(_one_line(each[0]) + count_text(len(each)),) for each in counts.values()]
    rows += [(record.layouts.repeating,)] if record.layouts is not None and record.layouts.repeating else []
    return Section("notes", rows) if rows else _NONE


def _one_line(note: RecordedNote) -> str:
    return " ".join(str(note).split("\n"))


def _without_numbers(text: str) -> str:
    """A note without the indices of layers: of paths, and of name scopes."""
    return re.sub(r"\[\d+\]|(?<=_)\d+", "*", text)
