"""Sums over the collectives of a plan: what one call sends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sdy_jax.lowering.interface.collective_record import CollectiveRecord


@dataclass(frozen=True, slots=True)
class PlanTotals:
    """What a call of a plan sends per device.

    `counted` are the collectives that count: all, but for those in branches that send less than another branch of the
    same conditional. `known` is False where a loop around one of them has an unknown trip count and was taken for one
    trip: then `wire_bytes` is the least.
    """

    counted: tuple[CollectiveRecord, ...]
    wire_bytes: float
    known: bool

    @classmethod
    def of(cls, records: Sequence[CollectiveRecord]) -> PlanTotals:
        kept = set(map(id, _counted(records, 0)))
        counted = tuple(record for record in records if id(record) in kept)
        known = all(record.times_known for record in records if record.wire_bytes)
        return cls(counted, _sum(counted), known)

    def by_kind(self) -> dict[str, tuple[int, float]]:
        """Executions and wire bytes of each kind of collective, sorted by kind."""
        kinds = sorted({record.kind for record in self.counted})
        of_kind = {kind: [record for record in self.counted if record.kind == kind] for kind in kinds}
        return {kind: (sum(record.times for record in found), _sum(found)) for kind, found in of_kind.items()}


def _counted(records: Sequence[CollectiveRecord], level: int) -> list[CollectiveRecord]:
    """The records that count, of those that share all branches up to one level: only the largest branches' are kept."""
    found = [record for record in records if len(record.branches) == level]
    branches: dict[int, dict[int, list[CollectiveRecord]]] = {}
    for record in records:
        if len(record.branches) > level:
            conditional, index = record.branches[level]
            branches.setdefault(conditional, {}).setdefault(index, []).append(record)
    for blocks in branches.values():
        found += max([_counted(inside, level + 1) for inside in blocks.values()], key=_sum)
    return found


def _sum(records: Iterable[CollectiveRecord]) -> float:
    return sum(record.total_wire_bytes for record in records)
