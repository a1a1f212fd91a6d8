"""The sections on costs: collectives, those that send most first; kernels; and what a device sends, holds and
computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from sdy_jax.base.errors import some_of
from sdy_jax.ir.jax_shardings import amount_text, bytes_text, count_text, flops_text, seconds_text
from sdy_jax.plan.page.text import Section, share_text
from sdy_jax.plan.record.differences import folded
from sdy_jax.plan.record.program import RecordedCollective, RecordedMemory
from sdy_jax.plan.record.record import PlanRecord
from sdy_jax.plan.record.recorded_plan import RecordedTime
from sdy_jax.plan.record.timeline import RecordedRoofline

# The section on collectives: equal ones folded, those that send most first.

_SHOWS = 0.005
"""Given: less prints as 0%."""

_PLAIN = 16
"""Lines up to which collectives are told apart by what they move; where there are more, only by kind, axes and line.
Chosen: for a page of `LINES`."""


@dataclass
class CollectiveLine:
    """Collectives in one line of the page."""

    members: list[RecordedCollective] = field(default_factory=list)

    @property
    def first(self) -> RecordedCollective:
        return self.members[0]

    @property
    def bytes(self) -> float:
        """What a device sends for those that count."""
        return sum(each.total_wire_bytes for each in self.members if each.counted)


def collective_section(record: PlanRecord) -> Section:
    """What runs where, for what, and what it sends; all that counts is the plan's `wire_bytes`."""
    sending = [each for each in record.collectives if each.wire_bytes]
    if not sending:
        return Section("collectives: none")
    unit, merged = record.time.unit, ""
    groups = grouped(sending, _alike)
    if sum(1 + len(group.first.members) for group in groups) > _PLAIN:
        every = [one for each in sending for one in each.single]
        groups = grouped((each for each in every if each.wire_bytes), _of_one_line)
        lines = [[_coarse(group, record.wire_bytes)] for group in groups]
        merged = ", before merging" if len(every) > len(sending) else ""
    else:
        lines = [_fine(group, record.wire_bytes if len(groups) > 1 else 0.0, unit) for group in groups]
    rows = [row for own in lines for row in own]
    sums = [size for group, own in zip(groups, lines, strict=True) for size in (group.bytes, *[0.0] * (len(own) - 1))]

    def left_out(hidden: int) -> str:
        sent = bytes_text(sum(sums[len(rows) - hidden :]))
        return f"and {hidden} more lines, {sent}: plan.table('collectives')"

    return Section(f"collectives (bytes per device{merged})", rows, {2, 3}, 2.0, left_out)


def grouped(
    collectives: Iterable[RecordedCollective], key: Callable[[RecordedCollective], object]
) -> list[CollectiveLine]:
    """The groups of collectives with one key, those that send most first."""
    groups: dict[object, CollectiveLine] = {}
    for each in collectives:
        groups.setdefault(key(each), CollectiveLine()).members.append(each)
    return sorted(groups.values(), key=lambda group: -group.bytes)


def _alike(each: RecordedCollective) -> object:
    """What tells collectives apart in a short plan: everything but layers that are alike, and their names."""
    where = each.place.lines, each.cause, folded(each.place.scope)
    how = each.times, each.times_known, each.counted, each.origin, each.again, each.is_ahead, bool(each.hidden)
    return each.kind, each.detail, each.type, each.wire_bytes, where, how, each.bucket


def _of_one_line(each: RecordedCollective) -> object:
    return each.kind, _names(each), each.place.lines, each.counted, each.origin


def _names(each: RecordedCollective) -> tuple[str, ...]:
    """The mesh axes that it runs over, in part or in whole."""
    return tuple(sorted({axis.partition(":")[0] for axis in each.axes}))


def said(each: RecordedCollective) -> str:
    """`all_gather [{"x"}, {}]`."""
    return f"{each.kind} {each.detail}".rstrip()


def _fine(group: CollectiveLine, whole: float, unit: str) -> list[tuple[str, ...]]:
    first = group.first
    if not first.members:
        return [_row(group, first, whole, unit)]
    bucket = f"{len(first.members)} of {first.dtype}"
    head = (f"{said(first)} bucket {first.bucket}", bucket, *_sent(group, whole), "", "")
    return [head, *(_row(CollectiveLine([each]), each, 0.0, unit, "  ") for each in first.members)]


def _row(
    group: CollectiveLine, first: RecordedCollective, whole: float, unit: str, indent: str = ""
) -> tuple[str, ...]:
    scope = folded(first.place.scope) if len(group.members) > 1 else first.place.scope
    cause = cause_of(first, unit) + (f" in {scope}" if scope else "")
    return (f"{indent}{said(first)}", first.type, *_sent(group, whole), first.place.lines, cause)


def _sent(group: CollectiveLine, whole: float) -> tuple[str, str, str]:
    """Bytes of all executions, their share of the whole, and how many executions of how many bytes they are."""
    first, count = group.first, len(group.members)
    sent = bytes_text(sum(each.total_wire_bytes for each in group.members))
    factors = ([f"{count} x"] if count > 1 else []) + trips(first)
    each = " ".join([*factors, bytes_text(first.wire_bytes)]) if factors else ""
    branch = [] if first.counted else ["in a smaller branch"]
    return sent, _share(group.bytes, whole), " ".join(filter(None, [each, *branch]))


def trips(each: RecordedCollective) -> list[str]:
    """`16 trips x`, `? trips x`: the executions of a collective in loops."""
    known = [f"{each.times} trips x"] if each.times != 1 else []
    return known if each.times_known else [*known, "? trips x"]


def _share(sent: float, whole: float) -> str:
    if not whole or not sent:
        return ""
    return f"{sent / whole:.0%}" if sent > _SHOWS * whole else "<1%"


def cause_of(each: RecordedCollective, unit: str) -> str:
    """For what a collective runs, and whether beside other work or once more."""
    again = ", made again: the copy before was freed" if each.again else ""
    if each.is_ahead:
        again += ", one trip ahead"
    elif each.hidden:
        again += f", in a ring with it ({amount_text(unit, each.hidden)} hidden)"
    is_written = each.origin == "user" and each.cause.startswith(("sdy.", "stablehlo."))
    return "the user's" if is_written else f"for {each.cause}{again}"


def _coarse(group: CollectiveLine, whole: float) -> tuple[str, ...]:
    first = group.first
    types = list(dict.fromkeys(each.type for each in group.members))
    sent, share, _ = _sent(group, whole)
    names = ", ".join(_names(first))
    axes = f"{first.kind} {{{names}}}" if names else first.kind
    type_ = types[0] if len(types) == 1 else f"{len(types)} types"
    return axes, type_, sent, share, _executions(group.members), first.place.lines, _causes(group.members)


def _executions(members: Sequence[RecordedCollective]) -> str:
    """`12 x 42.0 KiB`, or `24 x` where they send different amounts; loops as trips."""
    first, loops = members[0], {tuple(trips(each)) for each in members}
    if len(loops) > 1:
        return f"{len(members)} x, {sum(bool(trips(each)) for each in members)} in loops"
    factors = ([f"{len(members)} x"] if len(members) > 1 else []) + trips(first)
    if len({each.wire_bytes for each in members}) == 1:
        return " ".join([*factors, bytes_text(first.wire_bytes)]) if factors else ""
    return " ".join(factors).removesuffix(" x") if trips(first) else " ".join(factors)


def _causes(members: Sequence[RecordedCollective]) -> str:
    causes = list(dict.fromkeys(each.cause for each in members))
    scopes = list(dict.fromkeys(s for each in members if (s := folded(each.place.scope)) and "->" not in s))
    where = f" in {scopes[0]}" if len(scopes) == 1 else ""
    backward = [each for each in members if each.place.backward]
    when = " (backward)" if len(backward) == len(members) else ""
    if members[0].origin == "user" and all(cause.startswith(("sdy.", "stablehlo.")) for cause in causes):
        return f"the user's{where}"
    return f"for {some_of([cause.removeprefix('stablehlo.') for cause in causes], 2)}{when}{where}"


# The kernels of a program: what they compute, what they move, and how long that takes.


@dataclass(slots=True)
class _Sum:
    """What all executions of the kernels of one name and line take."""

    count: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0


def kernels_section(record: PlanRecord) -> Section:
    """The kernels, those that take longest first; one line for those of one name and line of the source."""
    sums: dict[tuple[str, str], _Sum] = {}
    for op in record.ops:
        if (own := op.kernel) is None:
            continue
        found = sums.setdefault((own.title, op.place.line), _Sum())
        found.count += 1
        found.flops += op.times * op.flops
        found.bytes += op.times * own.bytes
        found.seconds += op.times * own.seconds
    ordered = sorted(sums.items(), key=lambda item: (-item[1].seconds, -item[1].flops, -item[1].bytes))
    rows = [(f"{title}{count_text(each.count)}", *_figures(each), line) for (title, line), each in ordered]
    return Section("kernels (per device, in all executions)", rows, {1, 2, 3}) if rows else Section("")


def _figures(each: _Sum) -> tuple[str, str, str]:
    time = seconds_text(each.seconds) if each.seconds else ""
    return flops_text(each.flops), f"{bytes_text(each.bytes)} of memory", time


# The sections on what a device sends, holds and computes in all, and on what costs most.

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
        repeated = f", {flops_text(record.repeated_flops)} of it repeated" if record.repeated_flops else ""
        rows.append(("computes", flops_text(record.flops) + repeated))
    if record.time.unit == "seconds":
        rows.append(("takes", _takes(record.time, record.known)))
    if record.roofline is not None:
        rows.append(("uses", _uses(record.roofline)))
    if any(each.times for each in record.host):
        rows.append(("moves", _moves(record)))
    if record.time.origin:
        rows.append((f"costs in {record.time.unit}: {record.time.origin}",))
    return Section("each device", rows, weight=_WEIGHT)


def _moves(record: PlanRecord) -> str:
    """What moves from and to the memory of the host, and how long that takes by its link: `2.0 MiB to the host, 4.0 MiB
    from the host, 96 us by its link, for which the estimate does not wait`."""
    out, back = (sum(each.total for each in record.host if each.leaves is leaves) for leaves in (True, False))
    parts = [f"{bytes_text(out)} to the host"] if out else []
    parts += [f"{bytes_text(back)} from the host"] if back else []
    time = seconds_text(record.timeline.host) if record.timeline.host else ""
    how = f"{time} by its link" if time else "in a time that is not known"
    return f"{', '.join(parts) or 'some values'}, {how}, for which the estimate does not wait"


def _uses(roofline: RecordedRoofline) -> str:
    """The shares of peaks, and which resource would take longest alone: `5.1% of peak compute (MFU), 12% of memory
    bandwidth, links 33% data, 0.4% model; bound by data`."""
    said, links = [], []
    for each in roofline.resources:
        if each.name == "compute":
            said.append(f"{share_text(roofline.mfu)} of peak compute (MFU)")
        elif each.name == "memory":
            said.append(f"{share_text(roofline.share(each))} of memory bandwidth")
        else:
            links.append(f"{share_text(roofline.share(each))} {each.name.replace(', ', '+')}")
    bound = f"; bound by {roofline.bound.name.replace(', ', '+')}" if roofline.bound is not None else ""
    return ", ".join([*said, *([f"links {', '.join(links)}"] if links else [])]) + bound


def verdict_section(record: PlanRecord) -> Section:
    """What a reader has to know before all else: that a device has not so much memory, and that other layouts would
    take less time."""
    rows = [*_too_large(record), *_slower(record)]
    return Section(rows[0], [(row,) for row in rows[1:]], weight=_WEIGHT) if rows else Section("")


def _too_large(record: PlanRecord) -> Iterator[str]:
    memory = record.memory
    if memory is None or not memory.available or memory.peak <= memory.available:
        return
    if memory.border > memory.available:
        yield (
            f"does not fit: arguments and results alone hold {bytes_text(memory.border)} of "
            f"{bytes_text(memory.available)}. To fit: split them further (in_shardings and out_shardings, or AUTO), "
            "donate what is replaced (donate_argnums), or more devices"
        )
    else:
        largest = next((f", {share} of it {type_} ({line})" for share, _, type_, line in _most_held(record)), "")
        yield (
            f"does not fit: holds {bytes_text(memory.peak)} of {bytes_text(memory.available)}{largest}; no plan found "
            "holds less. To fit: more devices, a smaller batch, or jax.checkpoint"
        )


def _slower(record: PlanRecord) -> Iterator[str]:
    layouts, memory = record.layouts, record.memory
    if layouts is None or layouts.exposed <= (1 + _SLOWER) * layouts.baseline_exposed or memory is None:
        return
    is_over = memory.available and layouts.baseline_held > memory.available
    of = f" of {bytes_text(memory.available)}" if is_over else ""
    yield (
        f"slower than op by op around the propagated layouts, {layouts.exposed / layouts.baseline_exposed:.2f} of the "
        f"time: these would hold {bytes_text(layouts.baseline_held)}{of}, this plan {bytes_text(memory.peak)}"
    )


def _sends(record: PlanRecord) -> str:
    kinds = record.transfers_by_kind
    if not kinds:
        return "nothing"
    least = "" if record.known else "at least "
    parts = [f"{bytes_text(each.bytes)} in {each.text(kind)}" for kind, each in kinds.items()]
    whole = f"{bytes_text(record.wire_bytes)}: " if len(parts) > 1 else ""
    return f"{least}{whole}{', '.join(parts)}"


def _holds(memory: RecordedMemory) -> str:
    shared = f" ({bytes_text(memory.shared)} of them in donated arguments)" if memory.shared else ""
    available = f" of {bytes_text(memory.available)}" if memory.available else ""
    return (
        f"{bytes_text(memory.peak)}{available} at most: {bytes_text(memory.arguments)} of arguments, "
        f"{bytes_text(memory.results)} of results{shared}, {bytes_text(memory.temporaries)} of temporaries"
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
