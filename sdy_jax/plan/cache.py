"""Plans that are found in the cache in place of being made, with the lines that their source has now, and kept
there once they are made.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.base.files import SharedFolder
from sdy_jax.ir.custom_ops import calls_of_functions
from sdy_jax.ir.locations import place_of
from sdy_jax.ir.operations import pre_order
from sdy_jax.plan.border import boundary_values
from sdy_jax.plan.cache_entry import BrokenEntry, CachedAs, CachedPlan, CacheEntry, Stages, entry_bytes
from sdy_jax.plan.digests import PLAN, Key, RecordedSetting, cache_folder, can_be_cached, planned_with_from
from sdy_jax.plan.explanations.naming import all_marks
from sdy_jax.plan.notices import LOG
from sdy_jax.plan.pinning.choices import choices_of
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.record.files import choices_text
from sdy_jax.plan.stages import REWRITTEN, PlannedWith, imported, location_of_return
from sdy_jax.plan.stages import VARIABLE as DUMPS

# Modules of a program that were made when its source had other lines, with those that it has now.


class Relocation:
    """From the locations of ops in modules to those of the same ops in others.

    Args:
        pairs: modules before and now, whose ops are the same.
        sources: the lines before and now at which shardings of arguments and results are given.
        context: of all these modules.

    Raises:
        BrokenEntry: they have other ops.
    """

    def __init__(
        self, pairs: Iterable[tuple[ir.Operation, ir.Operation]], sources: tuple[str, str], context: ir.Context
    ):
        before, now = (location_of_return(source, context) for source in sources)
        self._both = [(old.location, new.location) for pair in pairs for old, new in _ops(*pair)]
        self._both += [(before, now)] if before is not None and now is not None else []
        self._now, self._sources = {old.attr: new for old, new in self._both}, dict([sources])

    def of(self, location: ir.Location) -> ir.Location:
        """Where an op is now that was at a location."""
        return self._now.get(location.attr, location)

    def move(self, module: ir.Operation) -> None:
        """Writes the locations of now into a module."""
        for op in pre_order(module):
            op.location = self.of(op.location)

    def line(self, before: str) -> str:
        """The line that a line of the source is now."""
        return self._sources.get(before) or self._lines.get(before, before)

    @cached_property
    def _lines(self) -> Mapping[str, str]:
        """From lines of the source to those of now."""
        return {place_of(old).line: place_of(new).line for old, new in self._both}


def _ops(before: ir.Operation, now: ir.Operation) -> Iterator[tuple[ir.Operation, ir.Operation]]:
    both = pre_order(before), pre_order(now)
    if [op.name for op in both[0]] != [op.name for op in both[1]]:
        raise BrokenEntry("it is of a program of other ops")
    yield from zip(*both, strict=True)


# Plans that are found in the cache in place of being made, and kept there once they are made.
#
# What cannot be read is as good as none: the program is planned, and its entry written again.

_KEPT = ("imported", "propagated", "partitioned", *REWRITTEN)
"""The stages of an entry; the program that was traced is at hand, but where layouts were stated for it."""

_FACTS = tuple(field.name for field in fields(CachedPlan) if field.name not in ("choices", "made_with"))
"""The attributes of plans that are kept as they are."""


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
        entry = CacheEntry(self.key, data, traced)
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
            stages=stages,
            source=self.source,
            planned_with=given if made_with is None else planned_with_from(made_with, given.inner),
            choices=found.choices,
            **{name: getattr(found, name) for name in _FACTS},
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
            choices=choices_text(choices) if choices is not None else None,
            made_with=RecordedSetting.of(plan.planned_with) if self.is_pinned and plan.planned_with else None,
            **{name: getattr(plan, name) for name in _FACTS},
        )
        return entry_bytes(self.key, self.source, found, stages, self.program.module.context)
