"""What a pipeline writes on its ops, so that plans find it: a name scope, which derivatives, loops and inlining keep.

sdy_pipeline.1f1b[4,8,1,16,FB,stage]    4 stages, 8 microbatches, 1 round, 16 layers; forward and backward rows
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from sdy_jax.ir.locations import PIPELINE
from sdy_jax.pipelines.schedules.tables import SCHEDULES, Kind, Table, pipeline_schedule

_LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.WEIGHTS: "W"}
_MARK = re.compile(re.escape(PIPELINE) + r"(\w+)\[(\d+),(\d+),(\d+),(\d+),([FBW]+),([^\]/]*)\]")


@dataclass(frozen=True, slots=True)
class Mark:
    """A run of a pipeline: some kinds of rows of a schedule.

    Attributes:
        schedule: its name.
        axis: the mesh axis of the stages.
        stages, microbatches, rounds: of the schedule.
        layers: how many there are.
        kinds: of the rows that run.
    """

    schedule: str
    axis: str
    stages: int
    microbatches: int
    rounds: int
    layers: int
    kinds: frozenset[Kind]

    @classmethod
    def of(cls, schedule: str, axis: str, table: Table, layers: int, kinds: Collection[Kind]) -> Mark:
        """That of a run of some kinds of a table's rows."""
        return cls(schedule, axis, table.stages, table.microbatches, table.rounds, layers, frozenset(kinds))

    @property
    def scope(self) -> str:
        """The name scope that says it."""
        letters = "".join(letter for kind, letter in _LETTERS.items() if kind in self.kinds)
        numbers = f"{self.stages},{self.microbatches},{self.rounds},{self.layers}"
        return f"{PIPELINE}{self.schedule}[{numbers},{letters},{self.axis}]"

    @property
    def table(self) -> Table:
        """The rows that run."""
        table = pipeline_schedule(self.schedule, self.stages, self.microbatches, self.rounds)
        return table.only(*self.kinds)


def mark_in(text: str) -> Mark | None:
    """The mark that a location says, of the innermost pipeline; None where there is none."""
    found = _MARK.search(text)
    if found is None or found[1] not in SCHEDULES:
        return None
    stages, microbatches, rounds, layers = map(int, found.groups()[1:5])
    kinds = frozenset(kind for kind, letter in _LETTERS.items() if letter in found[6])
    return Mark(found[1], found[7], stages, microbatches, rounds, layers, kinds)


def scope_of(kind: Kind) -> str:
    """The name scope of rows of a kind."""
    return kind.name.lower()
