"""What a device has of a tensor: coordinates, shape, buffers; and how these go from one layout to another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.base.errors import ShardingError
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.collectives import movement, packing, reductions
from sdy_jax.lowering.reshard.planner import Collective, ReshardPlanner
from sdy_jax.mesh_dialects.semantics.collectives import combined, combined_pieces, exchanged
from sdy_jax.mesh_dialects.semantics.grid import (
    NUMBERS,
    Arithmetic,
    AxisIndices,
    Coordinate,
    DeviceAxes,
    Grid,
    Index,
    check_axes,
    check_neighbors,
    check_whole_device,
    coordinates_in_group,
    op,
    position,
)
from sdy_jax.mesh_dialects.semantics.layout import (
    KIND_OF_REDUCTION,
    PARTIAL_IN_SDY,
    AxisLists,
    Dimension,
    Layout,
    buffer_shape,
    check_fits,
    check_layout,
    dimensions,
    even_shape,
    normalized,
)
from sdy_jax.runtime.meshes import RefinedMesh

# Ops that query a device's coordinates, its neighbours, and the shape of its shard.


@op
def grid_shape(grid: Grid, axes: AxisIndices = ()) -> tuple[int, ...]:
    """The sizes of the listed axes in their order; of all if none is listed."""
    check_axes(grid, axes, "axes")
    return grid.shape(axes or range(grid.rank))


@op
def process_multi_index(grid: Grid, axes: AxisIndices = ()) -> tuple[jax.Array, ...]:
    """The device's coordinates along the listed axes in their order; along all if none is listed."""
    check_axes(grid, axes, "axes")
    return tuple(jnp.asarray(grid.group_index((axis,))) for axis in axes or range(grid.rank))


@op
def process_linear_index(grid: Grid) -> jax.Array:
    """The row-major number of the device's coordinates."""
    return jnp.asarray(grid.group_index(range(grid.rank)))


@op
def neighbors_linear_indices(grid: Grid, device: Sequence[Coordinate], split_axes: AxisIndices) -> tuple[Index, Index]:
    """The linear indices of the devices before and after one in the group over `split_axes`; -1 where there is none.

    Integers for integers; scalars if a coordinate is one.
    """
    check_neighbors(grid, split_axes, device)
    own = position(grid, split_axes, device)
    return _neighbour(grid, device, split_axes, own - 1), _neighbour(grid, device, split_axes, own + 1)


def _neighbour(grid: Grid, device: Sequence[Coordinate], split_axes: AxisIndices, index: Index) -> Index:
    """The linear index of the device with another group index over `split_axes`."""
    inside: Any = (index >= 0) & (index < grid.group_size(split_axes))
    moved = list(device)
    for axis, coordinate in zip(split_axes, coordinates_in_group(grid, split_axes, index), strict=True):
        moved[axis] = coordinate
    found = position(grid, range(grid.rank), moved)
    if isinstance(found, int):
        return found if inside else -1
    return jnp.where(inside, found, -1)


@op
def shard_shape(grid: Grid, shape: Sequence[int], layout: Layout, device: Sequence[Coordinate]) -> tuple[Index, ...]:
    """The shape of what a device holds of a tensor of global `shape`, halos included.

    `device` are its coordinates, or its linear index alone. Integers for integers; else scalars.
    """
    check_layout(layout, grid)
    check_whole_device(grid, device, linear=True)
    check_fits(layout, grid, shape)
    return tuple(shard_lengths(layout, grid, shape, device, NUMBERS))


def shard_lengths(
    layout: Layout, on: DeviceAxes, sizes: Sequence[Any], device: Sequence[Any], arithmetic: Arithmetic
) -> Iterator[Any]:
    """The length of each dimension of what a device holds, halos included, as far as it is known.

    Args:
        layout: the layout of the tensor, which fits it.
        on: the grid.
        sizes: those of the tensor; None may stand for one that offsets say.
        device: its coordinates, or its linear index alone.
        arithmetic: that on sizes, coordinates, halos and offsets which are no integers.
    """
    offsets, halos, coordinates = layout.offsets_of(on), layout.halo_of, device
    if len(device) == 1:
        coordinates = coordinates_in_group(on, range(on.rank), device[0], arithmetic)
    for dim, size in enumerate(sizes):
        axes, length = layout.split[dim] if dim < len(layout.split) else (), size
        if axes:
            block = _block(on, axes, coordinates, arithmetic)
            lengths = [arithmetic("arith.subi", end, start) for start, end in pairwise(offsets.get(dim, ()))]
            length = arithmetic.pick(lengths, block) if lengths else _even(size, on.group_size(axes), block, arithmetic)
        for halo in halos.get(dim, (0, 0)):
            length = arithmetic("arith.addi", length, halo)
        yield length


def _block(on: DeviceAxes, axes: AxisIndices, coordinates: Sequence[Any], arithmetic: Arithmetic) -> Any:
    """The number of the block that a device holds of a dimension that is split along `axes`."""
    block: Any = 0
    for axis in axes:
        start = arithmetic("arith.muli", block, on.group_size((axis,)) or 0)
        block = arithmetic("arith.addi", start, coordinates[axis])
    return block


def _even(size: Any, count: int | None, block: Any, arithmetic: Arithmetic) -> Any:
    """The length of one of the blocks of length `ceil(size / count)`, of which the last ones are shorter, or empty."""
    length = arithmetic("arith.ceildivsi", size, count or 1)
    rest = arithmetic("arith.subi", size, arithmetic("arith.muli", block, length))
    return arithmetic("arith.minsi", arithmetic("arith.maxsi", rest, 0), length)


# Buffers: what a device holds of a tensor under a layout, made from the whole tensor and joined to it again.

# The kinds of which copies are no terms, so that all devices but one hold the identity.
COUNTING = {"sum": "sum", "product": "product", "bitwise_xor": "xor"}


def device_part(grid: Grid, x: jax.Array, dim: int, dimension: Dimension) -> jax.Array:
    """The device's part of a dimension of a tensor, with its halo."""
    if not dimension.axes:
        return x
    lo, hi = dimension.halo
    widths = [(lo, hi + dimension.core) if d == dim else (0, 0) for d in range(x.ndim)]
    block = grid.group_index(dimension.axes)
    start = jnp.asarray(dimension.starts[:-1], jnp.int32)[block]
    part = lax.dynamic_slice_in_dim(jnp.pad(x, widths), start, dimension.length, axis=dim)
    if dimension.is_even:
        return part
    own = jnp.asarray(dimension.lengths, jnp.int32)[block]
    row = lax.broadcasted_iota(jnp.int32, part.shape, dim)
    return jnp.where(row < own, part, jnp.zeros_like(part))


# On the host: all buffers at once.


def all_buffers(x: np.ndarray, layout: Layout, grid: Grid) -> np.ndarray:
    """The buffers of all devices along a new dimension 0, in the order of their linear index."""
    found = dimensions(layout, grid, x.shape)
    buffers = []
    for device in itertools.product(*map(range, grid.sizes)):
        if layout.partial in COUNTING and any(device[axis] for axis in layout.partial_axes):
            identity = reductions.identity(COUNTING[layout.partial], x.dtype)
            buffers.append(np.full([d.length for d in found], identity, x.dtype))
            continue
        part = x
        for dim, dimension in enumerate(found):
            part = _host_cut(grid, part, dim, dimension, device)
        buffers.append(part)
    return np.stack(buffers)


def _host_cut(grid: Grid, x: np.ndarray, dim: int, dimension: Dimension, device: Sequence[int]) -> np.ndarray:
    lo, hi = dimension.halo
    block = int(position(grid, dimension.axes, device))
    start, end = dimension.starts[block] - lo, dimension.starts[block + 1] + hi
    part = np.take(x, range(max(start, 0), min(end, dimension.size)), axis=dim)
    before = max(-start, 0)
    after = dimension.length - before - part.shape[dim]
    return np.pad(part, [(before, after) if d == dim else (0, 0) for d in range(x.ndim)])


_COMBINE: dict[str, Any] = {
    "sum": np.add,
    "average": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
}


def whole_tensor(buffers: np.ndarray, layout: Layout, grid: Grid, shape: Sequence[int]) -> np.ndarray:
    """The tensor of global `shape` of which all devices' buffers are given; partial sums are combined.

    Devices that hold copies of a block must agree; the first one's is taken.
    """
    found = dimensions(layout, grid, shape)
    expected = (int(np.prod(grid.sizes)), *(dimension.length for dimension in found))
    if buffers.shape != expected:
        raise ShardingError(f"got buffers of shape {buffers.shape}, expected {expected}")
    whole = buffers.reshape(*grid.sizes, *buffers.shape[1:])
    terms = [
        _term(whole, found, grid, dict(zip(layout.partial_axes, place, strict=True)))
        for place in itertools.product(*map(range, grid.shape(layout.partial_axes)))
    ]
    total = terms[0]
    for term in terms[1:]:
        total = _COMBINE[layout.partial or "sum"](total, term).astype(total.dtype)
    if layout.partial == "average":
        mean = np.trunc(total / len(terms)) if np.issubdtype(total.dtype, np.integer) else total / len(terms)
        return np.asarray(mean).astype(total.dtype)
    return total


def _term(whole: np.ndarray, found: Sequence[Dimension], grid: Grid, fixed: Mapping[int, int]) -> np.ndarray:
    """What the devices hold whose coordinates along some axes are fixed; those along axes that split nothing are 0."""
    result = np.zeros([dimension.size for dimension in found], whole.dtype)
    for blocks in itertools.product(*(range(len(dimension.lengths)) for dimension in found)):
        device = dict.fromkeys(range(grid.rank), 0) | dict(fixed)
        for dimension, block in zip(found, blocks, strict=True):
            device |= zip(dimension.axes, coordinates_in_group(grid, dimension.axes, block), strict=True)
        pairs = list(zip(found, blocks, strict=True))
        own = [slice(d.halo[0], d.halo[0] + d.lengths[block]) for d, block in pairs]
        here = [slice(d.starts[block], d.starts[block + 1]) for d, block in pairs]
        result[tuple(here)] = whole[tuple(device.values())][tuple(own)]
    return result


# Resharding on local buffers: from one layout of a tensor to another on the same grid, step by step.
#
# In order: halos off; uneven dimensions that change are joined; averages are taken; axes move and terms are combined or
# made as `plan_reshard` finds it cheapest; the joined dimensions are cut; halos on. Only joining, averages, the axes
# and the filling of halos communicate.


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
class ExchangeStep:
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
class CutStep:
    """Keep a block of a joined dimension."""

    dim: int
    after: Dimension

    def __str__(self) -> str:
        return f"cut dimension {self.dim}"

    def run(self, grid: Grid, x: jax.Array) -> jax.Array:
        return device_part(grid, x, self.dim, self.after)


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
    steps += [CutStep(dim, replace(after[dim], halo=(0, 0))) for dim in rejoined if after[dim].axes]
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
    steps = ReshardPlanner(mesh, whole_axes=True, strips=False).plan(tuple(shape), 1, source, target).steps
    starts = [source, *(step.result for step in steps)]
    return [ExchangeStep(before, step) for before, step in zip(starts, steps, strict=False)]
