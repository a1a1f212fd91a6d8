"""Text for one reason why a value does not have an axis: the op, the tensor in the way, and its annotation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from sdy_jax.ir.graph import Op
from sdy_jax.ir.stated_work import stated_work
from sdy_jax.plan.explanations.annotation_origins import Annotations
from sdy_jax.plan.explanations.naming import Naming
from sdy_jax.propagation.blockers import Blockage, Blockers, Reason
from sdy_jax.propagation.engine import Engine
from sdy_jax.propagation.history import axis_at
from sdy_jax.propagation.value_ids import NO_VALUE
from sdy_jax.propagation.worklist import WorklistEntry
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.type_text import axis_name, bytes_text, flops_text

Links = Callable[[int, int, AxisRef], Iterator[str]]
"""The links of an axis (place, dimension, axis) back to its annotation, as text."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One reason why a value does not have an axis.

    Attributes:
        reason: the name of a `Reason`, or "PRESENT" (it has the axis), "SCALAR", "MANUAL", "EXPORT", "NO_RULE",
            "NO_SOURCE", "MORE" (there are further ops).
        text: the reason in words.
        because: the origin of what is in the way, as text; may be empty.
        op, line, function: the op at which the axis stops; empty where there is none.
    """

    reason: str
    text: str
    because: tuple[str, ...] = ()
    op: str = ""
    line: str = ""
    function: str = ""

    def __str__(self) -> str:
        return "\n".join([self.text, *(f"  <- {line}" for line in self.because)])


@dataclass(frozen=True, slots=True)
class ObstacleTexts:
    """Writes the blocks of one propagated program, whose mesh axes have these `sizes`, as text."""

    engine: Engine
    blockers: Blockers
    naming: Naming
    annotations: Annotations
    sizes: Mapping[str, int]
    links: Links

    def obstacle(self, block: Blockage, steps: int, axis: AxisRef) -> Obstacle:
        """A block as text; `steps`: the number of ops between it and the value asked for."""
        naming, entry, op = self.naming, block.entry, block.entry.op
        operands = len(self.blockers.rule(entry).operand_mappings)
        site = naming.site_of(op)
        source, target = (naming.role(op, t, operands) for t in (block.source, block.target))
        holder = entry.value_ids[block.source]
        has = f"{source} ({naming.describe(holder, site)}, {naming.type_of(holder)})"
        far = ""
        if steps:
            far = f"nothing next to it has '{axis_name(axis)}'; {steps} op{'s' * (steps > 1)} away, "
        what = self._what(block, axis)
        if block.at != block.target:
            at = naming.role(op, block.at, operands)
            what = f"{at} is in the way: {what}"
        text = f"{far}{naming.op_text(op)}: {has} has it, but does not give it to {target}: {what}{_work_of(op)}"
        return Obstacle(block.reason.name, text, tuple(self._because(block)), op.name, site.line, site.function)

    def _what(self, block: Blockage, axis: AxisRef) -> str:
        """The reason with its axes and sizes."""
        candidate = block.candidate or axis
        name, size = axis_name(candidate), self.blockers.rule(block.entry).factor_sizes[block.factor]
        axes = ", ".join(f"'{axis_name(a)}'" for a in block.axes)
        value_id = block.entry.value_ids[block.at]
        dim = f"dim {block.dim} of {self.naming.type_of(value_id)}" if value_id != NO_VALUE else f"dim {block.dim}"
        first = f"'{name}' has to come first, and " if candidate.name != axis.name else ""
        texts = {
            Reason.MESHES: f"it lies on another mesh, {self._mesh(value_id)}",
            Reason.BLOCKED_FACTOR: "the op's sharding rule lets nothing propagate along this dimension",
            Reason.DIRECTION: f"shardings do not pass the op in this direction{_allowed(block.entry)}",
            Reason.FACTOR_CONFLICT: f"{dim} is split along {axes} instead, and the op's tensors must agree on it",
            Reason.CLOSED: f"{dim} is closed{f', with {axes}' if axes else ''}",
            Reason.REPLICATED: f"'{name}' is explicitly replicated there",
            Reason.UNREDUCED: f"it is unreduced along {axes}",
            Reason.USED: f"{axes} splits {dim} already",
            Reason.OVERFLOW: f"{dim} is split along {axes}, which does not fit its part of size {size}",
            Reason.MAJOR_FIRST: f"{dim} is made of several parts, and one that comes first is not split to its end",
            Reason.INDIVISIBLE: f"'{name}' of size {self._size(candidate)} does not divide the part of size {size} "
            f"of {dim} that the op sees",
            Reason.CONSERVATIVE: f"conservative propagation leaves out parts of axes such as '{name}'",
        }
        return first + texts[block.reason]

    def _size(self, axis: AxisRef) -> int:
        return axis.sub_axis.size if axis.sub_axis else self.sizes[axis.name]

    def _mesh(self, value_id: int) -> str:
        sharding = self.engine.sharding(value_id)
        return f"@{sharding.mesh}" if sharding is not None else "none"

    def _because(self, block: Blockage) -> Iterator[str]:
        """The annotation from which the axes in the way come."""
        value_id = block.entry.value_ids[block.at]
        if value_id == NO_VALUE:
            return
        if block.axes and block.reason in (Reason.FACTOR_CONFLICT, Reason.USED, Reason.OVERFLOW):
            held = axis_at(self.engine.sharding(value_id), block.dim, block.axes[0])
            if held is not None:
                yield from self.links(value_id, block.dim, held)
        elif block.reason in (Reason.CLOSED, Reason.REPLICATED, Reason.UNREDUCED, Reason.MESHES):
            yield from (note.text for note in self.annotations.of(value_id))


def _work_of(op: Op) -> str:
    """What a kernel performs that is not split; nothing of other ops."""
    work = stated_work(op) if op.name == "stablehlo.custom_call" else None
    if work is None:
        return ""
    return f"; whole it performs {flops_text(work.flops)} and moves {bytes_text(work.bytes)} of memory"


def _allowed(entry: WorklistEntry) -> str:
    if entry.op.name != "sdy.propagation_barrier":
        return ""
    return f": the barrier allows {entry.directions[0][0].name}"
