"""Decisions how ops run, remembered: equal ops with equal shardings around them share one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from sdy_jax.ir.graph import Op, Value
from sdy_jax.lowering.analysis.fusion import Touched, Touches
from sdy_jax.lowering.analysis.trip_counts import times_as_often
from sdy_jax.lowering.candidates.choice import choose, gathered_factors, sharded_factors
from sdy_jax.lowering.candidates.op_kinds import Kinds
from sdy_jax.lowering.candidates.op_problem import Decision, Kind, OpProblem, Shardings, Tensor
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.insert.placement import Placement, has_one_user
from sdy_jax.lowering.interface.setting import Setting
from sdy_jax.lowering.strategies.linearity import carries
from sdy_jax.lowering.targets.target import Target
from sdy_jax.representation.sharding import TensorSharding

_NONE: frozenset[int] = frozenset()

_CONVERT = "stablehlo.convert"
"""Partial sums are reduced before it, in the narrower type, unless a plan for the whole program says otherwise."""

_UNREDUCED = attrgetter("unreduced_axes")


class _Around(NamedTuple):
    """What is around an op: shardings of operands, then those declared for results; the operands that stay unreduced
    together; per operand, the op's executions for each time that it is computed (none where all are 1), and the layouts
    in which it is materialized; the operands that take no reshard of their own."""

    shardings: Shardings
    carried: frozenset[int]
    executions: tuple[int, ...]
    materialized: tuple[Shardings, ...]
    free: frozenset[int]


class Decisions:
    """The decisions for the ops of one program."""

    def __init__(self, placement: Placement, setting: Setting):
        self._placement, self._meshes = placement, placement.meshes
        self._costs, self._kinds, self._memo = setting.costs, kinds_of(setting), setting.memo
        self._made: dict[object, Decision] = {}

    def of(self, op: Op, planned: Decision | None = None) -> Decision | None:
        """The decision for an op whose operands have been placed, as planned where it is; None where it has no rule."""
        placed = self._placement.of(op.operands)
        around = (*placed, *map(self._placement.declared, op.results))
        if planned is not None:
            return self._as_planned(around, planned)
        kind = self._kinds.of(op)
        if kind is None:
            return None
        seen = _Around(
            around,
            self._carried(op, placed, around) if any(map(_UNREDUCED, placed)) else _NONE,
            self._executions_per_operand(op),
            self._placement.materialized_layouts_of(op.operands),
            self._placement.free_among(op.operands) | _given_before(op.operands, kind),
        )
        made = self._made.get((kind, seen))
        if made is None:
            made = self._made[kind, seen] = self._decided(op, kind, seen)
        return made

    def _as_planned(self, around: Shardings, planned: Decision) -> Decision:
        kind, gathered, strategy = planned.kind, planned.gathered, planned.strategy
        if strategy is not None and strategy.rule is None:
            sharded = self._memo.once(("sharded factors", kind, around), lambda: self._sharded_factors(kind, around))
            gathered = gathered_factors(sharded, strategy)
        return _noted(Decision(kind, planned.shardings, gathered, planned.inside), around)

    def _sharded_factors(self, kind: Kind, around: Shardings) -> tuple[int, ...]:
        tensors = [Tensor(*shaped, s) for shaped, s in zip(kind.tensors, around, strict=True)]
        return sharded_factors(OpProblem(kind, tuple(tensors), self._meshes.base, self._costs))

    def _decided(self, op: Op, kind: Kind, seen: _Around) -> Decision:
        mesh = self._mesh_of(op, seen.shardings)
        tensors = [Tensor(*shaped, s) for shaped, s in zip(kind.tensors, _on_mesh(seen.shardings, mesh), strict=True)]
        for index, times in enumerate(seen.executions):
            tensors[index] = tensors[index]._replace(share=1 / times)
        for index in seen.free:
            tensors[index] = tensors[index]._replace(share=0.0)
        for index, found in enumerate(seen.materialized):
            tensors[index] = tensors[index]._replace(materialized=_on_mesh(found, mesh))
        cuts = self._placement.cuts
        made = choose(OpProblem(kind, tuple(tensors), self._meshes.base, self._costs, seen.carried, cuts))
        if mesh != self._meshes.base_name:
            made = made._replace(shardings=tuple([self._meshes.settled(s, s.rank) for s in made.shardings]))
        return _noted(made, seen.shardings)

    def _executions_per_operand(self, op: Op) -> tuple[int, ...]:
        """Per operand, the op's executions for each time that it is computed; empty where all are 1.

        An operand from outside of a loop is resharded once, before the loop, so that costs less.
        """
        if op.block is None or op.block.parent.block is None:
            return ()
        executions = tuple([times_as_often(op, value) for value in op.operands])
        return executions if max(executions, default=1) > 1 else ()

    def _mesh_of(self, op: Op, around: Shardings) -> str:
        return self._meshes.name_of_op(around, (*op.operands, *op.results))

    def _carried(self, op: Op, placed: Sequence[TensorSharding], around: Shardings) -> frozenset[int]:
        """The indices of operands to keep unreduced, so that the results are; none if the op cannot pass them on."""
        partial = {i: sharding for i, sharding in enumerate(placed) if sharding.unreduced_axes}
        if len({(s.reduction, s.mesh) for s in partial.values()}) != 1:
            return _NONE
        kind, mesh = next((s.reduction, s.mesh) for s in partial.values())
        if mesh != self._mesh_of(op, around) or op.name == _CONVERT:
            return _NONE
        wanted = carries(op, kind, frozenset(partial)) or _NONE
        # Making other operands partial pays only where the result can meet another partial value.
        return wanted if wanted == set(partial) or _can_pass_on(op, kind) else _NONE


def kinds_of(setting: Setting) -> Kinds:
    """The kinds of ops, as they are decided about in a setting."""
    rules, touches = setting.rules.without_overrides(), _touches(setting.costs, setting.target)
    return Kinds(rules, setting.policy.halo_exchange, touches)


def _noted(made: Decision, around: Shardings) -> Decision:
    """The decision with whether it leaves all as it is around the op."""
    alike = all(a is b or a.same_layout_as(b) for a, b in zip(around, made.shardings, strict=True))
    return made._replace(at_rest=alike and not made.gathered and not made.inside)


def _touches(costs: CostModel, target: Target) -> Callable[[Op], tuple[Touched, ...]] | None:
    """What ops read from memory and write to it, where that has a price."""
    return Touches(target.compiler.fusion) if costs.memory else None


def _given_before(operands: Sequence[Value], kind: Kind) -> frozenset[int]:
    """The operands that are moved together with an earlier one: the same value, along the same factors."""
    if len(set(operands)) == len(operands):
        return _NONE
    rules = dict.fromkeys([kind.rule, *(strategy.rule for strategy in kind.strategies if strategy.rule is not None)])
    seen = set[object]()
    found = set[int]()
    for index, value in enumerate(operands):
        key = (value, *(tuple(rule.operand_mappings[index]) for rule in rules))
        if key in seen:
            found.add(index)
        seen.add(key)
    return frozenset(found)


def _on_mesh(shardings: Shardings, mesh: str) -> Shardings:
    """The shardings with the symbol of one mesh in place of their own; the axes keep their names."""
    return tuple([s if s.mesh == mesh else replace(s, mesh=mesh) for s in shardings])


def _can_pass_on(op: Op, kind: str) -> bool:
    if not op.results or not has_one_user(op, op.results[0]):
        return False
    user, index = op.results[0].uses[0]
    return user.name != _CONVERT and carries(user, kind, frozenset([index])) is not None
