"""The attribute that says per axis of a value where it came from.

That is an argument (`input: 0`), a result (`output: 0`), a constraint (`constraint_0`) or the border of a manual
computation (`mc_0_input: 0`). The names, and what is filed where, are Shardy's, its quirks included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.operations import post_order
from sdy_jax.ir.stored_shardings import set_entry
from sdy_jax.op_rules.registry import INSTALLED_IS_NEW
from sdy_jax.passes.transfers import Transfer
from sdy_jax.propagation.sharded_values import FunctionResult
from sdy_jax.propagation.value_ids import EDGES, NO_VALUE, ValueIds
from sdy_jax.representation.attributes import shardings_from_attribute
from sdy_jax.representation.axes import contains
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.sharding import TensorSharding

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
