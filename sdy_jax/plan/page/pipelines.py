"""The section, and the table, on pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sdy_jax.plan.page.columns import aligned
from sdy_jax.plan.page.sections import Section
from sdy_jax.plan.record.pipelines import RecordedPipeline, RecordedTried
from sdy_jax.plan.record.record import PlanRecord
from sdy_jax.representation.type_text import amount_text, bytes_text, count_text

_WEIGHT = 3.0
"""Lines of pipelines beside those of other sections. Chosen: a line per stage, of which there are few."""


class PipelineRow(NamedTuple):
    """A stage of a pipeline: its layers, the microbatches that it holds at most, the bytes of its part of stacks, and
    those that it carries from trip to trip."""

    pipeline: str
    stage: str
    layers: str
    microbatches: str
    bytes: float
    held: float
    line: str


def pipelines_section(record: PlanRecord) -> Section:
    """What each pipeline sends, and how long its stages wait; a line per stage."""
    rows = [(line,) for each in record.pipelines for line in _lines(record, each)] + [(row,) for row in _tried(record)]
    rest = lambda hidden: f"and {hidden} more lines: plan.table('pipelines')"  # noqa: E731
    return Section("pipelines" if rows else "", rows, weight=_WEIGHT, rest=rest)


def _lines(record: PlanRecord, each: RecordedPipeline) -> Iterator[str]:
    passes = "" if len(each.kinds) > 1 else f", {each.kinds[0]} rows"
    yield (
        f"{_name(each)}{passes}{count_text(each.times)}: {each.layers} layers on {each.stages} stages, "
        f"{each.microbatches} microbatches, {each.trips} trips, a stage waits {each.bubble:.0%} of the time  "
        f"{each.place.lines}"
    )
    yield f"  a boundary  {_boundary(each)}"
    yield f"  a device    holds {_holds(each)}{_takes(each, record.time.unit)}"
    yield from aligned([(f"stage {row.stage}", f"layers {row.layers or '-'}", _held(row)) for row in _of(each)])


def _tried(record: PlanRecord) -> Iterator[str]:
    """The numbers of microbatches of which one was taken, and why."""
    taken = next((each for each in record.tried if each.chosen), None)
    if taken is None:
        return
    why = "takes least of what fits" if taken.fits else "none fits, and it holds least"
    yield f"microbatches: {_numbers(taken)} {why}, of {len(record.tried)} that were planned  {', '.join(taken.lines)}"
    yield from aligned([(_numbers(each), *_figures(each, record.time.unit)) for each in record.tried])


def _numbers(each: RecordedTried) -> str:
    return ", ".join(map(str, each.microbatches))


def _figures(each: RecordedTried, unit: str) -> tuple[str, str]:
    takes = "" if each.time is None else f"takes {amount_text(unit, each.time)}"
    return takes, f"holds {bytes_text(each.peak)}" + ("" if each.fits else ", does not fit")


def _name(each: RecordedPipeline) -> str:
    rounds = f" in {each.rounds} rounds" if each.rounds > 1 else ""
    return f"{each.schedule}{rounds} over {each.axis!r}"


def _boundary(each: RecordedPipeline) -> str:
    """What a device sends to its neighbours."""
    directions = ("on", each.forward_bytes), ("back", each.backward_bytes)
    sent = " and ".join(f"{bytes_text(size)} {way}" for way, size in directions if size)
    return f"{sent} per microbatch, {bytes_text(each.sent)} in all trips" if sent else "sends nothing"


def _holds(each: RecordedPipeline) -> str:
    kept = " and activations" if each.kinds[0] != "forward" else ""
    return f"{bytes_text(each.stacks)} of weights{kept}, and carries {bytes_text(each.carried)} from trip to trip"


def _takes(each: RecordedPipeline, unit: str) -> str:
    """What its rows take, where times are known."""
    if unit != "seconds" or not each.durations:
        return ""
    rows = (f"{amount_text(unit, time)} a {kind} row" for kind, time in zip(each.kinds, each.durations, strict=True))
    return f"; takes {', '.join(rows)}"


def _held(row: PipelineRow) -> str:
    several = "" if row.microbatches == "1" else "es"
    return f"holds {row.microbatches} microbatch{several} at most" if row.microbatches else ""


def pipeline_rows(record: PlanRecord) -> Iterator[PipelineRow]:
    """A row per stage."""
    for each in record.pipelines:
        yield from _of(each)


def _of(each: RecordedPipeline) -> Iterator[PipelineRow]:
    for stage, layers in enumerate(each.groups):
        held = str(each.held[stage]) if each.held else ""
        yield PipelineRow(_name(each), str(stage), layers, held, each.stacks, each.carried, each.place.lines)
