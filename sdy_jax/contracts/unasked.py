"""What moves along strict axes although nobody asked for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sdy_jax.contracts.asked import Asked
from sdy_jax.ir.graph import Graph, Op
from sdy_jax.ir.locations import strict_axes
from sdy_jax.lowering.placement.report import CollectiveRecord
from sdy_jax.plan.annotation_origins import spec_text
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.recording.record import linked_collectives
from sdy_jax.plan.warn import warn_of
from sdy_jax.plan_record.counts import line_of
from sdy_jax.plan_record.program import RecordedCollective


def unasked(plan: Plan, strict: Sequence[str]) -> list[str]:
    """What moves unasked along strict axes, in words, with what to write. Where a region only warns, it is warned of.

    Args:
        plan: the plan.
        strict: the axes that are strict everywhere.
    """
    if not strict and not _has_regions(plan):
        return []
    ops, linked = linked_collectives(plan)
    moves = [move for record, one in linked if one.wire_bytes for move in _moves(record, one, ops, strict)]
    asked, texts = Asked(plan), dict[str, list[str]](error=[], warn=[])
    for move in moves:
        if not asked.is_asked(move.record, move.side):
            texts[move.on_move].append(_text(move))
    warn_of(texts["warn"])
    return list(dict.fromkeys(texts["error"]))


def _has_regions(plan: Plan) -> bool:
    """Whether a collective, or a loop or branch that it may be in, is in a strict region."""
    module = plan.stages.get("partitioned")
    if module is None or not plan.collectives:
        return False
    singles = (one for record in plan.collectives for one in record.members or (record,))
    around = (op.mlir.location for op in Graph(module).main.walk() if op.blocks)
    return any(strict_axes(one.location) for one in singles) or any(map(strict_axes, around))


class _Move(NamedTuple):
    """A collective along a strict axis: what becomes of it, and whether it moves the "operand" or the "result" of the
    op that needs it; empty where that op sends by itself."""

    axis: str
    on_move: str
    record: CollectiveRecord
    one: RecordedCollective
    side: str


def _moves(
    record: CollectiveRecord, one: RecordedCollective, ops: Sequence[Op], strict: Sequence[str]
) -> Iterator[_Move]:
    at = one.op if one.op is not None else one.serves
    found = _axes_at(ops[at]) if at is not None else {}
    found |= strict_axes(record.location) | dict.fromkeys(strict, "error")
    names = {axis.name for axis in record.axes}
    for axis, on_move in found.items():
        if axis in names or not record.axes:
            yield _Move(axis, on_move, record, one, _side(one))
            return


def _axes_at(op: Op) -> dict[str, str]:
    """The axes that are strict in the loops and branches around an op: bodies of loops have no scopes of outside."""
    found: dict[str, str] = {}
    parent = op.parent
    while parent is not None:
        found = strict_axes(parent.mlir.location) | found
        parent = parent.parent
    return found


def _side(one: RecordedCollective) -> str:
    if one.op is None or one.serves is None:
        return ""
    return "result" if one.serves < one.op else "operand"


def _text(move: _Move) -> str:
    primitive = move.one.place.primitive or move.record.cause
    what = f"the {move.side or 'operand'} of {primitive}, {move.record.dtype}{list(move.record.shape)}"
    return "\n".join(
        [
            f"strict({move.axis!r}): bytes move along it unasked",
            f"  {line_of(move.one)}",
            f"  to allow it, write sdy.reshard(x, {spec_text(move.record.result)}) around {what}",
        ]
    )
