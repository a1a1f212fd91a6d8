"""The materialized layouts of each value: as it is made, as reshards make it, as it is rematerialized."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jax.extend.mlir import ir

from sdy_jax.ir.attributes import shardings_to_attribute
from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.shardings import OpShardingRule, TensorSharding
from sdy_jax.lowering.ops.registry import REMATERIALIZABLE, strategies_of
from sdy_jax.lowering.planner.facts.factors import Assignment, are_apart, dimension_axes, factor_axes, is_contiguous
from sdy_jax.lowering.planner.facts.fusion import MAX_CHAIN, can_rematerialize, free_values, fuses
from sdy_jax.lowering.planner.placement.collectives import InsertedOps, Reshards, create_collective
from sdy_jax.lowering.planner.problem.layout_plan import PlannedUse
from sdy_jax.lowering.planner.schedule.op_order import create_after
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.shardy.propagation.data_flow import edges_of, state_body_arguments

# Rematerialization: a value is computed again in another sharding, where that is cheaper than a reshard.
# The producer of a broadcast, widened, transposed or constant value runs again in the target sharding, on its operands
# in matching shardings. So a weight is gathered before it is converted to a wider type, a row before it is broadcast,
# and an iota never (docs/explanation/strategies.md#placement).
# A slice costs nothing, but all of what it takes a part of has to be kept until then: some compilers do not compute
# again what a slice takes. So where the parts of what a value is computed of are there, the part is computed of them:
#
#     %y = all_gather %x          every device computes tanh of all of x
#     %t = tanh %y
#     %s = all_slice %t           the same as tanh %x
#
# So is where one value is as large, and what else it is computed of is small: what is taken a part of is that one,
# which other ops read as well, as those of a backward pass read what a normalization is computed of.
#
#     %m = mean %y
#     %n = subtract %y, %m
#     %s = all_slice %n           the same as the difference of slices of %y and %m

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


# Copies of values in other layouts that follow each other: each is recomputed for some of the uses, and freed after.
#
#     %w1 = sdy.all_gather %w            for the forward pass
#     %y  = dot %x, %w1
#     ...
#     %w2 = sdy_jax.after %w, %dy        for the backward pass: not %w1, which need not live until here,
#     %w3 = sdy.all_gather %w2           and not before %dy is there
#     %dx = dot %dy, %w3
#
# The plan says which copy serves a use. A copy starts from the layout in which the value is made, and waits for what
# the op takes that uses it first: else compilers take two gathers of a value for one, or run both at the start. See
# docs/explanation/memory.md#when-the-cheapest-program-does-not-fit.


class PlannedCopies:
    """The copies of a program's values, as planned."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Value, Op], int] = {}
        self._all_wait = False
        self._starts: dict[tuple[Value, int], ir.Value] = {}

    def follow(self, graph: Graph, planned: Mapping[PlannedUse, int], all_wait: bool) -> None:
        """Takes over a plan. `all_wait`: first copies wait as later ones do."""
        self._all_wait = all_wait
        for (maker, index, user), number in planned.items():
            values = graph.arguments if maker is None else graph.ops[maker].results
            self._numbers[values[index], graph.ops[user]] = number

    def number(self, value: Value, user: Op) -> int:
        """Which copy of a value an op takes, counted from 1; 0 where there is no choice."""
        return self._numbers.get((value, user), 0)

    def waits(self, number: int) -> bool:
        """Whether a copy is not to be made before it is needed."""
        return number > 1 or (number == 1 and self._all_wait)

    def start(self, value: Value, number: int, mlir: ir.Value, sharding: TensorSharding, before: Op) -> ir.Value:
        """From what a copy is made: the value in the layout in which it is made, once its users need it."""
        key = value, number
        if key not in self._starts:
            self._starts[key] = create_after([mlir], sharding, before.mlir.location, ir.InsertionPoint(before.mlir))
        return self._starts[key]


# The materialized layouts of each value: the one in which its op produces it, and those made by reshards.
#
# A user takes the value in a layout that exists, or has it brought to a new one from the layout from which that costs
# least. A value that only stands for another, such as the result of a sharding constraint, has the layouts of the
# other. Reshards without users are erased in the end.


class MaterializedLayout(NamedTuple):
    """A sharding in which a value is materialized, and the MLIR value of that layout."""

    sharding: TensorSharding
    mlir: ir.Value


class MaterializedLayouts:
    """The materialized layouts of a program's values.

    Args:
        graph: the program.
        placed: the sharding in which users expect each value. A value that is not tracked here exists in that one only.
        reshards: how values are brought from one sharding to another.
        ops: where inserted ops are recorded.
        setting: what the program is planned with.
    """

    def __init__(
        self,
        graph: Graph,
        placed: Mapping[Value, TensorSharding],
        reshards: Reshards,
        ops: InsertedOps,
        setting: Setting,
    ):
        self._graph, self._placed, self._reshards, self._ops = graph, placed, reshards, ops
        self._keeps_declared = setting.policy.keeps_declared
        self._keeps_whole = setting.target.compiler.order.keeps_whole
        self._rule_of, self._costs = setting.rules.without_overrides().rule_of, setting.costs
        self._origins: dict[Value, Value] = {}
        self._free = free_values(graph)
        self._by_layout: dict[Value, dict[object, MaterializedLayout]] = {}
        self._by_copy: dict[tuple[Value, int], dict[object, MaterializedLayout]] = {}
        self.tracked: set[Value] = set()
        """The values that may exist in other layouts than the one in which users expect them."""
        self.copies = PlannedCopies()
        self._user: Op | None = None
        """The op that a value is taken for."""

    def track(self, value: Value, sharding: TensorSharding, mlir: ir.Value) -> None:
        """Tracks a value whose layout is not the one users expect, or whose MLIR value is not its op's own result."""
        self._by_layout[value] = {sharding.layout: MaterializedLayout(sharding, mlir)}
        self.tracked.add(value)

    def alias(self, value: Value, other: Value) -> None:
        """Tracks a value as an alias of another one, whose layouts it shares."""
        self._origins[value] = self.origin(other)
        self.tracked.add(value)

    def take(self, value: Value, target: TensorSharding, user: Op) -> ir.Value:
        """The MLIR value in the target sharding, materialized by a reshard or rematerialization where there is none."""
        origin = self.origin(value)
        if value.shape is None:
            return origin.mlir
        copy = self.copies.number(origin, user)
        if not copy and value not in self.tracked and self._placed[value].same_layout_as(target):
            return value.mlir
        outer, self._user = self._user, user
        found = self._taken(value, target, user, copy, for_itself=outer is None)
        self._user = outer
        return found

    def _taken(self, value: Value, target: TensorSharding, user: Op, copy: int, for_itself: bool) -> ir.Value:
        """`take`, for the user itself or for an op that is computed again for it, before the loop that it is in."""
        origin, layouts = self.origin(value), self._materialized(value)
        if target.layout not in layouts:
            if self._has_to_be_reduced_first(value, target):
                self.take(value, self._placed[value], user)
            # In the block of the value, before the op that contains the user: loop invariants are resharded once.
            before = _ancestor_in(origin, user)
            may_run_again = not self._keeps_declared or self.is_free(value)
            plan = self._run_again(origin, target) if may_run_again else None
            if plan is not None:
                layouts[target.layout] = MaterializedLayout(target, self._rematerialized(plan, target, before))
            elif copy and self._as_made(origin).sharding.same_layout_as(target):
                return self._as_made(origin).mlir
            elif for_itself and before is not user and not copy and fuses(user) and self._is_cut(value, target):
                return self._behind(value, target, user, user)
            else:
                self.moved(value, target, before, user)
        return layouts[target.layout].mlir

    def _run_again(self, value: Value, target: TensorSharding) -> Rematerialization | None:
        # Not kept: it refers to this, and garbage is collected late while programs are planned.
        facts = RematerializationFacts(self, self._placed, self._rule_of, self._reshards.meshes.base, self._costs)
        found = rematerialization(value, target, facts)
        return found or (computed_of_parts(value, target, facts) if self._keeps_whole else None)

    def moved(self, value: Value, target: TensorSharding, before: Op, cause: Op) -> ir.Value:
        """The MLIR value behind the collectives, inserted here, that bring a value to the target sharding: for all
        users that follow."""
        found = self._behind(value, target, before, cause)
        self._materialized(value)[target.layout] = MaterializedLayout(target, found)
        return found

    def _is_cut(self, value: Value, target: TensorSharding) -> bool:
        """Whether nothing but shards of what a device has brings a value to a sharding: a loop that reads parts of an
        array reads parts of its shards instead, where they are cut inside. Before the loop they would be copied."""
        nearest = self._nearest(value, target).sharding
        return all(step.kind == "all_slice" for step in self._reshards.steps(value, nearest, target))

    def _behind(self, value: Value, target: TensorSharding, before: Op, cause: Op) -> ir.Value:
        origin = self.origin(value)
        nearest, producer = self._nearest(value, target), origin.defining_op
        again = self._copy(origin) > 1
        self.state(origin)
        current, point = nearest.mlir, ir.InsertionPoint(before.mlir)
        if nearest.sharding.unreduced_axes and producer is not None:
            cause = producer
            if producer.block is before.block:  # a sum is larger than what is left of it
                point = ir.InsertionPoint.after(current.owner)
        for step, moved in self._reshards.moves(value, nearest.sharding, target):
            record = self._ops.record(moved, origin, before, cause, again)
            current = create_collective(step, current, cause.mlir.location, point)
            self._ops.add(current.owner, record)
        return current

    def of(self, value: Value) -> tuple[TensorSharding, ...]:
        """The shardings from which a tracked value can be resharded."""
        return tuple([layout.sharding for layout in self._usable(value)])

    def is_free(self, value: Value) -> bool:
        """Whether every device can compute a value in any sharding without communication."""
        return self.origin(value) in self._free

    def state(self, value: Value) -> None:
        """Writes a value's sharding to the module if it has none: the dialect requires one on collectives' operands."""
        sharding, value = self._placed[value], _owner(value)
        producer = value.defining_op
        if value.sharding is None and (producer is None or producer.attribute("out_shardings") is None):
            self._graph.set_sharding(value, sharding)
        if isinstance(value.owner, Block):
            state_body_arguments(self._graph, value.owner.parent, self._placed.__getitem__)

    def origin(self, value: Value) -> Value:
        """The value that another one is an alias of; else itself."""
        return self._origins.get(value, value)

    def _materialized(self, value: Value) -> dict[object, MaterializedLayout]:
        """The layouts that there are for the present user; of a copy, those of no other."""
        origin = self.origin(value)
        if origin not in self._by_layout:
            self.track(origin, self._placed[origin], origin.mlir)
        copy = self._copy(origin)
        return self._by_copy.setdefault((origin, copy), {}) if copy else self._by_layout[origin]

    def _copy(self, origin: Value) -> int:
        return self.copies.number(origin, self._user) if self._user is not None else 0

    def _as_made(self, origin: Value) -> MaterializedLayout:
        """The layout in which a value is made."""
        return next(iter(self._by_layout[origin].values()))

    def _nearest(self, value: Value, target: TensorSharding) -> MaterializedLayout:
        """The materialized layout from which the target costs least."""
        layouts = self._usable(value, target)
        nearest = min(layouts, key=lambda layout: self._reshards.plan(value, layout.sharding, target).cost)
        origin = self.origin(value)
        copy = self._copy(origin)
        if self._user is None or not self.copies.waits(copy) or nearest is not self._as_made(origin):
            return nearest
        self.state(origin)
        start = self.copies.start(origin, copy, *nearest[::-1], _ancestor_in(origin, self._user))
        if start.owner.operation not in self._ops:
            self._ops.add(start.owner.operation)
        return MaterializedLayout(nearest.sharding, start)

    def _usable(self, value: Value, target: TensorSharding | None = None) -> list[MaterializedLayout]:
        """The layouts to reshard from: unreduced ones only where there are no others. A later copy of what an op makes
        is not what the op made."""
        layouts, origin = list(self._materialized(value).values()), self.origin(value)
        copy, made = self._copy(origin), self._as_made(origin)
        if copy and not (copy > 1 and target is not None and made.sharding.same_layout_as(target)):
            layouts.append(made)
        return [layout for layout in layouts if not layout.sharding.unreduced_axes] or layouts

    def cost(self, value: Value, target: TensorSharding) -> float:
        """The cost of materializing a value in a sharding."""
        if target.layout in self._materialized(value):
            return 0.0
        layouts = self._usable(value, target)
        return min([self._reshards.plan(value, layout.sharding, target).cost for layout in layouts], default=math.inf)

    def is_there(self, value: Value, target: TensorSharding) -> bool:
        """Whether a value is materialized in a sharding."""
        return target.layout in self._materialized(value)

    def _has_to_be_reduced_first(self, value: Value, target: TensorSharding) -> bool:
        """Whether a value that exists unreduced only is to be reduced to its placed sharding, once for all users."""
        placed = self._placed[value]
        if placed.unreduced_axes or placed.same_layout_as(target) or len(value.uses) == 1:
            return False
        return all(layout.sharding.unreduced_axes for layout in self._materialized(value).values())

    def _rematerialized(self, plan: Rematerialization, target: TensorSharding, before: Op) -> ir.Value:
        user = self._user or before
        operands = [self.take(v, s, user) for v, s in zip(plan.op.operands, plan.operands, strict=False)]
        clone = plan.op.mlir.clone(ir.InsertionPoint(before.mlir)).operation
        for index, operand in enumerate(operands):
            clone.operands[index] = operand
        clone.attributes["sdy.sharding"] = shardings_to_attribute((target,), clone.context)
        self._ops.add(clone)
        self._ops.may_erase(plan.op.mlir)
        return clone.results[0]


def _owner(value: Value) -> Value:
    """The value whose sharding attribute is that of `value`: for a region argument, the owner of its data-flow edge."""
    if not isinstance(value.owner, Block):
        return value
    return next((edge.owner for edge in edges_of(value.owner.parent) if value in edge.targets), value)


def _ancestor_in(value: Value, op: Op) -> Op:
    """The op in the block of `value` that is, or contains, `op`."""
    return op.ancestor_in(value.owner if isinstance(value.owner, Block) else value.owner.block)
