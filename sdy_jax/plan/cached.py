"""Plans that are found in the cache in place of being made, and kept there once they are made.

What cannot be read is as good as none: the program is planned, and its entry written again. See `plan/cache`.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace

from sdy_jax.annotate.program import Program
from sdy_jax.files.folders import SharedFolder
from sdy_jax.ir.custom_ops import calls_of_functions
from sdy_jax.plan.border.boundary import boundary_values
from sdy_jax.plan.border.planned_with import PlannedWith
from sdy_jax.plan.cache.emitted import CachedAs
from sdy_jax.plan.cache.entry import CachedPlan, Entry, Stages, entry_bytes
from sdy_jax.plan.cache.folder import PLAN, cache_folder
from sdy_jax.plan.cache.key import Key, can_be_cached
from sdy_jax.plan.cache.relocation import Relocation
from sdy_jax.plan.dump import VARIABLE as DUMPS
from sdy_jax.plan.explanations.checkpoint_names import all_marks
from sdy_jax.plan.importing import imported
from sdy_jax.plan.pinning.setting import RecordedSetting, planned_with_from
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.progress import LOG
from sdy_jax.plan.record.codec import choices_text
from sdy_jax.plan.recording.choices import choices_of

_KEPT = ("imported", "propagated", "partitioned", "recomputed", "blocked")
"""The stages of an entry; the program that was traced is at hand, but where layouts were stated for it."""


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """The place of a program's plan in the cache."""

    folder: SharedFolder
    key: Key
    name: str
    program: Program
    given: PlannedWith
    source: str
    is_pinned: bool

    @classmethod
    def of(
        cls, name: str, program: Program, given: PlannedWith, source: str, pin: str | None = None
    ) -> PlanEntry | None:
        """That of a program, which is about to be planned; None where plans are not kept, or this one cannot be.

        Args:
            name, program, given, source: as of `build_plan`.
            pin: the digest of the plan that is pinned, if one is.
        """
        folder = cache_folder()
        if folder is None or os.environ.get(DUMPS):
            return None
        calls = calls_of_functions(program.module)
        if not can_be_cached(program, calls):
            return None
        key = Key.of(program, given, source, all_marks(program.jaxpr), calls, pin)
        return cls(folder, key, name, program, given, source, pin is not None)

    def read(self) -> Plan | None:
        """The plan that is kept; None where there is none, or what is there cannot be read."""
        data = self.folder.read(self._file)
        if data is None:
            return None
        try:
            plan = self._as_cached(self._plan(*self._found(data)), data)
        except Exception as error:  # whatever is wrong with it, it is no plan
            LOG.info("the entry %s of the cache is broken, and %s is planned: %s", self.key.name, self.name, error)
            self.folder.remove(self._file)
            return None
        LOG.info("found in the cache: %r", plan)
        return plan

    @property
    def _file(self) -> str:
        return self.key.name + PLAN

    def _as_cached(self, plan: Plan, data: bytes) -> Plan:
        return replace(plan, cached_as=CachedAs.of(self.key, data, plan.program.module))

    def _found(self, data: bytes) -> tuple[CachedPlan, Stages]:
        """What an entry says, by the lines of now."""
        traced = self.program.module
        entry = Entry(self.key, data, traced)
        stages = entry.stages
        if entry.lines == self.key.lines:
            return entry.plan(), stages
        before, stages["imported"] = stages["imported"], imported(self.program)
        pairs = [(before, stages["imported"])]
        pairs += [(stages["traced"], traced)] if stages["traced"] is not traced else []
        now = Relocation(pairs, (entry.source, self.source), traced.context)
        for name in stages.keys() - {"imported"}:
            if stages[name] is not traced:
                now.move(stages[name])
        plan = entry.plan(now.of)
        notes = tuple([replace(note, source=now.line(note.source)) for note in plan.notes])
        return replace(plan, notes=notes), stages

    def _plan(self, found: CachedPlan, stages: Stages) -> Plan:
        none, program = frozenset[int](), self.program
        program = replace(program, automatic_arguments=none, automatic_results=none)
        program = program.with_module(stages["partitioned"])
        given, made_with = self.given, found.made_with
        return Plan(
            self.name,
            program,
            *boundary_values(program),
            found.collectives,
            found.notes,
            stages,
            self.source,
            layouts=found.layouts,
            planned_with=given if made_with is None else planned_with_from(made_with, given.inner),
            automatic=found.automatic,
            work_cost=found.work_cost,
            hidden_by_work=found.hidden_by_work,
            counted_peak=found.counted_peak,
            recomputed=found.recomputed,
            blocked=found.blocked,
            choices=found.choices,
        )

    def write(self, plan: Plan) -> Plan:
        """Keeps a plan, and returns it as one that is kept. Where that is not possible a warning says so, once per
        folder."""
        try:
            data = self._bytes(plan)
            self.folder.write(self._file, data)
            return self._as_cached(plan, data)
        except OSError as error:
            warnings.warn(f"plans cannot be kept in {self.folder.path}: {error.strerror or error}", stacklevel=2)
        except Exception as error:  # the plan is there, and runs
            LOG.warning("the plan of %s cannot be kept: %s: %s", self.name, type(error).__name__, error)
        return plan

    def _bytes(self, plan: Plan) -> bytes:
        names = (*_KEPT, "traced") if plan.automatic is not None else _KEPT
        stages = {name: plan.stages[name] for name in names if name in plan.stages}
        choices = choices_of(plan, named=False)
        found = CachedPlan(
            plan.collectives,
            plan.notes,
            plan.layouts,
            plan.work_cost,
            plan.hidden_by_work,
            plan.counted_peak,
            plan.recomputed,
            plan.blocked,
            plan.automatic,
            choices_text(choices) if choices is not None else None,
            RecordedSetting.of(plan.planned_with) if self.is_pinned and plan.planned_with else None,
        )
        return entry_bytes(self.key, self.source, found, stages, self.program.module.context)
