"""How collectives are counted, on every surface alike: headlines, sections, tables, pages, files, comparisons, demands.

A transfer is one run of a collective that sends something. A loop of 12 trips makes 12 of it; a bucket, whose members
run as one, makes one, and as many "before merging" as it has members. What sends nothing is none: a slice of what every
device has. Neither is what stands in a branch that sends less than another one of its conditional.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Sender(Protocol):
    """A collective, or a bucket of several, with what it sends: of a plan, or of its record."""

    @property
    def kind(self) -> str: ...
    @property
    def wire_bytes(self) -> float: ...
    @property
    def times(self) -> int: ...
    @property
    def members(self) -> Sequence[Sender]: ...


@dataclass(frozen=True, slots=True)
class Transfers:
    """The transfers of a call, of one kind or of all.

    Attributes:
        count: as they run. Loops whose trips are unknown count as one trip: then it is the least.
        unmerged: before merging, with each member of a bucket by itself.
        bytes: that a device sends in them.
    """

    count: int = 0
    unmerged: int = 0
    bytes: float = 0.0

    @property
    def before_merging(self) -> str:
        """` (62 before merging)`; empty where nothing was merged."""
        return f" ({self.unmerged} before merging)" if self.unmerged != self.count else ""

    def text(self, noun: str) -> str:
        """`14 all_gather (62 before merging)`."""
        return f"{self.count} {noun}{self.before_merging}"


def transfers_of(collectives: Iterable[Sender]) -> Transfers:
    """The transfers of collectives that count, buckets with their members."""
    sending = [each for each in collectives if each.wire_bytes]
    return Transfers(
        sum(each.times for each in sending),
        sum(one.times for each in sending for one in each.members or (each,) if one.wire_bytes),
        sum(each.wire_bytes * each.times for each in sending),
    )


def transfers_by_kind(collectives: Iterable[Sender]) -> dict[str, Transfers]:
    """The same by kind, those that send most first."""
    kinds: dict[str, list[Sender]] = {}
    for each in collectives:
        if each.wire_bytes:
            kinds.setdefault(each.kind, []).append(each)
    found = {kind: transfers_of(same) for kind, same in kinds.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1].bytes))
