"""What differs between two plans."""

from __future__ import annotations

from dataclasses import dataclass

from sdy_jax.plan_record.diff_text import diff_text
from sdy_jax.plan_record.program import RecordedCollective


@dataclass(frozen=True, slots=True)
class Cause:
    """Why plans differ.

    Attributes:
        kind: "mesh", "option", "annotation", "code", "argument", "costs" or "version".
        line: where the user changed it; in the file as it was before, where something is gone.
        what: what changed: `sharding_constraint P('data') removed`.
        text: the line's text; may be empty.
    """

    kind: str
    line: str
    what: str
    text: str = ""

    def __str__(self) -> str:
        said = f"{self.line}: {self.what}" if self.line else self.what
        return f"{said}: {self.text}" if self.text else said


@dataclass(frozen=True, slots=True)
class BorderChange:
    """An argument or result whose type differs; `before` is None where it is new, `after` where it is gone."""

    side: str
    path: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class CollectiveChange:
    """Collectives that differ, so many alike: `before` is None where they are new, `after` where they are gone."""

    before: RecordedCollective | None
    after: RecordedCollective | None
    count: int

    @property
    def bytes(self) -> float:
        """What a device sends more per call."""
        old, new = (c.total_wire_bytes if c is not None else 0.0 for c in (self.before, self.after))
        return self.count * (new - old)

    @property
    def one(self) -> RecordedCollective:
        """That of the plan after, or else before."""
        found = self.after or self.before
        assert found is not None
        return found


@dataclass(frozen=True, slots=True)
class ValueChange:
    """Values of one line in another layout: the name of the first one, both types, the line, and how many there are."""

    name: str
    before: str
    after: str
    line: str
    count: int


@dataclass(frozen=True, slots=True)
class Amount:
    """A figure of both plans, in bytes or seconds."""

    name: str
    before: float
    after: float
    unit: str = "bytes"


@dataclass(frozen=True)
class PlanDiff:
    """The differences between two plans; true where there are any. Printing it gives the causes first, then what they
    cost and what changed.

    Attributes:
        name: of the function.
        causes: what the user changed, the edited line first.
        amounts: bytes on the wire, memory, and time where the cost model knows it.
        border: arguments and results.
        collectives: those that differ, the largest difference in bytes first.
        values: those in other layouts; none where a plan does not list its values.
    """

    name: str
    causes: tuple[Cause, ...]
    amounts: tuple[Amount, ...]
    border: tuple[BorderChange, ...]
    collectives: tuple[CollectiveChange, ...]
    values: tuple[ValueChange, ...]

    def __bool__(self) -> bool:
        return bool(self.border or self.collectives or self.values)

    def __str__(self) -> str:
        return diff_text(self)
