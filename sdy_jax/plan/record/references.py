"""What a plan's records call by a number is there: files may say anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sdy_jax.errors import SdyError
from sdy_jax.plan.record.program import RecordedCollective
from sdy_jax.plan.record.record import PlanRecord


def check_references(record: PlanRecord) -> None:
    """
    Raises:
        SdyError: a record is of an op that the plan does not have; or an op stands in one that does not come before.
    """
    for where, number in _to_ops(record):
        if not 0 <= number < len(record.ops):
            raise SdyError(f"{where} is {number}, of {len(record.ops)} ops")
    for number, op in enumerate(record.ops):
        if op.parent is not None and not 0 <= op.parent < number:
            raise SdyError(f"plan.ops[{number}].parent is {op.parent}, which is no op before it")


def _to_ops(record: PlanRecord) -> Iterator[tuple[str, int]]:
    """The numbers of ops, and where they stand."""
    for number, value in enumerate(record.values):
        if value.op is not None:
            yield f"plan.values[{number}].op", value.op
    yield from _of_collectives(record.collectives, "plan.collectives")


def _of_collectives(collectives: Sequence[RecordedCollective], where: str) -> Iterator[tuple[str, int]]:
    for number, each in enumerate(collectives):
        for name, op in (("op", each.op), ("serves", each.serves)):
            if op is not None:
                yield f"{where}[{number}].{name}", op
        yield from _of_collectives(each.members, f"{where}[{number}].members")
