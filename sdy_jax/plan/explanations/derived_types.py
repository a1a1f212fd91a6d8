"""Types on Explicit axes that JAX's rules derived: which operand of an op an axis of its result came from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op
from sdy_jax.ir.statements import DERIVED
from sdy_jax.propagation.engine import Engine
from sdy_jax.propagation.history import axis_at
from sdy_jax.propagation.sharded_values import FunctionResult
from sdy_jax.propagation.solver import dim_of
from sdy_jax.representation.mesh import AxisRef


class Derivation(NamedTuple):
    """The result `target` of an op has an axis in its type because the operand `source` has it: the value id
    `value_id`, in its dimension `dim`."""

    op: Op
    source: int
    target: int
    num_operands: int
    value_id: int
    dim: int
    axis: AxisRef


def is_derived_result(result: FunctionResult) -> bool:
    """Whether the sharding of a function's result is that of its type."""
    return is_marked(result, DERIVED)


def is_marked(result: FunctionResult, name: str) -> bool:
    """Whether a function's result has an attribute of that name."""
    attributes = result.function.attributes
    return "res_attrs" in attributes and name in ir.DictAttr(ir.ArrayAttr(attributes["res_attrs"])[result.index])


class DerivedTypes:
    """The types in a propagated program that its annotations do not state."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._entries = {entry.op: entry for entry in engine.entries if entry is not None}

    def is_derived(self, op: Op) -> bool:
        """Whether the results of an op, or of the op to which an edge belongs, began with such types."""
        edge = self._engine.value_ids.edges.get(op)
        return DERIVED in (op if edge is None else edge.owner_op).attributes

    def of(self, value_id: int, dim: int, axis: AxisRef) -> Derivation | None:
        """The operand from which the result that is a value id has an axis; None if none has it."""
        where = self._engine.value_ids.values[value_id]
        if isinstance(where, FunctionResult):
            return self._returned(where, value_id, dim, axis) if is_derived_result(where) else None
        op = None if where is None else where.defining_op
        if op is None or op not in self._entries or not self.is_derived(op):
            return None
        return next(self._holders(op, value_id, dim, axis), None)

    def _returned(self, result: FunctionResult, value_id: int, dim: int, axis: AxisRef) -> Derivation | None:
        """A result has the type of what is returned."""
        entry = next(e for e in self._engine.result_entries if e.value_ids[-1] == value_id)
        held = axis_at(self._engine.given(entry.value_ids[0]), dim, axis)
        return None if held is None else Derivation(entry.op, 0, 1, 1, entry.value_ids[0], dim, held)

    def _holders(self, op: Op, value_id: int, dim: int, axis: AxisRef) -> Iterator[Derivation]:
        entry = self._entries[op]
        mappings = self._engine.solver.kind_of(entry.kind).rule.mappings
        first = len(entry.value_ids) - len(op.results)
        target = first + entry.value_ids[first:].index(value_id)
        for source, operand in enumerate(entry.value_ids[:first]):
            for factor in mappings[target][dim]:
                there = dim_of(mappings[source], factor)
                given = self._engine.given(operand) if there >= 0 else None
                held = axis_at(given, there, axis)
                if held is not None:
                    yield Derivation(op, source, target, first, operand, there, held)
