"""The axes that went from tensor to tensor in each step of propagation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sdy_jax.ir.graph import Op
from sdy_jax.propagation.history import gained
from sdy_jax.propagation.record import RecordedStep
from sdy_jax.representation.axes import can_merge, merge
from sdy_jax.representation.mesh import AxisRef, Mesh
from sdy_jax.representation.propagation_edges import EdgeValue


@dataclass(frozen=True, slots=True)
class Transfer:
    """An axis that went from one tensor of `op` to another in a step.

    `op` is the op, or main's return for what passes between returned values and result attributes. `source_place` and
    `target_place` are the tensors' places.
    """

    step: int
    op: Op
    axis: AxisRef
    source: EdgeValue
    target: EdgeValue
    source_place: int
    target_place: int


def transfers(steps: Sequence[RecordedStep], first: int, meshes: dict[str, Mesh]) -> Iterator[Transfer]:
    """What each step moved; the first step has number `first`."""
    for step in steps:
        if not step.written:
            continue
        reference = step.written[0][1].mesh
        mesh = meshes[reference] if isinstance(reference, str) else reference
        for target in dict.fromkeys(spread.target for spread in step.spreads):
            for axis, source in _pieces(step, target, mesh).items():
                yield Transfer(
                    first + step.number,
                    step.op,
                    axis,
                    _edge_value(step, source),
                    _edge_value(step, target),
                    step.tensors[source],
                    step.tensors[target],
                )


def _pieces(step: RecordedStep, target: int, mesh: Mesh) -> dict[AxisRef, int]:
    """The axes that a tensor got, with the tensors that they came from.

    Where the last axes of two factors of a dimension follow each other, Shardy records the two as one axis.
    """
    found: dict[AxisRef, int] = {}
    last: dict[int, AxisRef] = {}
    for spread in step.spreads:
        if spread.target != target or spread.source is None:
            continue
        *pieces, piece = gained(spread)
        previous = last.get(spread.dim)
        if previous is not None and can_merge(previous, piece):
            found.pop(previous, None)
            piece = merge(previous, piece, mesh)
        found.update((axis, spread.source) for axis in (*pieces, piece))
        last[spread.dim] = spread.axes[-1]
    return found


def _edge_value(step: RecordedStep, tensor: int) -> EdgeValue:
    if tensor < step.num_operands:
        return EdgeValue("operand", tensor)
    return EdgeValue("result", tensor - step.num_operands)
