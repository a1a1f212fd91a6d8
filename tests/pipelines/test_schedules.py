"""Tables of schedules: whole, in order, within their bounds of memory and bubble, for all small sizes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sdy_jax.annotate import pipeline_schedules
from sdy_jax.annotate.pipeline_schedules import SCHEDULES, Cell, Kind, Timetable, pipeline_schedule
from sdy_jax.errors import ArgumentError
from sdy_jax.pipelines.loops import Loop, Slots, cycles, exact_loops, fewest_loops

SIZES = [*itertools.product(range(1, 7), range(1, 14), range(1, 4))]
"""Stages, microbatches, rounds."""
PASSES = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}
THIRDS = dict.fromkeys(Kind, 1.0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_stage_does_all_once_and_in_order(schedule: str) -> None:
    for stages, microbatches, rounds in SIZES:
        assert not pipeline_schedule(schedule, stages, microbatches, rounds).faults(), (stages, microbatches, rounds)


def changed(table: Timetable, time: int, stage: int, cell: Cell | None) -> Timetable:
    trips = [list(trip) for trip in table.trips]
    for trip, row in ((t, r) for t in range(len(trips)) for r in range(len(trips[t]))):
        if trips[trip][row] is table.rows[time]:
            cells = list(trips[trip][row].cells)
            cells[stage] = cell
            trips[trip][row] = replace(trips[trip][row], cells=tuple(cells))
    return replace(table, trips=tuple(map(tuple, trips)))


def test_a_change_anywhere_is_a_fault() -> None:
    table = pipeline_schedule("zero_bubble", 3, 4)
    for time, row in enumerate(table.rows):
        for stage, cell in enumerate(row.cells):
            for other in {None, Cell(0, 0), Cell(2, 0)} - {cell}:
                assert changed(table, time, stage, other).faults(), (time, stage, other)


@pytest.mark.parametrize("first, second", [(0, 1), (2, 3), (8, 9)])
def test_rows_in_another_order_are_a_fault(first: int, second: int) -> None:
    table = pipeline_schedule("gpipe", 3, 4)
    trips = list(table.trips)
    trips[first], trips[second] = trips[second], trips[first]
    assert replace(table, trips=tuple(trips)).faults()


def test_held_microbatches() -> None:
    """All by gpipe; by the others as many as go to the last stage and back, however many there are."""
    for stages, microbatches, rounds in SIZES:
        held = {name: pipeline_schedule(name, stages, microbatches, rounds).held() for name in SCHEDULES}
        assert max(held["gpipe"]) == microbatches * rounds
        if microbatches >= 2 * stages:
            assert held["1f1b"] == held["interleaved"] == held["zero_bubble"]
            assert max(held["1f1b"]) <= (rounds + 1) * stages - 1
        if rounds == 1:
            assert held["1f1b"] == tuple(min(2 * (stages - s) - 1, microbatches) for s in range(stages))


def test_bubbles() -> None:
    """Those of the docstring of `pipeline`."""
    for stages, microbatches, rounds in SIZES:
        s, m, r = stages, microbatches, rounds
        one = {name: pipeline_schedule(name, s, m).bubble(PASSES) for name in ("gpipe", "1f1b")}
        assert one == pytest.approx(dict.fromkeys(one, (s - 1) / (m + s - 1)))
        if m % s == 0:
            assert pipeline_schedule("interleaved", s, m, r).bubble(PASSES) == pytest.approx((s - 1) / (r * m + s - 1))
        assert pipeline_schedule("zero_bubble", s, m).bubble(THIRDS) == pytest.approx((s - 1) / (1.5 * m + s - 1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_slots_are_not_written_while_they_are_read_later(schedule: str) -> None:
    for stages, microbatches, rounds in SIZES[::3]:
        table = pipeline_schedule(schedule, stages, microbatches, rounds)
        slots = Slots(table)
        for stage in range(stages):
            kept: dict[tuple[Kind, int], tuple[int, int]] = {}
            for row, columns in zip(table.rows, slots.columns, strict=True):
                each = columns[stage]
                cell = each.microbatch, each.round
                if each.read >= 0:
                    maker = Kind.FORWARD if row.kind is Kind.BACKWARD else Kind.BACKWARD
                    assert kept.pop((maker, each.read)) == cell
                if each.kept >= 0:
                    assert (row.kind, each.kept) not in kept
                    kept[row.kind, each.kept] = cell
            assert not kept
        assert slots.kept[Kind.FORWARD] == max(table.held())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("cut", [exact_loops, fewest_loops])
def test_loops_run_all_rows_in_order(schedule: str, cut: Callable[[Timetable], Sequence[Loop]]) -> None:
    for stages, microbatches, rounds in SIZES[::3]:
        table = pipeline_schedule(schedule, stages, microbatches, rounds)
        found = cut(table)
        assert tuple(row for loop in found for trip in loop.trips for row in trip) == table.rows
        for loop in found:
            assert {tuple(row.kind for row in trip) for trip in loop.trips} == {loop.kinds} == {tuple(loop.links)}
            for kind, links in loop.links.items():
                rows = [row for trip in loop.trips for row in trip if row.kind is kind]
                assert all(row.links <= given for row, given in zip(rows, links, strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_exact_loops_send_what_is_taken_and_no_more(schedule: str) -> None:
    """Forward rows before they run, backward rows after; a link is named by the later stage."""
    for stages, microbatches, rounds in SIZES[::3]:
        table = pipeline_schedule(schedule, stages, microbatches, rounds)
        wanted: dict[int, set[int]] = {time: set() for time in range(len(table.rows))}
        for each in table.times:
            sender = table._sender(*each)
            if stages > 1 and sender and sender[0] is each[0]:
                at, (_, stage, _) = (each, each) if each[0] is Kind.FORWARD else (sender, sender)
                wanted[table.times[at]].add(stage)
        sent = (
            loop.links[row.kind][n] for loop in exact_loops(table) for n, trip in enumerate(loop.trips) for row in trip
        )
        assert list(map(set, sent)) == list(wanted.values())
        if rounds == 1 < stages:
            crossed = Counter(link for links in wanted.values() for link in links)
            assert crossed == dict.fromkeys(range(1, stages), 2 * microbatches)


def test_loops_are_as_many_for_more_stages() -> None:
    """All links are crossed in the middle one, where sends have rows to travel beside."""
    table = pipeline_schedule("1f1b", 3, 8)
    assert [len(loop.trips) for loop in exact_loops(table)] == [3, 1, 5, 1, 2, 1]
    assert [len(loop.trips) for loop in exact_loops(pipeline_schedule("1f1b", 8, 16))] == [8, 6, 3, 6, 7, 1]
    assert [len(loop.trips) for loop in exact_loops(pipeline_schedule("1f1b", 2, 8))] == [2, 7, 1, 1]
    assert [len(loop.trips) for loop in exact_loops(pipeline_schedule("gpipe", 4, 8))] == [3, 6, 2, 2, 6, 2, 1]
    middle = exact_loops(table)[2]
    assert {links for each in middle.links.values() for links in each} == {frozenset({1, 2})}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cycles_are_all_loops_in_order(schedule: str) -> None:
    for stages, microbatches, rounds in SIZES[::3]:
        loops = exact_loops(pipeline_schedule(schedule, stages, microbatches, rounds))
        found = list(cycles(loops))
        assert [loop for cycle in found for turn in cycle.turns for loop in turn] == list(loops)
        assert all(len({tuple(loop.form for loop in turn) for turn in cycle.turns}) == 1 for cycle in found)


def test_turns_of_rounds_are_as_many_bodies_for_more_microbatches() -> None:
    """Those in which the last stage sends to the first, and those in which it does not, forward and back."""
    for stages, bodies in ((2, 10), (3, 14), (4, 14)):
        for turns in (4, 8):
            found = list(cycles(exact_loops(pipeline_schedule("interleaved", stages, stages * turns, 2))))
            assert sum(len(cycle.turns[0]) for cycle in found) == bodies
            assert [len(cycle.turns[0]) for cycle in found if len(cycle.turns) > 1] == [4]


def test_the_fewest_loops_have_the_last_backward_row_in_that_of_those_before_it() -> None:
    assert [len(loop.trips) for loop in fewest_loops(pipeline_schedule("1f1b", 3, 8))] == [1, 2, 7, 3]


def test_forwards_before_all_else_are_a_pass_of_their_own() -> None:
    assert pipeline_schedule("gpipe", 4, 8).starts_with_all_forwards
    assert not pipeline_schedule("1f1b", 4, 8).starts_with_all_forwards
    assert pipeline_schedule("1f1b", 4, 1).starts_with_all_forwards


def test_unknown_schedules() -> None:
    with pytest.raises(ArgumentError, match="schedule is '1f1'; did you mean '1f1b'"):
        pipeline_schedule("1f1", 2, 2)


def test_tables_need_no_jax() -> None:
    text = Path(pipeline_schedules.__file__ or "").read_text()
    assert "jax" not in text.replace("sdy_jax", "").replace("no jax", "")
