"""What propagation works on: numbered values, the ops that shardings go through, their neighbours, and live ops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.operations import COMPUTATIONS, TERMINATORS
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import set_sharding, sharding_of
from sdy_jax.shardy.propagation.data_flow import (
    FUNC_EDGE,
    CrossedBorder,
    DataFlowEdge,
    EdgeKind,
    calls_by_callee,
    edges_of,
    edges_of_calls,
    identity_rule,
    view_of,
)
from sdy_jax.shardy.propagation.factors import Direction
from sdy_jax.shardy.propagation.solver import Directions, Solver, at_every_level, by_level, early_direction
from sdy_jax.shardy.rules import RuleBook
from sdy_jax.shardy.rules.elementwise import is_elementwise

# What has a sharding in propagation: values, and the results of functions.


@dataclass(frozen=True, slots=True)
class FunctionResult:
    """The sharding attribute of result `index` of a function: a value id that no `Value` stands for."""

    function: Op
    index: int


ShardedValue = Value | FunctionResult


# The numbering of the shardings of a graph: one number, a value id, per shardable value and function result.
#
# Several values may share one value id: the sharding of all targets of a data-flow edge is that of the edge's op. Id
# 0 is for values that cannot have a sharding, such as the arguments of a reduction's body: it never has one.

NO_VALUE = 0
EDGE = "sdy.data_flow_edge"
EDGES = (EDGE, FUNC_EDGE)


@dataclass(frozen=True, slots=True)
class EdgeOp:
    """A data-flow edge that has an op: the op that stands for it, and the op that it belongs to."""

    op: Op
    edge: DataFlowEdge
    owner_op: Op


class ValueIds:
    """The numbering of one graph's value ids."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self.values: list[ShardedValue | None] = [None]
        self._of_value: dict[Value, int] = {}
        self.results: dict[str, list[int]] = {}
        """Per function, the value ids of its result attributes."""
        self.edges: dict[Op, EdgeOp] = {}
        """By the op that stands for the edge."""
        self._inside: set[int] = set()
        """The value ids at the border of a computation without edges."""
        for op in graph.ops:
            for result in op.results:
                self._add(result)
        for function in graph.functions.values():
            for argument in function.blocks[0].arguments:
                self._add(argument)
        for name, function in graph.functions.items():
            count = len(function.blocks[0].terminator.operands)
            self.results[name] = [self._number(FunctionResult(function, i)) for i in range(count)]
        for op in graph.ops:
            for edge in edges_of(op):
                self._share(op, edge)
        for owner_op, edge in edges_of_calls(graph):
            self._find_op(owner_op, edge)  # the arguments and results of calls keep value ids of their own

    def _add(self, value: Value) -> None:
        self._of_value[value] = self._number(value)

    def _number(self, value: ShardedValue) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def _share(self, owner_op: Op, edge: DataFlowEdge) -> None:
        edge_op = self._find_op(owner_op, edge)
        if edge_op is None and owner_op.name in COMPUTATIONS:
            if edge.owner not in self._of_value:
                self._add(edge.owner)
            self._inside.add(self.of(edge.owner))
            return
        shared = self.of(edge_op.results[0] if edge_op else edge.owner)
        for target in edge.targets:
            self._of_value[target] = shared

    def _find_op(self, owner_op: Op, edge: DataFlowEdge) -> Op | None:
        """The op that stands for an edge, which is remembered by it."""
        edge_op = next((user for user, _ in edge.owner.uses if user.name in EDGES), None)
        if edge_op is not None:
            self.edges[edge_op] = EdgeOp(edge_op, edge, owner_op)
        return edge_op

    def of(self, value: Value) -> int:
        """The value id of a value."""
        return self._of_value.get(value, NO_VALUE)

    def of_all(self, values: Sequence[Value]) -> tuple[int, ...]:
        known = self._of_value.get
        return tuple([known(v, NO_VALUE) for v in values])

    def read(self) -> list[TensorSharding | None]:
        """The sharding of each value id, from the graph."""
        found = [self._stored(i, p) if isinstance(p, Value) else None for i, p in enumerate(self.values)]
        for name, value_ids in self.results.items():
            for value_id, sharding in zip(
                value_ids, self._graph.result_shardings(self._graph.functions[name]), strict=True
            ):
                found[value_id] = sharding
        return found

    def _stored(self, value_id: int, value: Value) -> TensorSharding | None:
        return sharding_of(value.mlir) if value_id in self._inside else value.sharding

    def write(self, shardings: Iterable[tuple[int, TensorSharding | None]]) -> None:
        """Stores the shardings of value ids in the graph and its module."""
        values: list[tuple[Value, TensorSharding | None]] = []
        results: dict[Op, dict[int, TensorSharding | None]] = {}
        for value_id, sharding in shardings:
            where = self.values[value_id]
            if isinstance(where, Value) and value_id not in self._inside:
                values.append((where, sharding))
            elif isinstance(where, Value) and sharding is not None:
                set_sharding(where.mlir, sharding)
            elif isinstance(where, FunctionResult):
                results.setdefault(where.function, {})[where.index] = sharding
        self._graph.set_shardings(values)
        for function, found in results.items():
            self._graph.set_result_shardings(function, found)


# The ops through which shardings propagate, in compact form: value ids, rule, and what decides the direction.

_BARRIER = "sdy.propagation_barrier"
_BROADCAST = "stablehlo.broadcast_in_dim"


class WorklistEntry(NamedTuple):
    """One op to propagate; a tuple because there are as many as ops, and no other immutable object is made as fast.

    `value_ids` are those of its operands, then its results. `directions` has one entry per level and one for
    propagation without levels; with `counts_uses` the op takes no part in level 0 while an operand, scalars aside, has
    not exactly one use. `view` converts the (only) result of an edge at the border of a manual computation.
    """

    op: Op
    value_ids: tuple[int, ...]
    kind: int
    directions: tuple[Directions, ...]
    counts_uses: bool = False
    view: CrossedBorder | None = None


class EntryFactory:
    """Makes the entries of one graph."""

    def __init__(self, graph: Graph, value_ids: ValueIds, solver: Solver, rules: RuleBook, conservative: bool):
        self._graph, self._value_ids, self._solver = graph, value_ids, solver
        self._rules, self._conservative = rules, conservative

    def entry_of(self, op: Op) -> WorklistEntry | None:
        """The entry of an op; None where nothing propagates through the op."""
        if op.name in EDGES:
            edge = self._value_ids.edges.get(op)
            return self._edge(edge) if edge else None
        if op.name == _BARRIER:
            return self._identity(op, op.operands, self._value_ids.of(op.results[0]), barrier_direction(op))
        rule = self._rules.rule_of(op)
        if rule is None:
            return None
        kind = self._solver.kind(rule, is_elementwise(op), self._conservative)
        early = early_direction(op)
        directions = by_level(early, op.name == _BROADCAST)
        return WorklistEntry(
            op, self._value_ids.of_all((*op.operands, *op.results)), kind, directions, early != Direction.NONE
        )

    def _edge(self, edge: EdgeOp) -> WorklistEntry | None:
        result = self._value_ids.of(edge.op.results[0])
        view = view_of(edge.owner_op, edge.edge)
        return self._identity(edge.op, edge.edge.sources, result, Direction.BOTH, view)

    def results_of_main(self) -> list[WorklistEntry]:
        """Each returned value with the sharding attribute of its function result."""
        main = self._graph.main
        name = next(n for n, function in self._graph.functions.items() if function is main)
        returned = main.blocks[0].terminator
        entries = (
            self._identity(returned, [value], value_id, Direction.BOTH)
            for value, value_id in zip(returned.operands, self._value_ids.results[name], strict=True)
        )
        return [entry for entry in entries if entry is not None]

    def _identity(
        self, op: Op, sources: Sequence[Value], result: int, direction: Direction, view: CrossedBorder | None = None
    ) -> WorklistEntry | None:
        shape = sources[0].shape if sources else None
        if shape is None:
            return None
        kind = self._solver.kind(identity_rule(shape, len(sources)))
        return WorklistEntry(op, (*self._value_ids.of_all(sources), result), kind, at_every_level(direction), view=view)


def barrier_direction(op: Op) -> Direction:
    """`allowed_direction`: the dialect numbers NONE, FORWARD, BACKWARD, BOTH from 0."""
    text = str(op.attributes["allowed_direction"])
    return next((d for d in reversed(Direction) if d.name in text), None) or Direction(op.int("allowed_direction"))


# The ops to visit again after a change of a value, in the order in which they are put on the worklist, a stack.
#
# The order decides between competing shardings, so it is that of Shardy.


class Neighbours:
    """The ops around the values of a graph.

    Args:
      graph: with data-flow edges.
      value_ids: of its values.
      numbers: of the ops through which shardings propagate; others are nobody's neighbours.
    """

    def __init__(self, graph: Graph, value_ids: ValueIds, numbers: Mapping[Op, int]):
        self._value_ids, self._numbers = value_ids, numbers
        self._slots = self._edge_slots()
        calls = calls_by_callee(graph).items()
        self._callers = {graph.functions[name]: ops for name, ops in calls if name in graph.functions}
        self._callees = {call: function for function, ops in self._callers.items() for call in ops}
        self._found: dict[int, list[int]] = {}

    def _edge_slots(self) -> dict[tuple[Op, int], Op]:
        """The edge op at each place where values flow into an edge; operands of computations are not among them."""
        return {
            slot: edge.op
            for edge in self._value_ids.edges.values()
            if edge.edge.kind is EdgeKind.RESULT
            for slot in edge.edge.slots
        }

    def of(self, value_id: int) -> list[int]:
        """The ops to visit after a change of a value id, in the order in which they are put on the stack."""
        if value_id not in self._found:
            where = self._value_ids.values[value_id]
            found: list[Op] = []
            if isinstance(where, Value):
                self._add_touched(where, found, set())
            self._found[value_id] = [self._numbers[op] for op in found if op in self._numbers]
        return self._found[value_id]

    def _add_touched(self, value: Value, found: list[Op], seen: set[Value]) -> None:
        op = value.defining_op
        if op is not None:
            for target in self._other_targets(op):
                self._add_users(target, found, seen)
            found.append(op)
        self._add_users(value, found, seen)

    def _other_targets(self, op: Op) -> list[Value]:
        """The targets of an edge other than its owner; empty where `op` is no edge."""
        found = self._value_ids.edges.get(op)
        return [] if found is None else [t for t in found.edge.targets if t is not found.edge.owner]

    def _add_users(self, value: Value, found: list[Op], seen: set[Value]) -> None:
        """`seen`: the values visited. A function that returns its argument leads from call to call and back again."""
        if value in seen:
            return
        seen.add(value)
        for use in value.use_list():
            user = use[0]
            if use in self._slots:
                found.append(self._slots[use])
            elif user in self._callees:
                self._add_users(self._callees[user].blocks[0].arguments[use[1]], found, seen)
            elif user.name not in TERMINATORS:
                found.append(user)
            elif user.parent in self._callers:
                for call in self._callers[user.parent]:
                    self._add_users(call.results[use[1]], found, seen)
            elif user.parent is not None:
                found.append(user.parent)


# Sharding groups: value ids whose shardings are kept equal while propagation runs.
#
# See docs/explanation/propagation.md#groups.


def peers(graph: Graph, value_ids: ValueIds) -> dict[int, tuple[int, ...]]:
    """For each value id, the value ids of the other members of its group, in order.

    As in Shardy, a member that shares the value id of another value (a loop's argument that of the loop's result)
    follows its group, which does not follow it.
    """
    groups: dict[int, list[Value]] = {}
    for op in graph.ops:
        if op.name == "sdy.sharding_group":
            groups.setdefault(op.int("group_id"), []).append(op.operands[0])
    found: dict[int, tuple[int, ...]] = {}
    for _, members in sorted(groups.items()):
        own = [value_ids.of(value) for value in members]
        for value, value_id in zip(members, own, strict=True):
            if value_ids.values[value_id] is value:
                found[value_id] = tuple(other for other in own if other != value_id)
    return found


# Which ops are dead: propagation passes them by, and the passes erase them.

_EFFECTS = frozenset(
    {
        "builtin.module",
        "func.func",
        "func.call",
        "func.return",
        "mesh.recv",
        "mesh.send",
        "scf.yield",
        "sdy.return",
        "stablehlo.return",
        "sdy.mesh",
        "sdy.sharding_constraint",
        "sdy.data_flow_edge",
        "sdy.func_data_flow_edge",
        "sdy.sharding_group",
        "sdy.all_gather",
        "sdy.all_reduce",
        "sdy.all_slice",
        "sdy.all_to_all",
        "sdy.collective_permute",
        "sdy.reduce_scatter",
        "sdy.replicated_to_unreduced",
        "sdy.sharded_to_unreduced",
        "shard.recv",
        "shard.send",
        "stablehlo.all_gather",
        "stablehlo.all_reduce",
        "stablehlo.all_to_all",
        "stablehlo.collective_broadcast",
        "stablehlo.collective_permute",
        "stablehlo.reduce_scatter",
        "stablehlo.infeed",
        "stablehlo.outfeed",
        "stablehlo.send",
        "stablehlo.recv",
        "stablehlo.rng",
    }
)
"""Ops that stay even where nothing uses their results."""


def is_removable(op: Op) -> bool:
    """Whether an op has no effect besides its results, so that it may be erased when these are unused."""
    if op.name in _EFFECTS or (op.name == "stablehlo.custom_call" and op.flag("has_side_effect")):
        return False
    return all(is_removable(inner) for block in op.blocks for inner in block.ops[:-1])


class Liveness:
    """The ops that are left of a graph, while dead ones are taken out."""

    def __init__(self) -> None:
        self.dead: dict[Op, None] = {}
        """Dead ops, users before what they use, and what is in a region before the op that has it."""
        self._lost: dict[Value, int] = {}
        self._removable: dict[Op, bool] = {}

    def uses(self, value: Value) -> int:
        """The number of uses of a value by live ops."""
        return len(value.uses) - self._lost.get(value, 0) if self._lost else len(value.uses)

    def is_dead(self, op: Op) -> bool:
        """Whether no live op uses a result of the op, and it may be erased."""
        for result in op.results:
            if self.uses(result):
                return False
        if op not in self._removable:
            self._removable[op] = is_removable(op)
        return self._removable[op]

    def erase(self, op: Op) -> list[Op]:
        """Erases a dead op. Returns the producers of operands that few or no other ops use, to visit again."""
        again: list[Op] = []
        self._erase(op, again)
        return again

    def _erase(self, op: Op, again: list[Op]) -> None:
        for block in op.blocks:
            for inner in reversed(block.ops):
                if inner not in self.dead:
                    self._erase(inner, again)
        for value in op.operands:
            if value.defining_op and self._has_few_other_users(value, op):
                again.append(value.defining_op)
            self._lost[value] = self._lost.get(value, 0) + 1
        self.dead[op] = None

    def _has_few_other_users(self, value: Value, op: Op) -> bool:
        return len({user for user, _ in value.uses if user is not op and user not in self.dead}) <= 1
