"""The attributes that explain shardings, as one propagation pass writes them, and a module saved amid a pipeline."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jax.extend.mlir import ir

from sdy_jax.base.files import explained, write_whole
from sdy_jax.ir.attributes import propagation_edges_to_attribute, sharding_from_attribute, shardings_from_attribute
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.meshes import AxisRef, Mesh, can_merge, contains, merge, natural_order
from sdy_jax.ir.operations import post_order, pre_order
from sdy_jax.ir.shardings import AxisSpread, EdgeValue, PropagationEdges, PropagationStep, TensorSharding
from sdy_jax.ir.stored_shardings import SIDES, entries_of, set_entries, set_entry
from sdy_jax.ir.text.translation import module_text
from sdy_jax.shardy.propagation.engine import Engine, Event, RecordedStep
from sdy_jax.shardy.propagation.explanations import History, gained
from sdy_jax.shardy.propagation.worklist import EDGES, NO_VALUE, FunctionResult, ValueIds
from sdy_jax.shardy.rules.registry import INSTALLED_IS_NEW

# The axes that went from tensor to tensor in each step of propagation.


@dataclass(frozen=True, slots=True)
class Transfer:
    """An axis that went from one tensor of `op` to another in a step.

    `op` is the op, or main's return for what passes between returned values and result attributes. `source_place` and
    `target_place` are the tensors' places.
    """

    step: int
    op: Op
    axis: AxisRef
    source: EdgeValue
    target: EdgeValue
    source_place: int
    target_place: int


def transfers(steps: Sequence[RecordedStep], first: int, meshes: dict[str, Mesh]) -> Iterator[Transfer]:
    """What each step moved; the first step has number `first`."""
    for step in steps:
        if not step.written:
            continue
        reference = step.written[0][1].mesh
        mesh = meshes[reference] if isinstance(reference, str) else reference
        for target in dict.fromkeys(spread.target for spread in step.spreads):
            for axis, source in _pieces(step, target, mesh).items():
                yield Transfer(
                    first + step.number,
                    step.op,
                    axis,
                    _edge_value(step, source),
                    _edge_value(step, target),
                    step.tensors[source],
                    step.tensors[target],
                )


def _pieces(step: RecordedStep, target: int, mesh: Mesh) -> dict[AxisRef, int]:
    """The axes that a tensor got, with the tensors that they came from.

    Where the last axes of two factors of a dimension follow each other, Shardy records the two as one axis.
    """
    found: dict[AxisRef, int] = {}
    last: dict[int, AxisRef] = {}
    for spread in step.spreads:
        if spread.target != target or spread.source is None:
            continue
        *pieces, piece = gained(spread)
        previous = last.get(spread.dim)
        if previous is not None and can_merge(previous, piece):
            found.pop(previous, None)
            piece = merge(previous, piece, mesh)
        found.update((axis, spread.source) for axis in (*pieces, piece))
        last[spread.dim] = spread.axes[-1]
    return found


def _edge_value(step: RecordedStep, tensor: int) -> EdgeValue:
    if tensor < step.num_operands:
        return EdgeValue("operand", tensor)
    return EdgeValue("result", tensor - step.num_operands)


# The attribute that says which axis went from which tensor of an op to which others, in which step.
#
# What is filed where is as in Shardy, its quirks included.

PROPAGATION_EDGES = "sdy.propagation_edges"
SUNK_EDGES = ("sdy.block_arg_propagation_edges", "sdy.result_propagation_edges")


def next_step(module: ir.Operation) -> int:
    """One more than the largest step that is written in the module."""
    numbers: list[int] = []
    for op in pre_order(module):
        for text in _edge_texts(op):
            numbers += map(int, re.findall(r"\bstep-(\d+)", text))
    return max(numbers, default=-1) + 1


def _edge_texts(op: ir.Operation) -> Iterator[str]:
    attributes = op.attributes
    for name in (PROPAGATION_EDGES, *SUNK_EDGES):
        if name in attributes:
            yield str(attributes[name])
    if op.name == "func.func" and "res_attrs" in attributes:
        entries = entries_of(op, "res_attrs")
        yield from (str(entry[PROPAGATION_EDGES]) for entry in entries if PROPAGATION_EDGES in entry)


def write_edges(found: Iterable[Transfer]) -> None:
    """Stores transfers at their ops. Those at main's return all go to result 0, as in Shardy.

    Before jaxlib 0.12 the dialect lets a data-flow edge speak of its own operand only: what other sources took part in
    is left out.
    """
    by_op: dict[Op, dict[tuple[AxisRef, EdgeValue, EdgeValue], int]] = {}
    for t in found:
        source, target = (t.source, t.target)
        if not INSTALLED_IS_NEW and t.op.name in EDGES and max(source.index, target.index) > 0:
            continue
        if t.op.name == "func.return":
            source, target = EdgeValue(source.side, 0), EdgeValue(target.side, 0)
        by_op.setdefault(t.op, {}).setdefault((t.axis, source, target), t.step)
    for op, steps in by_op.items():
        attribute = propagation_edges_to_attribute(propagation_edges_of(steps), op.mlir.context)
        if op.name == "func.return":
            assert op.parent is not None
            set_entry(op.parent.mlir, "res_attrs", 0, PROPAGATION_EDGES, attribute)
        else:
            op.mlir.attributes[PROPAGATION_EDGES] = attribute


def write_constraint_edges(module: ir.Operation, applied: Sequence[ir.Operation]) -> None:
    """Stores one step for each constraint that gave its input its sharding."""
    source, target = EdgeValue("result", 0), EdgeValue("operand", 0)
    for step, op in enumerate(applied, next_step(module)):
        axes = [axis for d in sharding_from_attribute(op.attributes["sharding"]).dimensions for axis in d.axes]
        if axes:
            edges = propagation_edges_of({(axis, source, target): step for axis in axes})
            op.attributes[PROPAGATION_EDGES] = propagation_edges_to_attribute(edges, op.context)


def propagation_edges_of(steps: dict[tuple[AxisRef, EdgeValue, EdgeValue], int]) -> PropagationEdges:
    """The attribute's value from the first step of each (axis, source, target)."""
    by_step: dict[int, dict[tuple[AxisRef, EdgeValue], list[EdgeValue]]] = {}
    for (axis, source, target), step in steps.items():
        by_step.setdefault(step, {}).setdefault((axis, source), []).append(target)

    def order(value: EdgeValue) -> tuple[str, int]:
        return value.side, value.index  # operands first

    return PropagationEdges(
        tuple(
            PropagationStep(
                step,
                tuple(
                    AxisSpread(axis, source, tuple(sorted(targets, key=order)))
                    for (axis, source), targets in sorted(spreads.items(), key=lambda item: natural_order(item[0][0]))
                ),
            )
            for step, spreads in sorted(by_step.items())
        )
    )


# The attribute that says per axis of a value where it came from.
#
# That is an argument (`input: 0`), a result (`output: 0`), a constraint (`constraint_0`) or the border of a manual
# computation (`mc_0_input: 0`). The names, and what is filed where, are Shardy's, its quirks included.

SHARDING_ORIGINS = "sdy.sharding_origins"
ORIGIN_NAME = "sdy.sharding_origin_name"
SUNK_ORIGINS = ("sdy.block_arg_sharding_origins", "sdy.result_sharding_origins")
_NO_ORIGIN = None if INSTALLED_IS_NEW else ": 0"
"""Shardy's text for an axis that came from a value of which it knows no origin; jaxlib 0.12 writes none."""
_CONSTRAINT = "sdy.sharding_constraint"
_MANUAL = "sdy.manual_computation"


class Origins:
    """Per place, the origin of each of its axes.

    Args:
      graph: of the module before the pass.
    """

    def __init__(self, graph: Graph):
        self._graph, self._value_ids = graph, ValueIds(graph)
        self._known: dict[int, dict[AxisRef, str]] = {}
        self._names: dict[Op, str] = {}
        self._given = self._value_ids.read()
        self._file_constraints()
        self._file_manual_computations()
        self._file_boundary()

    def _file_constraints(self) -> None:
        constraints = (op for op in self._graph.ops if op.name == _CONSTRAINT)
        for number, op in enumerate(constraints):
            name = self._names[op] = f"constraint_{number}"
            self._file(self._value_ids.of(op.results[0]), op.results[0].sharding, name)
            operand = self._value_ids.of(op.operands[0])
            self._file(operand, self._given[operand], name)

    def _file_manual_computations(self) -> None:
        number = 0
        for op in _post_order(self._graph):
            if op.name != _MANUAL:
                continue
            name = self._names[op] = f"mc_{number}"
            number += 1
            inside = op.blocks[0].arguments if op.blocks else []
            for side, attribute, values in (("input", "in_shardings", inside), ("output", "out_shardings", op.results)):
                shardings = shardings_from_attribute(op.attributes[attribute])
                for i, (value, sharding) in enumerate(zip(values, shardings, strict=True)):
                    self._file(self._value_ids.of(value), sharding, f"{name}_{side}: {i}")
                    if side == "input":
                        operand = self._value_ids.of(op.operands[i])
                        self._file(operand, self._given[operand], f"{name}_{side}: {i}")

    def _file_boundary(self) -> None:
        for name, function in self._graph.functions.items():
            for i, argument in enumerate(function.blocks[0].arguments):
                self._file(self._value_ids.of(argument), argument.sharding, f"input: {i}")
            returned = function.blocks[0].terminator.operands
            for i, (value, value_id) in enumerate(zip(returned, self._value_ids.results[name], strict=True)):
                self._file(self._value_ids.of(value), self._given[value_id], f"output: {i}")

    def _file(self, value_id: int, sharding: TensorSharding | None, origin: str) -> None:
        if value_id == NO_VALUE or sharding is None:
            return
        for dimension in sharding.dimensions:
            for axis in dimension.axes:
                self._known.setdefault(value_id, {}).setdefault(axis, origin)

    def follow(self, found: Iterable[Transfer]) -> None:
        """Gives the target of each transfer the origin that the axis has at its source."""
        for t in found:
            source, target = self._returned_value_id(t.source_place), self._returned_value_id(t.target_place)
            origin = self._origin(source, t.axis)
            if origin is not None:
                self._known.setdefault(target, {}).setdefault(t.axis, origin)

    def _returned_value_id(self, value_id: int) -> int:
        """A result attribute counts as the value that is returned."""
        where = self._value_ids.values[value_id]
        if isinstance(where, FunctionResult):
            return self._value_ids.of(where.function.blocks[0].terminator.operands[where.index])
        return value_id

    def _origin(self, value_id: int, axis: AxisRef) -> str | None:
        known = self._known.get(value_id, {})
        if axis in known:
            return known[axis]
        related = (origin for other, origin in known.items() if contains(other, axis) or contains(axis, other))
        return next(related, _NO_ORIGIN)

    def write(self, dead: Iterable[Op] = ()) -> None:
        """Stores the origins of all values but those of dead ops, and the names that stand in them."""
        skipped = set(dead)
        for op in self._graph.ops:
            if op in skipped:
                continue
            if op in self._names:
                op.mlir.attributes[ORIGIN_NAME] = ir.StringAttr.get(self._names[op], op.mlir.context)
            if op.name == "func.func":
                self._write_function(op)
            elif op.name in (_CONSTRAINT, *EDGES):
                self._write_single(op)
            elif op.name != _MANUAL:
                self._write_results(op)

    def _write_function(self, function: Op) -> None:
        body = function.blocks[0]
        for name, values, side in (
            ("arg_attrs", body.arguments, "input"),
            ("res_attrs", body.terminator.operands, "output"),
        ):
            for i, value in enumerate(values):
                origins = self._attribute(value, f"{side}: {i}", function)
                if origins is not None and (side == "input" or _first_return(value) == i):
                    set_entry(function.mlir, name, i, SHARDING_ORIGINS, origins)

    def _write_single(self, op: Op) -> None:
        own = self._names.get(op) or self._name_of_edge(op)
        origins = self._attribute(op.results[0], own, op)
        if origins is not None:
            op.mlir.attributes[SHARDING_ORIGINS] = origins

    def _name_of_edge(self, op: Op) -> str:
        edge = self._value_ids.edges.get(op)
        if edge is None or edge.owner_op not in self._names:
            return ""
        side = "input" if edge.edge.owner.defining_op is None else "output"
        return f"{self._names[edge.owner_op]}_{side}: {edge.edge.owner.index}"

    def _write_results(self, op: Op) -> None:
        value_ids = self._value_ids.values
        own = (value_ids[self._value_ids.of(v)] is v for v in op.results)  # else an edge op has the origins
        found = [self._attribute(v, "", op) if is_own else None for v, is_own in zip(op.results, own, strict=True)]
        if any(found):
            empty = ir.DictAttr.get({}, op.mlir.context)
            op.mlir.attributes[SHARDING_ORIGINS] = ir.ArrayAttr.get([f or empty for f in found], op.mlir.context)

    def _attribute(self, value: Value, own: str, op: Op) -> ir.Attribute | None:
        """A value's origins; `own` is the name of the place where they are written."""
        known = self._known.get(self._value_ids.of(value))
        if not known or self._value_ids.of(value) == NO_VALUE:
            return None
        context = op.mlir.context
        entries = {
            str(axis).replace('"', ""): ir.StringAttr.get("self" if origin == own else origin, context)
            for axis, origin in known.items()
        }
        return ir.DictAttr.get(entries, context)


def _first_return(value: Value) -> int:
    """As which result a value is returned, by the first return in its use list; Shardy writes origins only there."""
    return next(int(use.operand_number) for use in value.mlir.uses if use.owner.operation.name == "func.return")


def _post_order(graph: Graph) -> Iterator[Op]:
    ops = {op.mlir: op for op in graph.ops}
    return (ops[op] for function in graph.functions.values() for op in post_order(function.mlir))


# The dialect's attributes that explain shardings, as one propagation pass writes them, and without them.
#
# These are `propagation_edges` and `sharding_origins`; the sunk ones are those of data-flow edges at the ops that
# these belong to. They are written as the jaxlib that is installed writes them: that of 0.12 says of a data-flow edge
# what came from each source, and nothing of axes without an origin; sunk origins have an entry for each value of an
# op there.


class DebugInfo:
    """What one propagation pass writes on request: made before it runs, written after it.

    Args:
      graph: before propagation.
      origins, edges: what to write.
    """

    def __init__(self, graph: Graph, *, origins: bool, edges: bool):
        self.events: list[Event] | None = [] if origins or edges else None
        self._graph, self._edges = graph, edges
        self._origins = Origins(graph) if origins else None

    def write(self, engine: Engine) -> None:
        """Stores the attributes; dead ops must not be erased yet."""
        if self.events is None:
            return
        steps = History(engine, self.events).steps
        found = list(transfers(steps, next_step(self._graph.module), self._graph.meshes))
        if self._edges:
            write_edges(t for t in found if t.op not in engine.liveness.dead)
        if self._origins is not None:
            self._origins.follow(found)
            self._origins.write(engine.liveness.dead)


def sink_attributes(op: ir.Operation, edges: Sequence[ir.Operation | None], side: str, name: str) -> None:
    """Moves attribute `name` of edge ops to the data-flow op that they belong to, as an array of those that have it.
    Where jaxlib 0.12 writes an entry for each value, so does this, unless it could not be parsed: records of no steps.

    Args:
      op: the data-flow op.
      edges: of its results or block arguments, None where there is no edge.
      side: "result" or "block_arg".
      name: `PROPAGATION_EDGES` or `SHARDING_ORIGINS`.
    """
    found = [edge.attributes[name] for edge in edges if edge is not None and name in edge.attributes]
    if INSTALLED_IS_NEW and name == SHARDING_ORIGINS:
        found = [_origins_of(edge, op.context) for edge in edges]
    op.attributes[f"sdy.{side}_{name.removeprefix('sdy.')}"] = ir.ArrayAttr.get(found, op.context)


def _origins_of(edge: ir.Operation | None, context: ir.Context) -> ir.Attribute:
    if edge is None or SHARDING_ORIGINS not in edge.attributes:
        return ir.DictAttr.get({}, context)
    return edge.attributes[SHARDING_ORIGINS]


def remove_propagation_debug_info(module: ir.Operation) -> None:
    """Deletes edges and origins everywhere."""
    for op in pre_order(module):
        for name in (PROPAGATION_EDGES, SHARDING_ORIGINS, *SUNK_EDGES, *SUNK_ORIGINS):
            if name in op.attributes:
                del op.attributes[name]
        if op.name == "func.func":
            _clean_boundary(op)


def _clean_boundary(function: ir.Operation) -> None:
    for side in SIDES:
        if side in function.attributes:
            entries = entries_of(function, side)
            written = (PROPAGATION_EDGES, SHARDING_ORIGINS)
            set_entries(function, side, ({n: a for n, a in entry.items() if n not in written} for entry in entries))


# Writing a module to a file in the midst of a pipeline.


def save_module(module: ir.Operation, *, directory: str = "", name: str = "module") -> None:
    """Writes the module to `directory/name.mlir`; without a directory, nothing is written.

    Raises:
        SdyError: it cannot be written.
    """
    if not directory:
        return
    path = Path(directory, f"{name}.mlir")
    with explained(f"sdy-save-module: {path} cannot be written", "name a directory that can be"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_module(module, path)


def write_module(module: ir.Operation, path: str | os.PathLike[str]) -> None:
    """Writes a module's text.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(path, module_text(module))
