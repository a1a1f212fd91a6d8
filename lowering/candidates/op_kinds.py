"""Kinds of ops: an op without the shardings around it. Equal ops are planned once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.analysis.fusion import Touched
from sdy_jax.lowering.candidates.op_problem import Kind
from sdy_jax.lowering.candidates.op_work import work_in_shards
from sdy_jax.lowering.strategies.registry import Strategy, strategies_of
from sdy_jax.op_rules import RuleBook
from sdy_jax.op_rules.registry import depends_on_signature_only
from sdy_jax.representation.rule import OpShardingRule


class Kinds:
    """The kinds of a program's ops; without `halo_exchange`, dimensions are whole along which ops would need elements
    of other shards. `touches`: what an op reads from memory and writes to it; None where that has no price."""

    def __init__(
        self, rules: RuleBook, halo_exchange: bool = True, touches: Callable[[Op], tuple[Touched, ...]] | None = None
    ):
        self._rules, self._halo_exchange, self._touches = rules, halo_exchange, touches
        self._by_op: dict[object, Kind | None] = {}
        self._shared: dict[object, Kind] = {}

    def of(self, op: Op) -> Kind | None:
        """The kind of an op; None where it has no rule."""
        rule = None
        if not depends_on_signature_only(op.name):
            rule = self._rules.rule_of(op)
            if rule is None:
                return None
        signature = op.signature
        touched = self._touches(op) if self._touches is not None else ()
        unread = tuple([i for i, value in enumerate(op.results) if not value.uses])
        key = (signature, op.attribute("sdy.sharding_rule"), rule, touched, unread)
        kind = self._by_op.get(key)
        if kind is None:
            rule = rule or self._rules.rule_of(op, signature)
            kind = self._by_op[key] = self._new_kind(op, rule, touched) if rule else None
        return kind

    def _new_kind(self, op: Op, rule: OpShardingRule, touched: tuple[Touched, ...]) -> Kind:
        """The kind of an op with this rule.

        Different ops share one if rule, strategies and tensors are equal: an addition and a subtraction, say.
        """
        op.keep_attributes()  # its strategies outlive it, where another one computes the same
        tensors = tuple([(v.shape or (), v.itemsize) for v in (*op.operands, *op.results)])
        strategies = strategies_of(op, rule)
        strategies = strategies if self._halo_exchange else _without_halos(strategies)
        kind = Kind(rule, strategies, tensors, _multiplies(rule, strategies, tensors), touched)
        return self._shared.setdefault((kind.rule, kind.strategies, tensors, touched), kind)


def _multiplies(
    rule: OpShardingRule, strategies: Sequence[Strategy], tensors: Sequence[tuple[tuple[int, ...], float]]
) -> bool:
    """Whether an op contracts a dimension that its operands share, states its work as kernels do, or computes with each
    element of its largest tensor more than once."""
    if any(sum(any(f in dim for dim in m) for m in rule.operand_mappings) > 1 for f in rule.reduction):
        return True
    if any(strategy.traffic is not None for strategy in strategies):
        return True
    if any(strategy.operations is not None or strategy.rule is not None for strategy in strategies):
        return False
    whole = (1,) * len(rule.factor_sizes)
    least = min([work_in_shards(strategy, rule, whole).operations for strategy in strategies], default=0.0)
    return least > max([math.prod(shape) for shape, _ in tensors], default=0)


def _without_halos(strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """The strategies, where a dimension is whole if the emitter would take elements of other shards of it."""
    return tuple(map(_without_halo, strategies))


def _without_halo(strategy: Strategy) -> Strategy:
    halos = [inside for inside in strategy.inside if inside.kind == "collective_permute"]
    whole = frozenset[int]().union(*(halo.factors for halo in halos))
    kept = tuple(inside for inside in strategy.inside if inside not in halos)
    return replace(strategy, splittable=strategy.splittable - whole, inside=kept)
