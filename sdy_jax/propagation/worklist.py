"""The ops through which shardings propagate, in compact form: value ids, rule, and what decides the direction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.op_rules import RuleBook
from sdy_jax.op_rules.predicates import is_elementwise
from sdy_jax.propagation.basic import Direction
from sdy_jax.propagation.edges import View, identity_rule, view_of
from sdy_jax.propagation.priorities import Directions, at_every_level, by_level, early_direction
from sdy_jax.propagation.solver import Solver
from sdy_jax.propagation.value_ids import EDGES, EdgeOp, ValueIds

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
    view: View | None = None


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
        self, op: Op, sources: Sequence[Value], result: int, direction: Direction, view: View | None = None
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
