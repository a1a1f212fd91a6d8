"""The kernels of a program: what they compute, what they move, and how long that takes."""

from __future__ import annotations

from dataclasses import dataclass

from sdy_jax.plan.page.sections import Section
from sdy_jax.plan.record.record import PlanRecord
from sdy_jax.representation.type_text import bytes_text, count_text, flops_text, seconds_text


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
