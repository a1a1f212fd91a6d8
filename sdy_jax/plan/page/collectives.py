"""The section on collectives: equal ones folded, those that send most first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sdy_jax.plan.page.sections import Section
from sdy_jax.plan.record.program import RecordedCollective
from sdy_jax.plan.record.record import PlanRecord
from sdy_jax.representation.type_text import amount_text, bytes_text

_SHOWS = 0.005
"""Given: less prints as 0%."""

_PLAIN = 16
"""Lines up to which collectives are told apart by what they move; where there are more, only by kind, axes and line.
Chosen: for a page of `LINES`."""


@dataclass
class Group:
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
    if not record.collectives:
        return Section("collectives: none")
    unit = record.time.unit
    groups = grouped(record.collectives, _alike)
    if sum(1 + len(group.first.members) for group in groups) > _PLAIN:
        every = [one for each in record.collectives for one in each.single]
        groups = grouped((each for each in every if each.wire_bytes), _of_one_line)
        rows = [*(_coarse(group, record.wire_bytes) for group in groups), *_silent(every)]
    else:
        with_members = ((group, len(groups) > 1) for group in groups)
        rows = [row for group, many in with_members for row in _fine(group, record.wire_bytes if many else 0.0, unit)]

    def left_out(hidden: int) -> str:
        sent = bytes_text(sum(group.bytes for group in groups[len(rows) - hidden :]))
        return f"and {hidden} more lines, {sent}: plan.table('collectives')"

    return Section("collectives (bytes per device)", rows, {2, 3}, 2.0, left_out)


def _silent(collectives: Iterable[RecordedCollective]) -> list[tuple[str]]:
    """The line on those that send nothing, such as slices of what every device has."""
    counts = Counter(each.kind for each in collectives if not each.wire_bytes)
    return [(f"{', '.join(f'{count} {kind}' for kind, count in counts.items())}: nothing is sent",)] if counts else []


def grouped(collectives: Iterable[RecordedCollective], key: Callable[[RecordedCollective], object]) -> list[Group]:
    """The groups of collectives with one key, those that send most first."""
    groups: dict[object, Group] = {}
    for each in collectives:
        groups.setdefault(key(each), Group()).members.append(each)
    return sorted(groups.values(), key=lambda group: -group.bytes)


def _alike(each: RecordedCollective) -> object:
    """What tells collectives apart in a short plan: everything but layers that are alike, and their names."""
    where = each.place.lines, each.cause, _folded(each.place.scope)
    how = each.times, each.times_known, each.counted, each.origin, each.again, each.is_ahead, bool(each.hidden)
    return each.kind, each.detail, each.type, each.wire_bytes, where, how, each.bucket


def _of_one_line(each: RecordedCollective) -> object:
    return each.kind, _names(each), each.place.lines, each.counted, each.origin


def _names(each: RecordedCollective) -> tuple[str, ...]:
    """The mesh axes that it runs over, in part or in whole."""
    return tuple(sorted({axis.partition(":")[0] for axis in each.axes}))


def _folded(scope: str) -> str:
    """A name scope without numbers of layers: `Block_*/attention`."""
    return re.sub(r"\d+", "*", scope)


def said(each: RecordedCollective) -> str:
    """`all_gather [{"x"}, {}]`."""
    return f"{each.kind} {each.detail}".rstrip()


def _fine(group: Group, whole: float, unit: str) -> list[tuple[str, ...]]:
    first = group.first
    if not first.members:
        return [_row(group, first, whole, unit)]
    bucket = f"{len(first.members)} of {first.dtype}"
    head = (f"{said(first)} bucket {first.bucket}", bucket, *_sent(group, whole), "", "")
    return [head, *(_row(Group([each]), each, 0.0, unit, "  ") for each in first.members)]


def _row(group: Group, first: RecordedCollective, whole: float, unit: str, indent: str = "") -> tuple[str, ...]:
    scope = _folded(first.place.scope) if len(group.members) > 1 else first.place.scope
    cause = cause_of(first, unit) + (f" in {scope}" if scope else "")
    return (f"{indent}{said(first)}", first.type, *_sent(group, whole), first.place.lines, cause)


def _sent(group: Group, whole: float) -> tuple[str, str, str]:
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
    if each.hidden:
        how = "one trip ahead" if each.is_ahead else "in a ring with it"
        again += f", {how} ({amount_text(unit, each.hidden)} hidden)"
    is_written = each.origin == "user" and each.cause.startswith(("sdy.", "stablehlo."))
    return "the user's" if is_written else f"for {each.cause}{again}"


def _coarse(group: Group, whole: float) -> tuple[str, ...]:
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
    scopes = list(dict.fromkeys(s for each in members if (s := _folded(each.place.scope)) and "->" not in s))
    where = f" in {scopes[0]}" if len(scopes) == 1 else ""
    more = f" and {len(causes) - 2} more" if len(causes) > 2 else ""
    backward = [each for each in members if each.place.backward]
    when = " (backward)" if len(backward) == len(members) else ""
    if members[0].origin == "user" and all(cause.startswith(("sdy.", "stablehlo.")) for cause in causes):
        return f"the user's{where}"
    return f"for {', '.join(cause.removeprefix('stablehlo.') for cause in causes[:2])}{more}{when}{where}"
