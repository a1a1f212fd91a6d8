"""Tables of schedules: whole, in order, within their bounds of memory and bubble, for all small sizes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from sdy_jax.errors import ArgumentError
from sdy_jax.pipelines import slots
from sdy_jax.pipelines.schedules import tables
from sdy_jax.pipelines.schedules.tables import SCHEDULES, Cell, Kind, Table, pipeline_schedule
from sdy_jax.pipelines.slots import Slots

SIZES = [*itertools.product(range(1, 7), range(1, 14), range(1, 4))]
"""Stages, microbatches, rounds."""
PASSES = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}
THIRDS = dict.fromkeys(Kind, 1.0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_stage_does_all_once_and_in_order(schedule: str) -> None:
    for stages, microbatches, rounds in SIZES:
        assert not pipeline_schedule(schedule, stages, microbatches, rounds).faults(), (stages, microbatches, rounds)


def changed(table: Table, time: int, stage: int, cell: Cell | None) -> Table:
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
def test_loops_run_all_rows_in_order_and_send_only_what_is_taken(schedule: str) -> None:
    for stages, microbatches, rounds in SIZES[::3]:
        table = pipeline_schedule(schedule, stages, microbatches, rounds)
        assert tuple(row for loop in table.segments() for trip in loop for row in trip) == table.rows
        for loop in table.segments():
            assert len({tuple((row.kind, row.crosses) for row in trip) for trip in loop}) == 1
        taken = [(each, table._sender(*each)) for each in table.times]
        across = [(each, sender) for each, sender in taken if sender and sender[0] is each[0] and stages > 1]
        received = {table.times[each] for each, _ in across if each[0] is Kind.FORWARD}
        sent = {table.times[sender] for each, sender in across if each[0] is Kind.BACKWARD}
        assert received | sent == {time for time, row in enumerate(table.rows) if row.crosses}


def test_the_last_backward_row_may_be_in_the_loop_of_those_before_it() -> None:
    table = pipeline_schedule("1f1b", 3, 8)
    assert list(map(len, table.segments())) == [1, 2, 7, 2, 1]
    assert list(map(len, table.segments(sends_last=True))) == [1, 2, 7, 3]


def test_forwards_before_all_else_are_a_pass_of_their_own() -> None:
    assert pipeline_schedule("gpipe", 4, 8).starts_with_all_forwards
    assert not pipeline_schedule("1f1b", 4, 8).starts_with_all_forwards
    assert pipeline_schedule("1f1b", 4, 1).starts_with_all_forwards


def test_unknown_schedules() -> None:
    with pytest.raises(ArgumentError, match="schedule is '1f1'; did you mean '1f1b'"):
        pipeline_schedule("1f1", 2, 2)


def test_tables_need_no_jax() -> None:
    for module in (tables, slots):
        text = Path(module.__file__ or "").read_text()
        assert "jax" not in text.replace("sdy_jax", "").replace("no jax", "")
