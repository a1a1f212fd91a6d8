"""The ops to visit again after a change of a value, in the order in which they are put on the worklist, a stack.

The order decides between competing shardings, so it is that of Shardy.
"""

from __future__ import annotations

from collections.abc import Mapping

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.operations import TERMINATORS
from sdy_jax.op_rules.dataflow import EdgeKind, calls_by_callee
from sdy_jax.propagation.value_ids import ValueIds


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
