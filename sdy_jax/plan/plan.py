"""The plan of a partitioned function: what is sharded how, which collectives run, why, and what could not be
split; and the plans of all its calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sdy_jax.base.extensions import Extension
from sdy_jax.base.files import whole_file
from sdy_jax.base.jax_calls import api_boundary
from sdy_jax.plan.digests import fingerprint_of
from sdy_jax.plan.page.page import page_of
from sdy_jax.plan.pinning.choices import choices_of
from sdy_jax.plan.questions import Answers
from sdy_jax.plan.record.comparison import diff
from sdy_jax.plan.record.differences import PlanDiff
from sdy_jax.plan.record.files import refused, save_plan
from sdy_jax.plan.record.program import RecordedPropagation
from sdy_jax.plan.record.record import PlanRecord
from sdy_jax.plan.record.recorded_plan import RecordedChoices, RecordedReason
from sdy_jax.plan.record.recording import reasons_for_layouts, record_of, steps_of
from sdy_jax.plan.record.timeline import RecordedRun
from sdy_jax.plan.source.module import PythonModule, python_module

FIXES: Extension[Callable[[Plan], Sequence[Any]]] = Extension("fixes")
ANALYZE: Extension[Callable[[Plan, tuple[Any, ...], Mapping[str, Any]], Any]] = Extension("analyze")


_FIXED_UNASKED = 150
"""Ops up to which a page shows fix-its unasked. Measured (2026-11): trying one takes less than half a second then."""


@dataclass(frozen=True, repr=False)
class Plan(Answers):
    """What `PartitionedFunction.plan` returns. Printing it is like SQL's EXPLAIN; its `repr` is the first line.

    Attributes:
        name, source: the function's, and the line at which it was partitioned.
        arguments, results: the border, with a layout per leaf.
        collectives: in the order in which they run, with bytes, axes and lines.
        notes: what could not be split, and what that costs.
        memory, time, wire_bytes: what a device holds, takes and sends.

    Example:
        plan = step.plan(state, batch)
        print(plan)
        print(plan.why("result"))
        assert plan.wire_bytes < 1 << 20

    See also:
        `show`: in a notebook.
        `load_plan`: from the file that `Plan.save` writes.
    """

    @cached_property
    @api_boundary
    def fixes(self) -> Sequence[Any]:
        """Fix-its: changes of one line of your code that save bytes on the wire or memory, those that save most first.
        Each was tried: the changed program was planned. That takes as long as the plan did for each change (up to
        eight), when this is asked for; printing the plan asks where the program is small.

        Example:
            print(plan.fixes)
            assert not plan.fixes  # in a test
        """
        return FIXES.function(self)

    @api_boundary
    def analyze(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function, and shows measured beside estimated: the time of a call, memory, and each collective where
        the profiler tells of it, with warnings where the cost model is off by more than 2 times; and the time of each
        name scope of the model. Like SQL's EXPLAIN ANALYZE. It takes about ten calls; donated arguments are copied
        before each. From then on the plan's record, page and trace have one measured call, too, under the estimate.

        Args:
            *args, **kwargs: arguments of the function, arrays like those that the plan was made for.

        Returns:
            An answer to print (`sdy_jax.plan.analysis.Analysis`), with the figures as attributes.

        Raises:
            SdyError: the arguments have another plan; the profiler is running already.

        Example:
            print(step.plan(state, batch).analyze(state, batch))
        """
        found = ANALYZE.function(self, args, kwargs)
        self._runs.append(found.run)
        return found

    def fingerprint(self) -> str:
        """32 hexadecimal digits that say which collectives run: their order, kinds, axes and types, the loops and
        branches they stand in, and the mesh. Equal plans have the same in every process and run, whatever the seed of
        hashes; source lines and costs do not matter. In programs of several processes, where these compare what they
        are about to run, it must be the same in all of them.

        Example:
            assert step.plan(state, batch).fingerprint() == "5d1c2f0be1a24b6a9d0c7f3a52c1e8f4"  # in a test
        """
        return fingerprint_of(self.program.mesh, self.collectives)

    @api_boundary
    def record(self, steps: bool = False, choices: bool = False) -> PlanRecord:
        """All that the plan says as plain data, without MLIR and jax objects: what is printed, saved and compared.

        Args:
            steps: with the steps of propagation, which runs once more for them, and with what layouts save; programs on
                local arrays have none.
            choices: with those that were searched for, from which `sdy.partition(plan=)` makes the plan again.
        """
        found = replace(self._record, run=self._runs[-1]) if self._runs else self._record
        if steps and self.planned_with:
            found = replace(found, propagation=self._steps, reasons=self._recorded_reasons)
        return replace(found, choices=self._choices) if choices and self.planned_with else found

    @cached_property
    def _runs(self) -> list[RecordedRun]:
        """What `analyze` measured, last at the end."""
        return []

    @cached_property
    def _record(self) -> PlanRecord:
        return record_of(self)

    @cached_property
    def _steps(self) -> RecordedPropagation:
        return steps_of(self)

    @cached_property
    def _recorded_reasons(self) -> tuple[RecordedReason, ...]:
        return reasons_for_layouts(self)

    @cached_property
    def _choices(self) -> RecordedChoices | None:
        return choices_of(self)

    @api_boundary
    def save(self, path: str | os.PathLike[str], steps: bool = False) -> None:
        """Writes the plan to a file, as JSON, which `sdy.load_plan` reads without the function or its source, and
        `sdy.partition(plan=path)` runs.

        Args:
            path: of the file.
            steps: with those of propagation, for pages made of the file; they add three fifths to its size.

        Raises:
            SdyError: the file cannot be written.

        Example:
            step.plan(state, batch).save("step.plan.json")
        """
        save_plan(self.record(steps, choices=True), path)

    @api_boundary
    def diff(self, other: Plan | PlanRecord) -> PlanDiff:
        """What changed between another plan and this one: which collectives and values, which changed annotation or
        line caused it, and what it costs. Edits elsewhere do not count: comments, names of variables, lines that moved.

        Args:
            other: the plan before; either may come from a file.

        Returns:
            The differences, to print; false where there are none.

        Example:
            print(step.plan(state, batch).diff(sdy.load_plan("step.plan.json")))
        """
        return diff(other, self)

    @api_boundary
    def assert_collectives(self, **expected: int) -> None:
        """Asserts how often collectives of some kinds run per call, counted as the plan's first line counts them: those
        that run as one are one, loops count once per trip, conditionals as the branch that sends most, and what sends
        nothing is none. Kinds that are left out may run as often as they like.

        Raises:
            AssertionError: with the lines of those that run.
            SdyError: there is no such kind.

        Example:
            plan.assert_collectives(all_reduce=4, all_gather=0)
        """
        self.record().assert_collectives(**expected)

    @api_boundary
    def to_html(self, path: str | os.PathLike[str], against: Plan | PlanRecord | None = None) -> None:
        """Writes the plan as a page to explore: the program as a tree of scopes and source lines and as a graph, how
        each value lies on the devices and why, collectives with their bytes and times, what is held in memory when,
        and the steps by which layouts came about. It is one file, which needs no network.

        Args:
            path: of the file.
            against: another plan, which the page compares this one with: the one before a change.

        Raises:
            SdyError: the file cannot be written.

        Example:
            step.plan(state, batch).to_html("step.html", against=sdy.load_plan("main.plan.json"))
        """
        self.record(steps=True).to_html(path, against.record(steps=True) if isinstance(against, Plan) else against)

    @api_boundary
    def to_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes one step of a device, by estimate, as a trace: JSON that [Perfetto](https://ui.perfetto.dev) and
        chrome://tracing open, beside what `jax.profiler.trace(..., create_perfetto_trace=True)` measured.

        It has a track for compute, with ops in phases, scopes and loops, and with what they wait for; a track for the
        links of each mesh axis, what is hidden beside work told from what is exposed; what the device holds; and an
        arrow through each collective, from the op that makes what is sent to the first that takes it. Each slice says
        its line, bytes or operations, and why it is there. A loop is one trip that is as wide as all of its trips.

        Args:
            path: of the file.

        Raises:
            SdyError: the plan's costs are bytes, not times: give `partition` costs in seconds, as
                `costs=sdy.CostModel.of_machine("h100", mesh)`; or the file cannot be written.

        Example:
            step.plan(state, batch).to_trace("step.trace.json")

        See also:
            `analyze`: runs the step, and shows what was measured.
        """
        self.record().to_trace(path)

    @api_boundary
    def to_python(self, path: str | os.PathLike[str] | None = None) -> str:
        """The program as a Python module that needs jax and numpy only: what each device runs, as lax calls in
        `jax.shard_map`, and a function of whole arrays that has the planned function's name, arguments and results.

        It is made to be read: values have the names of your source, its lines stand above the statements, and each
        collective says what it sends and for which op. ruff formats it where that is installed.

        Args:
            path: a file to write it to as well. Large arrays that the function closes over go into a file beside it,
                that ends in `.npz`; where there is no path, the text still loads them from there.

        Raises:
            UnsupportedError: the program calls back to the host, closes over values of an outer trace, or takes partial
                sums.
            SdyError: a file cannot be written; both are as they were.

        Example:
            step.plan(state, batch).to_python("step_on_devices.py")
        """
        specs = [value.sharding for value in self.results]
        module = python_module(self.name, self.headline, self.program, specs, self.collectives, self.source)
        if path is not None:
            with refused("the program", path):
                _write(module, Path(path))
        return module.text

    def __repr__(self) -> str:
        return f"<{self.headline}>"

    def __str__(self) -> str:
        return page_of(self.record(), self._said_of_fixes)

    @property
    def _said_of_fixes(self) -> Sequence[str]:
        """The lines of the page on fix-its, if they are there or soon found."""
        is_soon = "fixes" in vars(self) or len(self.record().ops) <= _FIXED_UNASKED
        return [str(fix) for fix in self.fixes] if self.planner is not None and self.wire_bytes and is_soon else ()


def _write(module: PythonModule, path: Path) -> None:
    """Writes a module and its arrays, neither before both are complete."""
    with whole_file(path) as file:
        file.write(module.text.encode())
        if module.arrays:
            with whole_file(path.with_suffix(".npz")) as arrays:
                np.savez(arrays, **module.arrays)  # type: ignore[arg-type]


# The plans of a partitioned function's calls, and of the functions that compute their derivatives.


@dataclass(frozen=True, slots=True)
class CallPlan:
    """The plan for calls of one signature. Iterating over it gives it and all plans below.

    Attributes:
        plan: the plan; its name says which function it is of: `mlp`, `mlp (forward of the derivative)`,
            `mlp (backward)`, `mlp (tangents)`, `mlp (with tangents)`.
        derivatives: those of the functions that calls of this signature run where they are differentiated, as far as
            they have been planned. They have derivatives in turn.
    """

    plan: Plan
    derivatives: tuple[CallPlan, ...] = ()

    @property
    def signature(self) -> str:
        """The arguments with their types: `x: f32[64@data,128], w: f32[128,512@model]`."""
        return ", ".join(f"{value.path}: {value.type}" for value in self.plan.arguments)

    def __iter__(self) -> Iterator[Plan]:
        yield self.plan
        for call in self.derivatives:
            yield from call

    def __str__(self) -> str:
        """One line per plan, those of derivatives indented."""
        lines = [self.plan.headline, *(line for call in self.derivatives for line in str(call).splitlines())]
        return "\n  ".join(lines)
