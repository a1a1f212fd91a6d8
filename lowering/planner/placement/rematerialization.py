"""Rematerialization: a value is computed again in another sharding, where that is cheaper than a reshard.

The producer of a broadcast, widened, transposed or constant value runs again in the target sharding, on its operands
in matching shardings. So a weight is gathered before it is converted to a wider type, a row before it is broadcast,
and an iota never.

A slice costs nothing, but all of what it takes a part of has to be kept until then: some compilers do not compute
again what a slice takes. So where the parts of what a value is computed of are there, the part is computed of them:

    %y = all_gather %x          every device computes tanh of all of x
    %t = tanh %y
    %s = all_slice %t           the same as tanh %x

So is where one value is as large, and what else it is computed of is small: what is taken a part of is that one, which
other ops read as well, as those of a backward pass read what a normalization is computed of.

    %m = mean %y
    %n = subtract %y, %m
    %s = all_slice %n           the same as the difference of slices of %y and %m
See docs/explanation/strategies.md#placement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.rules import OpShardingRule
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.registry import REMATERIALIZABLE, strategies_of
from sdy_jax.lowering.planner.facts.factors import Assignment, are_apart, dimension_axes, factor_axes, is_contiguous
from sdy_jax.lowering.planner.facts.fusion import MAX_CHAIN, can_rematerialize
from sdy_jax.lowering.targets.cost_model import CostModel

_MAX_PARTS = 16
"""The longest chain of ops of which a part is computed again. Guessed, a guard against walking whole programs."""

_SMALL = 8
"""How much smaller than a value something is that may as well be kept whole. Guessed: with less, what a part is made of
takes as much memory as the part saves."""

_CHEAP = frozenset(("stablehlo.gather",))
"""The ops that may run again for a part beside those that may anyway: they read little more than they make."""


class KnownLayouts(Protocol):
    """What is known of a program's values meanwhile."""

    def origin(self, value: Value) -> Value:
        """The value that another is an alias of."""

    def is_free(self, value: Value) -> bool:
        """Whether a value depends on no input."""

    def cost(self, value: Value, target: TensorSharding) -> float:
        """The cost of a value in a sharding."""

    def is_there(self, value: Value, target: TensorSharding) -> bool:
        """Whether it is there in it."""


@dataclass(frozen=True, slots=True)
class RematerializationFacts:
    """Facts for the search: what is known of values, the sharding in which users expect each, an op's rule, the mesh,
    and the cost model."""

    values: KnownLayouts
    placed: Mapping[Value, TensorSharding]
    rule_of: Callable[[Op], OpShardingRule | None]
    mesh: Mesh
    costs: CostModel


@dataclass(frozen=True, slots=True)
class Rematerialization:
    """A plan to run `op` again, with its operands in these shardings."""

    op: Op
    operands: tuple[TensorSharding, ...]


def rematerialization(value: Value, target: TensorSharding, facts: RematerializationFacts) -> Rematerialization | None:
    """How to rematerialize `value` in the `target` sharding; None where a reshard costs no more."""
    return _cheapest(value, target, facts, MAX_CHAIN)[1]


def computed_of_parts(value: Value, target: TensorSharding, facts: RematerializationFacts) -> Rematerialization | None:
    """How to compute a part of a value that a slice would take of it, if what it is computed of is there in parts, or
    small, or no more than the value is kept whole instead of it; None where it is not."""
    found = _Parts(facts).of(value, target)
    return found.plan if found is not None else None


class _Part(NamedTuple):
    """How a part of a value is computed, and the large values of which slices are taken for it."""

    plan: Rematerialization
    sliced: frozenset[Value]


class _Parts:
    """The parts of values that can be computed of parts, as found so far."""

    def __init__(self, facts: RematerializationFacts):
        self._facts = facts
        self._known: dict[object, _Part | None] = {}

    def of(self, value: Value, target: TensorSharding, depth: int = _MAX_PARTS) -> _Part | None:
        value = self._facts.values.origin(value)
        key = value, target.layout
        if key not in self._known:
            self._known[key] = self._found(value, target, depth)
        return self._known[key]

    def _found(self, value: Value, target: TensorSharding, depth: int) -> _Part | None:
        needed, op, sliced = _parts_needed(value, target, self._facts), value.defining_op, frozenset[Value]()
        if op is None or not needed or not depth:
            return None
        for operand, sharding in zip(map(self._facts.values.origin, op.operands), needed, strict=True):
            found = self._sliced(operand, sharding, value.bytes, depth - 1)
            if found is None:
                return None
            sliced |= found
        if sum(value.bytes for value in sliced) > value.bytes:
            return None
        return _Part(Rematerialization(op, needed), sliced)

    def _sliced(self, operand: Value, sharding: TensorSharding, size: float, depth: int) -> frozenset[Value] | None:
        """Of what slices are taken for a part of an operand; None where that is not there without sending."""
        is_free = not self._facts.values.cost(operand, sharding)
        if self._facts.values.is_there(operand, sharding) or (is_free and _SMALL * operand.bytes <= size):
            return frozenset()
        found = self.of(operand, sharding, depth)
        if found is not None:
            return found.sliced
        return frozenset((operand,)) if is_free else None


def _parts_needed(value: Value, target: TensorSharding, facts: RematerializationFacts) -> tuple[TensorSharding, ...]:
    """The parts of its operands of which a value's op would compute what a slice takes of the value; none where it
    may not run again."""
    op = value.defining_op
    if op is None or op.blocks or len(op.results) != 1 or facts.values.cost(value, target):
        return ()
    if target.unreduced_axes or facts.placed[value].unreduced_axes:
        return ()
    return _operand_shardings(op, target, facts, _CHEAP) or ()


def _cheapest(
    value: Value, target: TensorSharding, facts: RematerializationFacts, depth: int
) -> tuple[float, Rematerialization | None]:
    """The least cost of a value in a sharding, and the rematerialization with that cost; None: a reshard."""
    value = facts.values.origin(value)
    source = facts.placed[value]
    moved = facts.values.cost(value, target)
    if not moved or not depth or source.unreduced_axes or target.unreduced_axes:
        return moved, None
    made = _by_producer(value, target, facts, depth, moved)
    return made if made is not None else (moved, None)


def _by_producer(
    value: Value, target: TensorSharding, facts: RematerializationFacts, depth: int, limit: float
) -> tuple[float, Rematerialization] | None:
    """The cost and plan of running the value's producer again, if that costs less than `limit`."""
    op = value.defining_op
    if op is None or op.blocks or len(op.results) != 1:
        return None
    needed = _operand_shardings(op, target, facts)
    if needed is None:
        return None
    items = math.prod(target.local_shape(value.shape or (), facts.mesh))
    is_read_again = depth < MAX_CHAIN or facts.values.is_free(
        value
    )  # it is a part of what reads it, as masks and iotas are
    written = 0.0 if is_read_again else value.itemsize * items
    cost = facts.costs.work_time(items, written)
    for operand, sharding in zip(op.operands, needed, strict=True):
        if cost >= limit:
            return None
        cost += _cheapest(operand, sharding, facts, depth - 1)[0]
    return (cost, Rematerialization(op, needed)) if cost < limit else None


def _operand_shardings(
    op: Op, target: TensorSharding, facts: RematerializationFacts, also: frozenset[str] = frozenset()
) -> tuple[TensorSharding, ...] | None:
    """The shardings of operands with which the op produces its result in `target`; None where there are none, or the
    op may not run again: those in `also` may."""
    if op.name in REMATERIALIZABLE and not op.operands:
        return ()
    if op.name not in also and not can_rematerialize(op):
        return None
    rule = facts.rule_of(op)
    if rule is None or (rule.reduction and op.name not in also) or rule.need_replication or rule.permutation:
        return None
    factors = factor_axes(target.axes, rule.result_mappings[0], rule.factor_sizes, facts.mesh)
    assignment = tuple(factors.get(f, ()) for f in range(len(rule.factor_sizes)))
    if not _gives(assignment, rule, target, facts.mesh) or not _runs(op, rule, assignment):
        return None
    return tuple(
        TensorSharding.closed(target.mesh, dimension_axes(assignment, m, facts.mesh)) for m in rule.operand_mappings
    )


def _gives(assignment: Assignment, rule: OpShardingRule, target: TensorSharding, mesh: Mesh) -> bool:
    """Whether the assignment gives the target's axes, in contiguous blocks, with no axis used twice."""
    used = [a for axes in assignment for a in axes]
    return (
        dimension_axes(assignment, rule.result_mappings[0], mesh) == target.axes
        and is_contiguous(assignment, rule, mesh)
        and are_apart(used)
    )


def _runs(op: Op, rule: OpShardingRule, assignment: Assignment) -> bool:
    split = {f for f, axes in enumerate(assignment) if axes}
    return any(
        split <= strategy.splittable and not strategy.may_send and strategy.rule is None
        for strategy in strategies_of(op, rule)
    )
