"""Tables as loops run them: trips, links between stages, and slots of buffers by lifetimes. Plain Python, no jax."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sdy_jax.annotate.pipeline_schedules import Cell, Kind, Row, Table, Trip

# Tables as loops run them: of which trips, and over which links rows send. Plain Python, no jax.
#
# Four stages, a loop per line, with the links over which its rows send:
#
#     F0 - F3    none, 1, 1-2, 1-3
#     B0 F4 ...  backward 3, 2-3             two trips, in which links still fill
#     B2 F6 ...  backward 1-3, forward 1-3   as many as there are: in these all links send both ways
#     B5 F9 ...  forward 2-3, 3              two trips, in which links run dry
#     B7 - B9    1-3, 1-2, 1
#     B10        none
#
# Where stages have several rounds, the last one sends to the first in turns of as many rows as there are stages.
# There a turn is some loops, and a loop around them goes through the turns: so a table has no more loops for more
# microbatches.

Links = frozenset[int]
"""Those of `Row.links`."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Consecutive trips whose rows are of the same kinds.

    Attributes:
        trips: the rows.
        links: over which links rows of each kind send, by trip.
    """

    trips: tuple[Trip, ...]
    links: Mapping[Kind, tuple[Links, ...]]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Those of the rows of a trip, in order."""
        return tuple(row.kind for row in self.trips[0])

    @property
    def form(self) -> Hashable:
        """What loops with the same body have in common."""
        return len(self.trips), tuple(self.links.items())


@dataclass(frozen=True, slots=True)
class Cycle:
    """Consecutive loops that come several times.

    Attributes:
        turns: the loops of each time, of the same forms.
    """

    turns: tuple[tuple[Loop, ...], ...]


def cycles(loops: Sequence[Loop]) -> Iterator[Cycle]:
    """Loops in cycles; those that come once are cycles of one turn."""
    known = dict[Hashable, int]()
    forms = [known.setdefault(loop.form, len(known)) for loop in loops]
    while forms:
        widths = range(1, max(2, len(forms) // 2 + 1))
        width = max(widths, key=lambda width: width * (_turns(forms, width) - 1))
        end = width * _turns(forms, width)
        yield Cycle(tuple(tuple(loops[start : start + width]) for start in range(0, end, width)))
        loops, forms = loops[end:], forms[end:]


def _turns(forms: Sequence[int], width: int) -> int:
    """How often the first ones, of some number, come in turn."""
    return next(n for n in itertools.count(1) if forms[n * width : (n + 1) * width] != forms[:width])


def exact_loops(table: Table) -> tuple[Loop, ...]:
    """Loops whose rows send over no link but those over which another stage takes something.

    Where links differ from row to row, a row sends in a branch of its own, beside which nothing runs. So trips in which
    all links are crossed are other loops, but for a single such row alone between others. A forward row that no stage
    sends before is in the loop of those after it, as nothing runs beside what these send. A backward row that no stage
    sends after is a loop of its own: what follows may run beside it.
    """
    trips, every = _trips(table), frozenset[int]().union(*(row.links for row in table.rows))

    def crosses_all_alone(n: int) -> bool:
        return 0 <= n < len(trips) and len(trips[n]) == 1 and trips[n][0].links == every

    def alike(n: int) -> list[Hashable]:
        rows = trips[n]
        if len(rows) > 1:
            return [(row.kind, bool(row.links), row.links == every) for row in rows]
        is_steady = crosses_all_alone(n) and (crosses_all_alone(n - 1) or crosses_all_alone(n + 1))
        return [(rows[0].kind, rows[0].kind is Kind.FORWARD or bool(rows[0].links), is_steady)]

    loops = [tuple(trips[n] for n in numbers) for _, numbers in itertools.groupby(range(len(trips)), key=alike)]
    return tuple(Loop(loop, {row.kind: _links(loop, n) for n, row in enumerate(loop[0])}) for loop in loops)


def fewest_loops(table: Table) -> tuple[Loop, ...]:
    """Loops for where each one that adds to gradients reduces them: all links are crossed where some are, also those
    over which nobody takes anything, and last backward rows are in the loop of those before them."""

    def alike(trip: Trip) -> list[Hashable]:
        return [(row.kind, row.kind is Kind.BACKWARD or bool(row.links)) for row in trip]

    def links(loop: tuple[Trip, ...], n: int) -> tuple[Links, ...]:
        return (frozenset[int]().union(*_links(loop, n)),) * len(loop)

    loops = [tuple(loop) for _, loop in itertools.groupby(_trips(table), key=alike)]
    return tuple(Loop(loop, {row.kind: links(loop, n) for n, row in enumerate(loop[0])}) for loop in loops)


def _links(loop: tuple[Trip, ...], n: int) -> tuple[Links, ...]:
    return tuple(trip[n].links for trip in loop)


def _trips(table: Table) -> tuple[Trip, ...]:
    """Where stages send, trips begin with their backward rows here: so both directions have a row to travel beside in
    each trip that has both."""
    crosses = any(row.links for row in table.rows)
    return tuple(map(tuple, _from_backward_rows(table.rows))) if crosses else table.trips


def _from_backward_rows(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows in trips that begin with a backward row, where there is one, or with what the last trip has already."""
    trip: list[Row] = []
    for row in rows:
        if trip and (row.kind is Kind.BACKWARD or row.kind in {each.kind for each in trip}):
            yield trip
            trip = []
        trip.append(row)
    yield trip


# Where a stage keeps what it needs again later, as columns of a table: slots of buffers, found from lifetimes.


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
