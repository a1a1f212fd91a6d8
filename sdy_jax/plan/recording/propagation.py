"""The steps of propagation as plain data, over the values of the partitioned program."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.meshes import AxisRef
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.type_text import axis_name
from sdy_jax.plan.explanations.why import Explanation
from sdy_jax.plan.questions import Answers
from sdy_jax.plan.record.program import RecordedPropagation, RecordedSpread, RecordedStart
from sdy_jax.plan.recording.names import Names, Places, Tensors
from sdy_jax.plan.recording.ops import OpRecords, key_of, ops_in
from sdy_jax.plan.stages import input_names
from sdy_jax.shardy.propagation.explanations import Write, has_axis
from sdy_jax.shardy.propagation.worklist import NO_VALUE, FunctionResult, ValueIds


def steps_of(plan: Answers) -> RecordedPropagation:
    """How propagation gave the values of a plan their axes; it runs once more for that."""
    program, graph = plan.program, plan.graph
    places, tensors, inputs = Places(plan.name), Tensors(program.mesh_name, graph.meshes), input_names(program)
    ops = OpRecords(graph, tensors, Names(graph, places, inputs))
    names = _names(plan.explanation, ops, inputs)
    return _StepRecords(plan.explanation, names, [v.path for v in plan.results], places, tensors).propagation()


class _StepRecords:
    """Makes records of how propagation went.

    Args:
        explanation: of the program.
        names: of value ids.
        outputs: what the user calls the results.
        places, tensors: of the plan.
    """

    def __init__(
        self,
        explanation: Explanation,
        names: Mapping[int, str],
        outputs: Sequence[str],
        places: Places,
        tensors: Tensors,
    ):
        self._engine, self._history = explanation.engine, explanation.history
        self._annotations, self._places, self._tensors = explanation.annotations, places, tensors
        self._names, self._outputs = names, outputs

    def propagation(self) -> RecordedPropagation:
        """What values began with, and what the steps gave them."""
        return RecordedPropagation(tuple(self._starts()), tuple(self._spreads()))

    def _starts(self) -> Iterator[RecordedStart]:
        for value_id in range(1, len(self._engine.value_ids.values)):
            given = self._engine.given(value_id)
            name = self._name(value_id)
            if given is not None and not given.has_no_axes and name:
                texts = tuple(note.text for note in self._annotations.of(value_id))
                yield RecordedStart(name, self._type(value_id, given), texts)

    def _spreads(self) -> Iterator[RecordedSpread]:
        peers, before = self._engine.peers, dict[int, TensorSharding | None]()
        for step in self._history.steps:
            for tensor, sharding in step.written:
                value_id = step.tensors[tensor]
                for each in (value_id, *peers.get(value_id, ())):
                    known = before.get(each, self._engine.given(each))
                    yield from self._gained(each, known, Write(step, tensor, value_id, sharding))
                    before[each] = sharding

    def _gained(self, value_id: int, known: TensorSharding | None, write: Write) -> Iterator[RecordedSpread]:
        name, step = self._name(value_id), write.step
        if not name:
            return
        place, type_ = self._places.of(step.op.mlir.location), self._type(value_id, write.sharding)
        for dim, axis in _new(known, write.sharding):
            source, source_dim = self._source(value_id, dim, axis)
            said = source, source_dim, step.op.name, place, step.level, step.priority
            yield RecordedSpread(step.number, name, dim, axis_name(axis), type_, *said)

    def _source(self, value_id: int, dim: int, axis: AxisRef) -> tuple[str, int]:
        cause = self._history.cause(value_id, dim, axis)
        if cause is None or (cause.spread is not None and cause.source is None):
            return "", dim
        return self._name(cause.value_id), cause.dim

    def _name(self, value_id: int) -> str:
        where = self._engine.value_ids.values[value_id]
        if isinstance(where, FunctionResult):
            return self._outputs[where.index] if where.function is self._engine.graph.main else ""
        return self._names.get(value_id, "")

    def _type(self, value_id: int, sharding: TensorSharding) -> str:
        where = self._engine.value_ids.values[value_id]
        value = where if isinstance(where, Value) else None
        if isinstance(where, FunctionResult):
            value = where.function.blocks[0].terminator.operands[where.index]
        return self._tensors.type(value.dtype, value.shape, sharding) if value is not None else ""


def _new(known: TensorSharding | None, sharding: TensorSharding) -> Iterator[tuple[int, AxisRef]]:
    """The axes that a sharding has and the one before has not, or not so much of, with their dimensions."""
    for dim, dimension in enumerate(sharding.dimensions):
        for axis in dimension.axes:
            if not has_axis(known, dim, axis):
                yield dim, axis


def _names(explanation: Explanation, ops: OpRecords, inputs: Sequence[str]) -> dict[int, str]:
    """The names of value ids: those of the values that they became, or else of what they were made of."""
    graph, ids = explanation.engine.graph, explanation.engine.value_ids
    left = dict[object, deque[str]]()
    for op in ops.order:
        for value in op.results:
            left.setdefault(key_of(op, value), deque()).append(ops.names.of(value))
    names = {ids.of(value): name for value, name in zip(graph.main.blocks[0].arguments, inputs, strict=True)}
    for op in ops_in(graph.main.blocks[0]):
        for value in op.results:
            found = left.get(key_of(op, value))
            name = (found.popleft() if len(found) > 1 else found[0]) if found else _gone(op, names, ids)
            if name and ids.of(value) != NO_VALUE:
                names.setdefault(ids.of(value), name)
    return names


def _gone(op: Op, names: Mapping[int, str], ids: ValueIds) -> str:
    """What to call a value that the partitioned program has not: an edge is the value that it stands for."""
    of = names.get(ids.of(op.operands[0]), "") if len(op.operands) == 1 else ""
    return of if op in ids.edges or not of else f"{op.name.partition('.')[2]}({of})"
