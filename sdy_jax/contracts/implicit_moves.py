"""What moves along strict axes although nobody asked for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from sdy_jax.contracts.requests import Asked
from sdy_jax.ir.graph import Op
from sdy_jax.ir.locations import STRICT, may_mention, place_of, strict_axes
from sdy_jax.lowering.interface.collective_record import CollectiveRecord
from sdy_jax.plan.explanations.annotation_origins import spec_text
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.record.counts import line_of
from sdy_jax.plan.record.program import RecordedCollective
from sdy_jax.plan.recording.record import linked_collectives
from sdy_jax.plan.warn import warn_of
from sdy_jax.representation.sdy_collectives import REDUCING


def unasked(plan: Plan, strict: Sequence[str]) -> list[str]:
    """What moves unasked along strict axes, in words, with what to write. Where a region only warns, it is warned of.

    Args:
        plan: the plan.
        strict: the axes that are strict everywhere.
    """
    if not strict and not _has_regions(plan):
        return []
    ops, linked = linked_collectives(plan)
    moves = [move for record, one in linked if one.wire_bytes for move in _moves(plan, record, one, ops, strict)]
    asked, texts = Asked(plan), dict[str, list[str]](error=[], warn=[])
    for move in moves:
        if not asked.is_asked(move.record, move.side, move.origin):
            texts[move.on_move].append(_text(move))
    warn_of(texts["warn"])
    return list(dict.fromkeys(texts["error"]))


def _has_regions(plan: Plan) -> bool:
    """Whether a program that sends anything has strict regions."""
    module = plan.stages.get("partitioned")
    return module is not None and bool(plan.wire_bytes) and may_mention(module, STRICT)


class _Move(NamedTuple):
    """A collective along a strict axis: what becomes of it, and whether it moves the "operand" or the "result" of the
    op that needs it; empty where that op sends by itself. Where it reduces a sum, `origin` made the terms."""

    axis: str
    on_move: str
    record: CollectiveRecord
    one: RecordedCollective
    side: str
    origin: Op | None


def _moves(
    plan: Plan, record: CollectiveRecord, one: RecordedCollective, ops: Sequence[Op], strict: Sequence[str]
) -> Iterator[_Move]:
    at = one.op if one.op is not None else one.serves
    names = {axis.name for axis in record.axes}
    origin = _origin(ops[one.op], names) if one.op is not None and record.kind in REDUCING else None
    found = _axes_at(ops[at] if at is not None else None) | _axes_at(origin)
    found |= strict_axes(record.location) | dict.fromkeys(strict, "error")
    names |= {*map(plan.program.axis_of_function, names)}
    for axis, on_move in found.items():
        if axis in names or not record.axes:
            yield _Move(axis, on_move, record, one, _side(one), origin)
            return


def _axes_at(op: Op | None) -> dict[str, str]:
    """The axes that are strict at an op, or in the loops and branches around it: their bodies have no scopes of
    outside."""
    found: dict[str, str] = {}
    while op is not None:
        found = strict_axes(op.mlir.location) | found
        op = op.parent
    return found


def _origin(op: Op, axes: Set[str]) -> Op | None:
    """The op that made the terms of the sum that a collective reduces along some axes: the planner may reduce it after
    further ops."""
    found = None
    while op.operands:
        terms = (v for v in op.operands if v.sharding and axes & {a.name for a in v.sharding.unreduced_axes})
        made = next((v.defining_op for v in terms if v.defining_op is not None), None)
        if made is None:
            return found
        found = op = made
    return found


def _side(one: RecordedCollective) -> str:
    if one.op is None or one.serves is None:
        return ""
    return "result" if one.serves < one.op else "operand"


def _text(move: _Move) -> str:
    what = f"{_what(move)}, {move.record.dtype}{list(move.record.shape)}"
    return "\n".join(
        [
            f"strict({move.axis!r}): bytes move along it unasked",
            f"  {line_of(move.one)}",
            f"  to allow it, write sdy.reshard(x, {spec_text(move.record.result)}) around {what}",
        ]
    )


def _what(move: _Move) -> str:
    """What is to be stated: where terms of a sum are made, the sum; else what the collective moves."""
    if move.origin is not None:
        place = place_of(move.origin.mlir.location)
        return f"the result of {place.primitive or move.origin.name} at {place.lines}"
    return f"the {move.side or 'operand'} of {move.one.place.primitive or move.record.cause}"
