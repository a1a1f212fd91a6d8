"""The ops that are inserted into a program, with their records; those that end up without users are erased again."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.operations import has_users
from sdy_jax.lowering.emission.names import collective_attributes
from sdy_jax.lowering.interface.collective_record import CollectiveRecord, Moved
from sdy_jax.lowering.interface.report import PartitionReport
from sdy_jax.lowering.reshard.plan import Collective
from sdy_jax.representation.attributes import attribute_from_text, sharding_to_attribute
from sdy_jax.representation.sdy_collectives import BY_STRIPS


class InsertedOps:
    """Collectives and rematerialized ops, and what their report says of them."""

    def __init__(self, report: PartitionReport):
        self._report = report
        self._spare: list[tuple[ir.Operation, CollectiveRecord | None]] = []
        """Ops to erase if they end up without users: collectives, rematerialized ops, and the originals of these."""
        self._inside: dict[int, list[CollectiveRecord]] = {}
        """What ops send themselves, which is dropped with them; by identity, as an op's hash is that of its content."""
        self._made: dict[ir.Operation, CollectiveRecord | None] = {}
        """The collectives (with their records) and the rematerialized ops (with None)."""
        self._erased: set[int] = set()

    def __contains__(self, op: ir.Operation) -> bool:
        return op in self._made

    def record(self, moved: Moved, value: Value, before: Op, cause: Op, again: bool) -> CollectiveRecord:
        """The record of a collective that is inserted before an op, because of another."""
        return self._report.add(moved, value, before, cause, again=again)

    def add(self, op: ir.Operation, record: CollectiveRecord | None = None) -> None:
        """Adds a collective with its record, or an op that runs once more."""
        self.may_erase(op, record)
        self._made[op.operation] = record

    def may_erase(self, op: ir.Operation, record: CollectiveRecord | None = None) -> None:
        """An op of the program is erased, and its record dropped, if it has no users in the end."""
        self._spare.append((op, record))

    def keep_inside(self, op: Op, record: CollectiveRecord) -> None:
        """Records a collective that an op performs itself, as long as the op is there."""
        self._inside.setdefault(id(op.mlir), []).append(record)

    def sweep(self) -> None:
        """Erases ops without users: those rematerialized for all of their users, and reshards made for them."""
        dropped = []
        for op, record in reversed(self._spare):
            if id(op) in self._erased or has_users(op):
                continue
            self._erased.add(id(op))
            self._made.pop(op, None)
            dropped += self._inside.pop(id(op), [])
            op.erase()
            if record is not None:
                dropped.append(record)
        self._report.drop(dropped)

    @property
    def collectives(self) -> dict[ir.Operation, CollectiveRecord]:
        """The collectives that were inserted and are there, but for those that the program holds itself."""
        return {op: record for op, record in self._made.items() if record is not None}

    def is_erased(self, op: Op) -> bool:
        """Whether an op was erased because nothing used it."""
        return id(op.mlir) in self._erased

    def records_behind(self, value: ir.Value) -> list[CollectiveRecord]:
        """The collectives that produced a value, including those before a rematerialized op."""
        owner = value.owner
        if isinstance(owner, ir.Block) or (owner := owner.operation) not in self._made:
            return []
        found = [record for operand in owner.operands for record in self.records_behind(operand)]
        record = self._made[owner]
        return found if record is None else [*found, record]


def create_collective(step: Collective, operand: ir.Value, location: ir.Location, ip: ir.InsertionPoint) -> ir.Value:
    """Creates the sdy op of one step of a reshard."""
    context = operand.context
    attributes = {name: attribute_from_text(text, context) for name, text in collective_attributes(step).items()}
    attributes["sharding" if step.kind == BY_STRIPS else "out_sharding"] = sharding_to_attribute(step.result, context)
    op = ir.Operation.create(
        f"sdy.{step.kind}", results=[operand.type], operands=[operand], attributes=attributes, loc=location, ip=ip
    )
    return op.results[0]
