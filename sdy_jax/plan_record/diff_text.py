"""The text of the differences between two plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sdy_jax.plan_record.program import RecordedCollective
from sdy_jax.representation.type_text import bytes_text, count_text

if TYPE_CHECKING:
    from sdy_jax.plan_record.differences import Amount, BorderChange, CollectiveChange, PlanDiff, ValueChange

_LISTED = 20
"""Lines per table. Chosen: for a reader."""


def diff_text(found: PlanDiff) -> str:
    """What `print(plan.diff(other))` prints."""
    if not found:
        return f"plan of {found.name}: no differences"
    sections = [
        f"plan of {found.name}: differences",
        _section("caused by", [str(cause) for cause in found.causes]),
        _section("costs per device", [_amount(amount) for amount in found.amounts]),
        _section("arguments and results", [_border(change) for change in found.border]),
        _section("collectives", list(_collectives(found.collectives))),
        _section("values", [_value(change) for change in found.values]),
    ]
    return "\n".join(section for section in sections if section)


def _section(title: str, lines: Sequence[str]) -> str:
    more = [f"  and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return "\n".join([title, *(f"  {line}" for line in lines[:_LISTED]), *more]) if lines else ""


def _amount(amount: Amount) -> str:
    text = bytes_text if amount.unit == "bytes" else _seconds
    change = amount.after - amount.before
    if not change:
        return f"{text(amount.after)} {amount.name}, as before"
    share = f", {change / amount.before:+.0%}" if amount.before else ""
    sign = "+" if change > 0 else "-"
    return f"{text(amount.before)} -> {text(amount.after)} {amount.name} ({sign}{text(abs(change))}{share})"


def _seconds(amount: float) -> str:
    return f"{1e6 * amount:.4g} us"


def _border(change: BorderChange) -> str:
    name = change.path if change.side == "result" else f"{change.side} {change.path}"
    if change.before is None or change.after is None:
        return f"{'+' if change.before is None else '-'} {name}  {change.before or change.after}"
    return f"~ {name}  {change.before} -> {change.after}"


def _collectives(changes: Sequence[CollectiveChange]) -> Iterator[str]:
    for change in changes:
        one = change.one
        where = f"{one.place.line}{f' in {one.place.scope}' if one.place.scope and change.count == 1 else ''}"
        yield f"{_sign(change)} {_moved(change)}{count_text(change.count)}  {where} for {one.cause}"


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
