"""The choices that a plan was made by as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.interface.setting import Setting
from sdy_jax.lowering.prepare.preparation import prepared
from sdy_jax.lowering.proposal.choices import ProgramChoices
from sdy_jax.plan.answers import Answers
from sdy_jax.plan.border.boundary import BoundaryValue
from sdy_jax.plan.border.planned_with import input_names, to_partition
from sdy_jax.plan.pinning.digest import digest_of, program_text
from sdy_jax.plan.pinning.layouts import recorded_layout
from sdy_jax.plan.pinning.op_choices import recorded_layouts
from sdy_jax.plan.pinning.setting import recorded_costs, recorded_policy, recorded_target
from sdy_jax.plan.record.choices import RecordedBorderLayout, RecordedChoices, RecordedRewrite
from sdy_jax.plan.record.codec import choices_from_text
from sdy_jax.plan.recording.names import Names
from sdy_jax.plan.recording.places import Places


def choices_of(plan: Answers, named: bool = True) -> RecordedChoices | None:
    """What was chosen for a plan, by the ops of the program as it was about to be partitioned; None of a program on
    local arrays.

    Args:
        plan: the plan.
        named: with the names of ops.
    """
    given, choices, mesh_name = plan.planned_with, plan.choices, plan.program.mesh_name
    if given is None or choices is None:
        return None
    first = _prepared(plan)
    last = first if (stage := plan.stages.get("blocked", plan.stages.get("recomputed"))) is None else Graph(stage)
    names = tuple(op_names(last, plan.name, plan.program)) if named else ()
    if isinstance(choices, str):
        return replace(choices_from_text(choices), names=names)
    return RecordedChoices(
        digest_of(program_text(plan.stages["traced"])),
        digest_of(program_text(plan.stages["partitioned"])),
        recorded_costs(given.costs),
        recorded_target(given.target),
        recorded_policy(given.policy),
        recorded_layouts(choices.plan, last.ops, mesh_name, choices.decided),
        names,
        tuple(_rewrites(choices, first, mesh_name)),
        choices.saved,
        tuple(_border(plan.arguments, mesh_name)),
        tuple(_border(plan.results, mesh_name)),
    )


def _prepared(plan: Answers) -> Graph:
    """The program as it was about to be partitioned, before any rewrite."""
    given, propagated = plan.planned_with, plan.stages["propagated"]
    assert given is not None
    with propagated.context, ir.Location.unknown(propagated.context):
        module, _ = to_partition(propagated, plan.traced, plan.source, given.inner)
        setting = Setting(plan.program.mesh_name, given.costs, policy=given.policy, target=given.target)
        return prepared(module, setting)


def _rewrites(choices: ProgramChoices, first: Graph, mesh_name: str) -> Iterator[RecordedRewrite]:
    """The rewrites, each with the layouts by which values were priced. Only of the first program the ops are at hand:
    of others they are known by their numbers, as they come of the rewrites before."""
    for number, (rewrite, plan) in enumerate(choices.rewrites):
        layouts = recorded_layouts(plan, () if number else first.ops, mesh_name)
        said = rewrite.price, rewrite.keeps_named, rewrite.in_parts, rewrite.shared, rewrite.size
        yield RecordedRewrite(rewrite.kind, *said, layouts)


def op_names(graph: Graph, name: str, program: Program) -> Iterator[str]:
    """What ops are called: as their results are. `name`: of the function."""
    names = Names(graph, Places(name), input_names(program))
    for op in graph.ops:
        names.name(op)
        yield names.of(op.results[0]) if op.results else ""


def _border(values: Sequence[BoundaryValue], mesh_name: str) -> Iterator[RecordedBorderLayout]:
    for value in values:
        yield RecordedBorderLayout(value.path, recorded_layout(value.sharding, mesh_name))
