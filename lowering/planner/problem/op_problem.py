"""The decision about one op as data: its kind, the problem with the shardings around it, and its work on a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from sdy_jax.ir.graph import Op
from sdy_jax.ir.meshes import Axes, Mesh, axes_size, sort_and_merge
from sdy_jax.ir.shardings import OpShardingRule, TensorSharding
from sdy_jax.lowering.ops.registry import Shards, Strategy, strategies_of
from sdy_jax.lowering.planner.facts.factors import Assignment, Cuts, are_apart, split_factors
from sdy_jax.lowering.planner.facts.fusion import Touched
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.shardy.rules import RuleBook
from sdy_jax.shardy.rules.op_attributes import operations_of
from sdy_jax.shardy.rules.registry import depends_on_signature_only

# The decision about one op as data: its kind, the problem (with the shardings around it), candidates, how it runs.


@dataclass(frozen=True, slots=True, eq=False)
class OpKind:
    """An op without its shardings: ops of one kind have equal decisions under equal shardings.

    `tensors`: shape and bytes per element of operands, then results. `multiplies`: whether the op is a product, a
    convolution or a kernel, or as dear, so that its work may not be repeated. `touched`: what ops of the kind read from
    memory and write to it, where that has a price. `pace`: how long an operation takes beside one of a product of
    bfloat16. Compared by identity, so that keys are cheap.
    """

    rule: OpShardingRule
    strategies: tuple[Strategy, ...]
    tensors: tuple[tuple[tuple[int, ...], float], ...]
    multiplies: bool
    touched: tuple[Touched, ...] = ()
    pace: float = 1.0


class Tensor(NamedTuple):
    """An operand or result: its shape, bytes per element and sharding.

    `share`: reshards per execution of the op. Below 1 for a value that enters a loop, as it is resharded once before
    the loop; 0 for a value that every device can compute without communication.
    `materialized`: the shardings in which an operand is materialized, if they are not just `sharding`.
    """

    shape: tuple[int, ...]
    itemsize: float
    sharding: TensorSharding
    share: float = 1.0
    materialized: tuple[TensorSharding, ...] = ()


@dataclass(frozen=True, slots=True)
class InsideCollective:
    """A collective that the op performs itself on one block of a tensor (of operands, then results).

    `is_exact`: `wire_bytes` is what a device sends, not only what the kind of collective would.
    """

    kind: str
    axes: Axes
    tensor: int
    wire_bytes: float
    time: float
    is_exact: bool = False


class StrategyAssignment(NamedTuple):
    """A strategy with axes for each factor; along the axes `partial`, carried operands stay unreduced.

    What is priced of it is a `BoundedCandidate` where an op is decided alone, and a `Candidate` of the model, which has
    the layouts that follow and knows no problem, where the whole program is.
    """

    strategy: Strategy
    assignment: Assignment
    partial: Axes = ()


Shardings = tuple[TensorSharding, ...]
"""The shardings of an op's operands, then of its results."""


class Decision(NamedTuple):
    """How an op runs, decided alone or planned: its kind, the shardings required of operands, then those produced for
    results.

    `gathered`: factors along which operands are sharded and the op cannot run sharded, so that their axes are gathered.
    `inside`: the collectives that the op performs itself. `strategy`: that of a choice for the whole program, if it is
    not the one that was chosen for the op alone. `at_rest`: operands and results are in these shardings already, and
    there is nothing to report.
    """

    kind: OpKind
    shardings: Shardings
    gathered: tuple[int, ...] = ()
    inside: tuple[InsideCollective, ...] = ()
    strategy: Strategy | None = None
    at_rest: bool = False

    @property
    def rule(self) -> OpShardingRule:
        return self.kind.rule


class OpProblem(NamedTuple):
    """An op of a kind with the shardings around it, all on one mesh. `tensors`: operands, then results with their
    declared shardings.

    `carried`: the indices of the operands that must be unreduced for the results to be unreduced; empty where unreduced
    operands must be reduced before the op. `cuts`: where axes may be cut.
    """

    kind: OpKind
    tensors: tuple[Tensor, ...]
    mesh: Mesh
    costs: CostModel
    carried: frozenset[int] = frozenset()
    cuts: Cuts | None = None

    @property
    def rule(self) -> OpShardingRule:
        return self.kind.rule

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        return self.kind.strategies

    @property
    def mesh_name(self) -> str | Mesh:
        return self.tensors[0].sharding.mesh

    @property
    def shares_work(self) -> bool:
        """Whether no work is repeated that some candidate shares out."""
        return self.kind.multiplies and not self.costs.repeat_work

    def by_rule(self, rule: OpShardingRule, strategies: tuple[Strategy, ...]) -> OpProblem:
        """The problem by another rule of the op, of which these strategies speak."""
        return self._replace(kind=replace(self.kind, rule=rule, strategies=strategies))

    @property
    def partial_axes(self) -> Axes:
        """The axes along which carried operands are unreduced, in mesh order; none if some of these axes overlap."""
        if not self.carried:
            return ()
        found = list(dict.fromkeys(a for i in self.carried for a in self.tensors[i].sharding.unreduced_axes))
        return sort_and_merge(found, self.mesh) if are_apart(found) else ()

    @property
    def partial_kind(self) -> str:
        shardings = [self.tensors[i].sharding for i in self.carried]
        return next(sharding.reduction for sharding in shardings if sharding.unreduced_axes)


# The work of an op on one device: operations, and what it reads from memory and writes to it.
#
# An operation is a step of the loops over a rule's factors, or what a strategy says: it is not a floating-point
# operation as `shardy/rules/op_attributes.py` counts them for people, of which a product has two and a sort several.
# What is read and written are operands and results that are not fused with other ops, each once, but for strategies
# that say it: a kernel reads some blocks several times, and nothing of others.


class DeviceWork(NamedTuple):
    """What one device performs: operations, and the bytes of its memory that it reads and writes, and how many batches
    a convolution has there, where a strategy says them."""

    operations: float
    traffic: float | None = None
    batches: int | None = None


def work_in_shards(strategy: Strategy, rule: OpShardingRule, shards: Shards) -> DeviceWork:
    """What one device performs where each factor of a rule is in as many shards."""
    traffic = None if strategy.traffic is None else strategy.traffic(shards)
    batches = None if strategy.batch is None else _local_size(strategy.batch, rule, shards)
    return DeviceWork(_operations(strategy, rule, shards), traffic, batches)


def _operations(strategy: Strategy, rule: OpShardingRule, shards: Shards) -> float:
    if strategy.operations is not None:
        return strategy.operations(shards)
    shared = range(len(shards)) if strategy.work is None else strategy.work
    return _local_size(shared, rule, shards)


def _local_size(factors: Iterable[int], rule: OpShardingRule, shards: Shards) -> int:
    """That of a block of these factors on one device."""
    return math.prod([-(-rule.factor_sizes[f] // shards[f]) for f in factors])


def work_done(kind: OpKind, shardings: Sequence[TensorSharding], mesh: Mesh) -> DeviceWork:
    """What one device performs where an op of the kind has its tensors in these shardings."""
    rule, split = kind.rule, split_factors(kind.rule, shardings, mesh)
    shards = tuple([axes_size(split.get(factor, ()), mesh) for factor in range(len(rule.factor_sizes))])
    own = [strategy for strategy in kind.strategies if strategy.rule is None]
    able = [strategy for strategy in own if split.keys() <= strategy.splittable] or own
    return min([work_in_shards(strategy, rule, shards) for strategy in able], key=attrgetter("operations"))


def flops_per_operation(op: Op, kind: OpKind) -> float:
    """The floating-point operations, as people count them, in one operation of an op of a kind: two of a product, none
    of what only moves data."""
    whole = (1,) * len(kind.rule.factor_sizes)
    own = [strategy for strategy in kind.strategies if strategy.rule is None]
    operations = min([work_in_shards(strategy, kind.rule, whole).operations for strategy in own], default=0.0)
    return operations_of(op) / operations if operations else 0.0


def work_time(
    kind: OpKind, work: DeviceWork, elements: Iterable[int], costs: CostModel, written: Sequence[int] = ()
) -> float:
    """The time of one device's own work, on blocks of so many elements of operands and results. `written`: the results
    that are written to memory though nothing is said of them."""
    operations, traffic = work.operations * kind.pace * costs.pace_of_batches(work.batches), work.traffic
    touched, launch = _as_written(kind.touched, written, costs)
    if traffic is not None:
        return costs.work_time(operations, traffic) + launch
    if not touched:
        return costs.flop * operations
    return costs.work_time(operations, _traffic(kind, touched, elements)) + launch


def _traffic(kind: OpKind, touched: Iterable[Touched], elements: Iterable[int]) -> float:
    """The bytes that an op reads and writes, of blocks of so many elements."""
    blocks = [itemsize * count for (_, itemsize), count in zip(kind.tensors, elements, strict=True)]
    return sum([min(blocks[i], blocks[most]) for i, most in touched])


def _as_written(
    touched: tuple[Touched, ...], results: Sequence[int], costs: CostModel
) -> tuple[tuple[Touched, ...], float]:
    """What an op reads and writes where it writes these results, as partial sums that are reduced next, and what it
    takes beside if it were fused with their readers else."""
    added = tuple([(i, i) for i in results if (i, i) not in touched])
    return (*touched, *added), costs.launch if added else 0.0


def work_time_in(
    kind: OpKind, work: DeviceWork, shardings: Sequence[TensorSharding], costs: CostModel, mesh: Mesh
) -> float:
    """Likewise, of an op that has its tensors in these shardings."""
    return work_time(kind, work, _elements(kind, shardings, mesh), costs)


def _elements(kind: OpKind, shardings: Sequence[TensorSharding], mesh: Mesh) -> Iterator[int]:
    """Those of the blocks of an op that has its tensors in these shardings."""
    tensors = zip(kind.tensors, shardings, strict=True)
    return (math.prod(s.local_shape(shape, mesh)) for (shape, _), s in tensors)


def launch_time(kind: OpKind, costs: CostModel) -> float:
    """What an op of a kind takes beside its work, if it writes results to memory. Numbers of their own are none."""
    written = any(index >= len(kind.rule.operand_mappings) for index, _ in kind.touched)
    if not written or not any(shape for shape, _ in kind.tensors):
        return 0.0
    return costs.product_launch if kind.multiplies else costs.launch


def own_time(kind: OpKind, shardings: Sequence[TensorSharding], costs: CostModel, mesh: Mesh) -> float:
    """The time of one execution of an op that has its tensors in these shardings, but for what it sends."""
    return work_time_in(kind, work_done(kind, shardings, mesh), shardings, costs, mesh) + launch_time(kind, costs)


def own_traffic(kind: OpKind, shardings: Sequence[TensorSharding], mesh: Mesh) -> float:
    """The bytes that one execution of such an op reads from a device's memory and writes to it; 0 where these have no
    price."""
    traffic = work_done(kind, shardings, mesh).traffic
    return _traffic(kind, kind.touched, _elements(kind, shardings, mesh)) if traffic is None else traffic


# Kinds of ops: an op without the shardings around it. Equal ops are planned once.


class Kinds:
    """The kinds of a program's ops; without `halo_exchange`, dimensions are whole along which ops would need elements
    of other shards. `touches`: what an op reads from memory and writes to it; None where that has no price. `pace`: how
    long an operation of it takes beside one of bfloat16."""

    def __init__(
        self,
        rules: RuleBook,
        halo_exchange: bool = True,
        touches: Callable[[Op], tuple[Touched, ...]] | None = None,
        pace: Callable[[Op], float] = lambda op: 1.0,
    ):
        self._rules, self._halo_exchange, self._touches, self._pace = rules, halo_exchange, touches, pace
        self._by_op: dict[object, OpKind | None] = {}
        self._shared: dict[object, OpKind] = {}

    def of(self, op: Op) -> OpKind | None:
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

    def _new_kind(self, op: Op, rule: OpShardingRule, touched: tuple[Touched, ...]) -> OpKind:
        """The kind of an op with this rule.

        Different ops share one if rule, strategies and tensors are equal: an addition and a subtraction, say.
        """
        op.keep_attributes()  # its strategies outlive it, where another one computes the same
        tensors = tuple([(v.shape or (), v.itemsize) for v in (*op.operands, *op.results)])
        strategies = strategies_of(op, rule)
        strategies = strategies if self._halo_exchange else _without_halos(strategies)
        kind = OpKind(rule, strategies, tensors, _multiplies(rule, strategies, tensors), touched, self._pace(op))
        return self._shared.setdefault((kind.rule, kind.strategies, tensors, touched, kind.pace), kind)


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
