"""What the walk reports of each op: the collectives that it performs itself, and what could not be sharded."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.operations import module_meshes
from sdy_jax.lowering.candidates.op_problem import Decision
from sdy_jax.lowering.emission.wire_bytes import reduce_by_bytes, sent_at_border
from sdy_jax.lowering.insert.placement import Placement
from sdy_jax.lowering.insert.replication_notes import ReplicationNotes
from sdy_jax.lowering.interface.collective_record import Moved
from sdy_jax.lowering.interface.report import PartitionReport
from sdy_jax.lowering.strategies.registry import Taken, sent_by
from sdy_jax.representation.axes import braces
from sdy_jax.representation.mesh import axes_size
from sdy_jax.representation.sdy_collectives import CollectiveSummary
from sdy_jax.representation.sharding import TensorSharding


class OpReports:
    """The reports of a program's ops. `replication`: the notes on those that could not be sharded."""

    def __init__(self, report: PartitionReport, placement: Placement, module: ir.Operation):
        self._report, self._placement, self._module = report, placement, module
        self._mesh = placement.meshes.base
        self.replication = ReplicationNotes(placement, report, self._mesh)

    def decided(self, op: Op, decision: Decision) -> None:
        """Reports the collectives of the op's emitter, and the dimensions along which the op could not be sharded."""
        values = (*op.operands, *op.results)
        self.replication.add(op, decision)
        for inside in decision.inside:
            sharding = decision.shardings[inside.tensor]
            value, size = values[inside.tensor], axes_size(inside.axes, self._mesh)
            shape, sent = sharding.local_shape(value.shape or (), self._mesh), inside.wire_bytes
            if not inside.is_exact:
                sent = reduce_by_bytes(shape, value.itemsize, size, is_used=bool(value.uses))
            moved = Moved(CollectiveSummary(inside.kind, inside.axes, braces(inside.axes)), sharding, sent)
            self._placement.ops.keep_inside(op, self._report.add(moved, value, op, op))

    def sent(self, op: Op, shardings: Sequence[TensorSharding]) -> None:
        """Reports an op that is a collective by itself, as the program's author wrote it."""
        count = len(op.operands)
        for sent in sent_by(op, self._mesh, shardings[:count]):
            value, sharding = op.results[sent.result], shardings[count + sent.result]
            if value.uses:
                moved = Moved(sent.summary, sharding, sent.wire_bytes)
                self._report.written[op.mlir] = self._report.add(moved, value, op, op, "user")

    def border(self, values: Sequence[Value], shardings: Sequence[TensorSharding], at: Op, cause: Op) -> None:
        """Reports the permutes that bring arguments to a mesh with the devices in another order, and results back."""
        base = self._placement.meshes.base_name
        away = [pair for pair in zip(values, shardings, strict=True) if pair[1].mesh != base]
        meshes = module_meshes(self._module) if away else {}  # of the module as it is by now
        for value, sharding in away:
            sent = sent_at_border(value, sharding, self._mesh, meshes)
            if sent and value.uses:
                self._report.add(Moved(CollectiveSummary("collective_permute"), sharding, sent), value, at, cause)

    def taken(self, op: Op, taken: Taken) -> None:
        """Reports the collectives of an op that has a say in the layouts in which it runs."""
        for (kind, axes), sent in taken.sent.items():
            moved = Moved(CollectiveSummary(kind, axes, braces(axes)), taken.shardings[-1], sent)
            self._placement.ops.keep_inside(op, self._report.add(moved, op.results[-1], op, op))
