"""What differs between two plans, as a page reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sdy_jax.plan.record.differences import CollectiveChange, PlanDiff
from sdy_jax.plan.record.program import RecordedCollective
from sdy_jax.plan.record.record import PlanRecord


def differences(before: PlanRecord, after: PlanRecord) -> dict[str, Any]:
    """What JSON can say of the differences. Collectives stand by their numbers in the plans, -1 where one has none."""
    found: PlanDiff = after.diff(before)
    numbers = [{id(one): number for number, one in enumerate(_singles(record))} for record in (before, after)]
    return {
        "causes": [[cause.line, cause.what, cause.text] for cause in found.causes],
        "amounts": [[each.name, each.before, each.after, each.unit] for each in found.amounts],
        "border": [[each.side, each.path, each.before or "", each.after or ""] for each in found.border],
        "collectives": [_collective(change, *numbers) for change in found.collectives],
        "values": [[each.name, each.before, each.after, each.line, each.count] for each in found.values],
    }


def _singles(record: PlanRecord) -> Iterator[RecordedCollective]:
    return (one for each in record.collectives for one in each.single)


def _collective(change: CollectiveChange, before: dict[int, int], after: dict[int, int]) -> list[Any]:
    return [before.get(id(change.before), -1), after.get(id(change.after), -1), change.count, change.bytes]
