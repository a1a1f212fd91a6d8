"""The pipelines of a plan as plain data, found by what they write on their ops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from sdy_jax.annotate.pipeline_schedules import Kind, Mark, Table, mark_in, pipeline_schedule, scope_of
from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.ir.locations import place_of, short_source
from sdy_jax.ir.operations import manual_axes
from sdy_jax.ir.stored_shardings import list_of
from sdy_jax.lowering.ops.collectives.written import device_pairs
from sdy_jax.lowering.planner.facts.loops import executions
from sdy_jax.lowering.planner.memory.buffers import LocalBytes
from sdy_jax.plan.estimates import Decided
from sdy_jax.plan.questions import Answers
from sdy_jax.plan.record.program import RecordedCollective, RecordedPipeline, RecordedRow, RecordedTried
from sdy_jax.plan.recording.names import Places
from sdy_jax.plan.recording.ops import OpRecords

_MANUAL, _LOOP = "sdy.manual_computation", "stablehlo.while"
_CASE, _PERMUTE = "stablehlo.case", "stablehlo.collective_permute"

_KINDS = {scope_of(kind): kind for kind in Kind}

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
            ops.order[one.op]: (one.time - one.hidden) * one.times
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

    def _durations(self, ops: Sequence[OpOfRow], table: Table) -> Mapping[Kind, float]:
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
            computing = costs.flop / 2 * done.flops * done.runs.times
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
    return next((_KINDS[scope] for scope in scopes if scope in _KINDS), None)


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


def _rows(table: Table) -> Iterator[RecordedRow]:
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
