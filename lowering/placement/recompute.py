"""Rematerialization: a value is computed again in another sharding, where that is cheaper than a reshard.

The producer of a broadcast, widened, transposed or constant value runs again in the target sharding, on its operands
in matching shardings. So a weight is gathered before it is converted to a wider type, a row before it is broadcast,
and an iota never.
Source: spec of the partitioner, section 2.9.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sdy_jax.ir.graph import Op, Value
from sdy_jax.lowering.planning.factors import Assignment, are_apart, dimension_axes, factor_axes, is_contiguous
from sdy_jax.lowering.reshard.cost import CostModel
from sdy_jax.lowering.strategies.registry import REMATERIALIZABLE, strategies_of
from sdy_jax.representation.mesh import Mesh, axes_size
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.rules.predicates import is_elementwise

# The longest chain of ops that is rematerialized: a mask made of two iotas is four ops deep.
_DEPTH = 6


@dataclass(frozen=True, slots=True)
class Known:
    """Facts for the search: the value that another is an alias of, the sharding in which users expect a value, an op's
    rule, the cost of a value in a sharding, the mesh, and the cost model."""

    origin: Callable[[Value], Value]
    placed: Callable[[Value], TensorSharding]
    rule_of: Callable[[Op], OpShardingRule | None]
    cost: Callable[[Value, TensorSharding], float]
    mesh: Mesh
    costs: CostModel


@dataclass(frozen=True, slots=True)
class Recomputation:
    """A plan to run `op` again, with its operands in these shardings."""

    op: Op
    operands: tuple[TensorSharding, ...]


def is_made_of_nothing(value: Value, depth: int = _DEPTH) -> bool:
    """Whether a value depends on no input, so that a device can compute any part of it: constants, iotas, masks."""
    op = value.defining_op
    if not depth or op is None or op.blocks or len(op.results) != 1 or not _can_run_again(op):
        return False
    return all(is_made_of_nothing(operand, depth - 1) for operand in op.operands)


def recomputation(value: Value, target: TensorSharding, known: Known) -> Recomputation | None:
    """How to rematerialize `value` in the `target` sharding; None where a reshard costs no more."""
    return _cheapest(value, target, known, _DEPTH)[1]


def _cheapest(value: Value, target: TensorSharding, known: Known, depth: int) -> tuple[float, Recomputation | None]:
    """The least cost of a value in a sharding, and the rematerialization with that cost; None: a reshard."""
    value = known.origin(value)
    source = known.placed(value)
    moved = known.cost(value, target)
    if not moved or not depth or source.unreduced_axes or target.unreduced_axes:
        return moved, None
    made = _made_anew(value, target, known, depth, moved)
    return made if made is not None else (moved, None)


def _made_anew(
    value: Value, target: TensorSharding, known: Known, depth: int, limit: float
) -> tuple[float, Recomputation] | None:
    """The cost and plan of running the value's producer again, if that costs less than `limit`."""
    op = value.defining_op
    if op is None or op.blocks or len(op.results) != 1:
        return None
    needed = _operand_shardings(op, target, known)
    if needed is None:
        return None
    cost = known.costs.flop * math.prod(target.local_shape(value.shape or (), known.mesh))
    for operand, sharding in zip(op.operands, needed, strict=True):
        if cost >= limit:
            return None
        cost += _cheapest(operand, sharding, known, depth - 1)[0]
    return (cost, Recomputation(op, needed)) if cost < limit else None


def _operand_shardings(op: Op, target: TensorSharding, known: Known) -> tuple[TensorSharding, ...] | None:
    """The shardings of operands with which the op produces its result in `target`; None where there are none."""
    if op.name in REMATERIALIZABLE and not op.operands:
        return ()
    if not _can_run_again(op):
        return None
    rule = known.rule_of(op)
    if rule is None or rule.reduction or rule.need_replication or rule.permutation:
        return None
    factors = factor_axes(target.axes, rule.result_mappings[0], rule.factor_sizes, known.mesh)
    assignment = tuple(factors.get(f, ()) for f in range(len(rule.factor_sizes)))
    if not _gives(assignment, rule, target, known.mesh) or not _runs(op, rule, assignment):
        return None
    return tuple(
        TensorSharding.closed(target.mesh, dimension_axes(assignment, m, known.mesh)) for m in rule.operand_mappings
    )


def _can_run_again(op: Op) -> bool:
    return op.name in REMATERIALIZABLE or (is_elementwise(op) and op.name.startswith(("stablehlo", "chlo")))


def _gives(assignment: Assignment, rule: OpShardingRule, target: TensorSharding, mesh: Mesh) -> bool:
    """Whether the assignment gives the target's axes, in shards that divide every factor, with no axis used twice."""
    used = [a for axes in assignment for a in axes]
    return (
        dimension_axes(assignment, rule.result_mappings[0], mesh) == target.axes
        and all(n % axes_size(axes, mesh) == 0 for n, axes in zip(rule.factor_sizes, assignment, strict=True))
        and is_contiguous(assignment, rule, mesh)
        and are_apart(used)
    )


def _runs(op: Op, rule: OpShardingRule, assignment: Assignment) -> bool:
    split = {f for f, axes in enumerate(assignment) if axes}
    return any(split <= strategy.splittable and not strategy.inside for strategy in strategies_of(op, rule))
