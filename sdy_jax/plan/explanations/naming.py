"""Values by the names that a user has for them, and in the words that a user reads."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

from jax.extend.core import Jaxpr
from jax.extend.mlir import ir

from sdy_jax.annotate.jaxprs import line_of
from sdy_jax.base.errors import SdyError
from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.jax_shardings import array_text, type_text
from sdy_jax.ir.locations import SourcePlace, is_line, place_of, short_source
from sdy_jax.ir.operations import copied, functions, pre_order
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.shardy.passes.pipelines import PLAN_EXPORT, run_pipeline
from sdy_jax.shardy.propagation.data_flow import EdgeKind
from sdy_jax.shardy.propagation.engine import Engine
from sdy_jax.shardy.propagation.worklist import NO_VALUE, FunctionResult

# The values that `jax.ad_checkpoint.checkpoint_name` names.
#
# jax lowers such a name to nothing, so they are found by the line and the type of what is named, in the traced jaxpr.

Marks = Mapping[str, frozenset[tuple[str, str]]]
"""Source lines and types without axes, by name."""


def checkpoint_names(jaxpr: Any) -> Marks:
    """The names in a closed jaxpr, those of its inner ones too; nothing where there is none."""
    found: dict[str, frozenset[tuple[str, str]]] = {}
    for name, mark in _names(jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr):
        found[name] = found.get(name, frozenset()) | {mark}
    return found


def all_marks(jaxpr: Any) -> frozenset[tuple[str, str]]:
    """Those of all names in a closed jaxpr."""
    return frozenset[tuple[str, str]]().union(*checkpoint_names(jaxpr).values())


def _names(jaxpr: Any) -> Iterator[tuple[str, tuple[str, str]]]:
    if not isinstance(jaxpr, Jaxpr):
        return
    makers: dict[Any, Any] = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            (variable,) = equation.invars
            maker = makers.get(variable, equation)
            yield equation.params["name"], (line_of(maker), array_text(variable.aval))
        for inner in _inner(equation.params.values()):
            yield from _names(inner)


def _inner(parameters: Any) -> Iterator[Any]:
    for parameter in parameters:
        for each in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
            yield each.jaxpr if hasattr(each, "jaxpr") else each


# A propagated graph after export, where MLIR's names of values and the final shardings come from.

_NUMBER = re.compile(r'loc\("(\d+)"\)')


class AfterExport:
    """A copy of a graph taken through export, when it is first asked for.

    Args:
      graph, engine: propagated; shardings are written back, dead ops still there.
    """

    def __init__(self, graph: Graph, engine: Engine):
        self._propagated, self._engine = graph, engine

    @cached_property
    def graph(self) -> Graph:
        """The copy, each op located by its number in the propagated graph."""
        propagated, dead = self._propagated, self._engine.liveness.dead
        module = copied(propagated.module)
        inside = [op for function in functions(module).values() for op in pre_order(function)]
        for number, (op, copy) in enumerate(zip(propagated.ops, inside, strict=True)):
            assert op.name == copy.name
            copy.location = ir.Location.name(str(number), context=module.context)
        copies = dict(zip(propagated.ops, inside, strict=True))
        for op in dead:  # users before what they use
            if op.parent not in dead:
                copies[op].erase()
        run_pipeline(module, PLAN_EXPORT)
        return Graph(module)

    def origins(self) -> Iterator[tuple[Op, Op]]:
        """Each op after export with the op of the propagated graph that it was."""
        for op in self.graph.ops:
            number = _NUMBER.fullmatch(str(op.mlir.location))
            if number is not None:  # else export made it
                yield op, self._propagated.ops[int(number[1])]

    @cached_property
    def result_ids(self) -> list[int]:
        """The value ids of the main function's results."""
        named = self._propagated.functions.items()
        return self._engine.value_ids.results[next(n for n, f in named if f is self._propagated.main)]

    def sharding(self, value_id: int) -> TensorSharding | None:
        """The sharding of a value id after export; where export leaves none, that after propagation."""
        return self._final.get(value_id, self._engine.sharding(value_id))

    @cached_property
    def _final(self) -> dict[int, TensorSharding | None]:
        value_ids = self._engine.value_ids
        found: dict[int, TensorSharding | None] = {}
        for op, origin in self.origins():
            for value, source in zip(op.results, origin.results, strict=True):
                if value.sharding is not None:
                    found[value_ids.of(source)] = value.sharding
        for value, source in zip(self.graph.arguments, self._propagated.arguments, strict=True):
            found[value_ids.of(source)] = value.sharding
        found.update(zip(self.result_ids, self.graph.result_shardings(self.graph.main), strict=True))
        return found


# Values by the names that a user has for them, and in the words that a user reads.

# What data-flow edges connect, in words: where values come in (by number), and the value itself.
_SOURCES = {
    "stablehlo.while": ("initial value", "value that the body returns"),
    "stablehlo.optimization_barrier": ("operand",),
}
_TARGETS = {"stablehlo.while": "carried value"}


@dataclass(frozen=True, slots=True)
class Named:
    """A value that a user can ask about: its name, the source line where it is made (empty for the boundary), its
    place, its sharding in the end, what to call it in an answer, and the library's line if a library made it."""

    name: str
    line: str
    value_id: int
    sharding: TensorSharding | None
    label: str
    library: str = ""


class Naming:
    """Names of one propagated graph's values.

    Args:
      graph, engine: propagated; shardings are written back, dead ops still there.
      inputs, outputs: what the user calls the main function's arguments and results.
      checkpoints: the lines and types of the values that have a `checkpoint_name`.
    """

    def __init__(
        self,
        graph: Graph,
        engine: Engine,
        inputs: Sequence[str],
        outputs: Sequence[str],
        checkpoints: Marks = MappingProxyType({}),
    ):
        self._graph, self._engine, self._checkpoints = graph, engine, checkpoints
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        self._after_export = AfterExport(graph, engine)
        self.site = lru_cache(maxsize=None)(_site_of)

    # From names to values.

    def find(self, name: str) -> list[Named]:
        """The values that a name stands for.

        Args:
          name: a path (`params['w1']`, `result[0]`, also `out[0]`), the beginning of several (`params`), a name in the
            MLIR text after propagation (`%12`, `%arg3`), a `checkpoint_name`, or a source line (`model.py:42`).

        Raises:
          SdyError: there is no such value.
        """
        if not isinstance(name, str):
            raise SdyError(
                f"{name!r} is no name of a value; ask for one by a string, such as 'params', '%12' or 'model.py:42'"
            )
        exact = [n for n in self._boundary if n.name == name] or [n for n in self._exported if n.name == name]
        if exact:
            return exact
        below = [n for n in self._boundary if n.name.startswith((f"{name}[", f"{name}."))]
        found = below or self._named(name) or self._on_line(name)
        if not found and re.match(r"out\b", name):
            return self.find("result" + name.removeprefix("out"))
        if not found:
            raise SdyError(f"no value is called {name!r}; {self._near(name)}")
        return found

    def _near(self, name: str) -> str:
        known = [n.name for n in self._boundary]
        known += sorted(self._checkpoints)
        known += sorted({n.name if name.startswith("%") else os.path.basename(n.line) for n in self._exported})
        near = [n for n in difflib.get_close_matches(name, known, 3, 0.5) if n]
        return (f"did you mean {' or '.join(near)}? Else " if near else "") + (
            "ask for an argument or result as the plan names it, for a name in plan.mlir('propagated') (%12), "
            "for a checkpoint_name, or for a source line (model.py:42)"
        )

    @cached_property
    def _boundary(self) -> list[Named]:
        arguments = [self._engine.value_ids.of(v) for v in self._graph.arguments]
        value_ids = (*arguments, *self._after_export.result_ids)
        names = (*self._inputs, *self._outputs)
        return [Named(n, "", p, self.final(p), n) for n, p in zip(names, value_ids, strict=True)]

    def _named(self, name: str) -> list[Named]:
        """The values that a `checkpoint_name` names; of several of one line, those that other lines use."""
        marks = self._checkpoints.get(name, frozenset())
        found = [n for n in self._exported if self.made_at(n) in marks]
        return [n for n in found if self._leaves_its_line(n)] or found

    def made_at(self, named: Named) -> tuple[str, str]:
        """The line that makes a value, and its type without axes."""
        return named.line, self._plain_type(named.value_id)

    def _plain_type(self, value_id: int) -> str:
        value = self._value(value_id)
        return type_text(value.dtype, value.shape, None)

    def _leaves_its_line(self, named: Named) -> bool:
        return any(place_of(user.mlir.location).line != named.line for user, _ in self._value(named.value_id).uses)

    def _on_line(self, name: str) -> list[Named]:
        return [n for n in self._exported for line in (n.line, n.library) if is_line(line, name)]

    @cached_property
    def _exported(self) -> list[Named]:
        state = ir.AsmState(self._after_export.graph.module)
        found: list[Named] = []
        for op, origin in self._after_export.origins():
            source, nowhere = place_of(origin.mlir.location), SourcePlace("")
            values = [(v, own, source) for v, own in zip(op.results, origin.results, strict=True)]
            for block, inside in zip(op.blocks, origin.blocks, strict=True):
                values += [(v, own, nowhere) for v, own in zip(block.arguments, inside.arguments, strict=True)]
            for value, own, at in values:
                value_id = self._engine.value_ids.of(own)
                if value_id != NO_VALUE:
                    name = value.mlir.get_name(state)
                    label = f"{name}, {self.describe(value_id)}"
                    found.append(Named(name, at.line, value_id, self.final(value_id), label, at.library))
        return found

    def final(self, value_id: int) -> TensorSharding | None:
        """The sharding of a value id after export; where export leaves none, that after propagation."""
        return self._after_export.sharding(value_id)

    # From values to words.

    def type_of(self, value_id: int) -> str:
        """`f32[8@data,4]`, with the final axes."""
        value = self._value(value_id)
        return type_text(value.dtype, value.shape, self.final(value_id))

    def mark(self, named: Named) -> tuple[str, int | str]:
        """What tells a value in another graph of the same program: `("argument", 0)`, `("result", 1)`, or the source
        line at which it is made and its type without axes."""
        where = self._engine.value_ids.values[named.value_id]
        if not named.line and isinstance(where, FunctionResult):
            return "result", where.index
        if not named.line and isinstance(where, Value) and self.is_input(where):
            return "argument", where.index
        return named.line, self._plain_type(named.value_id)

    def shape_of(self, value_id: int) -> tuple[int, ...]:
        return self._value(value_id).shape or ()

    def mlir_type(self, value_id: int) -> ir.Type:
        return self._value(value_id).type

    def _value(self, value_id: int) -> Value:
        where = self._engine.value_ids.values[value_id]
        assert where is not None
        if isinstance(where, FunctionResult):
            return where.function.blocks[0].terminator.operands[where.index]
        return where

    def describe(self, value_id: int, near: SourcePlace | None = None) -> str:
        """What a user would call the value; the source line is left out if it is that of `near`."""
        where = self._engine.value_ids.values[value_id]
        assert where is not None
        if isinstance(where, FunctionResult):
            name = f"result {where.index} of @{where.function.text('sym_name')}"
            return self._outputs[where.index] if where.function is self._graph.main else name
        op = where.defining_op
        if op is None:
            return self._inputs[where.index] if self.is_input(where) else self._argument(where)
        edge = self._engine.value_ids.edges.get(op)
        if edge is not None:
            return self._edge(edge.owner_op, edge.edge.kind, edge.edge.owner.index)
        number = f"result {where.index} of " if len(op.results) > 1 else ""
        site = self.site(op)
        is_near = near is not None and (site.line, site.function) == (near.line, near.function)
        return number + (site.primitive if is_near else str(site))

    @staticmethod
    def _argument(value: Value) -> str:
        """An argument of a function other than main."""
        assert isinstance(value.owner, Block)
        return f"argument {value.index} of @{value.owner.parent.text('sym_name')}"

    def is_input(self, value: Value) -> bool:
        """The value is an argument of the main function."""
        return value.owner is self._graph.main.blocks[0]

    def _edge(self, owner: Op, kind: EdgeKind, index: int) -> str:
        site = self.site(owner)
        if owner.name == "stablehlo.while":
            return f"loop carry {index} of {site}"
        return f"{'argument' if kind is EdgeKind.BODY_ARGUMENT else 'result'} {index} of {site}"

    def role(self, op: Op, tensor: int, num_operands: int) -> str:
        """What a tensor is to its op: `operand 1`, `result`, `initial value`."""
        edge = self._engine.value_ids.edges.get(op)
        if edge is None:
            if tensor < num_operands:
                return f"operand {tensor}" if num_operands > 1 else "operand"
            return f"result {tensor - num_operands}" if len(op.results) > 1 else "result"
        if tensor == num_operands:
            return _TARGETS.get(edge.owner_op.name, "result" if edge.edge.kind is EdgeKind.RESULT else "value inside")
        if edge.edge.kind is EdgeKind.BODY_ARGUMENT:
            return "value outside"
        if edge.owner_op.name == "stablehlo.case":
            return f"value of branch {tensor}"
        return _SOURCES.get(edge.owner_op.name, ("value that the body returns",))[tensor]

    def op_text(self, op: Op) -> str:
        """`dot_general at model.py:34 in attention`; for a data-flow edge, what it belongs to."""
        edge = self._engine.value_ids.edges.get(op)
        if edge is not None:
            return self._edge(edge.owner_op, edge.edge.kind, edge.edge.owner.index)
        return str(self.site(op))

    def site_of_value_id(self, value_id: int) -> SourcePlace | None:
        """The site of the op whose result is for a value id; None for arguments and result attributes."""
        where = self._engine.value_ids.values[value_id]
        op = where.defining_op if isinstance(where, Value) else None
        return None if op is None else self.site_of(op)

    def site_of(self, op: Op) -> SourcePlace:
        """The site of an op; of a data-flow edge, that of the op it belongs to."""
        edge = self._engine.value_ids.edges.get(op)
        return self.site(op if edge is None else edge.owner_op)


def _site_of(op: Op) -> SourcePlace:
    """The place of an op as the user knows it, whose primitive is MLIR's name of the op where jax has none."""
    place = place_of(op.mlir.location)
    line, library = short_source(place.line), short_source(place.library)
    return replace(place, line=line, library=library, primitive=place.primitive or op.name)
