"""The choices for the ops of a program as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.candidates.op_problem import Decision, InsideCollective
from sdy_jax.lowering.proposal.layout_plan import LayoutPlan
from sdy_jax.plan.pinning.layouts import recorded_layout
from sdy_jax.plan.record.choices import RecordedChoice, RecordedCopy, RecordedInside, RecordedLayout, RecordedLayoutPlan
from sdy_jax.representation.axes import braces
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.type_text import type_text


def recorded_layouts(
    plan: LayoutPlan | None, ops: Sequence[Op], mesh_name: str, decided: Mapping[int, Decision] | None = None
) -> RecordedLayoutPlan:
    """The layouts of a program as data.

    Args:
        plan: what was chosen; None where it stayed as it was proposed: `decided`, of ops by their numbers.
        ops: of the program as it was about to be partitioned; none where it is not at hand.
        mesh_name: the program's mesh.
    """
    if plan is None:
        proposed = _OpChoices(LayoutPlan(decided or {}, {}, {}), mesh_name)
        return RecordedLayoutPlan(ops=tuple([proposed.of(number, op) for number, op in enumerate(ops)]))
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
