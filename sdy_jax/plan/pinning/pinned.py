"""Pinned plans: a program is partitioned by the choices of a plan that was kept, or not at all.

The choices of the file are followed, and all else follows from them, the program, and the costs and devices that the
file states. What comes of it is the module that was kept, by its digest, or, where the program, jax or sdy_jax is
another one, a plan without differences from the one that was kept; else an error says what differs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.base.errors import PinnedPlanError, SdyError
from sdy_jax.ir.jax_shardings import bytes_text
from sdy_jax.ir.meshes import Mesh
from sdy_jax.lowering.planner.facts.verifier import verify_partitioned
from sdy_jax.plan.build import build_plan
from sdy_jax.plan.digests import digest_of, planned_with_from, program_text
from sdy_jax.plan.notices import warn_of
from sdy_jax.plan.pinning.replay import DoesNotFit
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.record.comparison import diff
from sdy_jax.plan.record.differences import PlanDiff
from sdy_jax.plan.record.files import SavedPlan, plan_text
from sdy_jax.plan.record.program import RecordedMesh
from sdy_jax.plan.record.record import PlanRecord
from sdy_jax.plan.record.recorded_plan import RecordedChoices
from sdy_jax.plan.record.recording import versions
from sdy_jax.plan.stages import PlannedWith
from sdy_jax.shardy.passes.meshes import mesh_of_whole_axes

ON_CHANGE = ("error", "replan")

_SAVE = "to fix: save the plan again, plan.save(path)"


class PinnedPlan:
    """A plan that was kept, of which programs are partitioned.

    Args:
        given: its file, or the plan.
        option: by which it was given.

    The file is read when something of it is asked for, and where the cache has what comes of it only its digest is:
    `choices` and what needs these raise a `PinnedPlanError` if it was edited, or says none, and an `SdyError` if it is
    no plan.
    """

    def __init__(self, given: str | os.PathLike[str] | Plan | PlanRecord, option: str = "plan"):
        self._given, self._is_file = given, not isinstance(given, (Plan, PlanRecord))
        self.where = os.fspath(given) if self._is_file else f"the plan that {option}= gives"  # type: ignore[arg-type]

    @cached_property
    def digest(self) -> str | None:
        """That of the file; None of what is none, and may be large to write."""
        return digest_of(self._text) if self._is_file else None

    @cached_property
    def _text(self) -> str:
        return plan_text(self._given)  # type: ignore[arg-type]

    @cached_property
    def _said(self) -> SavedPlan | PlanRecord:
        given = self._given
        if isinstance(given, Plan):
            return given.record(choices=True)
        found = given if isinstance(given, PlanRecord) else SavedPlan(self._text, self.where)
        if found.is_edited:
            raise PinnedPlanError(
                f"{self.where} was edited, or damaged: its digest is not that of its choices. A pinned plan runs as it "
                f"was reviewed, or not at all; {_SAVE}"
            )
        return found

    @property
    def _record(self) -> PlanRecord:
        return self._said.record if isinstance(self._said, SavedPlan) else self._said

    def _part(self, name: str) -> Any:
        """An attribute of the record; of a file little else is read."""
        return self._said.part(name) if isinstance(self._said, SavedPlan) else getattr(self._said, name)

    @cached_property
    def choices(self) -> RecordedChoices:
        """What it was made by."""
        found: RecordedChoices | None = self._part("choices")
        if found is not None:
            return found
        raise PinnedPlanError(
            f"{self.where} says no choices: an older sdy_jax saved it, or it is of a local program; {_SAVE}"
        )

    @cached_property
    def _mesh(self) -> RecordedMesh:
        found: RecordedMesh = self._part("mesh")
        return found

    @property
    def taken(self) -> tuple[int, ...]:
        """The numbers of microbatches that were left to the planner, in the order in which they were asked for."""
        return next((each.microbatches for each in self._part("tried") if each.chosen), ())

    def is_on(self, mesh: Mesh) -> bool:
        """Whether the plan is on a mesh."""
        own = self._mesh
        axes = [(axis.name, axis.size) for axis in own.axes] == [(axis.name, axis.size) for axis in mesh.axes]
        return axes and tuple(own.device_ids) == tuple(mesh.device_ids)

    def plan(self, name: str, program: Program, given: PlannedWith, source: str, on_change: str) -> Plan:
        """The plan of a program by the choices that were kept.

        Args:
            name, program, source: as of `build_plan`.
            given: what the function says; costs and devices are those of the plan that was kept.
            on_change: "error", or "replan": what the program does not have in common with it is planned anew, and a
                warning says what.

        Raises:
            PinnedPlanError: the program has another plan.
            SdyError: the file is no plan.
        """
        pin = _PinOf(self, name, given, on_change)
        try:
            return build_plan(name, program, given, source, pinned=pin)
        except DoesNotFit:
            own = planned_with_from(self.choices, given.inner)
            plan = build_plan(name, program, own, source, kept=self.choices)
        self._check_memory(plan, given)
        return self._compared(plan, on_change)

    def _compared(self, plan: Plan, on_change: str) -> Plan:
        """A plan that may be another one than was kept.

        Raises:
            PinnedPlanError: it is.
        """
        name = plan.name
        plan = replace(plan, device_kind=self._mesh.device_kind)
        found = diff(self._record, plan)
        self._check_whether_changed(plan, found)
        if not found:
            return plan
        if on_change == "replan":
            warn_of([f"{self.where} is not the plan of {name} any more, and was made anew:\n{found}"])
            return plan
        raise PinnedPlanError(
            f"{self.where} is not the plan of {name} any more:\n{found}\nto accept what is planned now, save it in its "
            "place: plan.save(path); with on_change='replan' it runs, with a warning",
            found,
        )

    def _check_mesh(self, name: str, program: Program) -> None:
        mesh = mesh_of_whole_axes(program.module, program.mesh)
        if not self.is_on(mesh):
            said = ", ".join(f"{axis.name}={axis.size}" for axis in self._mesh.axes)
            raise PinnedPlanError(
                f"{self.where} is a plan on the mesh {said or 'without axes'}, and {name} is partitioned on {mesh}; "
                "to fix: pin a plan on this mesh"
            )

    def _check_options(self, given: PlannedWith) -> None:
        """What the user says about values, not about how layouts are found, has to be the same."""
        for option in ("uneven", "optimize_collectives"):
            stated, kept = getattr(given.policy, option), getattr(self.choices.policy, option)
            if stated != kept:
                raise PinnedPlanError(
                    f"{self.where} was made with {option}={kept!r}, and the function says {option}={stated!r}; to fix: "
                    f"say the same, or save the plan again"
                )

    def _check_memory(self, plan: Plan, given: PlannedWith) -> bool:
        """Whether a plan takes no more memory than devices have, with a warning if not.

        Raises:
            PinnedPlanError: the function states that it may take less.
        """
        stated, has = given.policy.memory, given.target.memory
        if stated is None and not has:  # it is not counted where nothing depends on it
            return True
        peak = plan.memory.peak
        if stated is not None and peak > stated:
            raise PinnedPlanError(
                f"{self.where} holds {bytes_text(peak)} on each device, and memory= allows {bytes_text(stated)}; to "
                "fix: leave memory= out, or pin a plan that was made with it"
            )
        if has and peak > has:
            warn_of([f"{self.where} holds {bytes_text(peak)} on each device, which have {bytes_text(has)}"])
            return False
        return True

    def _verify(self, plan: Plan) -> None:
        """
        Raises:
            PinnedPlanError: the choices make a program that would compute something else.
        """
        module = plan.stages["partitioned"]
        with module.context, ir.Location.unknown(module.context):
            try:
                verify_partitioned(module)
            except SdyError as error:
                raise PinnedPlanError(
                    f"{self.where} says choices that do not go together: {error}; it was edited, or another version of "
                    f"sdy_jax runs the ops otherwise; {_SAVE}"
                ) from None

    def _check_whether_changed(self, plan: Plan, found: PlanDiff) -> None:
        """
        Raises:
            PinnedPlanError: the program and all versions are those with which the plan was made, and it is another one.
        """
        is_same = digest_of(program_text(plan.stages["traced"])) == self.choices.program
        if is_same and self._part("versions") == versions():
            raise PinnedPlanError(
                f"{self.where} says choices of which another program comes than it says:\n{found}\nit was edited, or "
                f"sdy_jax was, and has the same version; {_SAVE}",
                found,
            )


@dataclass(frozen=True, slots=True)
class _PinOf:
    """A pinned plan for a function; a `Pin`."""

    kept: PinnedPlan
    name: str
    given: PlannedWith
    on_change: str

    @property
    def digest(self) -> str | None:
        return self.kept.digest

    @property
    def choices(self) -> RecordedChoices:
        return self.kept.choices

    def planned_with(self, program: Program) -> PlannedWith:
        self.kept._check_mesh(self.name, program)
        self.kept._check_options(self.given)
        return planned_with_from(self.choices, self.given.inner)

    def checked(self, plan: Plan) -> tuple[Plan, bool]:
        self.kept._verify(plan)
        fits = self.kept._check_memory(plan, self.given)
        if digest_of(program_text(plan.stages["partitioned"])) == self.choices.partitioned:
            return plan, fits
        return self.kept._compared(plan, self.on_change), False
