"""Tables as loops run them: of which trips, and over which links rows send. Plain Python, no jax.

Four stages, a loop per line, with the links over which its rows send:

    F0 - F3    none, 1, 1-2, 1-3
    B0 F4 ...  backward 3, 2-3             two trips, in which links still fill
    B2 F6 ...  backward 1-3, forward 1-3   as many as there are: in these all links send both ways
    B5 F9 ...  forward 2-3, 3              two trips, in which links run dry
    B7 - B9    1-3, 1-2, 1
    B10        none

Where stages have several rounds, the last one sends to the first in turns of as many rows as there are stages. There a
turn is some loops, and a loop around them goes through the turns: so a table has no more loops for more microbatches.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sdy_jax.pipelines.schedules.tables import Kind, Row, Table, Trip

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
