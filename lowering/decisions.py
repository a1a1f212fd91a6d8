"""How ops run: decided once for all ops that are alike and have the same shardings around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from sdy_jax.graph import Op, Value
from sdy_jax.lowering.choose import Choice, Problem, Tensor, choose
from sdy_jax.lowering.cost import CostModel
from sdy_jax.lowering.placement import Placement, has_one_user
from sdy_jax.lowering.strategies.linearity import carries
from sdy_jax.lowering.strategies.registry import Strategy, strategies_of
from sdy_jax.lowering.trips import times_as_often
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.rules import RuleBook
from sdy_jax.rules.registry import depends_on_signature_only

_NONE: frozenset[int] = frozenset()
_UNREDUCED = attrgetter("unreduced_axes")


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """What the problems of ops have in common that differ in shardings only. Each is its own key."""

    rule: OpShardingRule
    strategies: tuple[Strategy, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """An op's rule, how it runs, and the shardings of that on the meshes of the program.

    `at_rest`: everything lies as it is needed and declared, and there is nothing to tell.
    """

    rule: OpShardingRule
    choice: Choice
    operands: tuple[TensorSharding, ...]
    results: tuple[TensorSharding, ...]
    at_rest: bool


class Decisions:
    """The decisions for the ops of one program."""

    def __init__(self, placement: Placement, rules: RuleBook, costs: CostModel):
        self._placement, self._meshes = placement, placement.meshes
        self._rules, self._costs = rules, costs
        self._kinds: dict[object, _Kind | None] = {}
        self._alike: dict[object, _Kind] = {}
        self._made: dict[object, Decision] = {}

    def of(self, op: Op) -> Decision | None:
        """None where the op has no rule. Its operands must have been placed."""
        kind = self._kind_of(op)
        if kind is None:
            return None
        placed = [self._placement[value] for value in op.operands]
        declared = [self._placement.declared(value) for value in op.results]
        carried = self._carried(op, placed, declared) if any(map(_UNREDUCED, placed)) else _NONE
        often = self._often(op)
        key = (kind, carried, often, *placed, *declared)
        if key not in self._made:
            self._made[key] = self._decided(op, kind, placed, declared, carried, often)
        return self._made[key]

    def _kind_of(self, op: Op) -> _Kind | None:
        rule = None
        if not depends_on_signature_only(op.name):
            rule = self._rules.rule_of(op)
            if rule is None:
                return None
        signature = op.signature
        key = (signature, op.attribute("sdy.sharding_rule"), rule)
        if key not in self._kinds:
            rule = rule or self._rules.rule_of(op, signature)
            self._kinds[key] = self._new_kind(op, rule) if rule else None
        return self._kinds[key]

    def _new_kind(self, op: Op, rule: OpShardingRule) -> _Kind:
        """Additions and subtractions of one shape are of one kind, too."""
        kind = _Kind(rule, strategies_of(op, rule))
        tensors = tuple([(v.shape, v.itemsize) for v in (*op.operands, *op.results)])
        return self._alike.setdefault((kind.rule, kind.strategies, tensors), kind)

    def _decided(
        self,
        op: Op,
        kind: _Kind,
        placed: Sequence[TensorSharding],
        declared: Sequence[TensorSharding],
        carried: frozenset[int],
        often: tuple[int, ...],
    ) -> Decision:
        mesh = self._mesh_of(op, placed, declared)
        operands, results = _tensors(op.operands, placed, mesh), _tensors(op.results, declared, mesh)
        if often:
            operands = tuple([t._replace(share=1 / times) for t, times in zip(operands, often, strict=True)])
        problem = Problem(kind.rule, kind.strategies, operands, results, mesh, self._meshes.base, self._costs, carried)
        choice = choose(problem)
        wanted, made = (tuple([self._meshes.settled(s, s.rank) for s in c]) for c in (choice.operands, choice.results))
        alike = all(a is b or a.lies_like(b) for a, b in zip((*placed, *declared), (*wanted, *made), strict=True))
        return Decision(kind.rule, choice, wanted, made, alike and not choice.gathered and not choice.inside)

    def _often(self, op: Op) -> tuple[int, ...]:
        """How often the op runs for each time that an operand is made; nothing where that is once for all of them.

        What comes into a loop is resharded before the loop.
        """
        if op.parent is None or op.parent.parent is None:
            return ()
        often = tuple([times_as_often(op, value) for value in op.operands])
        return often if max(often, default=1) > 1 else ()

    def _mesh_of(self, op: Op, placed: Sequence[TensorSharding], declared: Sequence[TensorSharding]) -> str:
        return self._meshes.name_of_op((*placed, *declared), (*op.operands, *op.results))

    def _carried(self, op: Op, placed: Sequence[TensorSharding], declared: Sequence[TensorSharding]) -> frozenset[int]:
        """The operands to keep partial, so that the results are, where the op lets partial results pass."""
        partial = {i: sharding for i, sharding in enumerate(placed) if sharding.unreduced_axes}
        if len({(s.reduction, s.mesh) for s in partial.values()}) != 1:
            return _NONE
        kind, mesh = next((s.reduction, s.mesh) for s in partial.values())
        if mesh != self._mesh_of(op, placed, declared):
            return _NONE
        wanted = carries(op, kind, frozenset(partial)) or _NONE
        # Making other operands partial pays only where the result can meet another partial value.
        return wanted if wanted == set(partial) or _can_pass_on(op, kind) else _NONE


def _can_pass_on(op: Op, kind: str) -> bool:
    if not has_one_user(op, op.results[0]):
        return False
    user, number = op.results[0].uses[0]
    return carries(user, kind, frozenset([number])) is not None


def _tensors(values: Sequence[Value], shardings: Sequence[TensorSharding], mesh: str) -> tuple[Tensor, ...]:
    return tuple(
        [
            Tensor(v.shape or (), v.itemsize, s if s.mesh == mesh else replace(s, mesh=mesh))
            for v, s in zip(values, shardings, strict=True)
        ]
    )
