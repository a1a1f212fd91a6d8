"""Data-flow edges: values that control flow passes on, the shardings stated for them, and sums that loops carry."""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby

from sdy_jax.ir.attributes import shardings_from_attribute, shardings_to_attribute
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.meshes import AxisRef
from sdy_jax.ir.operations import CALL, COMPUTATIONS, callee_of, manual_axes
from sdy_jax.ir.shardings import OpShardingRule, TensorSharding, add_free_axes, erase_manual_axes
from sdy_jax.shardy.rules.registry import LINEAR, Linear

# Data-flow edges: values that are one value as far as shardings go, because control flow passes them on.
#
# An edge connects *sources* (values that flow in) with *targets* (values that flow out of it); one target is the
# *owner*, which carries the sharding. A loop's result i, for instance, owns the edge from the initial value i and the
# body's returned value i to the result itself and the arguments i of condition and body.

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


# Data-flow edges during propagation, and the two views of a sharding at the border of a manual computation.
#
# Outside, manual axes lead each dimension; inside there are only free axes. An edge at a body argument keeps the
# inner view and is compared with the outer operand; an edge at a result keeps the outer view and is compared with the
# inner returned value. So each is converted before an op propagation (`seen`) and back after it (`stored`). See
# docs/explanation/propagation.md#data-flow.


@dataclass(frozen=True, slots=True)
class CrossedBorder:
    """The border of a manual computation that an edge crosses: its manual axes and the outer sharding given there.

    `kept` are the axes that dimensions of this sharding wait for, which nothing else may take before that. (Shardy
    forgets them here, and may give an axis to two dimensions.)
    """

    outer: TensorSharding
    manual: tuple[str, ...]
    kind: EdgeKind
    kept: tuple[AxisRef, ...] = ()

    def keeping(self, axes: Sequence[AxisRef]) -> CrossedBorder:
        """The border while some dimensions wait for these axes."""
        kept = tuple(axis for axis in axes if axis.name not in self.manual)
        given = tuple(axis for axis in self.outer.replicated_axes if axis not in self.kept)
        return replace(self, outer=replace(self.outer, replicated_axes=given + kept), kept=kept)

    def seen(self, sharding: TensorSharding | None) -> TensorSharding | None:
        """The edge's sharding as its sources see it."""
        if sharding is None:
            return None
        if self.kind is EdgeKind.BODY_ARGUMENT:
            return add_free_axes(self.outer, sharding, self.manual)
        return erase_manual_axes(sharding, self.manual)

    def stored(self, sharding: TensorSharding) -> TensorSharding:
        """The edge's own sharding from what its sources see."""
        if self.kind is EdgeKind.BODY_ARGUMENT:
            return erase_manual_axes(sharding, self.manual)
        return add_free_axes(self.outer, sharding, self.manual)


def view_of(op: Op, edge: DataFlowEdge) -> CrossedBorder | None:
    """The conversion at an edge of a manual computation, if only of replicated axes; None where there is none."""
    name = "in_shardings" if edge.kind is EdgeKind.BODY_ARGUMENT else "out_shardings"
    outer = shardings_from_attribute(op.attributes[name]) if op.name == "sdy.manual_computation" else ()
    return CrossedBorder(outer[edge.owner.index], manual_axes(op), edge.kind) if outer else None


@cache
def identity_rule(shape: tuple[int, ...], num_operands: int) -> OpShardingRule:
    """One pass-through factor per dimension, shared by all operands and the one result."""
    mapping = tuple((dim,) for dim in range(len(shape)))
    return OpShardingRule(shape, (mapping,) * num_operands, (mapping,))


# The shardings that data-flow ops state for their edges, as sources and as targets of an edge have them.
#
# The border of a manual or named computation states shardings in outer terms; inside of a manual one, only free axes
# are left of them.

_STATED = {EdgeKind.BODY_ARGUMENT: "in_shardings", EdgeKind.RESULT: "out_shardings"}
"""Where a computation states the sharding of an edge, in outer terms."""


@dataclass(frozen=True, slots=True)
class EdgeSharding:
    """A data-flow edge with the sharding that its sources must have and the one that its targets have.

    The two are one, but at the border of a manual computation, where one of them is the inner view.
    """

    edge: DataFlowEdge
    sources: TensorSharding
    targets: TensorSharding


def edge_shardings(op: Op) -> list[EdgeSharding]:
    """The edges for which a data-flow op states shardings, with those shardings."""
    stated = ((edge, _stated(op, edge)) for edge in edges_of(op))
    return [_both_sides(op, edge, sharding) for edge, sharding in stated if sharding is not None]


def settle_edges(
    graph: Graph, op: Op, settled: Callable[[Value, TensorSharding | None], TensorSharding]
) -> list[EdgeSharding]:
    """Settles what is stated for each edge: `settled(value, stated)` is stored in its place, and returned by edge.

    `value` is the one with the edge's outer sharding: the owner, or the operand that flows into a body's argument.
    """
    outcome: list[EdgeSharding] = []
    for _, same_kind in groupby(edges_of(op), key=lambda edge: edge.kind):
        edges = list(same_kind)
        stated = [_stated(op, edge) for edge in edges]
        found = [settled(_outer_value(edge), s) for edge, s in zip(edges, stated, strict=True)]
        if any(s is not None for s in stated) and found != stated:
            _store(graph, op, edges, found)
        outcome += [_both_sides(op, edge, s) for edge, s in zip(edges, found, strict=True)]
    return outcome


def state_edges(graph: Graph, op: Op, shardings: Sequence[TensorSharding]) -> None:
    """States these shardings, in outer terms, for the first edges of a data-flow op."""
    for _, same_kind in groupby(zip(edges_of(op), shardings, strict=False), key=lambda pair: pair[0].kind):
        edges, found = zip(*same_kind, strict=True)
        _store(graph, op, edges, found)


def state_body_arguments(graph: Graph, op: Op, sharding_of: Callable[[Value], TensorSharding]) -> None:
    """Writes the shardings of a computation's body arguments, if the computation states none."""
    if op.name in COMPUTATIONS and "in_shardings" not in op.attributes:
        edges = [edge for edge in edges_of(op) if edge.kind is EdgeKind.BODY_ARGUMENT]
        _store(graph, op, edges, [sharding_of(edge.owner) for edge in edges])


def _both_sides(op: Op, edge: DataFlowEdge, outer: TensorSharding) -> EdgeSharding:
    inner = erase_manual_axes(outer, manual_axes(op))
    sides = (outer, inner) if edge.kind is EdgeKind.BODY_ARGUMENT else (inner, outer)
    return EdgeSharding(edge, *sides)


def _outer_value(edge: DataFlowEdge) -> Value:
    return edge.sources[0] if edge.kind is EdgeKind.BODY_ARGUMENT else edge.owner


def _stated(op: Op, edge: DataFlowEdge) -> TensorSharding | None:
    if op.name not in COMPUTATIONS:
        return edge.owner.sharding
    name = _STATED[edge.kind]
    return shardings_from_attribute(op.attributes[name])[edge.owner.index] if name in op.attributes else None


def _store(graph: Graph, op: Op, edges: Sequence[DataFlowEdge], shardings: Sequence[TensorSharding]) -> None:
    if op.name not in COMPUTATIONS:
        for edge, sharding in zip(edges, shardings, strict=True):
            graph.set_sharding(edge.owner, sharding)
        return
    kind, mesh = edges[0].kind, shardings[0].mesh
    known = {edge.owner: sharding for edge, sharding in zip(edges, shardings, strict=True)}
    owners = op.results if kind is EdgeKind.RESULT else op.blocks[0].arguments
    every = tuple(known.get(v) or TensorSharding.replicated(mesh, v.rank) for v in owners)
    op.mlir.attributes[_STATED[kind]] = op.attributes[_STATED[kind]] = shardings_to_attribute(every, op.mlir.context)


# Sums that loops carry: values to which a loop adds, in whole or in parts, and with which it does nothing else.
#
#     repeat:  part = dynamic_slice(sums, i);  sums = dynamic_update_slice(sums, part + term, i)
#
# Such a sum may be partial while the loop runs, and is reduced once behind it. See
# docs/explanation/strategies.md#partial-sums.

_LOOP = "stablehlo.while"
_ADDING = frozenset(("stablehlo.add", "stablehlo.subtract", _LOOP))
_PASSING = {
    Linear.DATA: range(1),
    Linear.EVERY: None,
    Linear.SUMMANDS: None,
    Linear.BRANCHES: range(1, 3),
    Linear.UPDATED: range(2),
}
"""The operands through which a sum goes on as one; None for any."""


def is_carried_sum(edge: DataFlowEdge, stacks: bool = False) -> bool:
    """Whether an edge is that of a loop which only adds to what it carries.

    One that writes parts anew adds nothing: what a scan stacks is as many bytes to reduce part by part, and is not held
    whole until then. `stacks`: that counts as well, as it waits once instead of in each trip.
    """
    inner = [target for target in edge.targets if target is not edge.owner]
    reached, left, adds = dict.fromkeys(inner), list(inner), False
    while left:
        for op, index in left.pop().uses:
            if (op, index) in edge.slots:
                continue
            further = _passed_on(op, index, stacks)
            if further is None:
                return False
            adds |= op.name in _ADDING or (stacks and _linear(op) is Linear.UPDATED)
            left += [value for value in further if value not in reached]
            reached |= dict.fromkeys(further)
    return adds and (stacks or all(_is_updated_by_sums(value, reached) for value in reached))


def _is_updated_by_sums(value: Value, sums: Container[Value]) -> bool:
    """Whether a value is no update of a sum by something else."""
    op = value.defining_op
    return op is None or _linear(op) is not Linear.UPDATED or all(operand in sums for operand in op.operands[:2])


def _passed_on(op: Op, index: int, stacks: bool) -> tuple[Value, ...] | None:
    """The values that are sums as an operand of an op is one; None where it does something else with it."""
    if op.name == _LOOP:
        inner = loop_edge(op, index)
        return (inner.owner,) if is_carried_sum(inner, stacks) else None
    how = _linear(op)
    if how is None or how not in _PASSING:
        return None
    allowed = _PASSING[how]
    return tuple(op.results) if allowed is None or index in allowed else None


def _linear(op: Op) -> Linear | None:
    by_kind = LINEAR.get(op.key, {})
    return by_kind.get("*") or by_kind.get("sum")
