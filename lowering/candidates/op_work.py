"""The work of an op on one device: operations, and what it reads from memory and writes to it.

An operation is a step of the loops over a rule's factors, or what a strategy says: it is not a floating-point operation
as `op_rules/flops.py` counts them for people, of which a product has two and a sort several. What is read and written
are operands and results that are not fused with other ops, each once, but for strategies that say it: a kernel reads
some blocks several times, and nothing of others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from sdy_jax.lowering.analysis.factors import split_factors
from sdy_jax.lowering.analysis.fusion import Touched
from sdy_jax.lowering.candidates.op_problem import Kind
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.strategies.registry import Shards, Strategy
from sdy_jax.representation.mesh import Mesh, axes_size
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import TensorSharding


class DeviceWork(NamedTuple):
    """What one device performs: operations, and the bytes of its memory that it reads and writes, where a strategy says
    them."""

    operations: float
    traffic: float | None = None


def work_in_shards(strategy: Strategy, rule: OpShardingRule, shards: Shards) -> DeviceWork:
    """What one device performs where each factor of a rule is in as many shards."""
    traffic = None if strategy.traffic is None else strategy.traffic(shards)
    return DeviceWork(_operations(strategy, rule, shards), traffic)


def _operations(strategy: Strategy, rule: OpShardingRule, shards: Shards) -> float:
    if strategy.operations is not None:
        return strategy.operations(shards)
    shared = range(len(shards)) if strategy.work is None else strategy.work
    return math.prod([-(-rule.factor_sizes[f] // shards[f]) for f in shared])


def work_done(kind: Kind, shardings: Sequence[TensorSharding], mesh: Mesh) -> DeviceWork:
    """What one device performs where an op of the kind has its tensors in these shardings."""
    rule, split = kind.rule, split_factors(kind.rule, shardings, mesh)
    shards = tuple([axes_size(split.get(factor, ()), mesh) for factor in range(len(rule.factor_sizes))])
    own = [strategy for strategy in kind.strategies if strategy.rule is None]
    able = [strategy for strategy in own if split.keys() <= strategy.splittable] or own
    return min([work_in_shards(strategy, rule, shards) for strategy in able], key=attrgetter("operations"))


def work_time(
    kind: Kind, work: DeviceWork, elements: Iterable[int], costs: CostModel, written: Sequence[int] = ()
) -> float:
    """The time of one device's own work, on blocks of so many elements of operands and results. `written`: the results
    that are written to memory though nothing is said of them."""
    operations, traffic = work
    touched, launch = _as_written(kind.touched, written, costs)
    if traffic is not None:
        return costs.work_time(operations, traffic) + launch
    if not touched:
        return costs.flop * operations
    blocks = [itemsize * count for (_, itemsize), count in zip(kind.tensors, elements, strict=True)]
    return costs.work_time(operations, sum([min(blocks[i], blocks[most]) for i, most in touched])) + launch


def _as_written(
    touched: tuple[Touched, ...], results: Sequence[int], costs: CostModel
) -> tuple[tuple[Touched, ...], float]:
    """What an op reads and writes where it writes these results, as partial sums that are reduced next, and what it
    takes beside if it were fused with their readers else."""
    added = tuple([(i, i) for i in results if (i, i) not in touched])
    return (*touched, *added), costs.launch if added else 0.0


def work_time_in(
    kind: Kind, work: DeviceWork, shardings: Sequence[TensorSharding], costs: CostModel, mesh: Mesh
) -> float:
    """Likewise, of an op that has its tensors in these shardings."""
    tensors = zip(kind.tensors, shardings, strict=True)
    return work_time(kind, work, (math.prod(s.local_shape(shape, mesh)) for (shape, _), s in tensors), costs)


def launch_time(kind: Kind, costs: CostModel) -> float:
    """What an op of a kind takes beside its work, if it writes results to memory. Numbers of their own are none."""
    written = any(index >= len(kind.rule.operand_mappings) for index, _ in kind.touched)
    if not written or not any(shape for shape, _ in kind.tensors):
        return 0.0
    return costs.product_launch if kind.multiplies else costs.launch


def own_time(kind: Kind, shardings: Sequence[TensorSharding], costs: CostModel, mesh: Mesh) -> float:
    """The time of one execution of an op that has its tensors in these shardings, but for what it sends."""
    return work_time_in(kind, work_done(kind, shardings, mesh), shardings, costs, mesh) + launch_time(kind, costs)
