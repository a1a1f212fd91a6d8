"""The record of a plan: arguments, results, annotations, lines of code, and the steps of propagation."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

import jax
from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.base.version import __version__
from sdy_jax.ir.attributes import itemsize, shape_and_dtype, shardings_from_attribute
from sdy_jax.ir.collectives import COLLECTIVE_OPS
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.jax_shardings import axis_name, type_text
from sdy_jax.ir.locations import short_source
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.operations import CONSTRAINTS, function_type, main_function, pre_order
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import function_shardings
from sdy_jax.lowering.planner.report import ChangedLayout, CollectiveRecord, InParts, LayoutChoice, Note, Recomputed
from sdy_jax.lowering.planner.setting import Policy
from sdy_jax.lowering.targets.target import Target
from sdy_jax.plan.border import BoundaryValue, pasted
from sdy_jax.plan.digests import fingerprint_of
from sdy_jax.plan.estimates import flops
from sdy_jax.plan.explanations.layout_reasons import RESULTS, Mark
from sdy_jax.plan.explanations.origins import spec_text
from sdy_jax.plan.explanations.why import Explanation
from sdy_jax.plan.questions import Answers
from sdy_jax.plan.record.names import Names, Places, Tensors, frame_of
from sdy_jax.plan.record.program import (
    RecordedAnnotation,
    RecordedAxis,
    RecordedBorder,
    RecordedCode,
    RecordedCollective,
    RecordedCount,
    RecordedFrame,
    RecordedMemory,
    RecordedMesh,
    RecordedPropagation,
    RecordedSpread,
    RecordedStart,
    RecordedTensor,
)
from sdy_jax.plan.record.record import PlanRecord
from sdy_jax.plan.record.recorded_memory import host_memory, locations_again, memory_record, phases_of
from sdy_jax.plan.record.recorded_ops import CollectiveRecords, OpRecords, PipelineRecords, key_of, ops_in, tried
from sdy_jax.plan.record.recorded_plan import (
    RecordedAgain,
    RecordedAutomatic,
    RecordedChange,
    RecordedComparedMesh,
    RecordedInParts,
    RecordedLayouts,
    RecordedLocalSort,
    RecordedMark,
    RecordedMeasured,
    RecordedNote,
    RecordedNotHeld,
    RecordedPadding,
    RecordedReason,
    RecordedRecomputed,
    RecordedTime,
)
from sdy_jax.plan.record.recorded_time import roofline_record, timeline_record, with_host
from sdy_jax.plan.stages import input_names
from sdy_jax.shardy.propagation.explanations import Write, has_axis
from sdy_jax.shardy.propagation.worklist import NO_VALUE, FunctionResult, ValueIds

# Arguments, results, and what the user wrote in between, as plain data.

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


def user_statements(traced: Program, places: Places) -> Iterator[RecordedAnnotation]:
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


# The user's program by its lines.


def code_of(module: ir.Operation, places: Places) -> tuple[RecordedCode, ...]:
    """The ops of a module before it is partitioned, by the lines at which they stand: what jax calls them, and how many
    there are."""
    found: dict[tuple[RecordedFrame, ...], Counter[str]] = {}
    for op in pre_order(main_function(module)):
        place = places.of(op.location)
        if place.primitive and not op.name.startswith("sdy."):  # those are the annotations
            found.setdefault(place.frames, Counter())[place.primitive] += 1
    return tuple(
        RecordedCode(frames, tuple(RecordedCount(name, count) for name, count in names.items()))
        for frames, names in found.items()
    )


# The record of a plan.

_OPTIONS = ("optimize_collectives", "uneven", "layouts", "constraints", "memory", "recompute")


def record_of(plan: Answers) -> PlanRecord:
    """The whole of a plan as plain data."""
    program, places = plan.program, Places(plan.name)
    tensors, ops = _ops(plan, places)
    border, count = BorderRecords(plan, tensors), len(plan.constants)
    arguments = border.arguments()
    records = CollectiveRecords(program.mesh, plan.costs, places, tensors, ops)
    collectives = tuple(records.of(plan.collectives, plan.totals.counted))
    again = locations_again(plan)
    phases = phases_of(ops, again) if ops is not None else {}
    planned, timeline, results = plan.planned_with, timeline_record(plan, ops, phases), border.results()
    made = tuple(ops.ops(plan.work_by_op, plan.costs)) if ops is not None else ()
    values = tuple(ops.values(plan.stages["propagated"])) if ops is not None else ()
    host = tuple(host_memory(program, arguments[count:], results, values, made))
    return PlanRecord(
        name=plan.name,
        headline=plan.headline,
        mesh=_mesh(plan),
        line=frame_of(plan.source),
        versions=versions(),
        options=tuple(_options(planned.policy)) if planned is not None else (),
        arguments=tuple(arguments[count:]),
        closed_over=tuple(arguments[:count]),
        results=tuple(results),
        annotations=tuple(user_statements(program.with_module(plan.stages["traced"]), places)),
        code=code_of(plan.stages["imported"], places) if ops is not None else (),
        collectives=collectives,
        ops=made,
        values=values,
        memory=_memory(plan, ops, phases, again) if ops is not None else None,
        time=_time(plan),
        notes=tuple(map(_note, plan.notes)),
        dear=tuple(_note(note) for note in plan.dear_constraints if note.op != RESULTS),
        layouts=_layouts(plan, plan.layouts, tensors) if plan.layouts is not None else None,
        automatic=_automatic(plan),
        padding=tuple(RecordedPadding(v.type, short_source(v.source), v.bytes) for v in plan.padding),
        wire_bytes=plan.wire_bytes,
        known=plan.totals.known,
        flops=flops(plan.work),
        repeated_flops=plan.repeated_flops,
        fingerprint=fingerprint_of(plan.program.mesh, plan.collectives),
        recomputed=_recomputed(plan.recomputed) if plan.recomputed is not None else None,
        meshes=tuple(_meshes(plan)),
        blocked=tuple(map(_in_parts, plan.blocked)),
        local_sorts=tuple(RecordedLocalSort(s.rows, s.axes, short_source(s.line)) for s in plan.local_sorts),
        pipelines=tuple(PipelineRecords(plan, places, ops, collectives).all()) if ops is not None else (),
        tried=tuple(tried(plan.decided)),
        timeline=with_host(timeline, host, plan.costs),
        roofline=roofline_record(plan, timeline),
        host=host,
    )


def versions() -> tuple[str, ...]:
    """Of sdy_jax and jax, as records say them."""
    return f"sdy_jax {__version__}", f"jax {jax.__version__}"


def linked_collectives(plan: Answers) -> tuple[list[Op], list[tuple[CollectiveRecord, RecordedCollective]]]:
    """The ops of a partitioned program, and its collectives one by one as they were and as data, which refers to the
    ops by their numbers."""
    places = Places(plan.name)
    tensors, ops = _ops(plan, places)
    records = CollectiveRecords(plan.program.mesh, plan.costs, places, tensors, ops)
    singles = [one for record in plan.collectives for one in record.members or (record,)]
    return ops.order if ops is not None else [], list(zip(singles, records.of(singles, ()), strict=True))


def _ops(plan: Answers, places: Places) -> tuple[Tensors, OpRecords | None]:
    """What makes records of tensors and of ops; a program on local arrays has no ops."""
    program = plan.program
    if "partitioned" not in plan.stages:
        return Tensors(program.mesh_name, {program.mesh_name: program.mesh}), None
    tensors = Tensors(program.mesh_name, plan.graph.meshes)
    return tensors, OpRecords(plan.graph, tensors, Names(plan.graph, places, input_names(program)))


def _memory(plan: Answers, ops: OpRecords, phases: Mapping[Op, str], again: frozenset[str]) -> RecordedMemory:
    planned = plan.planned_with
    target, available = (Target(), 0.0) if planned is None else (planned.target, planned.available)
    return memory_record(ops, phases, again, target, available)


def _recomputed(found: Recomputed) -> RecordedRecomputed:
    values = (
        RecordedNotHeld(type_text(each.dtype, each.shape, None), short_source(each.source), each.bytes)
        for each in found.values
    )
    ops = (RecordedAgain(each.op.rpartition(".")[2], short_source(each.source), each.flops) for each in found.ops)
    return RecordedRecomputed(tuple(values), tuple(ops), found.bytes)


def _in_parts(found: InParts) -> RecordedInParts:
    type_ = type_text(found.dtype, found.shape, None)
    return RecordedInParts(type_, short_source(found.source), found.dim, found.parts, found.bytes)


def _mesh(plan: Answers) -> RecordedMesh:
    mesh = plan.program.mesh
    return RecordedMesh(_axes(mesh), mesh.device_ids, plan.device_kind)


def _axes(mesh: Mesh) -> tuple[RecordedAxis, ...]:
    return tuple(RecordedAxis(axis.name, axis.size) for axis in mesh.axes)


def _meshes(plan: Answers) -> Iterator[RecordedComparedMesh]:
    best = min(plan.meshes, key=lambda each: each.rank, default=None)
    for each in plan.meshes:
        name, time = str(RecordedMesh(_axes(each.mesh))), each.time.total if each.time is not None else None
        yield RecordedComparedMesh(name, time, each.wire_bytes, each.peak, each.fits, each is best)


def _options(policy: Policy) -> Iterator[str]:
    defaults = {field.name: field.default for field in fields(Policy)}
    for name in _OPTIONS:
        value = getattr(policy, name)
        if value != defaults[name]:
            yield f"{name}={value!r}"


def _time(plan: Answers) -> RecordedTime:
    time = plan.time
    return RecordedTime(time.compute, time.communication, time.hidden, time.unit, plan.costs.origin)


def _note(note: Note) -> RecordedNote:
    library = short_source(note.library) if note.library else ""
    return RecordedNote(note.op, short_source(note.source), note.message, library, note.scope)


def _layouts(plan: Answers, choice: LayoutChoice, tensors: Tensors) -> RecordedLayouts:
    found: dict[tuple[str, str, str, str], list[ChangedLayout]] = {}
    for change in choice.changed:
        key = *_types(change, tensors), change.stated, short_source(change.source)
        found.setdefault(key, []).append(change)
    changed = [_change(*key, each) for key, each in found.items()]
    costs = choice.cost, choice.baseline_cost, choice.sent, choice.baseline_sent
    bound = None if plan.findings.bound is None else min(choice.sent, plan.findings.bound)
    beside = choice.exposed, choice.baseline_exposed, choice.baseline_held
    return RecordedLayouts(*costs, bound, tuple(changed), plan.findings.repeating, *beside)


def _change(chosen: str, baseline: str, stated: str, line: str, alike: Sequence[ChangedLayout]) -> RecordedChange:
    held = sum(math.prod(each.shape) * itemsize(each.dtype) for each in alike)
    before, after = alike[0].baseline, alike[0].chosen
    unused = {axis.name for dim, axes in enumerate(before.axes) for axis in axes if not has_axis(after, dim, axis)}
    return RecordedChange(chosen, baseline, stated, line, held, len(alike), tuple(sorted(unused)))


def _types(change: ChangedLayout, tensors: Tensors) -> tuple[str, str]:
    return (
        tensors.type(change.dtype, change.shape, change.chosen),
        tensors.type(change.dtype, change.shape, change.baseline),
    )


def _automatic(plan: Answers) -> RecordedAutomatic | None:
    automatic = plan.automatic
    if automatic is None:
        return None
    arguments, named = plan.input_specs
    stated = [f"in_shardings={pasted(arguments, 2)}"] if automatic.arguments and arguments else []
    stated += [f"{name}: {pasted(specs, 2)}" for name, specs in named.items() if automatic.arguments]
    stated += [f"out_shardings={pasted(plan.output_specs, 2)}"] if automatic.results else []
    both = {"chosen": automatic.chosen, **automatic.usual}
    measured = [RecordedMeasured(name, each.cost, each.sent, each.peak) for name, each in both.items()]
    limit = automatic.limit if math.isfinite(automatic.limit) else None
    return RecordedAutomatic(tuple(stated), tuple(measured), limit)


# The steps of propagation as plain data, over the values of the partitioned program.


def steps_of(plan: Answers) -> RecordedPropagation:
    """How propagation gave the values of a plan their axes; it runs once more for that."""
    program, graph = plan.program, plan.graph
    places, tensors, inputs = Places(plan.name), Tensors(program.mesh_name, graph.meshes), input_names(program)
    ops = OpRecords(graph, tensors, Names(graph, places, inputs))
    names = _names(plan.explanation, ops, inputs)
    return _StepRecords(plan.explanation, names, [v.path for v in plan.results], places, tensors).propagation()


_MOST_OPS = 4000
"""Ops up to which a page says what layouts save. Guessed, as for what a plan says unasked: its model is made again."""


def reasons_for_layouts(plan: Answers) -> tuple[RecordedReason, ...]:
    """Why the values of a plan have other layouts than op by op; of large programs nothing."""
    if plan.layouts is None or not plan.layouts.chosen or len(plan.graph.ops) > _MOST_OPS:
        return ()
    arguments, results = ([value.path for value in side] for side in ([*plan.constants, *plan.arguments], plan.results))
    paths = {"argument": arguments, "result": results}

    def marked(mark: Mark) -> RecordedMark:
        line, what = mark
        return RecordedMark("", paths[line][what]) if isinstance(what, int) else RecordedMark(short_source(line), what)

    return tuple(
        RecordedReason(tuple(sorted(map(marked, marks), key=str)), str(each.saves), str(each.costs), each.times)
        for marks, each in plan.reasons()
        if marks and each.saves.cost > each.costs.cost
    )


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
