"""Resharding on local buffers: from one layout of a tensor to another on the same grid, step by step.

In order: halos off; uneven dimensions that change are joined; averages are taken; axes move and terms are combined or
made as `plan_reshard` finds it cheapest; the joined dimensions are cut; halos on. Only joining, averages, the axes and
the filling of halos communicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.errors import ShardingError
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.collectives import movement, packing
from sdy_jax.lowering.reshard.plan import Collective
from sdy_jax.lowering.reshard.planner import Reshards
from sdy_jax.mesh_dialects.semantics.collectives import combined, combined_pieces, exchanged
from sdy_jax.mesh_dialects.semantics.grid import Grid, op
from sdy_jax.mesh_dialects.semantics.layout import (
    KIND_OF_REDUCTION,
    PARTIAL_IN_SDY,
    AxisLists,
    Dimension,
    Layout,
    buffer_shape,
    check_layout,
    dimensions,
    even_shape,
    normalized,
)
from sdy_jax.mesh_dialects.semantics.shards import COUNTING, cut
from sdy_jax.runtime.meshes import RefinedMesh


@op
def reshard(grid: Grid, x: jax.Array, source: Layout, target: Layout, shape: Sequence[int] | None = None) -> jax.Array:
    """The buffer under `target` of a tensor of which `x` is the buffer under `source`.

    Args:
        grid: the grid of both layouts.
        x: the device's buffer.
        source, target: the layouts.
        shape: the global shape; needed where blocks are uneven without offsets that say so.
    """
    check_layout(source, grid)
    check_layout(target, grid)
    whole = even_shape(source, grid, x.shape) if shape is None else tuple(shape)
    expected = buffer_shape(source, grid, whole)
    if x.shape != expected:
        raise ShardingError(
            f"got a buffer of shape {x.shape}, but {source} of a tensor of shape {whole} has {expected}"
        )
    for step in plan(source, target, grid, whole):
        x = step.run(grid, x)
    return x


class LocalStep(Protocol):
    """A step of a plan; its text is what tests and people read."""

    def run(self, grid: Grid, x: jax.Array) -> jax.Array:
        """The buffer after the step."""


@dataclass(frozen=True, slots=True)
class HalosOff:
    """Keep the cores of the buffers."""

    before: tuple[Dimension, ...]

    def __str__(self) -> str:
        return "halos off"

    def run(self, grid: Grid, x: jax.Array) -> jax.Array:
        for dim, dimension in enumerate(self.before):
            lo = dimension.halo[0]
            x = lax.slice_in_dim(x, lo, lo + dimension.core, axis=dim)
        return x


@dataclass(frozen=True, slots=True)
class Join:
    """Gather a dimension of uneven blocks and leave the padding out."""

    dim: int
    before: Dimension

    def __str__(self) -> str:
        return f"join dimension {self.dim}"

    def run(self, grid: Grid, x: jax.Array) -> jax.Array:
        before = self.before
        blocks = movement.all_gather(x, movement.along(x, self.dim, grid.refs(before.axes)), grid.mesh)
        rows = [i * before.core + r for i, length in enumerate(before.lengths) for r in range(length)]
        return jnp.take(blocks, np.array(rows, np.int32), axis=self.dim)


@dataclass(frozen=True, slots=True)
class Average:
    """Average what devices along some axes hold; where `dim` is given, each keeps its block of that dimension."""

    axes: tuple[int, ...]
    dim: int | None

    def __str__(self) -> str:
        return f"average {list(self.axes)}" + ("" if self.dim is None else f" scattered over axis {self.dim}")

    def run(self, grid: Grid, x: jax.Array) -> jax.Array:
        refs = grid.refs(self.axes)
        if self.dim is None:
            return combined(grid, x, refs, "average")
        return combined_pieces(grid, x, movement.along(x, self.dim, refs), "average")


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective of SDY on even blocks, and what it starts from."""

    before: TensorSharding
    collective: Collective

    def __str__(self) -> str:
        return f"{self.collective.kind} {self.collective}".rstrip()

    def run(self, grid: Grid, x: jax.Array) -> jax.Array:
        done, mesh = self.collective, grid.mesh
        match done.kind:
            case "all_reduce":
                return combined(grid, x, done.op.axes, KIND_OF_REDUCTION[done.reduction])
            case "reduce_scatter":
                return combined_pieces(grid, x, done.op.axes, KIND_OF_REDUCTION[done.reduction])
            case "collective_permute":
                return movement.collective_permute(x, self.before, done.result, self._used(mesh))
            case "replicated_to_unreduced" if done.reduction not in COUNTING.values():
                return x  # copies are terms
        return packing.run_collective(done.op, x, done.reduction, mesh)

    def _used(self, mesh: RefinedMesh) -> RefinedMesh:
        """The axes that it uses: along others devices may hold different values, or not be the program's at all."""
        ends = (self.before, self.collective.result)
        names = {axis.name for end in ends for axes in (*end.axes, end.unreduced_axes) for axis in axes}
        axes = [(axis, cuts) for axis, cuts in zip(mesh.mesh.axes, mesh.cuts, strict=True) if axis.name in names]
        return RefinedMesh(Mesh(tuple(axis for axis, _ in axes)), tuple(cuts for _, cuts in axes))


@dataclass(frozen=True, slots=True)
class Cut:
    """Keep a block of a joined dimension."""

    dim: int
    after: Dimension

    def __str__(self) -> str:
        return f"cut dimension {self.dim}"

    def run(self, grid: Grid, x: jax.Array) -> jax.Array:
        return cut(grid, x, self.dim, self.after)


@dataclass(frozen=True, slots=True)
class HalosOn:
    """Put the cores into longer buffers and fill the halos."""

    after: tuple[Dimension, ...]

    def __str__(self) -> str:
        return "halos on"

    def run(self, grid: Grid, x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [dimension.halo for dimension in self.after])
        halos = {dim: dimension.halo for dim, dimension in enumerate(self.after) if any(dimension.halo)}
        return exchanged(grid, x, [dimension.axes for dimension in self.after], halos)


def plan(source: Layout, target: Layout, grid: Grid, shape: Sequence[int]) -> list[LocalStep]:
    """The steps from one layout of a tensor of global `shape` to another; none if they mean the same."""
    source, target = normalized(source, grid), normalized(target, grid)
    if source == target:
        return []
    before, after = dimensions(source, grid, shape), dimensions(target, grid, shape)
    rejoined = [dim for dim, pair in enumerate(zip(before, after, strict=True)) if _is_rejoined(*pair)]
    current, wanted = _lists_without(before, rejoined), _lists_without(after, rejoined)
    steps: list[LocalStep] = []
    if source.halos:
        steps.append(HalosOff(before))
    steps += [Join(dim, replace(before[dim], halo=(0, 0))) for dim in rejoined if before[dim].axes]
    for average in _averages(source, target, current, wanted):
        steps.append(average)
        if average.dim is not None:
            current = tuple(axes + average.axes if dim == average.dim else axes for dim, axes in enumerate(current))
    padded = [d.size if dim in rejoined else d.core * len(d.lengths) for dim, d in enumerate(before)]
    steps += _exchanges(_sharding(current, source, grid), _sharding(wanted, target, grid), grid.mesh.mesh, padded)
    steps += [Cut(dim, replace(after[dim], halo=(0, 0))) for dim in rejoined if after[dim].axes]
    if target.halos:
        steps.append(HalosOn(after))
    return steps


def _is_rejoined(before: Dimension, after: Dimension) -> bool:
    """Whether blocks of one split are no blocks of blocks of the other."""
    if (before.axes, before.starts) == (after.axes, after.starts):
        return False
    return not (before.is_even and after.is_even)


def _lists_without(found: Sequence[Dimension], left_out: Sequence[int]) -> AxisLists:
    return tuple(() if dim in left_out else dimension.axes for dim, dimension in enumerate(found))


def _averages(source: Layout, target: Layout, current: AxisLists, wanted: AxisLists) -> list[Average]:
    """The average to take, if any: scattered if its axes are the next ones that a dimension is to be split by."""
    if source.partial != "average":
        return []
    kept = target.partial_axes if target.partial == "average" else ()
    axes = tuple(axis for axis in source.partial_axes if axis not in kept)
    for dim, (has, wants) in enumerate(zip(current, wanted, strict=True)):
        following = wants[len(has) : len(has) + len(axes)]
        if axes and wants[: len(has)] == has and sorted(following) == sorted(axes):
            return [Average(following, dim)]
    return [Average(axes, None)] if axes else []


def _sharding(lists: AxisLists, layout: Layout, grid: Grid) -> TensorSharding:
    """Axes and terms as SDY says them. An average is no reduction of SDY; of one that is to come, copies are terms."""
    kind = PARTIAL_IN_SDY.get(layout.partial or "")
    terms = grid.refs(layout.partial_axes) if kind else ()
    return TensorSharding.closed(grid.mesh.mesh, [grid.refs(axes) for axes in lists], terms, kind or "sum")


def _exchanges(source: TensorSharding, target: TensorSharding, mesh: Mesh, shape: Sequence[int]) -> list[LocalStep]:
    """The collectives between layouts whose blocks are even in a tensor of `shape`."""
    steps = Reshards(mesh, whole_axes=True, strips=False).plan(tuple(shape), 1, source, target).steps
    starts = [source, *(step.result for step in steps)]
    return [Exchange(before, step) for before, step in zip(starts, steps, strict=False)]
