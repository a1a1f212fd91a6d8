"""Schedules of pipelines as tables, which stage runs what, when; and the marks by which plans find them; no jax."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from sdy_jax.base.errors import ArgumentError, did_you_mean, listed
from sdy_jax.ir.locations import PIPELINE

# Schedules of pipelines as tables: which stage runs what, when. Plain Python, no jax.
#
# Stages run in lockstep: in a row of a table every stage does the same kind of work, on a microbatch of its own, or
# nothing. What a stage sends after a row arrives before the next row of that kind. Rows are joined to trips, of at
# most one row per kind, so that what a row sends travels while rows of other kinds run.
#
# Layers are in `stages * rounds` groups; group `g` is round `g // stages` on stage `g % stages`. The microbatch `m`
# passes stage 0 in round `r` at trip `(m // S) * R * S + r * S + m % S`, and each later stage a trip later: `S`
# microbatches go through all rounds before the next `S` enter. Cotangents take the same way back, last round first.
#
#     1f1b, two stages, three microbatches, a column per trip:
#
#     stage 0   F0   F1   F2B0      B1   B2
#     stage 1        F0B0 F1B1 F2B2
#
#     zero bubble: gradients of weights wait until all stages have some
#
#     stage 0   F0   F1   F2B0W0 B1W1 B2W2
#     stage 1        F0B0 F1B1W0 F2B2W1 W2


class Kind(StrEnum):
    """What a stage does in a row."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHTS = "weight gradient"


@dataclass(frozen=True, slots=True)
class Cell:
    """A microbatch, and in which round it passes the stage."""

    microbatch: int
    round: int


@dataclass(frozen=True, slots=True)
class Row:
    """Work of one kind: a cell per stage, None where it does nothing."""

    kind: Kind
    cells: tuple[Cell | None, ...]

    @property
    def links(self) -> frozenset[int]:
        """Over which links something is sent before it, or after a backward row: the stages that work on another group
        than the first one, each for the link from the stage before it, in a ring."""
        if self.kind is Kind.WEIGHTS or len(self.cells) == 1:
            return frozenset()
        return frozenset(stage for stage, cell in enumerate(self.cells) if cell is not None and (stage or cell.round))


Trip = tuple[Row, ...]
"""Rows of different kinds, in the order of `Kind`."""


@dataclass(frozen=True, slots=True)
class Timetable:
    """A schedule for a number of stages, rounds and microbatches."""

    stages: int
    rounds: int
    microbatches: int
    trips: tuple[Trip, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows in order; the index of a row is its time."""
        return tuple(row for trip in self.trips for row in trip)

    def __str__(self) -> str:
        held = f"bubble {self.bubble():.0%}, {max(self.held())} microbatches held at most"
        rounds = f", {self.rounds} rounds" * (self.rounds > 1)
        columns = [[f"stage {stage}" for stage in range(self.stages)]]
        columns += [["".join(self._letters(row, s) for row in trip) for s in range(self.stages)] for trip in self.trips]
        widths = [max(map(len, column)) for column in columns]
        lines = (
            "  ".join(column[s].ljust(width) for column, width in zip(columns, widths, strict=True))
            for s in range(self.stages)
        )
        title = f"{self.stages} stages, {self.microbatches} microbatches{rounds}: {held}"
        return "\n".join([title, *map(str.rstrip, lines)])

    def _letters(self, row: Row, stage: int) -> str:
        """`F3`: the forward pass of microbatch 3; `F3.1` of its second round."""
        cell = row.cells[stage]
        if cell is None:
            return ""
        return f"{row.kind[0].upper()}{cell.microbatch}" + f".{cell.round}" * (self.rounds > 1)

    @property
    def _defers(self) -> bool:
        return any(row.kind is Kind.WEIGHTS for row in self.rows)

    @property
    def times(self) -> dict[tuple[Kind, int, Cell], int]:
        """When a stage does a kind of work on a cell."""
        return {
            (row.kind, stage, cell): time
            for time, row in enumerate(self.rows)
            for stage, cell in enumerate(row.cells)
            if cell is not None
        }

    def group(self, stage: int, cell: Cell) -> int:
        """The group of layers that a cell passes on a stage."""
        return cell.round * self.stages + stage

    @property
    def share(self) -> float:
        """The weight of a microbatch's loss while gradients are summed: near one over their number, and a power of two,
        which all types have exactly."""
        return 0.5 ** (self.microbatches.bit_length() - 1)

    def only(self, *kinds: Kind) -> Timetable:
        """The rows of some kinds."""
        trips = (tuple(row for row in trip if row.kind in kinds) for trip in self.trips)
        return Timetable(self.stages, self.rounds, self.microbatches, tuple(trip for trip in trips if trip))

    @property
    def starts_with_all_forwards(self) -> bool:
        """Whether no microbatch goes back before all have gone through: a forward and a backward pass may run apart."""
        kinds = [row.kind for row in self.rows]
        return Kind.FORWARD not in kinds[kinds.count(Kind.FORWARD) :]

    def held(self) -> tuple[int, ...]:
        """How many microbatches of a group each stage holds at most between their forward and backward rows."""
        times, found = self.times, [0] * self.stages
        for stage in range(self.stages):
            spans = [
                (t, times[Kind.BACKWARD, s, c]) for (k, s, c), t in times.items() if (k, s) == (Kind.FORWARD, stage)
            ]
            found[stage] = max(sum(first <= time <= last for first, last in spans) for time, _ in spans)
        return tuple(found)

    def faults(self) -> list[str]:
        """What keeps the table from being run: a cell that is missing, or takes what has not just arrived."""
        return [*self._missing(), *self._out_of_order()]

    def _missing(self) -> Iterator[str]:
        times, kinds = self.times, {row.kind for row in self.rows}
        for kind in kinds:
            for stage in range(self.stages):
                done = [cell for each, s, cell in times if (each, s) == (kind, stage)]
                wanted = {Cell(m, r) for m in range(self.microbatches) for r in range(self.rounds)}
                if set(done) != wanted:
                    yield f"stage {stage} lacks {kind} of {sorted(wanted - set(done), key=str)}"
        count = sum(cell is not None for row in self.rows for cell in row.cells)
        if count != len(times):
            yield "a stage does something twice"

    def _out_of_order(self) -> Iterator[str]:
        times = self.times
        for (kind, stage, cell), time in times.items():
            source = self._sender(kind, stage, cell)
            if source is not None and source in times and times[source] >= time:
                yield f"{kind} of {cell} on stage {stage} at {time} before {source} at {times[source]}"
            between = (row.kind for row in self.rows[times.get(source, time) + 1 : time]) if source else ()
            if source is not None and source[0] is kind and kind in between:
                yield f"{kind} of {cell} on stage {stage} at {time} takes what came before the last row"

    def _sender(self, kind: Kind, stage: int, cell: Cell) -> tuple[Kind, int, Cell] | None:
        """Whose result a cell takes; None for the first of all."""
        if kind is Kind.WEIGHTS:
            return Kind.BACKWARD, stage, cell
        group = self.group(stage, cell) + (1 if kind is Kind.BACKWARD else -1)
        if group == self.stages * self.rounds:
            return Kind.FORWARD, stage, cell
        return None if group < 0 else (kind, group % self.stages, Cell(cell.microbatch, group // self.stages))

    def bubble(self, costs: Mapping[Kind, float] | None = None) -> float:
        """The share of the time in which a stage does nothing: a row takes as long as a group's work of its kind.

        Args:
            costs: how long each kind takes. Unless given, a backward pass takes twice as long as a forward pass, and
                half of it for gradients of weights.
        """
        if costs is None:
            costs = {Kind.FORWARD: 1, Kind.BACKWARD: 1 if self._defers else 2, Kind.WEIGHTS: 1}
        total = sum(costs[row.kind] for row in self.rows)
        busy = self.microbatches * self.rounds * sum(costs[kind] for kind in {row.kind for row in self.rows})
        return 1 - busy / total


Passing = tuple[int, int, Cell]
"""The trip and the stage of a cell."""


def _forward(stages: int, rounds: int, microbatches: int) -> Iterator[Passing]:
    for m in range(microbatches):
        for r in range(rounds):
            first = m // stages * rounds * stages + r * stages + m % stages
            yield from ((first + s, s, Cell(m, r)) for s in range(stages))


def _backward(stages: int, rounds: int, microbatches: int, start: int) -> Iterator[Passing]:
    """The way of the forward pass through mirrored groups; `start` is the trip of the first cell."""
    for trip, stage, cell in _forward(stages, rounds, microbatches):
        yield start + trip, stages - 1 - stage, Cell(cell.microbatch, rounds - 1 - cell.round)


def _table(stages: int, rounds: int, microbatches: int, passings: Mapping[Kind, list[Passing]]) -> Timetable:
    """The table of the cells of each kind. A kind has a row in each trip from its first cell to its last."""
    cells = {(kind, trip, stage): cell for kind, found in passings.items() for trip, stage, cell in found}
    spans = {kind: range(min(found)[0], max(found)[0] + 1) for kind, found in passings.items()}
    trips = (
        tuple(
            Row(kind, tuple(cells.get((kind, trip, stage)) for stage in range(stages)))
            for kind in Kind
            if kind in spans and trip in spans[kind]
        )
        for trip in range(max(span.stop for span in spans.values()))
    )
    return Timetable(stages, rounds, microbatches, tuple(trip for trip in trips if trip))


def _gpipe(stages: int, rounds: int, microbatches: int) -> Timetable:
    forward = list(_forward(stages, rounds, microbatches))
    backward = list(_backward(stages, rounds, microbatches, max(forward)[0] + 1))
    return _table(stages, rounds, microbatches, {Kind.FORWARD: forward, Kind.BACKWARD: backward})


def _one_forward_one_backward(stages: int, rounds: int, microbatches: int) -> Timetable:
    """The last stage turns a microbatch back in the trip in which it arrives."""
    forward = list(_forward(stages, rounds, microbatches))
    backward = list(_backward(stages, rounds, microbatches, rounds * stages - 1))
    return _table(stages, rounds, microbatches, {Kind.FORWARD: forward, Kind.BACKWARD: backward})


def _zero_bubble(stages: int, rounds: int, microbatches: int) -> Timetable:
    """Gradients of weights begin when the first microbatch has come back, on all stages, so that no row of them waits
    for a microbatch on its way."""
    forward = list(_forward(stages, rounds, microbatches))
    backward = list(_backward(stages, rounds, microbatches, rounds * stages - 1))
    last = {(cell, stage): trip for trip, stage, cell in backward}
    weights = [(max(last[cell, s] for s in range(stages)), stage, cell) for cell, stage in last]
    return _table(stages, rounds, microbatches, {Kind.FORWARD: forward, Kind.BACKWARD: backward, Kind.WEIGHTS: weights})


SCHEDULES: Mapping[str, Callable[[int, int, int], Timetable]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _one_forward_one_backward,
    "zero_bubble": _zero_bubble,
}


def pipeline_schedule(schedule: str, stages: int, microbatches: int, rounds: int = 1) -> Timetable:
    """The schedule that `pipeline` runs, as a table that prints as a timeline.

    Args:
        schedule: "gpipe", "1f1b", "interleaved" or "zero_bubble".
        stages: the size of the mesh axis.
        microbatches: into how many the batch is cut.
        rounds: how many groups of layers each stage holds.

    Returns:
        The table: `bubble()` is the share of the time that stages wait, `held()` how many microbatches each holds.

    Raises:
        ArgumentError: there is no such schedule, or a number is none that is positive.

    Example:
        >>> print(pipeline_schedule("1f1b", stages=2, microbatches=3))
        2 stages, 3 microbatches: bubble 25%, 3 microbatches held at most
        stage 0  F0  F1    F2B0    B1  B2
        stage 1      F0B0  F1B1  F2B2

    See also:
        `pipeline`: what runs it.
    """
    if schedule not in SCHEDULES:
        hint, known = did_you_mean(schedule, SCHEDULES), listed(map(repr, SCHEDULES))
        raise ArgumentError(f"pipeline: schedule is {schedule!r}; {hint}schedules are {known}")
    for name, number in (("stages", stages), ("microbatches", microbatches), ("rounds", rounds)):
        if not isinstance(number, int) or number < 1:
            raise ArgumentError(f"pipeline: {name} is {number!r}; expected a positive integer")
    return SCHEDULES[schedule](stages, rounds, microbatches)


# What a pipeline writes on its ops, so that plans find it: a name scope, which derivatives, loops and inlining keep.
#
# sdy_pipeline.1f1b[4,8,1,16,FB,stage]    4 stages, 8 microbatches, 1 round, 16 layers; forward and backward rows

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
    def of(cls, schedule: str, axis: str, table: Timetable, layers: int, kinds: Collection[Kind]) -> Mark:
        """That of a run of some kinds of a table's rows."""
        return cls(schedule, axis, table.stages, table.microbatches, table.rounds, layers, frozenset(kinds))

    @property
    def scope(self) -> str:
        """The name scope that says it."""
        letters = "".join(letter for kind, letter in _LETTERS.items() if kind in self.kinds)
        numbers = f"{self.stages},{self.microbatches},{self.rounds},{self.layers}"
        return f"{PIPELINE}{self.schedule}[{numbers},{letters},{self.axis}]"

    @property
    def table(self) -> Timetable:
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


def row_scope(kind: Kind) -> str:
    """The name scope of rows of a kind."""
    return kind.name.lower()
