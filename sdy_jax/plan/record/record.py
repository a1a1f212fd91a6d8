"""The whole of a plan as frozen dataclasses of strings, numbers and tuples: what is printed, drawn and compared.

`Plan.record` makes one. Nothing in it refers to MLIR or to arrays, so that it outlives the process and reads the same
on a machine without the function's source. Sizes are bytes per device, times in the unit of `RecordedTime.unit`.

Values have names that edits elsewhere do not change: arguments and results of the function their paths
(`params['w1']`, `result[0]`), others the name scopes or the function around them, and what jax calls the op:
`layer_0/attention/dot_general`, `loss/reduce_sum (backward)`; `#2` for the second of that name. What a collective makes
is named after what it moves: `all_gather(params['w1'])`. No name has a line number in it.

Lines are `file.py:42`, relative to the directory that the plan was made in, or to where packages lie.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sdy_jax.ir.extensions import Extension
from sdy_jax.plan.record.counts import check_counts
from sdy_jax.plan.record.diff import diff
from sdy_jax.plan.record.differences import PlanDiff
from sdy_jax.plan.record.recorded_plan import (
    RecordedPlan,
)

PAGE_OF: Extension[Callable[[PlanRecord], str]] = Extension("page_of")
WRITE_PAGE: Extension[Callable[[PlanRecord, str | os.PathLike[str], PlanRecord | None], None]] = Extension("write_page")


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
        pipelines: the runs of `sdy.pipeline` in it.
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

    def to_html(self, path: str | os.PathLike[str], against: PlanRecord | None = None) -> None:
        """Writes the plan as a page, as `Plan.to_html` does; of a plan that was read from a file, without the steps of
        propagation.

        Raises:
            SdyError: the file cannot be written.
        """
        WRITE_PAGE.function(self, path, against)

    def __repr__(self) -> str:
        return f"<record of the {self.headline}>"
