"""The text of a plan: tables of its arguments, results, collectives and notes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sdy_jax.ir.graph import itemsize
from sdy_jax.ir.locations import short_source
from sdy_jax.lowering.placement.report import ChangedLayout, CollectiveRecord, LayoutChoice
from sdy_jax.plan.automatic_layouts import AutomaticLayouts, Measured
from sdy_jax.plan.border_specs import pasted
from sdy_jax.plan.boundary import BoundaryValue
from sdy_jax.plan.layout_reason import sent_text
from sdy_jax.plan.layout_reasons import RESULTS
from sdy_jax.plan.work import flops
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.type_text import bytes_text, flops_text, type_text

if TYPE_CHECKING:
    from sdy_jax.plan.plan import Plan

_REPEATED, _REPEATED_SHARE = 1e6, 0.01
"""The least repeated operations that a plan lists, and their least share of all that a device performs."""

_LISTED = 5
"""Lines on padded values and on changed layouts."""


def plan_text(plan: Plan) -> str:
    """What `print(plan)` prints."""
    sections = [
        plan.headline,
        _values("arguments", plan.arguments),
        _values("closed-over arrays", plan.constants),
        _values("results", plan.results),
        _automatic(plan),
        _moves(plan),
        _costs(plan),
        _collectives(plan),
        _layouts(plan),
        _padding(plan),
        _repeated(plan),
        _notes(plan),
    ]
    return "\n\n".join(section for section in sections if section)


def _automatic(plan: Plan) -> str:
    """The layouts that were chosen for arguments and results, as they can be stated, beside the usual ones."""
    if plan.automatic is None:
        return ""
    arguments, named = plan.input_specs
    stated = [f"  in_shardings={pasted(arguments, 2)}"] if plan.automatic.arguments and arguments else []
    stated += [f"  {name}: {pasted(specs, 2)}" for name, specs in named.items() if plan.automatic.arguments]
    stated += [f"  out_shardings={pasted(plan.output_specs, 2)}"] if plan.automatic.results else []
    both = {"chosen": plan.automatic.chosen, **plan.automatic.usual}
    rows = [(name, *_measured(plan, each, plan.automatic)) for name, each in both.items()]
    return "\n".join(["automatic layouts", *stated, _table(rows)])


def _measured(plan: Plan, of: Measured, beside: AutomaticLayouts) -> tuple[str, str, str]:
    """What a plan sends, holds, and costs beside the chosen one."""
    holds = f"holds {bytes_text(of.peak)}{', too much' if of.peak > beside.limit else ''}"
    share = f"{of.cost / beside.chosen.cost:.2f} of the cost" if beside.chosen.cost else ""
    return f"sends {sent_text(plan.costs, of.sent)}", holds, share


def _costs(plan: Plan) -> str:
    return f"costs in {plan.costs.unit}: {plan.costs.origin}" if plan.costs.origin else ""


def _collectives(plan: Plan) -> str:
    if not plan.collectives:
        return "collectives: none"
    counted = set(map(id, plan.totals.counted))
    rows = []
    for record in plan.collectives:
        is_counted = id(record) in counted
        rows += [_row(plan, record, is_counted), *(_row(plan, m, is_counted, "  ") for m in record.members)]
    return "collectives (bytes per device)\n" + _table(rows)


def _row(plan: Plan, record: CollectiveRecord, is_counted: bool, indent: str = "") -> tuple[str, ...]:
    """A line on a collective."""
    said, sent = f"{indent}{record.kind} {record.detail}".rstrip(), _sent(record, is_counted)
    if record.members:
        return f"{said} bucket {record.bucket}", f"{len(record.members)} of {record.dtype}", sent, "", ""
    place = record.place
    type_ = type_text(record.dtype, record.shape, record.result, plan.program.mesh_name)
    cause = _cause(plan, record) + (f" in {place.scope}" if place.scope else "")
    return said, type_, sent, place.lines, cause


def _cause(plan: Plan, record: CollectiveRecord) -> str:
    again = ", made again: the copy before was freed" if record.again else ""
    if record.hidden:
        how = "one trip ahead" if record.is_ahead else "in a ring with it"
        again += f", {how} ({sent_text(plan.costs, record.hidden)} hidden)"
    is_written = record.origin == "user" and record.cause.startswith(("sdy.", "stablehlo."))
    return "the user's" if is_written else f"for {record.cause}{again}"


def _moves(plan: Plan) -> str:
    rows = [(move.path, f"{move.before} -> {move.after}", bytes_text(move.bytes)) for move in plan.moves]
    return "moves at the border (bytes that a device receives, at least)\n" + _table(rows) if rows else ""


def _layouts(plan: Plan) -> str:
    """What the plan sends beside the op by op plan and the bound, and the largest values that it lays out
    otherwise."""
    if plan.layouts is None or not plan.layouts.sent:
        return ""
    if not plan.layouts.changed and plan.findings.bound is None:
        return ""
    found: dict[tuple[str, ...], list[float]] = {}
    for change in plan.layouts.changed:
        types = (type_text(change.dtype, change.shape, s, plan.program.mesh_name) for s in _both(change))
        key = (*types, change.stated, short_source(change.source))
        found.setdefault(key, []).append(math.prod(change.shape) * itemsize(change.dtype))
    rows = [
        (chosen, f"for {proposed}" + (f" x {len(each)}" if len(each) > 1 else "") + _as_stated(stated), source)
        for (chosen, proposed, stated, source), each in sorted(found.items(), key=lambda item: -sum(item[1]))
    ]
    more = f"\n  and {len(rows) - _LISTED} more" if len(rows) > _LISTED else ""
    tables = [_table(rows[:_LISTED]) + more] if rows else []
    repeating = [f"  {plan.findings.repeating}"] if plan.findings.repeating else []
    return "\n".join([_layout_headline(plan, plan.layouts), *tables, *repeating])


def _layout_headline(plan: Plan, choice: LayoutChoice) -> str:
    """What the plan sends, what the op by op plan around the propagated layouts does, and the bound, where that is
    known soon; and the devices' own work, where it differs."""
    amounts = [("estimated", choice.sent), ("propagated", choice.proposed_sent)]
    if plan.findings.bound is not None:
        amounts.append(("bound", min(choice.sent, plan.findings.bound)))
    texts = [f"{name} {sent_text(plan.costs, amount)}" for name, amount in amounts]
    work, proposed_work = choice.cost - choice.sent, choice.proposed_cost - choice.proposed_sent
    if abs(work - proposed_work) > 0.01 * proposed_work > 0:
        texts.append(f"{work / proposed_work:.2f} of the work")
    if plan.findings.bound is None:
        texts.append("plan.bound says the least")
    return f"layouts: global ({', '.join(texts)})"


def _padding(plan: Plan) -> str:
    """The largest padded values, one line for those of one type and line of the source."""
    sums: dict[tuple[str, str], list[float]] = {}
    for value in plan.padding:
        sums.setdefault((value.type, short_source(value.source)), []).append(value.bytes)
    rows = [
        (type_ + (f" x {len(each)}" if len(each) > 1 else ""), bytes_text(sum(each)), source)
        for (type_, source), each in sorted(sums.items(), key=lambda item: -sum(item[1]))
    ]
    more = f"\n  and {len(rows) - _LISTED} more" if len(rows) > _LISTED else ""
    return "padding (bytes per device)\n" + _table(rows[:_LISTED]) + more if rows else ""


def _repeated(plan: Plan) -> str:
    """The ops that repeat much, one line for those of one type and line of the source."""
    least = max(_REPEATED, _REPEATED_SHARE * flops(plan.work))
    sums: dict[tuple[str, ...], float] = {}
    for work in plan.work:
        if work.repeated * work.runs.times < least:
            continue
        why = "to split it costs more" if work.is_choice else "nothing around it is split further"
        key = (work.op, work.type, short_source(work.source), f"the same on {work.alike} devices; {why}")
        sums[key] = sums.get(key, 0.0) + work.repeated * work.runs.times
    rows = [(op, type_, flops_text(count), *rest) for (op, type_, *rest), count in sums.items()]
    return "repeated work (operations per device that others perform as well)\n" + _table(rows) if rows else ""


def _notes(plan: Plan) -> str:
    dear = (note for note in plan.dear_constraints if note.op != RESULTS)
    notes = [*plan.notes, *dear]
    return "\n".join(["notes", *(f"  {note}" for note in notes)]) if notes else ""


def _as_stated(stated: str) -> str:
    return f", stated {stated}" if stated else ""


def _both(change: ChangedLayout) -> tuple[TensorSharding, TensorSharding]:
    return change.chosen, change.proposed


def _sent(record: CollectiveRecord, is_counted: bool) -> str:
    """`3.0 KiB x 12`: bytes and executions, with a `?` where there may be more of them."""
    times = f" x {record.times}" if record.times != 1 else ""
    more = "" if record.times_known else " x ?"
    return f"{bytes_text(record.wire_bytes)}{times}{more}{'' if is_counted else ' in a smaller branch'}"


def _values(title: str, values: Sequence[BoundaryValue]) -> str:
    return f"{title}\n{_table([(v.path, v.type) for v in values])}" if values else ""


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in aligned columns, indented by two."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )
