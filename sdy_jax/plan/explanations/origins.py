"""The origins of shardings that a program has before propagation: the user's annotations, and types on Explicit
axes that JAX's rules derived.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.attributes import shardings_from_attribute
from sdy_jax.ir.graph import DERIVED, RETURNED, Op, Value
from sdy_jax.ir.meshes import AxisRef
from sdy_jax.ir.operations import CONSTRAINTS
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.plan.explanations.naming import Naming
from sdy_jax.shardy.propagation.data_flow import EdgeKind
from sdy_jax.shardy.propagation.engine import Engine
from sdy_jax.shardy.propagation.explanations import axis_at
from sdy_jax.shardy.propagation.solver import dim_of
from sdy_jax.shardy.propagation.worklist import EdgeOp, FunctionResult

# Types on Explicit axes that JAX's rules derived: which operand of an op an axis of its result came from.


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
            return self._returned(value_id, dim, axis) if is_derived_result(where) else None
        op = None if where is None else where.defining_op
        if op is None or op not in self._entries or not self.is_derived(op):
            return None
        return next(self._holders(op, value_id, dim, axis), None)

    def _returned(self, value_id: int, dim: int, axis: AxisRef) -> Derivation | None:
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


# The origin of the shardings that a program has before propagation: the user's annotations.

_MANUAL = "sdy.manual_computation"


@dataclass(frozen=True, slots=True)
class Annotation:
    """A sharding that the user wrote, or one step on the way to it.

    `kind` is "annotation", or "constraint" or "group" for a sharding that import copied to `value_id` from a constraint
    on it or from another member of its sharding group.
    """

    kind: str
    value_id: int
    text: str
    op: str = ""
    line: str = ""
    function: str = ""


@dataclass(frozen=True, slots=True)
class StatedBorder:
    """Where the shardings of main's arguments and results come from.

    Attributes:
      given: the numbers of main's arguments that the user gave a sharding.
      definition: source line at which the user gave `in_shardings` and `out_shardings`; empty for a module, whose
        arguments and results have their shardings written on them.
      as_passed: the numbers of main's arguments whose shardings are those of the arrays that were passed.
    """

    given: frozenset[int]
    definition: str = ""
    as_passed: frozenset[int] = frozenset()


class Annotations:
    """Finds the annotation behind the sharding with which a value id began.

    Args:
      engine, naming: of the propagated program.
      border: of its arguments and results.
    """

    def __init__(self, engine: Engine, naming: Naming, border: StatedBorder):
        self._engine, self._naming, self._border = engine, naming, border

    def of(self, value_id: int) -> list[Annotation]:
        """The way from a value's first sharding to the annotation; empty if there was none."""
        own = self._own(value_id)
        if own is not None:
            return [own]
        where, sharding = self._engine.value_ids.values[value_id], self._engine.given(value_id)
        if sharding is None or not isinstance(where, Value):
            return []
        applied = next(self._applied(where, sharding), None)
        if applied is not None:
            return [replace(applied, kind="constraint", text=f"{applied.text}, applied to its input"), applied]
        for peer in self._engine.peers.get(value_id, ()):
            found = self._own(peer) or self._applied_at(peer)
            if found is not None:
                text = f"{self._naming.describe(peer)}, which is in the same sharding group"
                return [Annotation("group", peer, text, "sdy.sharding_group"), found]
        return [self._at_op(value_id, where.defining_op, sharding)] if where.defining_op else []

    def _own(self, value_id: int) -> Annotation | None:
        """The annotation that was written at the value id itself; None where import may have put the sharding."""
        where = self._engine.value_ids.values[value_id]
        sharding = self._engine.given(value_id)
        if isinstance(where, FunctionResult):
            if sharding is not None and is_derived_result(where):
                text = f"the type of {self._naming.describe(value_id)}: {spec_text(sharding)}"
                return Annotation("annotation", value_id, text)
            if sharding is not None and is_marked(where, RETURNED):
                text = f"the layout of the argument that {self._naming.describe(value_id)} replaces, which is small: "
                return Annotation("annotation", value_id, text + spec_text(sharding))
            return self._boundary("out_shardings", value_id, sharding)
        assert where is not None
        op = where.defining_op
        if op is None:
            if self._naming.is_input(where) and where.index in self._border.as_passed and sharding is not None:
                text = f"the layout of the array passed as {self._naming.describe(value_id)}: {spec_text(sharding)}"
                return Annotation("annotation", value_id, text)
            written = where.index in self._border.given or not self._naming.is_input(where)
            return self._boundary("in_shardings", value_id, sharding) if written else None
        edge = self._engine.value_ids.edges.get(op)
        if edge is not None:
            return self._at_edge(value_id, edge, sharding)
        if op.name in CONSTRAINTS and sharding is not None:
            return self._at_op(value_id, op, sharding)
        return None

    def _boundary(self, name: str, value_id: int, sharding: TensorSharding | None) -> Annotation | None:
        if sharding is None:
            return None
        where, spec = self._naming.describe(value_id), spec_text(sharding)
        if not self._border.definition:
            return Annotation("annotation", value_id, f"the sharding of {where}: {spec}")
        text = f"{name} of {where}: {spec}, given at {self._border.definition}"
        return Annotation("annotation", value_id, text, "", self._border.definition)

    def _at_edge(self, value_id: int, edge: EdgeOp, sharding: TensorSharding | None) -> Annotation | None:
        """Data-flow edges begin with what is written on the op that they belong to."""
        site = self._naming.site(edge.owner_op)
        name = "in_shardings" if edge.edge.kind is EdgeKind.BODY_ARGUMENT else "out_shardings"
        index = edge.edge.owner.index
        attributes = edge.owner_op.attributes
        if name in attributes:
            written = shardings_from_attribute(attributes[name])[index]
            text = f"{name}[{index}] of {self._computation(edge.owner_op)}: {spec_text(written)}"
        elif sharding is not None and "sdy.sharding" in attributes:
            text = f"the sharding of {self._naming.describe(value_id)}: {spec_text(sharding)}"
        else:
            return None
        return Annotation("annotation", value_id, text, edge.owner_op.name, site.line, site.function)

    def _computation(self, op: Op) -> str:
        site = self._naming.site(op)
        kind = "manual computation" if op.name == _MANUAL else "computation"
        return f"the {kind} at {site.line}" + (f" in {site.function}" if site.function else "")

    def _applied_at(self, value_id: int) -> Annotation | None:
        where, sharding = self._engine.value_ids.values[value_id], self._engine.given(value_id)
        if not isinstance(where, Value) or sharding is None:
            return None
        return next(self._applied(where, sharding), None)

    def _applied(self, value: Value, sharding: TensorSharding) -> Iterator[Annotation]:
        """The closed constraints and manual computations that use the value and gave it their sharding."""
        for user, operand in value.uses:
            if user.name == "sdy.sharding_constraint" and user.results[0].sharding is not None:
                value_id = self._engine.value_ids.of(user.results[0])
                if self._engine.given(value_id) == sharding:
                    yield self._at_op(value_id, user, sharding)
            if user.name == _MANUAL and "in_shardings" in user.attributes:
                written = shardings_from_attribute(user.attributes["in_shardings"])[operand]
                if written == sharding:
                    site = self._naming.site(user)
                    text = f"in_shardings[{operand}] of {self._computation(user)}: {spec_text(sharding)}"
                    value_id = self._engine.value_ids.of(value)
                    yield Annotation("annotation", value_id, text, user.name, site.line, site.function)

    def _at_op(self, value_id: int, op: Op, sharding: TensorSharding) -> Annotation:
        site = self._naming.site(op)
        what = "sharding constraint" if op.name in CONSTRAINTS else f"the sharding on {op.name}"
        if DERIVED in op.attributes:
            what = f"the type that JAX's rule gives the result of {op.name},"
        function = f" in {site.function}" if site.function else ""
        text = f"{what} {spec_text(sharding)} at {site.line}{function}"
        return Annotation("annotation", value_id, text, op.name, site.line, site.function)


def spec_text(sharding: TensorSharding) -> str:
    """`P(None, 'model')` where a `PartitionSpec` can say it, else the sharding as SDY writes it."""
    axes = [axis for d in sharding.dimensions for axis in d.axes]
    plain = all(d.is_closed and d.priority is None for d in sharding.dimensions)
    if not plain or sharding.replicated_axes or sharding.unreduced_axes or any(a.sub_axis for a in axes):
        return str(replace(sharding, mesh="")).removeprefix('@"", ')
    entries = [tuple(repr(a.name) for a in d.axes) for d in sharding.dimensions]
    while entries and not entries[-1]:
        entries.pop()
    return f"P({', '.join(_entry(e) for e in entries)})"


def _entry(names: tuple[str, ...]) -> str:
    if not names:
        return "None"
    return names[0] if len(names) == 1 else f"({', '.join(names)})"
