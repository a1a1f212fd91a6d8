"""The whole of a plan as frozen dataclasses of strings, numbers and tuples: what is printed, drawn and compared;
demands on its collectives, and the part of it that people review.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sdy_jax.base.errors import SdyError
from sdy_jax.base.extensions import Extension
from sdy_jax.ir.collectives import KINDS
from sdy_jax.ir.jax_shardings import bytes_text, count_text
from sdy_jax.plan.record.comparison import check_plan, diff
from sdy_jax.plan.record.differences import PlanDiff
from sdy_jax.plan.record.program import RecordedCollective
from sdy_jax.plan.record.recorded_plan import RecordedPlan
from sdy_jax.plan.record.timeline import NO_TIMELINE
from sdy_jax.plan.record.transfers import Transfers

# Demands on the number of collectives.

_IN_JAX = {"psum": "all_reduce", "psum_scatter": "reduce_scatter", "ppermute": "collective_permute"}

_LISTED = 8
"""Collectives that a message lists. Chosen: for a reader."""


def check_counts(record: RecordedPlan, expected: Mapping[str, int]) -> None:
    """
    Raises:
        AssertionError: a kind of collective runs more or less often than expected.
        SdyError: there is no such kind.
    """
    check_kinds(expected, "assert_collectives")
    problems, sent = [], record.transfers_by_kind
    for kind, count in expected.items():
        found = [one for one in record.counted if one.kind == kind and one.wire_bytes]
        own, known = sent.get(kind, Transfers()), all(one.times_known for one in found)
        if own.count != count or not known:
            at_least = "" if known else "at least "
            lines = [f"{kind}: {at_least}{own.count} per call{own.before_merging}, expected {count}", *listed(found)]
            problems.append("\n".join(lines))
    if problems:
        raise AssertionError("\n".join([f"collectives of {record.name} on mesh {record.mesh}", *problems]))


def check_kinds(kinds: Iterable[str], what: str) -> None:
    """
    Raises:
        SdyError: one of them is no kind of collective.
    """
    for kind in kinds:
        if kind not in KINDS:
            near = [_IN_JAX[kind]] if kind in _IN_JAX else difflib.get_close_matches(str(kind), KINDS, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise SdyError(
                f"{what}: no collective is called {kind!r}; {meant}expected one of {', '.join(sorted(KINDS))}"
            )


def listed(collectives: Iterable[RecordedCollective]) -> list[str]:
    """A line for each of the largest."""
    found = sorted(collectives, key=lambda one: -one.total_wire_bytes)
    more = [f"  and {len(found) - _LISTED} more"] if len(found) > _LISTED else []
    return [*(f"  {line_of(one)}" for one in found[:_LISTED]), *more]


def line_of(one: RecordedCollective) -> str:
    """`model.py:9: all_reduce {"model"} of f32[8@data,16], 384 B x 3, for stablehlo.dot_general in mlp`."""
    said, times = f"{one.kind} {one.detail}".rstrip(), count_text(one.times)
    scope = f" in {one.place.scope}" if one.place.scope else ""
    return f"{one.place.lines}: {said} of {one.type}, {bytes_text(one.wire_bytes)}{times}, for {one.cause}{scope}"


# The whole of a plan as frozen dataclasses of strings, numbers and tuples: what is printed, drawn and compared.
#
# `Plan.record` makes one. Nothing in it refers to MLIR or to arrays, so that it outlives the process and reads the
# same on a machine without the function's source. Sizes are bytes per device, times in the unit of
# `RecordedTime.unit`.
#
# Values have names that edits elsewhere do not change: arguments and results of the function their paths
# (`params['w1']`, `result[0]`), others the name scopes or the function around them, and what jax calls the op:
# `layer_0/attention/dot_general`, `loss/reduce_sum (backward)`; `#2` for the second of that name. What a collective
# makes is named after what it moves: `all_gather(params['w1'])`. No name has a line number in it.
#
# Lines are `file.py:42`, relative to the directory that the plan was made in, or to where packages lie.

PAGE_OF: Extension[Callable[[PlanRecord], str]] = Extension("page_of")
WRITE_PAGE: Extension[Callable[[PlanRecord, str | os.PathLike[str], PlanRecord | None], None]] = Extension("write_page")

WRITE_TRACE: Extension[Callable[[PlanRecord, str | os.PathLike[str]], None]] = Extension("write_trace")


_OF_PROGRAMS = frozenset(("analyze", "explanation", "mlir", "save", "to_python", "why", "why_not"))
"""What a `Plan` has that a record has not."""


@dataclass(frozen=True)
class PlanRecord(RecordedPlan):
    """A plan.

    Attributes:
        name: the function's.
        headline: the first line of the plan's text.
        mesh: the devices.
        line: the source line at which the function was partitioned, and its text.
        versions: of sdy_jax and jax.
        options: of `partition` that decide about layouts and differ from the defaults, `layouts='local'`.
        arguments, closed_over, results: the border.
        annotations: what the user wrote inside of the function.
        code: the ops of the user's own program by the lines at which they stand.
        collectives: in the order in which they run.
        ops: of the partitioned program in order; ops in regions follow the op that they are in.
        values: arguments first, then what ops make.
        memory, time, notes, layouts, automatic, padding: as in `Plan`; notes on dear constraints are `dear`. A
            program on local arrays has no memory, ops or values.
        wire_bytes: that a device sends per call; `known` is False where that is the least.
        flops, repeated_flops: that a device performs per call.
        fingerprint: of the ordered collectives.
        recomputed: what is computed again for the sake of memory, if anything is.
        blocked: what is computed part by part for the sake of memory.
        local_sorts: the sorts of which each device sorts its own rows, as nobody sees the order of all.
        pipelines: the runs of `sdy.pipeline` in it.
        timeline: when ops compute and collectives are sent, over one step.
        roofline: what of a device's peaks that uses; None where the cost model knows no time.
        host: what lies in the memory of the host, and what moves from and to it.
        reasons: why values have other layouts than op by op, where that was asked for with the steps.
        run: what the step took when `Plan.analyze` ran it last, if it did. Records with and without it are equal.
        tried: the numbers of microbatches of which the planner took one, with what plans with them take.
        propagation: its steps, where they were asked for: `Plan.record(steps=True)`.
        choices: all that was searched for, from which `partition(plan=)` makes the plan again; in files, and where they
            were asked for: `Plan.record(choices=True)`. Records with and without them are equal.
        is_edited: it was read from a file with choices that is not as it was written.
        meshes: of several that were given, all, with what plans on them take.

    Example:
        record = sdy.load_plan("step.plan.json")
        print(record.headline, record.wire_bytes)

    See also:
        `Plan.record`, `load_plan`: make it.
    """

    def record(self) -> PlanRecord:
        """Itself: what takes plans takes records as well."""
        return self

    def assert_collectives(self, **expected: int) -> None:
        """Asserts how often collectives of some kinds run per call: as `Plan.assert_collectives`."""
        check_counts(self, expected)

    def diff(self, other: Any) -> PlanDiff:
        """What changed between another plan and this one: as `Plan.diff`."""
        return diff(other, self)

    def __str__(self) -> str:
        return PAGE_OF.function(self)

    def to_html(self, path: str | os.PathLike[str], against: Any = None) -> None:
        """Writes the plan as a page, as `Plan.to_html` does, `against` another one or a record; of a plan that was read
        from a file, without the steps of propagation.

        Raises:
            SdyError: the file cannot be written.
        """
        check_plan(against)
        WRITE_PAGE.function(self, path, None if against is None else against.record())

    def to_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes one step as a trace for Perfetto, as `Plan.to_trace` does.

        Raises:
            SdyError: the plan's costs are no times, or the file cannot be written.
        """
        WRITE_TRACE.function(self, path)

    def __repr__(self) -> str:
        return f"<record of the {self.headline}>"

    if not TYPE_CHECKING:  # for which it would have any attribute

        def __getattr__(self, name):
            hint = ""
            if name in _OF_PROGRAMS:
                hint = (
                    ": that needs the program, which no file of a plan holds. Ask `f.plan(...)` of the partitioned "
                    "function; `partition(..., plan=...)` makes it the plan of a file"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)


# The part of a plan that people review: arguments, results, collectives, and what they come from.


def reviewed(record: PlanRecord) -> PlanRecord:
    """A record without ops, values and the course of memory, of which there are as many as there are ops."""
    memory = record.memory
    if memory is not None:
        memory = replace(memory, timeline=(), buffers=(), largest=())
    collectives = tuple(map(_alone, record.collectives))
    kept = replace(record, memory=memory, collectives=collectives)
    return replace(kept, ops=(), values=(), timeline=NO_TIMELINE, run=None)


def _alone(collective: RecordedCollective) -> RecordedCollective:
    """A collective that does not refer to ops."""
    return replace(collective, op=None, serves=None, members=tuple(map(_alone, collective.members)))
