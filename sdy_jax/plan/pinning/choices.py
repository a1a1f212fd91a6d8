"""The choices that a plan was made by as plain data: layouts, the choices for each op, and all of them together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.base.errors import SdyError
from sdy_jax.ir.graph import Graph, Op
from sdy_jax.ir.jax_shardings import type_text
from sdy_jax.ir.meshes import braces
from sdy_jax.ir.parsers import parse_axes, parse_axis_lists
from sdy_jax.ir.shardings import REDUCTION_KINDS, TensorSharding
from sdy_jax.lowering.planner.problem.layout_plan import LayoutPlan, ProgramChoices
from sdy_jax.lowering.planner.problem.op_problem import Decision, InsideCollective
from sdy_jax.lowering.planner.rewrites.preparation import prepared
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.plan.border import BoundaryValue
from sdy_jax.plan.digests import digest_of, program_text, recorded_costs, recorded_policy, recorded_target
from sdy_jax.plan.questions import Answers
from sdy_jax.plan.record.files import choices_from_text
from sdy_jax.plan.record.names import Names, Places
from sdy_jax.plan.record.recorded_plan import (
    RecordedBorderLayout,
    RecordedChoice,
    RecordedChoices,
    RecordedCopy,
    RecordedInside,
    RecordedLayout,
    RecordedLayoutPlan,
    RecordedRewrite,
)
from sdy_jax.plan.stages import REWRITTEN, input_names, to_partition

# Layouts as plain data and back.


@lru_cache(maxsize=1 << 12)
def recorded_layout(sharding: TensorSharding, mesh_name: str) -> RecordedLayout:
    """A layout as data; `mesh_name`: the program's mesh."""
    axes = f"[{', '.join(map(braces, sharding.axes))}]"
    unreduced = braces(sharding.unreduced_axes) if sharding.unreduced_axes else ""
    assert isinstance(sharding.mesh, str)
    return RecordedLayout(axes, unreduced, sharding.reduction, "" if sharding.mesh == mesh_name else sharding.mesh)


@lru_cache(maxsize=1 << 12)
def layout_from(recorded: RecordedLayout, mesh_name: str) -> TensorSharding:
    """A layout that data says; `mesh_name`: the program's mesh.

    Raises:
        SdyError: it is none.
    """
    if recorded.reduction not in REDUCTION_KINDS:
        raise SdyError(f"{recorded.reduction!r} is no reduction")
    unreduced = parse_axes(recorded.unreduced) if recorded.unreduced else ()
    lists = parse_axis_lists(recorded.axes)
    return TensorSharding.closed(recorded.mesh or mesh_name, lists, unreduced, recorded.reduction)


# The choices for the ops of a program as plain data.


def recorded_layouts(
    plan: LayoutPlan | None, ops: Sequence[Op], mesh_name: str, decided: Mapping[int, Decision] | None = None
) -> RecordedLayoutPlan:
    """The layouts of a program as data.

    Args:
        plan: what was chosen; None where it stayed as the baseline: `decided`, of ops by their numbers.
        ops: of the program as it was about to be partitioned; none where it is not at hand.
        mesh_name: the program's mesh.
    """
    if plan is None:
        choices = _OpChoices(LayoutPlan(decided or {}, {}, {}), mesh_name)
        return RecordedLayoutPlan(ops=tuple([choices.of(number, op) for number, op in enumerate(ops)]))
    choices = _OpChoices(plan, mesh_name)
    count = len(ops) or 1 + max(
        [*plan.ops, *plan.edges, *plan.user_collectives, *(n for n, _ in plan.shared)], default=-1
    )
    found = [choices.of(number, ops[number] if ops else None) for number in range(count)]
    return RecordedLayoutPlan(True, tuple(found), plan.chosen, tuple(_copies(plan)))


class _OpChoices:
    """Makes data of what was chosen for ops."""

    def __init__(self, plan: LayoutPlan, mesh_name: str):
        self._mesh_name, self._plan, self._shared = mesh_name, plan, dict[int, dict[int, TensorSharding]]()
        for (number, index), sharding in plan.shared.items():
            self._shared.setdefault(number, {})[index] = sharding

    def of(self, number: int, op: Op | None) -> RecordedChoice:
        """That of an op, by its number."""
        plan, shared = self._plan, self._shared.get(number, {})
        decision, operand = plan.ops.get(number), plan.user_collectives.get(number)
        name, place = _strategy(decision)
        return RecordedChoice(
            op.name if op is not None else "",
            types_of(op) if op is not None else (),
            self._layouts(decision.shardings if decision is not None else ()),
            name,
            place,
            decision.gathered if decision is not None else (),
            tuple(map(_inside, decision.inside)) if decision is not None else (),
            tuple([self._stated(shared.get(index)) for index in range(max(shared, default=-1) + 1)]),
            self._layouts(plan.edges.get(number, ())),
            self._stated(operand),
        )

    def _layout(self, sharding: TensorSharding) -> RecordedLayout:
        return recorded_layout(sharding, self._mesh_name)

    def _stated(self, sharding: TensorSharding | None) -> RecordedLayout | None:
        return None if sharding is None else self._layout(sharding)

    def _layouts(self, shardings: Iterable[TensorSharding]) -> tuple[RecordedLayout, ...]:
        return tuple(map(self._layout, shardings))


def _strategy(decision: Decision | None) -> tuple[str, int]:
    """The name of a strategy, and its place among those of the op."""
    if decision is None or decision.strategy is None:
        return "", 0
    return decision.strategy.name, decision.kind.strategies.index(decision.strategy)


def _copies(plan: LayoutPlan) -> Iterator[RecordedCopy]:
    """The copies of values that uses take."""
    for (maker, index, user), number in plan.copies.items():
        yield RecordedCopy(maker, index, user, number)


def types_of(op: Op) -> tuple[str, ...]:
    """The global types of an op's operands, then of its results."""
    return tuple([type_text(value.dtype, value.shape, None) for value in (*op.operands, *op.results)])


def _inside(collective: InsideCollective) -> RecordedInside:
    axes = braces(collective.axes)
    return RecordedInside(
        collective.kind, axes, collective.tensor, collective.wire_bytes, collective.time, collective.is_exact
    )


# The choices that a plan was made by as plain data.


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
    stage = next((plan.stages[name] for name in REWRITTEN if name in plan.stages), None)
    last = first if stage is None else Graph(stage)
    names = tuple(recorded_op_names(last, plan.name, plan.program)) if named else ()
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
        said = rewrite.memory_multiplier, rewrite.keeps_named, rewrite.in_parts, rewrite.shared, rewrite.size
        yield RecordedRewrite(rewrite.kind, *said, layouts, rewrite.limit, rewrite.axes)


def recorded_op_names(graph: Graph, name: str, program: Program) -> Iterator[str]:
    """What ops are called: as their results are. `name`: of the function."""
    names = Names(graph, Places(name), input_names(program))
    for op in graph.ops:
        names.name(op)
        yield names.of(op.results[0]) if op.results else ""


def _border(values: Sequence[BoundaryValue], mesh_name: str) -> Iterator[RecordedBorderLayout]:
    for value in values:
        yield RecordedBorderLayout(value.path, recorded_layout(value.sharding, mesh_name))
