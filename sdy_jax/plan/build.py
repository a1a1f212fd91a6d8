"""Making a plan: import, propagation, export, partitioning, each on its own copy of the module; and making it
again without some axes of its mesh.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.base.errors import ShardingError
from sdy_jax.base.extensions import load_extensions
from sdy_jax.ir.attributes import mesh_to_attribute, shape_and_dtype
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.locations import short_source, source_line
from sdy_jax.ir.meshes import Mesh, MeshAxis
from sdy_jax.ir.operations import copied, function_type, main_function, module_meshes, named, pre_order, read_attributes
from sdy_jax.ir.shardings import erase_manual_axes
from sdy_jax.ir.stored_shardings import SIDES, function_shardings, set_function_shardings
from sdy_jax.lowering.planner.plan_program import best_border, partition
from sdy_jax.lowering.planner.problem.layout_plan import Follow, FreeBorder, Keep
from sdy_jax.lowering.planner.report import Note, uneven
from sdy_jax.lowering.planner.search.baseline import is_large
from sdy_jax.lowering.planner.setting import Memo, Policy, Setting, limit
from sdy_jax.plan.auto_layouts import Border, Planners, automatic_layouts, automatic_plan, with_border
from sdy_jax.plan.border import boundary_values
from sdy_jax.plan.cache import PlanEntry
from sdy_jax.plan.explanations.naming import all_marks
from sdy_jax.plan.notices import LOG, Tell, progress_of, report_shown
from sdy_jax.plan.pinning.replay import KeptChoices, Replay, pinned_border, with_known_border
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.record.recorded_plan import RecordedChoices
from sdy_jax.plan.stages import Dump, PlannedWith, dump_of, ignore, imported, input_names, to_partition, to_whole_axes
from sdy_jax.shardy.passes.pipelines import PLAN_EXPORT, plan_import, run_pipeline
from sdy_jax.shardy.passes.registry import Pass
from sdy_jax.shardy.rules import RuleBook

# When Python looks for garbage among what planning makes.

_MANY = 500_000
"""Objects that may wait for a whole collection. Chosen: those of a few 12-layer training steps, about 80 MB. With many
more of them a process that plans again and again holds what nobody needs; with none each plan pays for a look."""

_OF_PYTHON = 2000
"""Objects that may be frozen without anybody having asked for it. Measured (2026-11, Python 3.12): 375, none on 3.11. A
program that freezes what it has, before it forks for instance, has a hundred thousand."""

_others_freeze = False
"""Whether more than that was ever found frozen. Then it is not asked again: Python counts frozen objects one by one, in
20 ms for what a run of tests has (2026-11), several times per plan."""

_waiting = 0
"""Objects that are not looked at before a whole collection."""


@contextmanager
def collection_paused() -> Iterator[None]:
    """Planning makes many small linked objects that all live until it is done. Looking for garbage among them and in
    all that jax has alive made reading the example's graphs take 0.2 s instead of 0.06 s (2026-11).

    Nor are they looked through behind it, where two thirds are found to be garbage: a fifth of the time of planning a
    flax step of 12 layers (2026-11). They are made old ones, until so many wait that all are looked through at once.
    """
    was_enabled = gc.isenabled()
    if was_enabled and _waiting > _MANY:
        _collect_all()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            try:
                _age_young()
            finally:  # an interrupt leaves it enabled, too
                gc.enable()


def _collect_all() -> None:
    global _waiting
    gc.collect()
    _waiting = 0


def _age_young() -> None:
    """Makes objects old ones without a look, unless there are many, or somebody froze others, which should stay so."""
    global _waiting, _others_freeze
    _others_freeze = _others_freeze or gc.get_freeze_count() > _OF_PYTHON
    young = gc.get_count()[0]
    if young > _MANY or _others_freeze:
        return
    gc.freeze()
    gc.unfreeze()  # which makes them old ones
    _waiting += young


# Making a plan: import, propagation, export, partitioning, each on its own copy of the module.

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
            program = to_whole_axes(program)
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

    def plan(self, program: Program, incumbent: float = math.inf, follow: Follow | None = None) -> Plan:
        """The plan of a program whose border is stated.

        Args:
            program: the program.
            incumbent: the cost of another program that fits.
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
        report, choices = partition(module, self._setting(program, rules, inputs), named, follow, self.keep, incumbent)
        if report.before is not None:
            stage = "blocked" if report.blocked else "ordered" if report.recomputed is None else "recomputed"
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
            op_times=report.op_times,
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

    def _freed(self, program: Program, border: FreeBorder, incumbent: float) -> Border:
        stages, rules = self._propagated(program, self._dump())
        module, _ = to_partition(stages["propagated"], program, self.source, self.given.inner)
        found = best_border(module, self._setting(program, rules), border, incumbent)
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


# A plan made again without some axes of its mesh: `jax.vmap(spmd_axis_name=...)` splits a new dimension along them.


def without_axes(plan: Plan, axes: frozenset[str], of: Plan | None = None) -> Plan:
    """The plan of the same program in which these axes split nothing: as if they had one device each.

    Args:
        plan: the plan.
        axes: the axes.
        of: the user's function, where the plan is that of its derivative: the border of this was chosen by the planner,
            and leaves the axes out.

    Raises:
        ShardingError: the user said something of the axes.
    """
    assert plan.planned_with is not None
    module = copied(plan.stages["traced"])
    with module.context, ir.Location.unknown(module.context):
        users = of or plan
        _check_unsaid(users.name, axes, chain(_border_statements(users, axes), _op_statements(module, axes)))
        if of is not None:
            _free_border(main_function(module), axes)
        for op in named(module, "sdy.mesh"):
            mesh = module_meshes(module)[ir.StringAttr(op.attributes["sym_name"]).value]
            op.attributes["mesh"] = mesh_to_attribute(_of_one_device(mesh, axes), module.context)
    mesh = plan.program.mesh
    program = replace(plan.program, module=module, mesh=_of_one_device(mesh, axes))
    found = build_plan(plan.name, program, plan.planned_with, plan.source)
    return replace(found, program=replace(found.program, mesh=mesh))


def _of_one_device(mesh: Mesh, axes: frozenset[str]) -> Mesh:
    if not mesh.axes:
        return mesh
    return Mesh(tuple(MeshAxis(axis.name, 1) if axis.name in axes else axis for axis in mesh.axes))


def _free_border(main: ir.Operation, axes: frozenset[str]) -> None:
    for side in SIDES:
        found = enumerate(function_shardings(main, side))
        freed = {i: erase_manual_axes(s, tuple(axes)) for i, s in found if s is not None}
        set_function_shardings(main, side, freed)


def _check_unsaid(name: str, axes: frozenset[str], statements: Iterable[str]) -> None:
    for said in statements:
        raise ShardingError(
            f"jax.vmap(spmd_axis_name={', '.join(map(repr, sorted(axes)))}) of {name}: {said}, and an axis splits one "
            "dimension only. To fix: leave spmd_axis_name out, or other axes there; or vmap inside, "
            "partition(jax.vmap(f), in_shardings=...) with the axis at the new dimension"
        )


def _border_statements(plan: Plan, axes: frozenset[str]) -> Iterator[str]:
    """What the options of `partition` say of these axes, for messages."""
    main, first = main_function(plan.stages["traced"]), len(plan.program.constants)
    paths = {"arg_attrs": plan.program.inputs, "res_attrs": plan.program.outputs}
    for side, option in zip(SIDES, ("in_shardings", "out_shardings"), strict=True):
        shardings = function_shardings(main, side)
        stated = shardings[first:] if side == "arg_attrs" else shardings
        for path, sharding in zip(paths[side], stated, strict=True):
            if sharding is not None and sharding != erase_manual_axes(sharding, tuple(axes)):
                yield f"{option} says <{sharding}> for `{path}`"


def _op_statements(module: ir.Operation, axes: frozenset[str]) -> Iterator[str]:
    """What the function itself says of these axes, for messages."""
    for op in pre_order(module):
        if op.name not in ("sdy.mesh", "func.func"):
            place = short_source(source_line(op.location))
            yield from (f"{place}: {op.name} says {text}" for text in _texts(op) if _names_one_of(axes, text))


def _texts(op: ir.Operation) -> Iterator[str]:
    """What an op says of axes."""
    is_sdys = op.name.startswith("sdy.")
    return (str(said) for name, said in read_attributes(op).items() if is_sdys or name.startswith("sdy."))


def _names_one_of(axes: frozenset[str], text: str) -> bool:
    return any(f'"{axis}"' in text for axis in axes)
