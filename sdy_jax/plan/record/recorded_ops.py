"""Ops, values, memory, collectives and pipelines of a partitioned program as plain data."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.annotate.pipeline_schedules import Kind, Mark, Timetable, mark_in, pipeline_schedule, row_scope
from sdy_jax.ir.collectives import BY_STRIPS, KINDS, ops_of
from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.jax_shardings import axis_name
from sdy_jax.ir.locations import place_of, short_source
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.operations import manual_axes
from sdy_jax.ir.stored_shardings import list_of
from sdy_jax.lowering.ops.collectives.written import device_pairs
from sdy_jax.lowering.ops.emit import value_shardings
from sdy_jax.lowering.ops.products import pace
from sdy_jax.lowering.planner.facts.loops import Executions, executions
from sdy_jax.lowering.planner.memory.buffers import LocalBytes
from sdy_jax.lowering.planner.report import CollectiveRecord
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.plan.estimates import Decided, Work
from sdy_jax.plan.questions import Answers
from sdy_jax.plan.record.names import Names, Places, Tensors
from sdy_jax.plan.record.program import (
    RecordedBranch,
    RecordedCollective,
    RecordedKernel,
    RecordedOp,
    RecordedPipeline,
    RecordedRow,
    RecordedTried,
    RecordedValue,
)
from sdy_jax.shardy.propagation.data_flow import is_data_flow

# Ops, values and memory of a partitioned program as plain data.


class OpRecords:
    """The ops of a partitioned program in order; those of a reduction's body, and such, are left out.

    Attributes:
        graph: the program.
        order: its ops.
        index: their numbers.
        names: of its values.
    """

    def __init__(self, graph: Graph, tensors: Tensors, names: Names):
        self.graph, self.names, self._tensors = graph, names, tensors
        self.order = list(ops_in(graph.main.blocks[0]))
        self.index = {op: number for number, op in enumerate(self.order)}
        self._runs: dict[Block, Executions] = {}
        for op in self.order:
            names.name(op)

    def ops(self, work: Mapping[Op, Work], costs: CostModel) -> Iterator[RecordedOp]:
        """The ops, with what they compute, and how long kernels take."""
        for op in self.order:
            made, done = self._op(op), work.get(op)
            if done is None:
                yield made
            else:
                yield replace(
                    made,
                    flops=done.flops,
                    repeated=done.repeated,
                    alike=done.alike,
                    is_choice=done.is_choice,
                    kernel=_kernel(op, done, costs),
                )

    def _op(self, op: Op) -> RecordedOp:
        """The op without what it computes."""
        parent, name, runs = op.parent if op.parent in self.index else None, self.names.of, self.runs(op)
        return RecordedOp(
            op.name,
            self.names.place(op),
            tuple(map(name, op.operands)),
            tuple(map(name, op.results)),
            self.index[parent] if parent is not None else None,
            parent.blocks.index(op.block) if parent is not None and op.block is not None else 0,
            times=runs.times,
            times_known=runs.known,
        )

    def runs(self, op: Op) -> Executions:
        """How often an op runs."""
        assert op.block is not None
        if op.block not in self._runs:
            self._runs[op.block] = executions(op)
        return self._runs[op.block]

    def values(self, propagated: ir.Operation) -> Iterator[RecordedValue]:
        """The values, with what propagation proposed for them."""
        shardings, proposed = value_shardings(self.graph), _Proposed(propagated, self._tensors)
        for value in self._values():
            tensor = self._tensors.of(value.dtype, value.shape, shardings.get(value))
            op = value.defining_op
            inside = op if op is not None else value.owner.parent if isinstance(value.owner, Block) else None
            made = self.index.get(inside) if inside is not None else None
            yield RecordedValue(self.names.of(value), tensor, proposed.of(value), made)

    def _values(self) -> Iterator[Value]:
        yield from self.graph.arguments
        for op in self.order:
            yield from op.results
            if is_data_flow(op):
                yield from (value for block in op.blocks for value in block.arguments)


def ops_in(block: Block) -> Iterator[Op]:
    """The ops of a block, and of those in the regions of its loops and branches, in order."""
    for op in block.ops:
        yield op
        if is_data_flow(op):
            for inner in op.blocks:
                yield from ops_in(inner)


def _kernel(op: Op, done: Work, costs: CostModel) -> RecordedKernel | None:
    """What a kernel takes; None of other ops."""
    own = done.kernel
    if own is None:
        return None
    seconds = costs.work_time(own.operations, own.bytes) if costs.unit == "seconds" else 0.0
    return RecordedKernel(op.title, own.bytes, seconds, own.basis)


class _Proposed:
    """The layouts after propagation, of values that are found in the partitioned program by op, location and type."""

    def __init__(self, propagated: ir.Operation, tensors: Tensors):
        self._graph = Graph(propagated)
        shardings = value_shardings(self._graph)
        self._arguments = [tensors.type(v.dtype, v.shape, shardings.get(v)) for v in self._graph.arguments]
        self._found: dict[Key, deque[str]] = {}
        for op in ops_in(self._graph.main.blocks[0]):
            for value in op.results:
                type_ = tensors.type(value.dtype, value.shape, shardings.get(value))
                self._found.setdefault(key_of(op, value), deque()).append(type_)

    def of(self, value: Value) -> str:
        """The proposed type; empty where the planner made the value."""
        op = value.defining_op
        if op is None:
            is_input = isinstance(value.owner, Block) and value.owner.parent.name == "func.func"
            return self._arguments[value.index] if is_input else ""
        found = self._found.get(key_of(op, value))
        if not found:
            return ""
        return found.popleft() if len(found) > 1 else found[0]  # ops that are made twice come last


Key = tuple[str, ir.Attribute, int, ir.Type]
"""What a value is found by in another module of the same program: op, location, number and type."""


def key_of(op: Op, value: Value) -> Key:
    """The key of a result of an op."""
    return op.name, op.mlir.location.attr, value.index, value.type


def by_location(ops: Mapping[Op, int]) -> dict[ir.Attribute, list[Op]]:
    """The ops by their locations."""
    found: dict[ir.Attribute, list[Op]] = {}
    for op in ops:
        found.setdefault(op.mlir.location.attr, []).append(op)
    return found


# The collectives of a plan as plain data, each with the op that it is and the one that it serves.

_KINDS = ops_of((*KINDS, BY_STRIPS))


class CollectiveRecords:
    """Makes records of collectives.

    Args:
        mesh, costs, places, tensors: of the plan.
        ops: the partitioned program; None of a program on local arrays.
    """

    def __init__(self, mesh: Mesh, costs: CostModel, places: Places, tensors: Tensors, ops: OpRecords | None = None):
        self._mesh, self._costs, self._places, self._tensors, self._ops = mesh, costs, places, tensors, ops
        self._at = by_location(ops.index) if ops is not None else {}
        self._left = _Collectives(ops.order if ops is not None else ())

    def of(
        self, records: Sequence[CollectiveRecord], counted: Sequence[CollectiveRecord]
    ) -> Iterator[RecordedCollective]:
        """The records of a plan; `counted` are those in the largest branches."""
        kept = set(map(id, counted))
        for record in records:
            yield self._one(record, id(record) in kept)

    def _one(self, record: CollectiveRecord, counts: bool) -> RecordedCollective:
        made = self._said(record, counts)
        if not record.members:
            return self._at_op(made, record)
        members = [self._one(member, counts) for member in record.members]
        alone = sum(member.time for member in members)
        share = made.time / alone if alone else 0.0  # they start once
        return replace(made, members=tuple(replace(member, time=share * member.time) for member in members))

    def _said(self, record: CollectiveRecord, counts: bool) -> RecordedCollective:
        """What is said of it, without the op that it is."""
        return RecordedCollective(
            record.kind,
            tuple(map(axis_name, record.axes)),
            record.detail,
            record.moved.reduction,
            "" if record.members else self._tensors.type(record.dtype, record.shape, record.result),
            record.dtype,
            record.shape,
            record.wire_bytes,
            self._places.of(record.location),
            record.cause,
            record.times,
            record.times_known,
            record.sending_time(self._costs, self._mesh),
            record.hidden,
            record.depth,
            tuple(RecordedBranch(*branch) for branch in record.branches),
            counts,
            record.origin,
            again=record.again,
            is_ahead=record.is_ahead,
            bucket=record.bucket,
            estimated_times=record.estimated_times,
        )

    def _at_op(self, made: RecordedCollective, record: CollectiveRecord) -> RecordedCollective:
        if self._ops is None:
            return made
        near = self._at.get(record.location.attr, [])
        op = self._left.take(record)
        if op is None:  # the op sends by itself
            return replace(made, serves=next((self._ops.index[o] for o in near if o.title == record.cause), None))
        name = self._ops.names.of
        served = self._served(op, [*near, *(user for user, _ in op.results[0].uses)], record)
        value, result = name(op.operands[0]), name(op.results[0])
        return replace(made, op=self._ops.index[op], value=value, result=result, serves=served)

    def _served(self, op: Op, near: Sequence[Op], record: CollectiveRecord) -> int | None:
        """The op that needed it: that one of its name which is nearest."""
        assert self._ops is not None
        index, here = self._ops.index, self._ops.index[op]
        found = [index[o] for o in near if o in index and o.title == record.cause]
        return min(found, key=lambda number: (abs(number - here), number), default=None)


class _Collectives:
    """The collective ops of a program, each of which one record is of."""

    def __init__(self, order: Sequence[Op]):
        self._exact: dict[object, list[Op]] = {}
        for op in order:
            if op.name in _KINDS and op.operands:
                self._exact.setdefault(_key(op), []).append(op)

    def take(self, record: CollectiveRecord) -> Op | None:
        """The first that is left of those that are like a record."""
        near = self._exact.get((record.kind, record.shape, str(record.result)), [])
        at = next((n for n, op in enumerate(near) if op.mlir.location == record.location), 0)
        return near.pop(at) if near else None


def _key(op: Op) -> object:
    kind = op.name.removeprefix("sdy.")
    value = op.results[0]
    return "collective_permute" if kind == BY_STRIPS else kind, value.shape, str(value.sharding)


def recorded_collectives(plan: Answers) -> list[RecordedCollective]:
    """The collectives of a plan that count, one by one, without the ops that they are."""
    mesh, name = plan.program.mesh, plan.program.mesh_name
    records = CollectiveRecords(mesh, plan.costs, Places(plan.name), Tensors(name, {name: mesh}))
    found = records.of(plan.collectives, plan.totals.counted)
    return [one for each in found for one in each.single if one.counted]


# The pipelines of a plan as plain data, found by what they write on their ops.

_MANUAL, _LOOP = "sdy.manual_computation", "stablehlo.while"
_CASE, _PERMUTE = "stablehlo.case", "stablehlo.collective_permute"

_KIND_OF_SCOPE = {row_scope(kind): kind for kind in Kind}

OpOfRow = tuple[Op, Kind]
"""An op, and the kind of the row that it is of."""


class PipelineRecords:
    """Makes records of pipelines.

    Args:
        plan: with a partitioned program.
        places, ops: of it.
        collectives: its collectives, each with the op that it is.
    """

    def __init__(self, plan: Answers, places: Places, ops: OpRecords, collectives: Sequence[RecordedCollective]):
        self._plan, self._places, self._ops = plan, places, ops
        self._local = LocalBytes(plan.graph)
        self._sending = {
            ops.order[one.op]: (one.time - one.hidden) * one.estimated_times
            for each in collectives
            for one in each.single
            if one.op is not None and one.counted
        }

    def all(self) -> Iterator[RecordedPipeline]:
        """Those of the plan."""
        for op in self._ops.order:
            mark = mark_in(str(op.mlir.location)) if op.name == _MANUAL else None
            if mark is not None and mark.axis in manual_axes(op) and not _is_inside(op, mark.axis):
                yield self._of(op, mark)

    def _of(self, region: Op, mark: Mark) -> RecordedPipeline:
        table, times = mark.table, executions(region).times
        ops = list(_ops_of_rows(region))
        durations, permutes = self._durations(ops, table), list(_permutes(ops))
        return RecordedPipeline(
            mark.schedule,
            mark.axis,
            mark.stages,
            mark.microbatches,
            mark.rounds,
            mark.layers,
            len(table.trips),
            table.bubble(durations or None),
            self._places.of(region.mlir.location),
            self._boundary_bytes(permutes, Kind.FORWARD),
            self._boundary_bytes(permutes, Kind.BACKWARD),
            self._sent(permutes) / times,
            tuple(durations.values()),
            sum(self._local.of(value) for value in _stacks(region, mark.axis)),
            max((self._carried(loop) for loop in _loops(region.blocks[0])), default=0.0),
            _held(mark),
            tuple(_groups(mark)),
            tuple(_rows(table)),
            times,
            self._ops.index[region],
        )

    def _boundary_bytes(self, permutes: Sequence[OpOfRow], kind: Kind) -> float:
        """What rows of a kind send in one trip: by one of the branches, where there are several."""
        found = defaultdict[Block | None, float](float)
        for op, of in permutes:
            if of is kind:
                found[op.block] += self._moved(op)
        return max(found.values(), default=0.0)

    def _sent(self, permutes: Sequence[OpOfRow]) -> float:
        """What the two devices exchange that exchange most."""
        found = defaultdict[frozenset[int], float](float)
        for op, _ in permutes:
            for pair in device_pairs(op, self._plan.program.mesh):
                found[frozenset(pair)] += executions(op).times * self._moved(op)
        return max(found.values(), default=0.0)

    def _moved(self, permute: Op) -> float:
        return self._local.of(permute.results[0])

    def _carried(self, loop: Op) -> float:
        body = loop.blocks[1]
        pairs = zip(body.arguments, body.terminator.operands, strict=True)
        return sum(self._local.of(argument) for argument, result in pairs if argument is not result)

    def _durations(self, ops: Sequence[OpOfRow], table: Timetable) -> Mapping[Kind, float]:
        """What a row of each kind takes by the cost model: products and the like, and what is sent inside of a stage.
        Nothing where some compute nothing that is known."""
        rows, found = [row.kind for row in table.rows], dict.fromkeys((row.kind for row in table.rows), 0.0)
        for top, kind in ops:
            if kind in found:
                found[kind] += sum(map(self._time, top.walk()))
        return {kind: time / rows.count(kind) for kind, time in found.items()} if all(found.values()) else {}

    def _time(self, op: Op) -> float:
        """What an op takes in all its runs."""
        done, costs, computing = self._plan.work_by_op.get(op), self._plan.costs, 0.0
        if done is not None and done.kernel is not None:
            computing = costs.work_time(done.kernel.operations, done.kernel.bytes) * done.runs.times
        elif done is not None:
            computing = costs.flop / 2 * done.flops * pace(op, costs) * done.runs.times
        return self._sending.get(op, 0.0) + computing


def _is_inside(op: Op, axis: str) -> bool:
    """Whether code around is manual on an axis: then the op is of a layer."""
    parent = op.parent
    while parent is not None and axis not in manual_axes(parent):
        parent = parent.parent
    return parent is not None


def _loops(block: Block) -> Iterator[Op]:
    return (op for op in block.ops if op.name == _LOOP)


def _ops_of_rows(region: Op) -> Iterator[OpOfRow]:
    """The ops of rows in a region: in the bodies of its loops, or of the loops in these."""
    pending = list(_loops(region.blocks[0]))
    while pending:
        for op in pending.pop(0).blocks[1].ops:
            if (kind := _kind(op)) is not None:
                yield op, kind
            elif op.name == _LOOP:
                pending.append(op)


def _permutes(ops: Sequence[OpOfRow]) -> Iterator[OpOfRow]:
    """What rows send, at once or in branches."""
    for top, kind in ops:
        inside = (op for block in top.blocks for op in block.ops) if top.name == _CASE else ()
        yield from ((op, kind) for op in (top, *inside) if op.name == _PERMUTE)


def _kind(op: Op) -> Kind | None:
    """The kind of the row that an op is of, which stands in the body of a segment's loop: the outermost scope that says
    one. Those around the pipeline are not on the name stack of a loop's body."""
    scopes = place_of(op.mlir.location).scope.split("/")
    return next((_KIND_OF_SCOPE[scope] for scope in scopes if scope in _KIND_OF_SCOPE), None)


def _stacks(region: Op, axis: str) -> Iterator[Value]:
    """What is split by stage, in the body: weights and, of a pass apart, what the pass before has kept."""
    shardings = list_of(region.mlir, "in_shardings")
    for value, sharding in zip(region.blocks[0].arguments, shardings, strict=True):
        if sharding is not None and sharding.axes and any(each.name == axis for each in sharding.axes[0]):
            yield value


def _held(mark: Mark) -> tuple[int, ...]:
    if Kind.BACKWARD not in mark.kinds:
        return ()
    return pipeline_schedule(mark.schedule, mark.stages, mark.microbatches, mark.rounds).held()


def _groups(mark: Mark) -> Iterator[str]:
    """The layers of each stage."""
    depth = -(-mark.layers // (mark.stages * mark.rounds))
    for stage in range(mark.stages):
        firsts = (depth * group for group in range(stage, mark.stages * mark.rounds, mark.stages))
        spans = [(first, min(first + depth, mark.layers) - 1) for first in firsts if first < mark.layers]
        yield ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _rows(table: Timetable) -> Iterator[RecordedRow]:
    for number, trip in enumerate(table.trips):
        for row in trip:
            microbatches = tuple(-1 if cell is None else cell.microbatch for cell in row.cells)
            rounds = tuple(0 if cell is None else cell.round for cell in row.cells)
            yield RecordedRow(number, row.kind.value, microbatches, rounds)


def tried(decided: Decided) -> Iterator[RecordedTried]:
    """The numbers of microbatches of which one was taken, and what plans with them take."""
    for each in decided.compared:
        numbers = tuple(one.taken for one in each.decisions)
        lines = tuple(short_source(one.line) for one in each.decisions)
        time = None if each.time is None else each.time.total
        yield RecordedTried(numbers, lines, time, each.peak, each.fits, each.decisions == decided.decisions)
