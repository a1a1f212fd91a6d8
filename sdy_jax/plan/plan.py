"""The plan of a partitioned function: what is sharded how, which collectives run, why, and what could not be split."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.errors import SdyError
from sdy_jax.ir.extensions import extension
from sdy_jax.lowering.placement.policy import Policy
from sdy_jax.lowering.placement.report import CollectiveRecord, LayoutChoice, Note
from sdy_jax.lowering.reshard.cost import CostModel
from sdy_jax.plan.automatic_layouts import AutomaticLayouts
from sdy_jax.plan.border_moves import BorderMove
from sdy_jax.plan.border_specs import specs_of
from sdy_jax.plan.boundary import BoundaryValue
from sdy_jax.plan.estimated_time import EstimatedTime
from sdy_jax.plan.fingerprint import fingerprint_of
from sdy_jax.plan.memory import MemoryUse, memory_of
from sdy_jax.plan.padding import PaddedValue, padded_values
from sdy_jax.plan.proposal import PlannedWith
from sdy_jax.plan.questions import Questions
from sdy_jax.plan.recording.record import record_of
from sdy_jax.plan.recording.steps import steps_of
from sdy_jax.plan.totals import PlanTotals
from sdy_jax.plan.work import Work, flops, work_of
from sdy_jax.plan_page.page import page_of
from sdy_jax.plan_record.diff import diff
from sdy_jax.plan_record.differences import PlanDiff
from sdy_jax.plan_record.files import save_plan
from sdy_jax.plan_record.propagation import RecordedPropagation
from sdy_jax.plan_record.record import PlanRecord
from sdy_jax.python_source.module import python_module
from sdy_jax.representation.type_text import bytes_text

_FIXED_UNASKED = 150
"""Ops up to which a page shows fix-its unasked: trying one takes less than half a second then (2026-11)."""


@dataclass(frozen=True, repr=False)
class Plan(Questions):
    """What `PartitionedFunction.plan` returns. Printing it is like SQL's EXPLAIN; its `repr` is the first line.

    Attributes:
        name: the function's name.
        program: the partitioned program.
        arguments, results: the boundary values, closed-over arrays excluded.
        collectives: one record per collective of the partitioned program, the user's own included; several that run as
            one are the `members` of its record.
        notes: what moves or is computed whole because it cannot be split, by op, source line and name scope.
        stages: the module after each stage of planning.
        moves: the arguments that are passed in another layout than they enter in, if the plan was made from arrays.
        as_passed: the arguments whose shardings are those of the arrays that were passed.
        source: the source line at which the shardings of arguments and results are given; may be empty.
        layouts: the choice of layouts for the whole program; None where they were decided op by op.
        automatic: which arguments and results were left to the planner, and what the usual layouts would have cost;
            None where all are stated.
        planned_with: the costs and decisions that the plan was made with; None of a program on local arrays.
        work_cost: the time of one device's own work, by the cost model.
        planner: makes the plan of another traced program of the same function, under a policy.
        resized: traces the function anew, all sizes of arguments that are the first number being the second.
        device_kind: what the devices call themselves; empty where nobody knows.
        function: gives the partitioned function that runs it; None where there is none any more.
    """

    name: str
    program: Program
    arguments: tuple[BoundaryValue, ...]
    constants: tuple[BoundaryValue, ...]
    results: tuple[BoundaryValue, ...]
    collectives: tuple[CollectiveRecord, ...]
    notes: tuple[Note, ...]
    stages: Mapping[str, ir.Operation]
    source: str = ""
    moves: tuple[BorderMove, ...] = ()
    as_passed: frozenset[str] = frozenset()
    layouts: LayoutChoice | None = None
    planned_with: PlannedWith | None = None
    automatic: AutomaticLayouts | None = None
    work_cost: float = 0.0
    planner: Callable[[Program, Policy], Plan] | None = None
    resized: Callable[[int, int], Program] | None = None
    device_kind: str = ""
    function: Callable[[], Any] = lambda: None

    @property
    def input_specs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The `PartitionSpec`s of positional and of keyword arguments, in trees like theirs: as the `in_shardings` of
        another function, or to place arrays by.

        Raises:
            UnsupportedError: an argument is split by a part of a mesh axis.

        Example:
            args, _ = plan.input_specs
            step = sdy.partition(step, mesh=mesh, in_shardings=args, out_shardings=plan.output_specs)
        """
        return specs_of(self.program.in_tree, [(v.path, v.sharding) for v in self.arguments])  # type: ignore[no-any-return]

    @property
    def output_specs(self) -> Any:
        """The `PartitionSpec`s of the results, in a tree like theirs.

        Raises:
            UnsupportedError: a result is split by a part of a mesh axis.
        """
        return specs_of(self.program.out_tree, [(v.path, v.sharding) for v in self.results])

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends per call: loops count once per trip, conditionals as their largest branch.

        Where the trip count of a loop is unknown (`totals.known` is False), it counts as one trip: this is the least.
        """
        return self.totals.wire_bytes

    @cached_property
    def totals(self) -> PlanTotals:
        """The sums over `collectives`."""
        return PlanTotals.of(self.collectives)

    @property
    def costs(self) -> CostModel:
        """The cost model that the plan was made with."""
        return self.planned_with.costs if self.planned_with is not None else CostModel()

    @cached_property
    def time(self) -> EstimatedTime:
        """How long the program takes by the cost model, for collectives and for each device's own work one after the
        other, but for what rings and gathers one trip ahead hide: in seconds where the model is one of time (`unit`),
        else in bytes. Of a program on local arrays only the collectives count.

        Example:
            assert plan.time.communication < 0.1 * plan.time.compute
        """
        costs, mesh = self.costs, self.program.mesh
        sent = sum(
            r.estimated_times * costs.sending_time(r.kind, r.axes, mesh, r.wire_bytes, r.cut) for r in self.collectives
        )
        hidden = sum(record.estimated_times * record.hidden for record in self.collectives)
        return EstimatedTime(self.work_cost, sent, costs.unit, hidden)

    @cached_property
    def padding(self) -> tuple[PaddedValue, ...]:
        """The values that lie in blocks which do not divide them, with the bytes of padding that a device holds."""
        return padded_values(self.stages["partitioned"]) if "partitioned" in self.stages else ()

    @property
    def padded_bytes(self) -> float:
        """Bytes of padding per device, over all values of the program (which need not exist at the same time)."""
        return sum(value.bytes for value in self.padding)

    @cached_property
    def memory(self) -> MemoryUse:
        """What a device holds while the program runs, by estimate: arguments, results, and what is in between at most.

        A compiler that fuses more, or orders ops better, needs less; one that copies needs more.

        Example:
            assert plan.memory.peak < 16 * 2**30
        """
        fuse = self.planned_with is not None and self.planned_with.policy.products_fuse
        return memory_of(self.stages["partitioned"], fuse)

    @cached_property
    def work(self) -> tuple[Work, ...]:
        """What the program's ops compute, as far as that is known; nothing of a program on local arrays."""
        return work_of(self.stages["partitioned"], self.program.mesh_name) if "partitioned" in self.stages else ()

    @property
    def repeated_flops(self) -> float:
        """Operations per device and call that exceed the device's part of an op: several devices perform the same.

        Loops count once per trip (a loop with an unknown count as one trip), conditionals as their largest branch.
        """
        return flops(self.work, repeated=True)

    @property
    def traced(self) -> Program:
        """The program before propagation."""
        return self.program.with_module(self.stages["traced"])

    @property
    def policy(self) -> Policy:
        """The user's decisions about partitioning."""
        return self.planned_with.policy if self.planned_with is not None else Policy()

    def replanned(self, program: Program, policy: Policy | None = None) -> Plan:
        """The plan of another traced program of the same function, or under another policy."""
        if self.planner is None:
            raise SdyError(f"the plan of {self.name} is of a program on local arrays, which is not planned anew")
        return self.planner(program, policy or self.policy)

    @cached_property
    def fixes(self) -> Sequence[Any]:
        """Fix-its: changes of one line of your code that save bytes on the wire or memory, those that save most first.
        Each was tried: the changed program was planned. That takes as long as the plan did for each change (up to
        eight), when this is asked for; printing the plan asks where the program is small.

        Example:
            print(plan.fixes)
            assert not plan.fixes  # in a test
        """
        return extension("fixes")(self)  # type: ignore[no-any-return]

    def analyze(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function, and shows measured beside estimated: the time of a call, memory, and each collective where
        the profiler tells of it, with warnings where the cost model is off by more than 2 times. Like SQL's EXPLAIN
        ANALYZE. It takes about ten calls; donated arguments are copied before each.

        Args:
            *args, **kwargs: arguments of the function, arrays like those that the plan was made for.

        Returns:
            An answer to print (`sdy_jax.measuring.analysis.Analysis`), with the figures as attributes.

        Raises:
            SdyError: the arguments have another plan; the profiler is running already.

        Example:
            print(step.plan(state, batch).analyze(state, batch))
        """
        return extension("analyze")(self, args, kwargs)

    def fingerprint(self) -> str:
        """32 hexadecimal digits that say which collectives run: their order, kinds, axes and types, the loops and
        branches they stand in, and the mesh. Equal plans have the same in every process and run, whatever the seed of
        hashes; source lines and costs do not matter. In programs of several processes, where these compare what they
        are about to run, it must be the same in all of them.

        Example:
            assert step.plan(state, batch).fingerprint() == "5d1c2f0be1a24b6a9d0c7f3a52c1e8f4"  # in a test
        """
        return fingerprint_of(self.program.mesh, self.collectives)

    def record(self, steps: bool = False) -> PlanRecord:
        """All that the plan says as plain data, without MLIR and jax objects: what is printed, saved and compared.

        Args:
            steps: with the steps of propagation, which runs once more for them; programs on local arrays have none.
        """
        return replace(self._record, propagation=self._steps) if steps and self.planned_with else self._record

    @cached_property
    def _record(self) -> PlanRecord:
        return record_of(self)

    @cached_property
    def _steps(self) -> RecordedPropagation:
        return steps_of(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file, as JSON, which `sdy.load_plan` reads without the function or its source.

        Raises:
            SdyError: the file cannot be written.

        Example:
            step.plan(state, batch).save("step.plan.json")
        """
        save_plan(self.record(), path)

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

    def assert_collectives(self, **expected: int) -> None:
        """Asserts how often collectives of some kinds run per call: loops count once per trip, conditionals as the
        branch that sends most. Kinds that are left out may run as often as they like.

        Raises:
            AssertionError: with the lines of those that run.
            SdyError: there is no such kind.

        Example:
            plan.assert_collectives(all_reduce=4, all_gather=0)
        """
        self.record().assert_collectives(**expected)

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

    def mlir(self, stage: str = "partitioned") -> str:
        """The module's text after a stage: "traced", "imported", "propagated" or "partitioned"."""
        if stage not in self.stages:
            raise SdyError(f"no stage {stage!r}; the stages are {', '.join(self.stages)}")
        return str(self.stages[stage])

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

        Example:
            step.plan(state, batch).to_python("step_on_devices.py")
        """
        specs = [value.sharding for value in self.results]
        module = python_module(self.name, self.headline, self.program, specs, self.collectives, self.source)
        if path is not None:
            Path(path).write_text(module.text)
            if module.arrays:
                np.savez(Path(path).with_suffix(".npz"), **module.arrays)  # type: ignore[arg-type]
        return module.text

    def summary(self) -> str:
        """One line per kind of collective: how many executions, how many bytes."""
        lines = [self.headline]
        for kind, (count, wire) in self.totals.by_kind().items():
            lines.append(f"  {count:4d} x {kind:<22} {bytes_text(wire):>10} per device")
        if self.notes:
            lines.append(f"  {len(self.notes):4d} notes: print the plan to read them")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{self.headline}>"

    def __str__(self) -> str:
        return page_of(self.record(), self._said_of_fixes)

    @property
    def _said_of_fixes(self) -> Sequence[str]:
        """The lines of the page on fix-its: these, if they are there or soon found, else how to ask for them."""
        if self.planner is None or not self.wire_bytes:
            return ()
        if "fixes" in vars(self) or len(self.record().ops) <= _FIXED_UNASKED:
            return [str(fix) for fix in self.fixes]
        return ("plan.fixes looks for changes of one line that save bytes, and plans the program again with each",)

    @property
    def headline(self) -> str:
        """The first line of the plan's text: name, mesh, number of collectives, bytes, and the estimated time."""
        axes = ", ".join(f"{axis.name}={axis.size}" for axis in self.program.mesh.axes)
        count, least = len(self.collectives), "" if self.totals.known else "at least "
        return (
            f"plan of {self.name} on mesh {axes} ({self.program.mesh.size} devices): {count} "
            f"collective{'' if count == 1 else 's'}, {least}{bytes_text(self.wire_bytes)} on the wire per device"
            + (f", estimated {least}{self.time}" if self.costs.unit == "seconds" else "")
        )
