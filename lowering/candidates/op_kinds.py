"""Kinds of ops: an op without the shardings around it. Equal ops are planned once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.analysis.factors import factor_axes
from sdy_jax.lowering.analysis.fusion import Touched
from sdy_jax.lowering.candidates.candidate_prices import operations_in_shards, touched_bytes
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.strategies.registry import Strategy, strategies_of
from sdy_jax.op_rules import RuleBook
from sdy_jax.op_rules.registry import depends_on_signature_only
from sdy_jax.representation.mesh import Mesh, axes_size
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import TensorSharding


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """An op without its shardings: ops of one kind have equal decisions under equal shardings.

    `tensors`: shape and bytes per element of operands, then results. `multiplies`: whether the op is a product or a
    convolution, or as dear, so that its work may not be repeated. `touched`: what ops of the kind read from memory and
    write to it, where that has a price. Compared by identity, so that keys are cheap.
    """

    rule: OpShardingRule
    strategies: tuple[Strategy, ...]
    tensors: tuple[tuple[tuple[int, ...], float], ...]
    multiplies: bool
    touched: tuple[Touched, ...] = ()


def operations_done(kind: Kind, shardings: Sequence[TensorSharding], mesh: Mesh) -> float:
    """The operations that one device performs where an op of the kind has its tensors in these shardings."""
    rule = kind.rule
    shards = [1] * len(rule.factor_sizes)
    for sharding, mapping in zip(shardings, rule.mappings, strict=True):
        for factor, axes in factor_axes(sharding.axes, mapping, rule.factor_sizes, mesh).items():
            shards[factor] = max(shards[factor], axes_size(axes, mesh))
    split = {factor for factor, count in enumerate(shards) if count > 1}
    own = [strategy for strategy in kind.strategies if strategy.rule is None]
    able = [strategy for strategy in own if split <= strategy.splittable] or own
    return min(operations_in_shards(strategy, rule, tuple(shards)) for strategy in able)


def work_time(
    kind: Kind, operations: float, shardings: Sequence[TensorSharding], costs: CostModel, mesh: Mesh
) -> float:
    """The time of one device's own work, which are so many operations, where an op has its tensors in these
    shardings."""
    if not kind.touched:
        return costs.flop * operations
    tensors = zip(kind.tensors, shardings, strict=True)
    blocks = [itemsize * math.prod(sharding.local_shape(shape, mesh)) for (shape, itemsize), sharding in tensors]
    return costs.work_time(operations, touched_bytes(kind.touched, blocks))


def launch_time(kind: Kind, costs: CostModel) -> float:
    """What an op of a kind takes beside its work, if it writes results to memory. Numbers of their own are none."""
    written = any(index >= len(kind.rule.operand_mappings) for index, _ in kind.touched)
    if not written or not any(shape for shape, _ in kind.tensors):
        return 0.0
    return costs.product_launch if kind.multiplies else costs.launch


def own_time(kind: Kind, shardings: Sequence[TensorSharding], costs: CostModel, mesh: Mesh) -> float:
    """The time of one execution of an op that has its tensors in these shardings, but for what it sends."""
    own = work_time(kind, operations_done(kind, shardings, mesh), shardings, costs, mesh)
    return own + launch_time(kind, costs)


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
        key = (signature, op.attribute("sdy.sharding_rule"), rule, touched)
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
    """Whether an op contracts a dimension that its operands share, or computes with each element of its largest tensor
    more than once."""
    if any(sum(any(f in dim for dim in m) for m in rule.operand_mappings) > 1 for f in rule.reduction):
        return True
    if any(strategy.operations is not None or strategy.rule is not None for strategy in strategies):
        return False
    whole = (1,) * len(rule.factor_sizes)
    least = min([operations_in_shards(strategy, rule, whole) for strategy in strategies], default=0.0)
    return least > max([math.prod(shape) for shape, _ in tensors], default=0)


def _without_halos(strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """The strategies, where a dimension is whole if the emitter would take elements of other shards of it."""
    return tuple(map(_without_halo, strategies))


def _without_halo(strategy: Strategy) -> Strategy:
    halos = [inside for inside in strategy.inside if inside.kind == "collective_permute"]
    whole = frozenset[int]().union(*(halo.factors for halo in halos))
    kept = tuple(inside for inside in strategy.inside if inside not in halos)
    return replace(strategy, splittable=strategy.splittable - whole, inside=kept)
