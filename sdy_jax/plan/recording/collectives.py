"""The collectives of a plan as plain data, each with the op that it is and the one that it serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.interface.collective_record import CollectiveRecord
from sdy_jax.plan.answers import Answers
from sdy_jax.plan.record.program import RecordedBranch, RecordedCollective
from sdy_jax.plan.recording.ops import OpRecords, by_location
from sdy_jax.plan.recording.places import Places
from sdy_jax.plan.recording.tensors import Tensors
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.sdy_collectives import BY_STRIPS, KINDS, ops_of
from sdy_jax.representation.type_text import axis_name

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
        members = tuple(self._one(member, counts) for member in record.members)
        made = self._said(record, counts)
        return replace(made, members=members) if members else self._at_op(made, record)

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
