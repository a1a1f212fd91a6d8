"""Data-flow edges: values that are one value as far as shardings go, because control flow passes them on.

An edge connects *sources* (values that flow in) with *targets* (values that flow out of it); one target is the *owner*,
which carries the sharding. A loop's result i, for instance, owns the edge from the initial value i and the body's
returned value i to the result itself and the arguments i of condition and body.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.operations import CALL, callee_of

FUNC_EDGE = "sdy.func_data_flow_edge"
"""The op that stands for an edge between a function and its calls."""


class EdgeKind(enum.Enum):
    """Where the owner of an edge is: a result of the op, an argument of its body, or where a call passes values."""

    RESULT = "result"
    BODY_ARGUMENT = "body_argument"
    FUNCTION = "function"


@dataclass(frozen=True, slots=True)
class DataFlowEdge:
    """Sources and targets that must be sharded alike; `owner` is among the targets.

    `slots` are the places where sources flow in: (op, operand number), the op being the data-flow op itself or the
    terminator of one of its regions.
    """

    owner: Value
    slots: tuple[tuple[Op, int], ...]
    targets: tuple[Value, ...]
    kind: EdgeKind = EdgeKind.RESULT

    @property
    def sources(self) -> tuple[Value, ...]:
        return tuple(op.operands[number] for op, number in self.slots)


def is_data_flow(op: Op) -> bool:
    """Whether values flow through the op along edges (it may have none, if it carries only tokens)."""
    return op.name in _FAMILIES


def edges_of(op: Op) -> list[DataFlowEdge]:
    """The edges of a data-flow op, in the order of their owners; none for other ops.

    Values that are no tensors of static shape (tokens) have no edge.
    """
    if not is_data_flow(op):
        return []
    return [edge for edge in _FAMILIES[op.name](op) if edge.owner.shape is not None]


def calls_by_callee(graph: Graph) -> dict[str, list[Op]]:
    """The calls of each function, level by level: those in no region of another op come first.

    That is the order in which MLIR lists the uses of a symbol; which source of an edge comes first depends on it.
    """
    found: dict[str, list[Op]] = {}
    if len(graph.functions) < 2:
        return found
    blocks = [block for function in graph.functions.values() for block in function.blocks]
    for block in blocks:
        for op in block.ops:
            blocks += op.blocks
            if op.name == CALL:
                found.setdefault(callee_of(op), []).append(op)
    return found


def edges_of_calls(graph: Graph) -> Iterator[tuple[Op, DataFlowEdge]]:
    """The edges between functions and their calls, each with the function or call that has its owner.

    What the calls of a function pass as argument i flows into that argument; what the function returns flows into each
    call's result.
    """
    for name, calls in calls_by_callee(graph).items():
        if name not in graph.functions:
            continue
        function = graph.functions[name]
        body = function.blocks[0]
        for i, argument in enumerate(body.arguments):
            slots = tuple((call, i) for call in calls)
            yield function, DataFlowEdge(argument, slots, (argument,), EdgeKind.FUNCTION)
        for call in calls:
            for i, result in enumerate(call.results):
                yield call, _edge(result, [(body.terminator, i)], EdgeKind.FUNCTION)


def accumulator(edge: DataFlowEdge) -> Op | None:
    """The op that adds to a sum which a loop carries, where nothing else in the loop looks at the sum."""
    inner = [target for target in edge.targets if target is not edge.owner]
    uses = [use for target in inner for use in target.uses]
    if len(uses) != 1 or uses[0][0].name != "stablehlo.add":
        return None
    added = uses[0][0].results[0]
    return uses[0][0] if len(added.uses) == 1 and added.uses[0] in edge.slots else None


def loop_edge(op: Op, number: int) -> DataFlowEdge:
    """The edge of what a loop carries at a number."""
    (condition, body), result = op.blocks, op.results[number]
    slots = ((op, number), (body.terminator, number))
    return DataFlowEdge(result, slots, (result, condition.arguments[number], body.arguments[number]))


def _loop(op: Op) -> Iterator[DataFlowEdge]:
    return (loop_edge(op, number) for number in range(len(op.results)))


def _branches(op: Op) -> Iterator[DataFlowEdge]:
    for i, result in enumerate(op.results):
        yield _edge(result, [(block.terminator, i) for block in op.blocks])


def _barrier(op: Op) -> Iterator[DataFlowEdge]:
    for i, result in enumerate(op.results):
        yield _edge(result, [(op, i)])


def _computation(op: Op) -> Iterator[DataFlowEdge]:
    body = op.blocks[0]
    for i, argument in enumerate(body.arguments):
        yield _edge(argument, [(op, i)], EdgeKind.BODY_ARGUMENT)
    for i, result in enumerate(op.results):
        yield _edge(result, [(body.terminator, i)])


def _edge(owner: Value, slots: Sequence[tuple[Op, int]], kind: EdgeKind = EdgeKind.RESULT) -> DataFlowEdge:
    return DataFlowEdge(owner, tuple(slots), (owner,), kind)


_FAMILIES: dict[str, Callable[[Op], Iterator[DataFlowEdge]]] = {
    "stablehlo.while": _loop,
    "stablehlo.case": _branches,
    "stablehlo.if": _branches,
    "stablehlo.optimization_barrier": _barrier,
    "sdy.named_computation": _computation,
    "sdy.manual_computation": _computation,
}
