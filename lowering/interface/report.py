"""What the partitioner reports beside rewriting the module: the collectives that run, and all else it decided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.ir.locations import place_of, short_source
from sdy_jax.lowering.analysis.trip_counts import executions
from sdy_jax.lowering.interface.collective_record import Branch, CollectiveRecord, Moved, Origin, bucket_of
from sdy_jax.lowering.interface.notes import Note
from sdy_jax.lowering.interface.outcomes import InParts, LayoutChoice, Recomputed


@dataclass(slots=True)
class PartitionReport:
    """What the partitioner did beside rewriting the module."""

    inputs: Sequence[str] = ()
    """What the user calls the arguments of the main function."""
    collectives: list[CollectiveRecord] = field(default_factory=list, init=False)
    written: dict[ir.Operation, CollectiveRecord] = field(default_factory=dict, init=False)
    """Those of ops that are collectives by themselves, as the program's author wrote them."""
    notes: dict[Note, None] = field(default_factory=dict, init=False)
    """In order, each once."""
    layouts: LayoutChoice | None = field(default=None, init=False)
    """The choice of layouts, where they were chosen for the whole program."""
    work: float = field(default=0.0, init=False)
    """The time of one device's own work, by the cost model."""
    hidden: float = field(default=0.0, init=False)
    """The time of collectives that the compiler hides by itself: beside that of rings and of those one trip ahead."""
    held: float = field(default=0.0, init=False)
    """What a device holds at most, where that was counted of the module as it is left; else 0."""
    recomputed: Recomputed | None = field(default=None, init=False)
    """What is computed again for the sake of memory."""
    blocked: tuple[InParts, ...] = field(default=(), init=False)
    """The largest value of each group of ops that run part by part for the sake of memory."""
    before: ir.Operation | None = field(default=None, init=False)
    """Where something is computed again, or in parts, the program that was partitioned, in which it is."""
    _conditionals: dict[Op, int] = field(default_factory=dict, init=False)

    def add(
        self, moved: Moved, value: Value, at: Op, cause: Op, origin: Origin = "partitioner", again: bool = False
    ) -> CollectiveRecord:
        """Records a collective that moves a value, beside the op `at`, because of another."""
        runs = executions(at)
        record = CollectiveRecord(
            moved,
            value.dtype,
            value.shape or (),
            cause.mlir.location,
            cause.title,
            runs.depth,
            runs.times,
            runs.known,
            runs.estimate,
            origin,
            tuple([self._branch(block) for block in runs.branches]),
            again,
        )
        self.collectives.append(record)
        return record

    def _branch(self, block: Block) -> Branch:
        conditional = self._conditionals.setdefault(block.parent, len(self._conditionals))
        return Branch(conditional, block.parent.blocks.index(block))

    def drop(self, records: Iterable[CollectiveRecord]) -> None:
        """Removes the records of collectives that were erased."""
        dropped = set(map(id, records))
        self.collectives = [record for record in self.collectives if id(record) not in dropped]

    def exchange(self, records: Mapping[int, CollectiveRecord]) -> None:
        """Puts records in the place of others, which are given by their identities."""
        self.collectives = [records.get(id(record), record) for record in self.collectives]

    def combine(self, buckets: Sequence[Sequence[CollectiveRecord]]) -> None:
        """Makes one record of those of each bucket, in the place of its first one."""
        place = {id(record): n for n, record in enumerate(self.collectives)}
        firsts = [min(members, key=lambda record: place[id(record)]) for members in buckets]
        found = {id(first): bucket_of(n, buckets[n]) for n, first in enumerate(firsts)}
        self.drop(member for members in buckets for member in members if id(member) not in found)
        self.exchange(found)

    def note(self, op: Op, message: str) -> None:
        """Notes an op that could not be split."""
        self.notes[Note.at(op.title, op.mlir.location, message)] = None

    def note_value(self, value: Value, message: str) -> None:
        """Notes a value that could not be split."""
        if is_input(value):
            self.notes[Note("argument", "", message)] = None
            return
        op = value.owner if isinstance(value.owner, Op) else value.owner.parent
        place = place_of(op.mlir.location)
        self.notes[Note(place.primitive or op.name, place.line, message, place.library, place.scope)] = None

    def name(self, value: Value) -> str:
        """A user's name for a value: the path of an argument, or the op that makes it."""
        if is_input(value):
            return f"`{self.inputs[value.index]}`" if self.inputs else f"argument {value.index}"
        op = value.owner if isinstance(value.owner, Op) else value.owner.parent
        place = place_of(op.mlir.location)
        made = f"{place.primitive or op.name} at {short_source(place.line)}"
        return f"the result of {made}" if op is value.owner else f"a value that {made} passes into its body"


def is_input(value: Value) -> bool:
    """The value is an argument of a function."""
    return isinstance(value.owner, Block) and value.owner.parent.name == "func.func"
