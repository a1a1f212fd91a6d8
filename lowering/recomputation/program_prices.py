"""What it costs to run ops again, and what values take on a device, by a partitioned copy of the program."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from functools import cached_property

from jax.extend.mlir import ir

from sdy_jax.ir.custom_ops import AFTER
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.lowering.analysis.trip_counts import executions
from sdy_jax.lowering.candidates.op_problem import Decision
from sdy_jax.lowering.candidates.op_work import own_time, work_done
from sdy_jax.lowering.targets.family import Arrays
from sdy_jax.lowering.whole_program.partitioned_program import PartitionedProgram
from sdy_jax.op_rules.dataflow import edges_of
from sdy_jax.representation.sharding import TensorSharding


class ProgramPrices:
    """Times and bytes of a program's ops and values.

    Args:
        graph: the program before it is partitioned.
        trial: a copy of it, partitioned.
        arrays: how arrays lie on a device.
    """

    def __init__(self, graph: Graph, trial: PartitionedProgram, arrays: Arrays):
        self._graph, self._trial, self._proposal = graph, trial, trial.proposal
        self._arrays = arrays
        self._number = {op: number for number, op in enumerate(graph.ops)}

    def seconds(self, op: Op) -> float:
        """The time of an op in all executions: its own work, that in its regions, and what is sent for both."""
        return sum([self._work(inner) + self._sent.get(inner.mlir.location, 0.0) for inner in op.walk()])

    def operations(self, op: Op) -> float:
        """The operations that a device performs for an op in all executions."""
        return sum([self._operations(inner) for inner in op.walk()])

    def bytes_of(self, value: Value) -> float:
        """The bytes of a value on a device, in the layout in which it is made."""
        return self._bytes(value, self.layout_of(value))

    def layout_of(self, value: Value) -> TensorSharding | None:
        """The layout in which a value is made; that which is stored, where the proposal says nothing."""
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
        numbers, wanted = self._proposal.remaining, {self._number[op] for op in ops}
        makers = ((_maker(live.value), live.bytes) for live in self._trial.peak.live)
        return sum([size for op, size in makers if op is not None and numbers.get(op.mlir) in wanted])

    def taken_bytes(self, op: Op, index: int) -> float:
        """The bytes of an operand on a device, in the layout in which an op takes it."""
        decision, value = self._decision(op), op.operands[index]
        return self.bytes_of(value) if decision is None else self._bytes(value, decision.shardings[index])

    def _bytes(self, value: Value, sharding: TensorSharding | None) -> float:
        if value.shape is None:
            return math.inf
        shape = value.shape if sharding is None else sharding.local_shape(value.shape, self._proposal.mesh)
        return self._arrays.bytes(shape, value.itemsize)

    def _decision(self, op: Op) -> Decision | None:
        return self._proposal.layouts.decided.get(self._number[op])

    def _work(self, op: Op) -> float:
        decision = self._decision(op)
        own = 0.0 if decision is None else self._own_time(decision) * executions(op).estimate
        return own or self._operations(op)

    def _own_time(self, decision: Decision) -> float:
        return own_time(decision.kind, decision.shardings, self._trial.setting.costs, self._proposal.mesh)

    def _operations(self, op: Op) -> float:
        decision = self._decision(op)
        if decision is None:
            return 0.0
        return work_done(decision.kind, decision.shardings, self._proposal.mesh).operations * executions(op).estimate

    @cached_property
    def _sent(self) -> dict[ir.Location, float]:
        """The time of what is sent in all executions, by the location of the op that caused it."""
        found = dict[ir.Location, float]()
        costs, mesh = self._trial.setting.costs, self._proposal.mesh
        for record in self._proposal.report.collectives:
            time = record.sending_time(costs, mesh) * record.estimated_times
            found[record.location] = found.get(record.location, 0.0) + time
        return found

    @cached_property
    def _layouts(self) -> dict[Value, TensorSharding]:
        """The layouts in which values are made; where the proposal says nothing, those that are stored."""
        found = dict[Value, TensorSharding]()
        for op in self._graph.ops:
            found.update(zip(op.results, self._made(op, found), strict=False))
            found.update(self._carried(op))
        return found

    def _made(self, op: Op, known: dict[Value, TensorSharding]) -> Iterator[TensorSharding]:
        layouts, number = self._proposal.layouts, self._number[op]
        count = len(op.operands)
        if number in layouts.decided:
            yield from layouts.decided[number].shardings[count:]
        elif number in layouts.fixed:
            yield from layouts.fixed[number][count:]
        elif number in layouts.passed and op.operands[0] in known:
            yield known[op.operands[0]]

    def _carried(self, op: Op) -> Iterator[tuple[Value, TensorSharding]]:
        edges = self._proposal.layouts.edges.get(self._number[op])
        for edge, carried in zip(edges_of(op), edges or (), strict=False):
            yield from ((value, carried.targets) for value in edge.targets)


def _maker(value: Value) -> Op | None:
    """The op that makes a value, before it is moved."""
    op = value.defining_op
    while op is not None and op.operands and (op.name.startswith("sdy.") or op.key == AFTER):
        op = op.operands[0].defining_op
    return op
