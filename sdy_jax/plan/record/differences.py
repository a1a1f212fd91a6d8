"""What differs between two plans, as data and as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sdy_jax.ir.jax_shardings import bytes_text, count_text, flops_text, seconds_text
from sdy_jax.plan.record.program import RecordedCollective

T = TypeVar("T")

_LISTED = 20
"""Lines per table. Chosen: for a reader."""

_ALIKE = 3
"""Paths that differ in numbers alone from which on they are one line. Chosen: two are read as fast."""


def folded(name: str) -> str:
    """`layer_*/mlp` for `layer_3/mlp`, `layers[*].up` for `layers[3].up`."""
    return re.sub(r"\d+", "*", name)


def alike(entries: Iterable[T], key: Callable[[T], tuple[str, ...]]) -> Iterator[tuple[T, str, int]]:
    """Entries with their names and how many they are: of those with one key, whose first part is the name with its
    numbers, that are alike but for these, the first one.

    >>> list(alike(["a", "w[0]", "w[1]", "w[2]"], lambda name: (name,)))
    [('a', 'a', 1), ('w[0]', 'w[*]', 3)]
    """
    groups: dict[tuple[str, ...], list[T]] = {}
    for entry in entries:
        name, *rest = key(entry)
        groups.setdefault((folded(name), *rest), []).append(entry)
    for (name, *_), group in groups.items():
        if len(group) < _ALIKE:
            yield from ((entry, key(entry)[0], 1) for entry in group)
        else:
            yield group[0], name, len(group)


_LITTLE = 0.01
"""The share by which a figure may differ without the share being written. Given: it says a percent."""

_TIMES = 2.0
"""How many times as much is said so, and no more in percent. Chosen: people read "12 times" faster than "+1100%"."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why plans differ.

    Attributes:
        kind: "mesh", "option", "annotation", "code", "argument", "costs" or "version".
        line: where the user changed it; in the file as it was before, where something is gone.
        what: what changed: `sharding_constraint P('data') removed`.
        text: the line's text; may be empty.
    """

    kind: str
    line: str
    what: str
    text: str = ""

    def __str__(self) -> str:
        said = f"{self.line}: {self.what}" if self.line else self.what
        return f"{said}: {self.text}" if self.text else said


@dataclass(frozen=True, slots=True)
class BorderChange:
    """An argument or result whose type differs; `before` is None where it is new, `after` where it is gone."""

    side: str
    path: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class CollectiveChange:
    """Collectives that differ, so many alike: `before` is None where they are new, `after` where they are gone."""

    before: RecordedCollective | None
    after: RecordedCollective | None
    count: int

    @property
    def bytes(self) -> float:
        """What a device sends more per call."""
        old, new = (c.total_wire_bytes if c is not None else 0.0 for c in (self.before, self.after))
        return self.count * (new - old)

    @property
    def sends(self) -> bool:
        """Whether one of both sends something."""
        return any(each is not None and each.wire_bytes > 0 for each in (self.before, self.after))

    @property
    def one(self) -> RecordedCollective:
        """That of the plan after, or else before."""
        found = self.after or self.before
        assert found is not None
        return found


@dataclass(frozen=True, slots=True)
class ValueChange:
    """Values of one line in another layout: the name of the first one, both types, the line, and how many there are."""

    name: str
    before: str
    after: str
    line: str
    count: int


@dataclass(frozen=True, slots=True)
class Amount:
    """A figure of both plans; `unit` is "bytes", "seconds", "transfers" or "flop"."""

    name: str
    before: float
    after: float
    unit: str = "bytes"


@dataclass(frozen=True)
class PlanDiff:
    """The differences between two plans; true where there are any. Printing it gives the causes first, then what they
    cost and what changed.

    Attributes:
        name: of the function.
        causes: what the user changed, the edited line first.
        amounts: bytes on the wire, memory, time where the cost model knows it, collectives as they run, operations.
        border: arguments and results.
        collectives: those that differ, the largest difference in bytes first.
        values: those in other layouts; none where a plan does not list its values.
    """

    name: str
    causes: tuple[Cause, ...]
    amounts: tuple[Amount, ...]
    border: tuple[BorderChange, ...]
    collectives: tuple[CollectiveChange, ...]
    values: tuple[ValueChange, ...]

    def __bool__(self) -> bool:
        return bool(self.border or self.collectives or self.values)

    def __str__(self) -> str:
        return diff_text(self)


def diff_text(found: PlanDiff) -> str:
    """What `print(plan.diff(other))` prints."""
    if not found:
        return f"plan of {found.name}: no differences"
    sections = [
        f"plan of {found.name}: differences",
        _section("caused by", [str(cause) for cause in found.causes]),
        _section("costs per device", [_amount(amount) for amount in found.amounts]),
        _section("arguments and results", list(_borders(found.border))),
        _section("collectives", list(_collectives(found.collectives))),
        _section("values", [_value(change) for change in found.values]),
    ]
    return "\n".join(section for section in sections if section)


def _section(title: str, lines: Sequence[str]) -> str:
    more = [f"  and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return "\n".join([title, *(f"  {line}" for line in lines[:_LISTED]), *more]) if lines else ""


_TEXTS: Mapping[str, Callable[[float], str]] = {
    "bytes": bytes_text,
    "seconds": seconds_text,
    "transfers": lambda count: f"{count:.0f}",
    "flop": flops_text,
}
"""How figures are written, by their units."""


def _amount(amount: Amount) -> str:
    text = _TEXTS[amount.unit]
    change = amount.after - amount.before
    if not change:
        return f"{text(amount.after)} {amount.name}, as before"
    if abs(change) < _LITTLE * amount.before:
        return f"{text(amount.after)} {amount.name}, within a percent of before"
    share = f", {_share(amount.before, amount.after)}" if amount.before else ""
    sign = "+" if change > 0 else "-"
    return f"{text(amount.before)} -> {text(amount.after)} {amount.name} ({sign}{text(abs(change))}{share})"


def _share(before: float, after: float) -> str:
    """`+6%`, `-12%`, `2.5 times`, `12 times`."""
    times = after / before
    if times < _TIMES:
        return f"{times - 1:+.0%}"
    return f"{times:.1f} times" if round(times, 1) < 10 else f"{times:,.0f} times"


def _borders(changes: Sequence[BorderChange]) -> Iterator[str]:
    """Those of layers that are alike are one."""
    for change, path, count in alike(changes, lambda c: (c.path, c.side, c.before or "", c.after or "")):
        yield _border(change, path + count_text(count))


def _border(change: BorderChange, path: str) -> str:
    name = path if change.side == "result" else f"{change.side} {path}"
    if change.before is None or change.after is None:
        return f"{'+' if change.before is None else '-'} {name}  {change.before or change.after}"
    return f"~ {name}  {change.before} -> {change.after}"


def _collectives(changes: Sequence[CollectiveChange]) -> Iterator[str]:
    for change in changes:
        if not change.sends:
            continue
        one = change.one
        scope = one.place.scope if change.count == 1 else folded(one.place.scope)
        where = f"{one.place.line}{f' in {scope}' if scope else ''}"
        yield f"{_sign(change)} {_moved(change)}{count_text(change.count)}  {where} for {one.cause}"
    if silent := sum(change.count for change in changes if not change.sends):
        yield f"and {silent} slice{'s' if silent > 1 else ''} and the like, which send nothing"


def _sign(change: CollectiveChange) -> str:
    return "+" if change.before is None else "-" if change.after is None else "~"


def _moved(change: CollectiveChange) -> str:
    texts = [_one(one) for one in (change.before, change.after) if one is not None]
    return " -> ".join(texts)


def _one(collective: RecordedCollective) -> str:
    said, times = f"{collective.kind} {collective.detail}".rstrip(), count_text(collective.times)
    return f"{said} {collective.type} {bytes_text(collective.wire_bytes)}{times}"


def _value(change: ValueChange) -> str:
    more = f" and {change.count - 1} more" if change.count > 1 else ""
    return f"~ {change.name}{more}  {change.before} -> {change.after}  {change.line}"
