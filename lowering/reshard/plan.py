"""A reshard as a plan: its collectives in order, what they send, their time; reduce-scatters along torus lines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sdy_jax.ir.collectives import SdyCollective
from sdy_jax.ir.meshes import Axes, AxisRef, Mesh, axes_size, merge_neighbours, set_difference
from sdy_jax.ir.shardings import TensorSharding

# A reshard as a plan: its collectives in order, what they send, and their time.


@dataclass(frozen=True, slots=True)
class Collective:
    """One step of a plan.

    `op` is what the op says that it becomes; `result` is the closed, canonical sharding after the step; `wire_bytes` is
    per device; `reduction` is the kind of an all_reduce or reduce_scatter.
    """

    op: SdyCollective
    result: TensorSharding
    wire_bytes: float
    reduction: str = "sum"

    def __str__(self) -> str:
        """The attribute of the op as the dialect prints it; nothing for a permute."""
        return str(self.op)

    @property
    def kind(self) -> str:
        return self.op.kind


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """The steps in order, the bytes that each device sends in all of them, and their time by the cost model."""

    steps: tuple[Collective, ...]
    wire_bytes: float
    cost: float


# Reduce-scatters along one dimension of a torus after the other.
#
#     %s = reduce_scatter [{"fsdp"}] %x             256 chips of 16 x 16
#
# Where a compiler does so (`Collectives.along_lines`), it makes an all-reduce of one whose chips do not lie in a
# line, and every chip sends twice as much:
#
#     %r = reduce_scatter [{"fsdp":(1)16}] %x       255/256 of %x in all
#     %s = reduce_scatter [{"fsdp":(16)16}] %r
#
# stay what they are (libtpu 0.0.52, v5e:16x16, bfloat16 and float32, either dimension; 2026-11). Where an axis
# follows no lines, as one of 16 chips that goes around 4 x 4, the all-reduce is what is counted.

Lines = Mapping[str, tuple[tuple[int, int], ...]]
"""Per mesh axis its parts, major to minor, that each lie along one dimension of the torus: size and dimension. None
where it goes around."""

_FEW = 8
"""Chips of which reduce-scatters stay what they are, however they lie. Measured (2026-11, libtpu 0.0.51, v5e:2x4): of
more, XLA makes all-reduces, which send twice the bytes."""


def along_lines(
    step: Collective, before: TensorSharding, shape: Sequence[int], itemsize: float, lines: Lines, mesh: Mesh
) -> tuple[Collective, ...]:
    """A step of a reshard as the steps that run for it.

    Args:
        step: of any kind; reduce-scatters alone become several.
        before: the sharding in front of it.
        shape, itemsize: of the global value.
        lines: empty where the devices' places are not known.
        mesh: of both shardings.
    """
    if step.kind != "reduce_scatter" or not lines or before.mesh != step.result.mesh:
        return (step,)
    parts = [(dim, part) for dim, axes in enumerate(step.op.axes) for part in _parts(axes, lines, mesh)]
    if len(parts) < 2 or any(n % k for n, k in zip(shape, step.result.shard_counts(mesh), strict=True)):
        axes = [axis for _, part in parts for axis in part]
        goes_around = any(lines.get(axis.name) == () for axis in axes) and axes_size(axes, mesh) > _FEW
        return (replace(step, wire_bytes=2 * step.wire_bytes) if goes_around else step,)
    return tuple(_scatters(step, before, parts, shape, itemsize, mesh))


def _scatters(
    step: Collective,
    before: TensorSharding,
    parts: Sequence[tuple[int, Axes]],
    shape: Sequence[int],
    itemsize: float,
    mesh: Mesh,
) -> Iterator[Collective]:
    """One per part, the major ones first: so the blocks come out in the order of all of them."""
    current = before
    for number, (dim, axes) in enumerate(parts):
        lists = [merge_neighbours((*old, *axes), mesh) if d == dim else old for d, old in enumerate(current.axes)]
        left = set_difference(current.unreduced_axes, axes, mesh)
        held = itemsize * math.prod(current.local_shape(shape, mesh))
        result = TensorSharding.closed(current.mesh or "", lists, left, current.reduction if left else "sum")
        count = axes_size(axes, mesh)
        yield replace(
            step,
            op=replace(step.op, axes=tuple(axes if d == dim else () for d in range(len(shape)))),
            result=step.result if number == len(parts) - 1 else result,
            wire_bytes=held * (count - 1) / count,
        )
        current = result


def _parts(axes: Axes, lines: Lines, mesh: Mesh) -> list[Axes]:
    """A list of axes cut where it turns into another dimension of the torus."""
    cut = [found for axis in axes for found in _cut(axis, lines.get(axis.name, ()), mesh)]
    return [tuple(axis for axis, _ in group) for _, group in itertools.groupby(cut, key=lambda found: found[1])]


def _cut(axis: AxisRef, lines: Sequence[tuple[int, int]], mesh: Mesh) -> Iterator[tuple[AxisRef, object]]:
    """The parts of an axis with the dimension in which each lies; all of it where they are not parts of it."""
    first, end, pre, found = axis.pre_size, axis.next_pre_size(mesh), 1, []
    for size, dimension in lines:
        low, high = max(first, pre), min(end, pre * size)
        if low < high:
            found.append((low, high, dimension))
        pre *= size
    if pre != mesh.sizes[axis.name] or any(high % low or low % first for low, high, _ in found):
        yield axis, axis
        return
    for low, high, dimension in found:
        yield AxisRef.canonical(axis.name, low, high // low, mesh), dimension
