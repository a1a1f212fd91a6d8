"""What a device holds as plain data: when, of which kind, and made by which op."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.lowering.planner.memory.buffers import HeldBuffer, LocalBytes
from sdy_jax.lowering.planner.memory.live_ranges import peak_and_buffers
from sdy_jax.lowering.targets.target import Target
from sdy_jax.plan.record.phases import computed_again
from sdy_jax.plan.record.program import RecordedBuffer, RecordedHeld, RecordedMemory
from sdy_jax.plan.record.recorded_ops import OpRecords

# Kinds of temporaries are told by which phase makes a value, and which needs it last; those of arguments by which
# phases read them.

_BY_PHASES = {("forward", "backward"): "activations", ("backward", "update"): "gradients"}


def memory_record(
    ops: OpRecords, phases: Mapping[Op, str], again: Collection[str], target: Target, available: float
) -> RecordedMemory:
    """What a device holds, of what it has.

    Args:
        ops: of the partitioned program.
        phases, again: as `phases_of` says them, and what it takes.
        target: which device that is.
        available: what it has for the program.
    """
    peak, buffers = peak_and_buffers(ops.graph, target)
    kinds = _Kinds(ops, phases, frozenset(computed_again(ops.graph, phases, again)))
    held = [kinds.recorded(buffer) for buffer in buffers]
    spans = {(buffer.value, buffer.bytes): buffer for buffer in held}
    largest = [spans[ops.names.of(live.value), live.bytes] for live in peak.live]
    timeline, always = tuple(size for _, size in peak.at), list(kinds.always(LocalBytes(ops.graph, target.arrays)))
    if own_results := peak.results - peak.shared:
        always.append(RecordedHeld("results", own_results))
    border = peak.arguments, peak.results, peak.bytes, peak.shared
    return RecordedMemory(*border, timeline, tuple(held), tuple(largest), available, tuple(always))


class _Kinds:
    def __init__(self, ops: OpRecords, phases: Mapping[Op, str], again: Collection[Op]):
        self._ops, self._phases, self._again = ops, phases, again

    def recorded(self, buffer: HeldBuffer) -> RecordedBuffer:
        """A temporary with its kind and its maker."""
        maker = _maker(buffer.value)
        number = self._ops.index.get(maker) if maker is not None else None
        kind = self._kind(maker, self._ops.order[buffer.last])
        return RecordedBuffer(self._ops.names.of(buffer.value), buffer.bytes, buffer.first, buffer.last, kind, number)

    def _kind(self, maker: Op | None, last: Op) -> str:
        if maker is None:
            return "temporaries"
        if maker.name == "sdy.all_gather":
            return "gathered"
        if maker in self._again:
            return "recomputed"
        phases = self._phases.get(maker, ""), self._phases.get(last, "")
        return _BY_PHASES.get(phases, "temporaries")

    def always(self, sizes: LocalBytes) -> Iterator[RecordedHeld]:
        """The arguments by what they are."""
        found = dict[str, float]()
        for value in self._ops.graph.arguments:
            kind = self._of_argument(value)
            found[kind] = found.get(kind, 0.0) + sizes.of(value)
        for kind in ("weights", "optimizer state", "arguments"):
            if found.get(kind):
                yield RecordedHeld(kind, found[kind])

    def _of_argument(self, value: Value) -> str:
        """Weights are read by the passes and the update, state of the optimizer by that alone."""
        block = self._ops.graph.main.blocks[0]
        read = {self._phases.get(user.ancestor_in(block), "") for user, _ in value.uses} - {""}
        if "update" not in read:
            return "arguments"
        return "weights" if len(read) > 1 else "optimizer state"


def _maker(value: Value) -> Op | None:
    """The op that makes a value, or around it."""
    made = value.defining_op
    return made if made is not None else value.owner.parent if isinstance(value.owner, Block) else None
