"""Arguments, results, and what the user wrote in between, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.ir.graph import Graph, Op
from sdy_jax.ir.locations import short_source
from sdy_jax.ir.operations import CONSTRAINTS, function_type, main_function
from sdy_jax.ir.stored_shardings import function_shardings
from sdy_jax.ir.tensor_types import shape_and_dtype
from sdy_jax.plan.answers import Answers
from sdy_jax.plan.border.boundary import BoundaryValue
from sdy_jax.plan.explanations.annotation_origins import spec_text
from sdy_jax.plan.record.border import RecordedAnnotation, RecordedBorder, RecordedTensor
from sdy_jax.plan.recording.places import Places
from sdy_jax.plan.recording.tensors import Tensors
from sdy_jax.representation.attributes import shardings_from_attribute
from sdy_jax.representation.sdy_collectives import COLLECTIVE_OPS

_WRITTEN = frozenset((*COLLECTIVE_OPS, *CONSTRAINTS, "sdy.manual_computation"))


class BorderRecords:
    """Makes records of a plan's border."""

    def __init__(self, plan: Answers, tensors: Tensors):
        self._plan, self._tensors, self._line = plan, tensors, short_source(plan.source)
        self._main = main_function(plan.program.module)
        self._moves = {move.path: (move.before, move.bytes) for move in plan.moves}
        automatic = plan.automatic
        self._chosen = automatic.arguments | automatic.results if automatic is not None else frozenset()

    def arguments(self) -> list[RecordedBorder]:
        """The arguments, closed-over arrays first."""
        values = (*self._plan.constants, *self._plan.arguments)
        return self._records(values, function_type(self._main).inputs, "arg_attrs")

    def results(self) -> list[RecordedBorder]:
        """The results."""
        return self._records(self._plan.results, function_type(self._main).results, "res_attrs")

    def _records(self, values: Sequence[BoundaryValue], types: Sequence[ir.Type], side: str) -> list[RecordedBorder]:
        if self._plan.planned_with is None:  # a program on local arrays
            return [RecordedBorder(value.path, RecordedTensor(value.type)) for value in values]
        stated = function_shardings(main_function(self._plan.stages["traced"]), side)
        found = []
        for value, type_, said in zip(values, types, stated, strict=True):
            shape, dtype = shape_and_dtype(type_)
            tensor = self._tensors.of(dtype, shape, value.sharding)
            origin = self._origin(value.path, said is not None)
            text = spec_text(said) if said is not None and origin == "stated" else ""
            line = self._line if text else ""
            found.append(
                RecordedBorder(value.path, tensor, origin, text, line, *self._moves.get(value.path, ("", 0.0)))
            )
        return found

    def _origin(self, path: str, is_stated: bool) -> str:
        if path in self._chosen:
            return "planner"
        if path in self._plan.as_passed:
            return "passed"
        return "stated" if is_stated else "propagation"


def written(traced: Program, places: Places) -> Iterator[RecordedAnnotation]:
    """What the user wrote inside of the function, in program order."""
    for op in Graph(traced.module).ops:
        if op.name in _WRITTEN:
            shape = op.results[0] if op.results else None
            type_ = f"{shape.dtype}[{','.join(map(str, shape.shape or ()))}]" if shape is not None else ""
            yield RecordedAnnotation(op.name.removeprefix("sdy."), _text(op), type_, places.of(op.mlir.location))


def _text(op: Op) -> str:
    if op.name == "sdy.manual_computation":
        sides = (shardings_from_attribute(op.attributes[name]) for name in ("in_shardings", "out_shardings"))
        return " -> ".join(f"({', '.join(map(spec_text, side))})" for side in sides)
    sharding = op.results[0].sharding if op.results else None
    return spec_text(sharding) if sharding is not None else ""
