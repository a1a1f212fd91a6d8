"""What recomputation costs and saves: prices of ops and values, and a minimum cut per segment and multiplier."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jax.extend.mlir import ir

from sdy_jax.ir.custom_ops import AFTER
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.jax_shardings import type_text
from sdy_jax.ir.locations import place_of
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.planner.facts.fusion import moves
from sdy_jax.lowering.planner.facts.loops import executions
from sdy_jax.lowering.planner.problem.op_problem import Decision, flops_per_operation, own_time, work_done
from sdy_jax.lowering.planner.report import NotHeld, RanAgain
from sdy_jax.lowering.planner.rewrites.forward_loops import ForwardLoop, forward_loops, run_trips_again
from sdy_jax.lowering.planner.rewrites.segments import Segment, Stretch, can_run_again
from sdy_jax.lowering.planner.search.partitioned_program import PartitionedProgram
from sdy_jax.lowering.targets.family import Arrays
from sdy_jax.shardy.propagation.data_flow import edges_of

if TYPE_CHECKING:
    from scipy.sparse import csr_array

# What it costs to run ops again, and what values take on a device, by a partitioned copy of the program.


class ProgramPrices:
    """Times and bytes of a program's ops and values.

    Args:
        graph: the program before it is partitioned.
        trial: a copy of it, partitioned.
        arrays: how arrays lie on a device.
    """

    def __init__(self, graph: Graph, trial: PartitionedProgram, arrays: Arrays):
        self._graph, self._trial, self._placed = graph, trial, trial.placed
        self._arrays = arrays
        self._number = {op: number for number, op in enumerate(graph.ops)}

    def seconds(self, op: Op) -> float:
        """The time of an op in all executions: its own work, that in its regions, and what is sent for both."""
        return sum([self._work(inner) + self._sent.get(inner.mlir.location, 0.0) for inner in op.walk()])

    def flops(self, op: Op) -> float:
        """The floating-point operations that a device performs for an op in all executions, as people count them."""
        decided = ((inner, self._decision(inner)) for inner in op.walk())
        return sum([self._operations(o) * flops_per_operation(o, d.kind) for o, d in decided if d is not None])

    def bytes_of(self, value: Value) -> float:
        """The bytes of a value on a device, in the layout in which it is made."""
        return self._bytes(value, self.layout_of(value))

    def layout_of(self, value: Value) -> TensorSharding | None:
        """The layout in which a value is made; that which is stored, where the baseline says nothing."""
        return self._layouts.get(value, value.sharding)

    @property
    def peak(self) -> Op:
        """The op of the program while which most is held; its main function, if that is arguments and results alone."""
        return self._graph.ops[self._trial.live.argmax().item()]

    def live_at(self, op: Op) -> float:
        """The bytes that are live on a device while an op runs, arguments and results included."""
        return float(self._trial.live[self._number[op]])

    def bytes_at_peak(self, ops: Collection[Op]) -> float:
        """The bytes on a device that are live at the peak and come from some ops of the program, moved or not."""
        numbers, wanted = self._placed.remaining, {self._number[op] for op in ops}
        makers = ((_maker(live.value), live.bytes) for live in self._trial.peak.live)
        return sum([size for op, size in makers if op is not None and numbers.get(op.mlir) in wanted])

    def taken_bytes(self, op: Op, index: int) -> float:
        """The bytes of an operand on a device, in the layout in which an op takes it."""
        decision, value = self._decision(op), op.operands[index]
        return self.bytes_of(value) if decision is None else self._bytes(value, decision.shardings[index])

    def _bytes(self, value: Value, sharding: TensorSharding | None) -> float:
        if value.shape is None:
            return math.inf
        shape = value.shape if sharding is None else sharding.local_shape(value.shape, self._placed.mesh)
        return self._arrays.bytes(shape, value.itemsize)

    def _decision(self, op: Op) -> Decision | None:
        return self._placed.layouts.decided.get(self._number[op])

    def _work(self, op: Op) -> float:
        decision = self._decision(op)
        own = 0.0 if decision is None else self._own_time(decision) * executions(op).estimate
        return own or self._operations(op)

    def _own_time(self, decision: Decision) -> float:
        return own_time(decision.kind, decision.shardings, self._trial.setting.costs, self._placed.mesh)

    def _operations(self, op: Op) -> float:
        decision = self._decision(op)
        if decision is None:
            return 0.0
        return work_done(decision.kind, decision.shardings, self._placed.mesh).operations * executions(op).estimate

    @cached_property
    def _sent(self) -> dict[ir.Location, float]:
        """The time of what is sent in all executions, by the location of the op that caused it."""
        found = dict[ir.Location, float]()
        costs, mesh = self._trial.setting.costs, self._placed.mesh
        for record in self._placed.report.collectives:
            time = record.sending_time(costs, mesh) * record.estimated_times
            found[record.location] = found.get(record.location, 0.0) + time
        return found

    @cached_property
    def _layouts(self) -> dict[Value, TensorSharding]:
        """The layouts in which values are made; where the baseline says nothing, those that are stored."""
        found = dict[Value, TensorSharding]()
        for op in self._graph.ops:
            found.update(zip(op.results, self._made(op, found), strict=False))
            found.update(self._carried(op))
        return found

    def _made(self, op: Op, known: dict[Value, TensorSharding]) -> Iterator[TensorSharding]:
        layouts, number = self._placed.layouts, self._number[op]
        count = len(op.operands)
        if number in layouts.decided:
            yield from layouts.decided[number].shardings[count:]
        elif number in layouts.fixed:
            yield from layouts.fixed[number][count:]
        elif number in layouts.passed and op.operands[0] in known:
            yield known[op.operands[0]]

    def _carried(self, op: Op) -> Iterator[tuple[Value, TensorSharding]]:
        edges = self._placed.layouts.edges.get(self._number[op])
        for edge, carried in zip(edges_of(op), edges or (), strict=False):
            yield from ((value, carried.targets) for value in edge.targets)


def _maker(value: Value) -> Op | None:
    """The op that makes a value, before it is moved."""
    op = value.defining_op
    while op is not None and op.operands and (op.name.startswith("sdy.") or op.key == AFTER):
        op = op.operands[0].defining_op
    return op


# Which ops of a segment run again, at a Lagrange multiplier of memory: a minimum cut.
#
# A node per op says whether it runs again, one per value whether it is there later. What is needed is there. If an op
# runs again, what it takes of its part is there; a value is there because its op runs again, which costs the op's
# time, or because it is held, which costs its bytes.

_LARGEST = 1e300
"""Given by floats: times what is nothing, it is nothing."""

_INFINITE = 2**29
_FINITE = 2**28
"""What all finite capacities together are. Given: flows are 32-bit integers, and what is infinite has to be more."""


def ops_to_run_again(
    segment: Segment, seconds: Callable[[Op], float], held_bytes: Callable[[Value], float], multiplier: float
) -> frozenset[Op]:
    """The ops that run again, where time and what is held together cost least; the fewest of them.

    Args:
        segment: the ops, and what is needed of them.
        seconds: the time of an op; infinite where it may not run again.
        held_bytes: what a value takes if it is held, where nothing holds it yet.
        multiplier: of memory, in seconds per byte that is held.
    """
    edges = _Edges()
    values = dict.fromkeys(segment.needed)
    for op in segment.ops:
        taken = [value for value in segment.taken(op) if segment.is_near(value, op)]
        values.update(dict.fromkeys(taken))
        edges.add(op, _SINK, seconds(op))
        for value in taken:
            edges.add(op, value, math.inf)
    made = set(segment.ops)
    for value in values:
        size = segment.needed[value] if value in segment.needed else held_bytes(value)
        edges.add(value, value.owner if value.owner in made else _SINK, multiplier * size)
    for value in segment.needed:
        edges.add(_SOURCE, value, math.inf)
    reached = edges.reached()
    return frozenset(op for op in segment.ops if edges.numbers[op] in reached)


_SOURCE, _SINK = "source", "sink"


class _Edges:
    """A network, whose nodes are numbered as they come."""

    def __init__(self) -> None:
        self.numbers: dict[object, int] = {_SOURCE: 0, _SINK: 1}
        self._edges: dict[tuple[int, int], float] = {}

    def add(self, start: object, end: object, capacity: float) -> None:
        pair = self._number(start), self._number(end)
        self._edges[pair] = self._edges.get(pair, 0.0) + capacity

    def _number(self, node: object) -> int:
        return self.numbers.setdefault(node, len(self.numbers))

    def reached(self) -> frozenset[int]:
        """The nodes on the source's side of a minimum cut, as few as may be."""
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow  # slow to import, and rarely needed

        capacities = self._capacities()
        flow = maximum_flow(capacities, 0, 1).flow
        left = capacities - flow
        left.data = np.maximum(left.data, 0)
        left.eliminate_zeros()
        return frozenset(breadth_first_order(left, 0, return_predecessors=False).tolist())

    def _capacities(self) -> csr_array:
        """Capacities as integers."""
        from scipy.sparse import csr_array

        given = np.array(list(self._edges.values()))
        finite = np.isfinite(given)
        scale = _FINITE / max(given[finite].sum(), math.ulp(0.0))
        whole = np.full(len(given), _INFINITE, np.int32)
        whole[finite] = np.ceil(given[finite] * min(scale, _LARGEST)).astype(np.int32)
        count = len(self.numbers)
        return csr_array(
            (whole, tuple(np.array(list(self._edges), int).reshape(-1, 2).T)), (count, count), dtype=np.int32
        )


# Segments of a program with prices: what runs again at a multiplier of memory, and what that saves.

Mark = tuple[str, str]
"""The line and the type, without axes, of a value."""

_ANEW = 1.001
"""What is not held yet counts a little more: of a value and its entry in a stack that is there, that stays. Guessed:
anything above 1 breaks the tie."""


class Rerun(NamedTuple):
    """How ops of a segment run again.

    `may_run`: whether an op may. `gone`: what is not held where a needed value is not. `run`: lets ops run again in the
    program.
    """

    may_run: Callable[[Op], bool]
    gone: Callable[[Value, float], NotHeld]
    run: Callable[[Collection[Op]], None]


class PricedSegment:
    """A segment, with times and bytes for all executions together.

    Args:
        segment: the ops, and what is needed of them.
        prices: of ops and values.
        now: the bytes that are held now: the others are computed of that where they are needed, by one kernel.
        entries: how many of a value are held.
        rerun: how ops run again here.
    """

    def __init__(
        self,
        segment: Segment,
        prices: ProgramPrices,
        now: float,
        entries: int,
        rerun: Rerun,
    ):
        self._segment, self._prices, self.bytes = segment, prices, now
        self._entries, self._gone, self.run = entries, rerun.gone, rerun.run
        able = {op: rerun.may_run(op) and can_run_again(op) for op in segment.ops}
        self._times = {op: prices.seconds(op) if is_able else math.inf for op, is_able in able.items()}
        self._known: dict[float, frozenset[Op]] = {}

    @cached_property
    def seconds(self) -> float:
        """The time of all ops that may run again."""
        return sum([time for time in self._times.values() if time < math.inf])

    def again(self, multiplier: float) -> frozenset[Op]:
        """The ops that run again at a multiplier of memory."""
        if multiplier not in self._known:
            self._known[multiplier] = ops_to_run_again(
                self._segment, self._times.__getitem__, self._held_bytes, multiplier
            )
        return self._known[multiplier]

    def saved(self, again: frozenset[Op]) -> float:
        """The bytes that are held less."""
        needed, held = self._segment.needed, self._segment.held(again)
        return self.bytes - sum([needed[value] if value in needed else self._held_bytes(value) for value in held])

    def _held_bytes(self, value: Value) -> float:
        return _ANEW * self._entries * self._prices.bytes_of(value)

    def not_held(self, again: frozenset[Op]) -> list[NotHeld]:
        """What is gone."""
        held = set(map(_before_moves, self._segment.held(again)))
        needed = self._segment.needed.items()
        return [self._gone(value, size) for value, size in needed if _before_moves(value) not in held]

    def ran(self, again: frozenset[Op]) -> list[RanAgain]:
        """The ops that run again and take time, in order."""
        ran = [op for op in self._segment.ops if op in again and self._times[op] > 0]
        return [RanAgain(op.title, op.mlir.location, self._prices.flops(op), self._times[op]) for op in ran]


def priced_segments(
    graph: Graph, prices: ProgramPrices, mesh_name: str, kept: Collection[Mark], in_parts: bool
) -> Iterator[PricedSegment]:
    """The segments of a program of which ops could run again, in the order in which they can be rewritten.

    Args:
        graph: the program.
        prices: of its ops and values.
        mesh_name: the program's mesh.
        kept: the marks of values that are not recomputed.
        in_parts: what is recomputed is so part by part, of what passes between them.
    """
    loops = forward_loops(graph)
    if prices.peak is not graph.main:
        stretch = Stretch(graph, prices.peak.ancestor_in(graph.main.blocks[0]), mesh_name)
        yield _of_stretch(stretch, prices, loops, kept, in_parts)
    yield from priced_loops(loops, prices, kept)


def priced_loops(
    loops: Iterable[ForwardLoop], prices: ProgramPrices, kept: Collection[Mark]
) -> Iterator[PricedSegment]:
    """Those of them that are bodies of loops."""
    for forward in loops:
        yield _of_loop(forward, prices, kept)


def _is_kept(op: Op, kept: Collection[Mark]) -> bool:
    """Whether an op makes a value that is not recomputed."""
    if not kept:
        return False
    line = place_of(op.mlir.location).line
    return any((line, type_text(value.dtype, value.shape, None)) in kept for value in op.results)


def _of_stretch(
    stretch: Stretch, prices: ProgramPrices, loops: Collection[ForwardLoop], kept: Collection[Mark], in_parts: bool
) -> PricedSegment:
    apart = {op for forward in loops for op in (forward.loop, *map(stretch.op_around, forward.reads))}
    segment = stretch.segment(lambda value: 0.0 if value.owner in apart else prices.bytes_of(value), in_parts)

    def gone(value: Value, size: float) -> NotHeld:
        assert isinstance(value.owner, Op)
        return NotHeld(value.dtype, value.shape or (), size, value.owner.mlir.location)

    def run(again: Collection[Op]) -> None:
        stretch.run_again(segment, again)

    def may_run(op: Op) -> bool:
        return op not in apart and not _is_kept(op, kept)

    now = prices.bytes_at_peak([op for op in segment.ops if op not in apart])
    return PricedSegment(segment, prices, now, 1, Rerun(may_run, gone, run))


def _of_loop(forward: ForwardLoop, prices: ProgramPrices, kept: Collection[Mark]) -> PricedSegment:
    sizes = dict[Value, float]()
    for stack in forward.stacks:
        size = forward.trips * prices.taken_bytes(stack.update, 1)
        sizes[stack.entry] = sizes.get(stack.entry, 0.0) + size
    segment, stacks = forward.segment(sizes), forward.entries

    def gone(entry: Value, size: float) -> NotHeld:
        update = stacks[entry].update
        made = _before_moves(entry).defining_op or update
        return NotHeld(entry.dtype, update.results[0].shape or (), size, made.mlir.location)

    def run(again: Collection[Op]) -> None:
        run_trips_again(forward, segment, again)

    def may_run(op: Op) -> bool:
        return not forward.depends_on_place(op) and not _is_kept(op, kept)

    return PricedSegment(segment, prices, sum(sizes.values()), forward.trips, Rerun(may_run, gone, run))


def _before_moves(value: Value) -> Value:
    """The value of which one has all elements, in another shape."""
    op = value.defining_op
    while op is not None and moves(op) and len(op.operands) == 1 and _count(op.operands[0]) == _count(value):
        value = op.operands[0]
        op = value.defining_op
    return value


def _count(value: Value) -> int:
    return math.prod(value.shape or ())
