"""What a plan is made of, its figures, and what can be asked of it: why, why not, how it differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from jax.extend.mlir import ir
from jax.sharding import PartitionSpec

from sdy_jax.annotate.program import Program
from sdy_jax.base.errors import SdyError, did_you_mean, listed
from sdy_jax.base.extensions import Extension
from sdy_jax.base.jax_calls import api_boundary
from sdy_jax.ir.graph import Graph, Op
from sdy_jax.ir.jax_shardings import bytes_text, type_text
from sdy_jax.ir.locations import short_source
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.planner.op_times import NO_TIMES, OpTimes
from sdy_jax.lowering.planner.problem.layout_plan import ProgramChoices
from sdy_jax.lowering.planner.report import CollectiveRecord, InParts, LayoutChoice, Note, NotHeld, Recomputed
from sdy_jax.lowering.planner.schedule.timeline import Timeline, Timing, timeline_of, timeline_without_ops
from sdy_jax.lowering.planner.setting import Policy
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.target import Target
from sdy_jax.plan.border import AutomaticLayouts, BorderMove, BoundaryValue, specs_of
from sdy_jax.plan.cache_entry import CachedAs
from sdy_jax.plan.estimates import (
    NOTHING_DECIDED,
    ComparedMesh,
    Decided,
    EstimatedTime,
    MemoryUse,
    PaddedValue,
    PlanTotals,
    Work,
    flops,
    memory_of,
    padded_values,
    work_of_ops,
)
from sdy_jax.plan.explanations.layout_reasons import Findings, LayoutReason, LayoutReasons, Mark
from sdy_jax.plan.explanations.naming import checkpoint_names
from sdy_jax.plan.explanations.origins import StatedBorder
from sdy_jax.plan.explanations.why import Explanation, Why, given_arguments, is_collective, why_collective
from sdy_jax.plan.explanations.why_not import WhyNot
from sdy_jax.plan.record.program import RecordedCollective
from sdy_jax.plan.record.recorded_plan import Printed
from sdy_jax.plan.record.transfers import transfers_by_kind
from sdy_jax.plan.stages import REWRITTEN, LocalSort, PlannedWith, local_sorts

# What a plan is made of: the partitioned program, its collectives and border, and what it was planned with.


@dataclass(frozen=True, repr=False)
class PlanFacts(Printed):
    """A plan's attributes.

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
        meshes: what plans on the meshes take of which the best one was chosen, in the order in which they were given;
            none where one was given.
        decided: the numbers of microbatches that were left to the planner, and what plans with each of them take.
        planned_with: the costs and decisions that the plan was made with; None of a program on local arrays.
        work_cost: the time of one device's own work, by the cost model.
        recomputed: what is computed again so that it need not be held between a forward and a backward pass.
        blocked: the values that are made part by part, so that no device holds all of its own.
        hidden_by_work: the time of collectives that is hidden but for rings, by the cost model.
        op_times: what the ops of the partitioned program take, and which of them send.
        counted_peak: `memory.peak` where planning counted it; else 0.
        choices: what was searched for, from which the plan is made again without; as text where it was found in the
            cache; None of a program on local arrays.
        planner: makes the plan of another traced program of the same function, under a policy.
        resized: traces the function anew, all sizes of arguments that are the first number being the second.
        cached_as: what it is in the cache, beside which what is emitted is kept; None where it is not kept.
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
    meshes: tuple[ComparedMesh, ...] = ()
    decided: Decided = NOTHING_DECIDED
    work_cost: float = 0.0
    hidden_by_work: float = 0.0
    op_times: OpTimes = NO_TIMES
    counted_peak: float = 0.0
    recomputed: Recomputed | None = None
    blocked: tuple[InParts, ...] = ()
    choices: ProgramChoices | str | None = None
    planner: Callable[[Program, Policy], Self] | None = None
    resized: Callable[[int, int], Program] | None = None
    cached_as: CachedAs | None = None
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
        return specs_of(self.program.in_tree, self._on_axes_of_function(self.arguments))  # type: ignore[no-any-return]

    @property
    def output_specs(self) -> Any:
        """The `PartitionSpec`s of the results, in a tree like theirs.

        Raises:
            UnsupportedError: a result is split by a part of a mesh axis.
        """
        return specs_of(self.program.out_tree, self._on_axes_of_function(self.results))

    def _on_axes_of_function(self, values: Iterable[BoundaryValue]) -> list[tuple[str, TensorSharding]]:
        return [(value.path, self.program.on_uncut(value.sharding)) for value in values]

    @cached_property
    def graph(self) -> Graph:
        """The partitioned program as plain objects."""
        return Graph(self.stages["partitioned"])

    @property
    def costs(self) -> CostModel:
        """The cost model that the plan was made with."""
        return self.planned_with.costs if self.planned_with is not None else CostModel()

    @property
    def target(self) -> Target:
        """The devices for which the plan was made."""
        return self.planned_with.target if self.planned_with is not None else Target()

    @property
    def traced(self) -> Program:
        """The program before propagation."""
        return self.program.with_module(self.stages["traced"])

    @property
    def policy(self) -> Policy:
        """The user's decisions about partitioning."""
        return self.planned_with.policy if self.planned_with is not None else Policy()

    def replanned(self, program: Program, policy: Policy | None = None) -> Self:
        """The plan of another traced program of the same function, or under another policy."""
        if self.planner is None:
            raise SdyError(f"the plan of {self.name} is of a program on local arrays, which is not planned anew")
        return self.planner(program, policy or self.policy)

    @property
    def local_sorts(self) -> tuple[LocalSort, ...]:
        """The sorts of which each device sorts its own rows: what is made of them depends on no other rows, and their
        order is undone, so that nobody sees which rows are sorted together."""
        return local_sorts(self.stages)

    @api_boundary
    def mlir(self, stage: str = "partitioned") -> str:
        """The module's text after a stage: "traced", "imported", "propagated" or "partitioned"; and "recomputed" or
        "blocked", where something is computed again, or part by part, for the sake of memory, or "ordered", where
        dimensions that loops carry merged are in the order in which devices hold their parts, or devices sort their
        own rows."""
        if stage not in self.stages:
            near = did_you_mean(stage, self.stages)
            raise SdyError(f"no stage {stage!r}; {near}the stages are {listed(self.stages)}")
        return str(self.stages[stage])


# The figures of a plan: bytes on the wire, times, memory, padding, work that devices repeat.


class Figures(PlanFacts):
    """What `Plan` says in numbers, by estimate."""

    @property
    def headline(self) -> str:
        """The first line of the plan's text: name, mesh, that it does not fit, collectives as they run and before
        merging, bytes, and the estimated time."""
        axes = ", ".join(f"{axis.name}={axis.size}" for axis in self.program.mesh.axes)
        sent, least = self.totals.transfers, "" if self.totals.known else "at least "
        return (
            f"plan of {self.name} on mesh {axes} ({self.program.mesh.size} devices): {self._too_large}{least}"
            f"{sent.text('collective' if sent.count == 1 else 'collectives')}, {least}{bytes_text(self.wire_bytes)} "
            "on the wire per device" + (f", estimated {least}{self.time}" if self.costs.unit == "seconds" else "")
        )

    @property
    def _too_large(self) -> str:
        """That a device has less memory than the program takes."""
        if self.planned_with is None or self.memory.fits:
            return ""
        return f"does not fit: {bytes_text(self.memory.peak)} of {bytes_text(self.memory.available)}; "

    @property
    def compared(self) -> ComparedMesh:
        """What it takes, to be compared with plans on other meshes."""
        return ComparedMesh(self.program.mesh, self.time, self.wire_bytes, self.memory.peak, self.memory.fits)

    def summary(self) -> str:
        """One line per kind of collective: how many run, how many bytes they send."""
        lines = [self.headline]
        for kind, sent in transfers_by_kind(self.totals.counted).items():
            lines.append(f"  {sent.count:4d} x {kind:<22} {bytes_text(sent.bytes):>10} per device{sent.before_merging}")
        if self.notes:
            lines.append(f"  {len(self.notes):4d} notes: print the plan to read them")
        return "\n".join(lines)

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

    @cached_property
    def time(self) -> EstimatedTime:
        """How long the program takes by the cost model, for collectives and for each device's own work one after the
        other, but for what is hidden, by rings, by gathers one trip ahead, and by what the compiler starts early: in
        seconds where the model is one of time (`unit`), else in bytes. Of a program on local arrays only the
        collectives count. Of conditionals the branch that sends most counts; loops of unknown length count by a guess.

        Example:
            assert plan.time.communication < 0.1 * plan.time.compute
        """
        costs, mesh, counted = self.costs, self.program.mesh, self.totals.counted
        sent = sum(record.estimated_times * record.sending_time(costs, mesh) for record in counted)
        hidden = self.hidden_by_work + sum(record.estimated_times * record.hidden for record in counted)
        return EstimatedTime(self.work_cost, sent, costs.unit, hidden)

    @cached_property
    def placed_in_time(self) -> Timeline:
        """When each op computes and each collective is sent, over one step of a device; as long as `time` says."""
        costs, mesh = self.costs, self.program.mesh
        if "partitioned" not in self.stages:
            return timeline_without_ops((one.sending_time(costs, mesh), one) for one in self.collectives)
        compiler = self.target.compiler.collectives
        return timeline_of(Timing(self.graph, self.op_times, self.collectives, mesh, costs, compiler))

    @cached_property
    def padding(self) -> tuple[PaddedValue, ...]:
        """The values that lie in blocks which do not divide them, with the bytes of padding that a device holds."""
        return padded_values(self.graph) if "partitioned" in self.stages else ()

    @property
    def padded_bytes(self) -> float:
        """Bytes of padding per device, over all values of the program (which need not exist at the same time)."""
        return sum(value.bytes for value in self.padding)

    @cached_property
    def memory(self) -> MemoryUse:
        """What a device holds while the program runs, by estimate: arguments, results, and temporaries at most.

        A compiler that fuses more, or orders ops better, needs less; one that copies needs more.

        Example:
            assert plan.memory.peak < 16 * 2**30
        """
        if self.planned_with is None:
            return memory_of(self.graph)
        return memory_of(self.graph, self.target, self.planned_with.available)

    @cached_property
    def work(self) -> tuple[Work, ...]:
        """What the program's ops compute, as far as that is known; nothing of a program on local arrays."""
        return tuple(self.work_by_op.values()) if "partitioned" in self.stages else ()

    @cached_property
    def work_by_op(self) -> dict[Op, Work]:
        """The same by the ops of `graph`."""
        return work_of_ops(self.graph, self.program.mesh_name)

    @property
    def repeated_flops(self) -> float:
        """Operations per device and call that exceed the device's part of an op: several devices perform the same.

        Loops count once per trip (a loop with an unknown count as one trip), conditionals as their largest branch.
        """
        return flops(self.work, repeated=True)


# Planning keeps nothing for this but the choice itself; what is needed is made when the first question is asked.

WHY_NOT_LAYOUT: Extension[Callable[[Any, str, PartitionSpec], WhyNot]] = Extension("why_not_layout")


class Questions(PlanFacts):
    """The questions that `Plan` answers."""

    @api_boundary
    def why(self, value: str | CollectiveRecord | RecordedCollective) -> Why:
        """Why a value is sharded as it is: each of its axes, followed back to the annotation that it came from; or why
        a collective runs.

        Args:
            value: an argument or result as the plan names it (`params['w1']`, `result[0]`, also `out[0]`), the
                beginning of several (`params`), a name in `plan.mlir("propagated")` (`%12`), a `checkpoint_name`, or a
                source line (`model.py:42`) for all values made there. A collective: a record of `collectives`, its kind
                and line as the plan prints them (`all_gather at model.py:42`), or the name of what it makes
                (`all_gather(params['w1'])`).

        Returns:
            An answer to print; iterating over it gives its links.

        Raises:
            SdyError: there is no such value, or collective.

        Example:
            print(plan.why("result"))
            print(plan.why(max(plan.collectives, key=lambda record: record.total_wire_bytes)))
        """
        if isinstance(value, (CollectiveRecord, RecordedCollective)) or is_collective(value):
            return why_collective(self, value)
        notes = tuple(note for note in self.notes if note.is_about(value))
        try:
            why = self.explanation.why(value)
        except SdyError:
            if notes:  # on a line whose ops make nothing, such as a callback
                return Why((), (), notes=notes)
            raise
        instead, again = tuple(self._chosen_instead(value, why)), tuple(self._computed_again(value))
        blocked = tuple(self._in_parts(value))
        return replace(why, instead=instead, notes=notes, again=again, blocked=blocked)

    @cached_property
    def bound(self) -> float | None:
        """What a plan that does no more work than this one sends at least, whatever its layouts and strategies: bytes
        per device, or time where the cost model says how fast these are sent. None where layouts were not chosen for
        the whole program.

        It is a bound by the planner's model, which does not know that values may be computed again instead of sent,
        and knows no limit of memory. On one mesh axis the model is solved exactly; on several the bound may be far
        below the best plan, and takes some times as long as the plan did.

        Example:
            assert plan.layouts.sent <= 1.1 * plan.bound
        """
        if self.layouts is None:
            return None
        found = self.findings.bound
        return min(self.layouts.sent, self._layout_reasons().bound() if found is None else found)

    @property
    def dear_constraints(self) -> tuple[Note, ...]:
        """Notes on what costs more than a twentieth of the whole program because the user says so: constraints, by
        source line, and `out_shardings`. That is what would be saved if the values had any layout there. Nothing where
        layouts were not chosen for the whole program."""
        return self.findings.constraints

    @api_boundary
    def why_not(self, value: str, axis: str | PartitionSpec, dim: int | None = None) -> WhyNot:
        """What keeps a value from being split along a mesh axis, or from a layout.

        Args:
            value: as for `why`.
            axis: `model`, or a sub-axis, `model:(1)2`; or a whole layout, `P("model")`. For a layout the program is
                planned once more with the annotation that would state it, which takes as long as the plan did.
            dim: the dimension to be split along an axis; None: any.

        Returns:
            An answer to print; iterating over it gives the obstacles. For a layout it also has the annotation to add,
            and what that costs or saves.

        Raises:
            SdyError: there is no such value, axis or dimension, or the value cannot have such a layout.

        Example:
            print(plan.why_not("x", "model"))
            print(plan.why_not("hidden", P("data", "model")))
        """
        if isinstance(axis, PartitionSpec):
            return WHY_NOT_LAYOUT.function(self, value, axis)
        return self.explanation.why_not(value, axis, dim)

    @cached_property
    def explanation(self) -> Explanation:
        """Propagation once more, with a recorder, and the names of its values."""
        inputs = [v.path for v in (*self.constants, *self.arguments)]
        given = given_arguments(self.stages["traced"])
        outputs = [v.path for v in self.results]
        passed = frozenset(i for i, path in enumerate(inputs) if path in self.as_passed)
        source, names = short_source(self.source), checkpoint_names(self.program.jaxpr)
        border = StatedBorder(given, source, passed)
        return Explanation(self.stages["imported"], inputs, outputs, border, checkpoints=names)

    @cached_property
    def findings(self) -> Findings:
        """What the program's model says about all of it: the bound where it is known soon, dear constraints, and what
        repeating work would save."""
        sends = self.layouts is not None and self.layouts.sent > 0
        return self._layout_reasons().findings() if sends else Findings(0.0, (), "")

    def reasons(self) -> Iterator[tuple[frozenset[Mark], LayoutReason]]:
        """Why values have other layouts than op by op, with their marks."""
        return self._reasons.every()

    @cached_property
    def _reasons(self) -> LayoutReasons:
        return self._layout_reasons()

    def _layout_reasons(self) -> LayoutReasons:
        assert self.layouts is not None and self.planned_with is not None
        traced = self.program.with_module(self.stages["traced"])
        planned = next(self.stages[name] for name in (*REWRITTEN, "propagated") if name in self.stages)
        return LayoutReasons(planned, traced, self.source, self.layouts, self.planned_with)

    def _computed_again(self, value: str) -> Iterator[NotHeld]:
        """Those of the values that were asked for that are computed again for the sake of memory."""
        gone = self.recomputed.values if self.recomputed is not None else ()
        asked = self._asked(value) if gone else set()
        for each in gone:
            shapes = each.shape, each.shape[1:]  # a stack has an entry per trip
            if any((each.source, type_text(each.dtype, shape, None)) in asked for shape in shapes):
                yield each

    def _in_parts(self, value: str) -> Iterator[InParts]:
        """Those of the values that were asked for that are computed part by part."""
        asked = self._asked(value) if self.blocked else set()
        for each in self.blocked:
            if (each.source, type_text(each.dtype, each.shape, None)) in asked:
                yield each

    def _asked(self, value: str) -> set[tuple[str, str]]:
        """The lines and types of the values that were asked for."""
        naming = self.explanation.naming
        return set(map(naming.made_at, naming.find(value)))

    def _chosen_instead(self, value: str, why: Why) -> Iterator[LayoutReason]:
        """Why values that were asked for have other layouts than propagation says."""
        if self.layouts is None or not self.layouts.chosen:
            return
        found = self.explanation.naming.find(value)
        origins = {chain.type: chain.links[-1].text for chain in why.chains if chain.links}
        for reason in self._reasons.of(frozenset(map(self.explanation.naming.mark, found))):
            texts = (origins[change.baseline] for change in reason.changed if change.baseline in origins)
            yield replace(reason, origins=tuple(dict.fromkeys(texts)))


# All that a plan says: its figures, and its answers to questions.


@dataclass(frozen=True, repr=False)
class Answers(Questions, Figures):
    """A plan before it is recorded: what records are made of."""
