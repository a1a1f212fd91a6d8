"""The sections on arguments, closed-over arrays and results: what each looks like on a device."""

from __future__ import annotations

from collections.abc import Sequence

from sdy_jax.plan.page.paths import FoldedValue, Folding
from sdy_jax.plan.page.sections import Section
from sdy_jax.plan.record.border import RecordedBorder
from sdy_jax.plan.record.record import PlanRecord
from sdy_jax.representation.type_text import bytes_text, sizes_text

_PLAIN = 12
"""Values up to which none are folded. Chosen: for a page of `LINES`."""

_RESULTS = 0.6
"""Lines of results beside those of arguments. Chosen: most results are arguments again."""


def border_sections(record: PlanRecord) -> list[Section]:
    """Arguments, closed-over arrays and results, with the type of each, the block of one device, and its bytes."""
    folding = Folding()
    values = ("arguments", record.arguments), ("closed-over arrays", record.closed_over), ("results", record.results)
    return [_section(title, of, folding) for title, of in values if of]


def _section(title: str, values: Sequence[RecordedBorder], folding: Folding) -> Section:
    folded = folding.folded(values)
    if len(values) <= _PLAIN:
        folded = [FoldedValue(value.path, 1, value.tensor.bytes, value) for value in values]
    rest = [value for value in folded if not value.like]
    order = {id(value): number for number, value in enumerate(sorted(folded, key=lambda value: -value.bytes))}
    shown = folded if len(folded) <= _PLAIN else sorted(folded, key=lambda value: order[id(value)])
    name = {"arguments": "arguments", "results": "results"}.get(title, "arguments")
    total = bytes_text(sum(value.bytes for value in folded))
    heading = f"{title}: {len(values)} arrays, {total} on each device" if len(rest) < len(values) else title

    def left_out(hidden: int) -> str:
        held = sum(value.bytes for value in shown[len(shown) - hidden :])
        return f"and {hidden} more, {bytes_text(held)}: plan.table({name!r})"

    weight = 1.0 if title == "arguments" else _RESULTS
    return Section(heading, [_row(value) for value in shown], {3, 4}, weight, left_out)


def _row(value: FoldedValue) -> tuple[str, ...]:
    tensor, held = value.value.tensor, bytes_text(value.bytes) if value.bytes else ""
    if value.like:
        return value.path, f"as {value.like}", "", f"{value.count} arrays", held
    block = f"{sizes_text(tensor.local_shape)} on a device" if tensor.local_shape != tensor.shape else ""
    return value.path, tensor.type, block, f"x {value.count}" if value.count > 1 else "", held
