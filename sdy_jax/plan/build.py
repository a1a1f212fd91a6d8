"""Making a plan: import, propagation, export, partitioning, each on its own copy of the module."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.errors import ShardingError
from sdy_jax.ir.extensions import load_extensions
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import copied, function_type, main_function
from sdy_jax.ir.stored_shardings import function_shardings
from sdy_jax.ir.tensor_types import shape_and_dtype
from sdy_jax.lowering.blocking.partition import partition
from sdy_jax.lowering.interface.memo import Memo
from sdy_jax.lowering.interface.notes import Note
from sdy_jax.lowering.interface.policy import Policy
from sdy_jax.lowering.interface.setting import Setting, limit
from sdy_jax.lowering.interface.uneven_notes import uneven
from sdy_jax.lowering.proposal.choices import Follow, Keep
from sdy_jax.lowering.proposal.free_border import FreeBorder
from sdy_jax.lowering.whole_program.partition import best_border
from sdy_jax.lowering.whole_program.starting_proposal import is_large
from sdy_jax.op_rules import RuleBook
from sdy_jax.passes.common_mesh import on_whole_axes
from sdy_jax.passes.pipelines import PLAN_EXPORT, plan_import
from sdy_jax.passes.programs import run_pipeline
from sdy_jax.passes.registry import Pass
from sdy_jax.plan.auto_layouts import Border, Planners, automatic_layouts, automatic_plan, with_border
from sdy_jax.plan.border.boundary import boundary_values
from sdy_jax.plan.border.planned_with import PlannedWith, input_names, to_partition
from sdy_jax.plan.cached import PlanEntry
from sdy_jax.plan.dump import Dump, dump_of, ignore
from sdy_jax.plan.explanations.checkpoint_names import all_marks
from sdy_jax.plan.garbage import collection_paused
from sdy_jax.plan.importing import imported
from sdy_jax.plan.keeping import KeptChoices, with_known_border
from sdy_jax.plan.pinning.border import pinned_border
from sdy_jax.plan.pinning.replay import Replay
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.progress import LOG, Tell, progress_of
from sdy_jax.plan.record.choices import RecordedChoices
from sdy_jax.plan.sharding_display import report_shown

NOTE_SOURCES: list[Callable[[ir.Operation], Iterable[Note]]] = []
"""Functions from a traced module to notes for its plan, registered by dialects."""


class Pin(Protocol):
    """A plan that is pinned."""

    @property
    def digest(self) -> str | None:
        """What says that another one is equal."""

    @property
    def choices(self) -> RecordedChoices:
        """What it was made by."""

    def planned_with(self, program: Program) -> PlannedWith:
        """With what it was made. Raises an error where it cannot be the plan of a program."""

    def checked(self, plan: Plan) -> tuple[Plan, bool]:
        """The plan that was made by these choices if it may run, and whether it is the pinned one, of which there is
        nothing to say."""


_PROPAGATE = Pass("sdy-user-priority-propagate", compat="sdy_jax")


def build_plan(
    name: str,
    program: Program,
    given: PlannedWith,
    source: str = "",
    *,
    is_trial: bool = False,
    pinned: Pin | None = None,
    kept: RecordedChoices | None = None,
    like: RecordedChoices | None = None,
) -> Plan:
    """Propagates and partitions a traced program.

    Args:
        name: what the function is called.
        program: the traced program.
        given: the costs, the user's decisions and the devices for which it is planned.
        source: the line at which the program's shardings are given.
        is_trial: the plan is only to be compared with another one; its stages are not dumped.
        pinned: a plan to follow in place of a search.
        kept: choices of another program, which are kept for the ops that this one has as well.
        like: likewise, of a program of other sizes, for arguments and results as well.

    Raises:
        DoesNotFit: the choices that are pinned are for another program.
    """
    context = program.module.context
    begun = time.monotonic()
    with collection_paused(), context, ir.Location.unknown(context):  # jax may be lowering in a context of its own
        with progress_of(name) as tell:
            program = on_whole_axes(program)
            keep = None
            if (others := kept or like) is not None:
                program = with_known_border(program, others, is_like=like is not None)
                keep = KeptChoices(others, name, program, is_like=like is not None)
            making = _Making(name, source, given, is_trial, tell, Memo(), keep)
            plan = making.kept(program) if pinned is None else making.pinned(program, pinned)
        if not is_trial:
            if LOG.isEnabledFor(logging.INFO):
                LOG.info("planned in %.2f s: %r", time.monotonic() - begun, plan)
            report_shown(plan.stages["partitioned"], program.mesh_name)
    return plan


@dataclass(frozen=True, slots=True)
class _Making:
    """How plans of a function are made."""

    name: str
    source: str
    given: PlannedWith
    is_trial: bool
    tell: Tell
    memo: Memo
    """Shared by the plans with all borders that are tried."""
    keep: Keep | None = None
    whole_axes: bool = False
    """Whether layouts are along whole axes, as far as the program states no parts: that takes a fraction of the time,
    and tells borders apart as well."""

    def again(self, program: Program, policy: Policy) -> Plan:
        """The plan of another program of the same function, to be compared with the first."""
        return build_plan(self.name, program, replace(self.given, policy=policy), self.source, is_trial=True)

    def _dump(self) -> Dump:
        return ignore if self.is_trial else dump_of(self.name)

    def kept(self, program: Program) -> Plan:
        """The plan of a program from the cache, or else made, and kept there."""
        entry = (
            None
            if self.is_trial or self.keep is not None
            else PlanEntry.of(self.name, program, self.given, self.source)
        )
        if entry is None:
            return self.made(program)
        plan = entry.read()
        if plan is None:
            plan = self.made(program)
            plan = entry.write(plan)
        return replace(plan, planner=self.again)

    def made(self, program: Program) -> Plan:
        """The plan of a program."""
        return self.searched(program) if program.is_automatic else self.plan(program)

    def pinned(self, program: Program, pin: Pin) -> Plan:
        """The plan of a program that is pinned: from the cache, if it was made and checked before."""
        digest = pin.digest
        entry = digest and PlanEntry.of(self.name, program, self.given, self.source, digest)
        if entry and (plan := entry.read()) is not None:
            return replace(plan, planner=replace(self, given=plan.planned_with or self.given).again)
        making = replace(self, given=pin.planned_with(program))
        plan, is_pinned = pin.checked(making.followed(program, pin.choices))
        return entry.write(plan) if entry and is_pinned else plan

    def followed(self, program: Program, choices: RecordedChoices) -> Plan:
        """The plan of a program by choices that are known."""
        follow = Replay(choices)
        if not program.is_automatic:
            return self.plan(program, follow=follow)
        plan = self.plan(with_border(program, pinned_border(program, choices)), follow=follow)
        policy, target = self.given.policy, self.given.target
        return replace(plan, automatic=automatic_layouts(program, plan, {}, limit(policy, target)))

    def plan(self, program: Program, known: float = math.inf, follow: Follow | None = None) -> Plan:
        """The plan of a program whose border is stated.

        Args:
            program: the program.
            known: what another program costs that is known to fit.
            follow: gives choices in place of a search.

        Raises:
            GivenUp: it does not fit as it is written, and costs more where it does.
        """
        dump = self._dump()
        self.tell("propagation")
        stages, rules = self._propagated(program, dump)
        module, notes = to_partition(stages["propagated"], program, self.source, self.given.inner)
        inputs = input_names(program)
        mains = main_function(program.module), main_function(module)
        uneven_ones = list(_uneven_arguments(*mains, program, inputs, self.source))
        if uneven_ones and self.given.policy.uneven == "error":
            raise ShardingError(f"{self.source}: {uneven_ones[0].message}, or leave uneven='pad'")
        self.tell("layouts and collectives")
        named = all_marks(program.jaxpr)
        report, choices = partition(module, self._setting(program, rules, inputs), named, follow, self.keep, known)
        if report.before is not None:
            stage = "blocked" if report.blocked else "recomputed"
            dump(stage, report.before)
            stages[stage] = report.before
        dump("partitioned", module)
        stages["partitioned"] = module

        notes = [*_notes_of_dialects(program.module), *notes, *uneven_ones, *report.notes]
        program = program.with_module(module)
        return Plan(
            self.name,
            program,
            *boundary_values(program),
            tuple(report.collectives),
            tuple(dict.fromkeys(note if note.source else replace(note, source=self.source) for note in notes)),
            stages,
            self.source,
            layouts=report.layouts,
            planned_with=self.given,
            work_cost=report.work,
            hidden_by_work=report.hidden,
            counted_peak=report.held,
            recomputed=report.recomputed,
            blocked=report.blocked,
            choices=choices,
            planner=self.again,
        )

    def searched(self, program: Program) -> Plan:
        """The plan of a program whose border is left to the planner, in part at least."""
        before = copied(program.module)
        run_pipeline(before, plan_import())
        available, policy = limit(self.given.policy, self.given.target), self.given.policy
        coarse = replace(self, whole_axes=True)
        unlimited = replace(coarse, given=replace(self.given, policy=replace(policy, memory=math.inf, effort=1)))
        slow = self.given.costs.slow_axes(program.mesh)
        planners = Planners(self.plan, unlimited.plan, coarse._freed, along_parts=not is_large(Graph(before)))
        return automatic_plan(program, before, planners, available, slow, self.tell)

    def _freed(self, program: Program, border: FreeBorder, known: float) -> Border:
        stages, rules = self._propagated(program, self._dump())
        module, _ = to_partition(stages["propagated"], program, self.source, self.given.inner)
        found = best_border(module, self._setting(program, rules), border, known)
        first = len(program.constants)
        return {number - first: sharding for number, sharding in found.arguments.items()}, found.results

    def _setting(self, program: Program, rules: RuleBook, inputs: Sequence[str] = ()) -> Setting:
        given = self.given
        program_given = program.mesh_name, given.costs, rules, given.policy, given.target, inputs
        return Setting(*program_given, whole_axes=self.whole_axes, memo=self.memo)

    def _propagated(self, program: Program, dump: Dump) -> tuple[dict[str, ir.Operation], RuleBook]:
        """The module after each stage, and the rules that propagation used."""
        stages, rules = {"traced": program.module}, RuleBook()
        dump("traced", program.module)
        stages["imported"] = imported(program, dump)
        dump("imported", stages["imported"])

        module = copied(stages["imported"])
        _PROPAGATE(module, rules)
        dump(_PROPAGATE, module)
        run_pipeline(module, PLAN_EXPORT, after=dump)
        stages["propagated"] = module
        return stages, rules


def _uneven_arguments(
    traced: ir.Operation, main: ir.Operation, program: Program, names: Sequence[str], source: str
) -> Iterator[Note]:
    """Notes on arguments that export gives fewer axes than stated, because these do not divide a dimension."""
    types = function_type(main).inputs
    given, found = (function_shardings(function, "arg_attrs") for function in (traced, main))
    for name, type_, stated, even in zip(names, types, given, found, strict=True):
        shape, dtype = shape_and_dtype(type_)
        if stated and even and shape is not None and stated.mesh == even.mesh == program.mesh_name:
            for message in uneven(f"`{name}`", shape, dtype, stated, even, program.mesh):
                yield Note("argument", source, message)


def _notes_of_dialects(module: ir.Operation) -> Iterator[Note]:
    load_extensions()
    for source in NOTE_SOURCES:
        yield from source(module)
