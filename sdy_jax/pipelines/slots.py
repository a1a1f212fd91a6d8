"""Where a stage keeps what it needs again later, as columns of a table: slots of buffers, found from lifetimes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sdy_jax.pipelines.schedules.tables import Cell, Kind, Table


@dataclass(frozen=True, slots=True)
class Columns:
    """What a stage needs to know of one row; a slot of -1 is none.

    Attributes:
        active: whether the stage does anything.
        microbatch, round, group: on what.
        kept: where it puts what a later kind of row reads: backward rows from forward ones, weights' rows from backward
            ones.
        read: from where it reads that.
        result: where a forward row of the last group puts its result, and its backward row reads it.
    """

    active: int = False
    microbatch: int = 0
    round: int = 0
    group: int = 0
    kept: int = -1
    read: int = -1
    result: int = -1


class Slots:
    """Slots for a table, as few as the stage that needs most of them can do with.

    Attributes:
        columns: of all rows, by time and stage.
        kept: how many slots hold what rows of a kind keep for others.
        results: how many hold results that wait for their backward row.
    """

    def __init__(self, table: Table):
        keeping = {kind: _numbered(_lifetimes(table, kind, user)) for kind, user in _USERS.items()}
        last = table.stages * table.rounds - 1
        turned = (each for each in _lifetimes(table, Kind.FORWARD, Kind.BACKWARD) if table.group(*each[2:]) == last)
        results = _numbered(turned)
        self._table, self._keeping, self._results = table, keeping, results
        self.kept = {kind: _size(numbers) for kind, numbers in keeping.items()}
        self.results = _size(results)
        self.columns = tuple(
            tuple(self._of_cell(row.kind, stage, cell) for stage, cell in enumerate(row.cells)) for row in table.rows
        )

    def _of_cell(self, kind: Kind, stage: int, cell: Cell | None) -> Columns:
        if cell is None:
            return Columns()
        key = stage, cell
        return Columns(
            active=True,
            microbatch=cell.microbatch,
            round=cell.round,
            group=self._table.group(stage, cell),
            kept=self._keeping[kind].get(key, -1) if kind in self._keeping else -1,
            read=self._keeping[_MAKERS[kind]].get(key, -1) if kind in _MAKERS else -1,
            result=self._results.get(key, -1),
        )


_USERS = {Kind.FORWARD: Kind.BACKWARD, Kind.BACKWARD: Kind.WEIGHTS}
_MAKERS = {user: kind for kind, user in _USERS.items()}

Lifetime = tuple[int, int, int, Cell]
"""First and last time, stage, and what is kept of which cell."""
Numbers = dict[tuple[int, Cell], int]


def _lifetimes(table: Table, kind: Kind, user: Kind) -> Iterator[Lifetime]:
    """What rows of one kind keep for those of another."""
    for (each, stage, cell), time in table.times.items():
        if each is kind and (user, stage, cell) in table.times:
            yield time, table.times[user, stage, cell], stage, cell


def _numbered(lifetimes: Iterator[Lifetime]) -> Numbers:
    """A slot for each lifetime, on each stage as few as overlap; a slot is free in the row after its last one."""
    found: Numbers = {}
    ends: dict[int, list[int]] = {}
    for first, last, stage, cell in sorted(lifetimes, key=lambda each: each[:3]):
        taken = ends.setdefault(stage, [])
        slot = next((i for i, end in enumerate(taken) if end < first), len(taken))
        taken[slot : slot + 1] = [last]
        found[stage, cell] = slot
    return found


def _size(numbers: Numbers) -> int:
    return 1 + max(numbers.values(), default=-1)
