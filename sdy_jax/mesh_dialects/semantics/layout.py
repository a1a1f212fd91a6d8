"""The layout of a tensor on a grid: blocks, their lengths and halos, and unreduced axes; and as a sharding of SDY."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeVar

from sdy_jax.base.errors import ShardingError
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.mesh_dialects.semantics.collectives import KINDS, Halo, check_kind, paired
from sdy_jax.mesh_dialects.semantics.grid import DeviceAxes, Grid, check_axis_range, check_halo_sizes

# The layout of a tensor on a grid: the blocks of devices, their lengths and halos, and unreduced axes.
#
# Dimension d is cut along the grid axes `split[d]`, major to minor; a device's position is its group index over that
# list, and it holds the block of that number. Blocks are equal, or the last ones shorter (those of SDY and JAX, of
# length `ceil(size / n)`), or given by offsets. All devices hold buffers of one shape: uneven blocks stand at the
# start of a buffer as long as the longest one.

AxisLists = tuple[tuple[int, ...], ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Layout:
    """What a `sharding` op says, without its grid.

    Attributes:
        split: the axes per dimension; missing trailing lists are empty.
        partial: the reduction kind of `partial_axes`, along which the tensor is unreduced; None if there are none.
        halos: two sizes per split dimension.
        offsets: per split dimension where its blocks start, and its size.

    Halos and offsets are integers, and in text also the values that have them in the run.
    """

    split: AxisLists
    partial: str | None = None
    partial_axes: tuple[int, ...] = ()
    halos: tuple[Any, ...] = ()
    offsets: tuple[Any, ...] = ()

    def __str__(self) -> str:
        """The text after the grid in the op."""
        return sharding_text(self.split, self.partial, self.partial_axes, self.halos, self.offsets)

    @property
    def split_dimensions(self) -> list[int]:
        return [dim for dim, axes in enumerate(self.split) if axes]

    @property
    def halo_of(self) -> dict[int, Halo]:
        """The halos of the split dimensions, if there are any."""
        return dict(zip(self.split_dimensions, paired(self.halos), strict=True)) if self.halos else {}

    def offsets_of(self, on: DeviceAxes) -> dict[int, tuple[Any, ...]]:
        """The offsets of each split dimension, if they are given."""
        if not self.offsets:
            return {}
        found, rest = {}, self.offsets
        for dim in self.split_dimensions:
            count = (on.group_size(self.split[dim]) or 0) + 1
            found[dim], rest = rest[:count], rest[count:]
        return found


def sharding_text(
    split: Sequence[Sequence[int | str]],
    partial: str | None,
    partial_axes: Sequence[int | str],
    halos: Sequence[int],
    offsets: Sequence[int],
) -> str:
    """The dialect's text of a sharding, after its grid."""
    text = f"split_axes = {[*map(list, split)]}"
    if partial_axes:
        text += f" partial = {partial} {list(partial_axes)}"
    if halos:
        text += f" halo_sizes = {list(halos)}"
    if offsets:
        text += f" sharded_dims_offsets = {list(offsets)}"
    return text


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension of a tensor under a layout.

    Attributes:
        axes: what splits it.
        starts: where each block starts, and the size of the dimension.
        halo: the cells before and after the device's own.
    """

    axes: tuple[int, ...]
    starts: tuple[int, ...]
    halo: Halo = (0, 0)

    @property
    def size(self) -> int:
        return self.starts[-1]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The length of each block."""
        return tuple(end - start for start, end in pairwise(self.starts))

    @property
    def core(self) -> int:
        """The length of the longest block."""
        return max(self.lengths)

    @property
    def length(self) -> int:
        """The length of the buffer."""
        return self.halo[0] + self.core + self.halo[1]

    @property
    def is_even(self) -> bool:
        return min(self.lengths) == self.core


def even_starts(size: int, count: int) -> tuple[int, ...]:
    """Where the blocks of length `ceil(size / count)` start, and the size."""
    block = -(-size // count)
    return tuple(min(i * block, size) for i in range(count + 1))


def dimensions(layout: Layout, grid: Grid, shape: Sequence[int]) -> tuple[Dimension, ...]:
    """The dimensions of a tensor of global `shape`.

    Raises:
        ShardingError: the layout does not fit the shape.
    """
    check_fits(layout, grid, shape)
    split = trimmed(layout.split)
    split += ((),) * (len(shape) - len(split))
    offsets, halos = layout.offsets_of(grid), layout.halo_of
    return tuple(
        Dimension(axes, offsets.get(dim) or even_starts(size, grid.group_size(axes)), halos.get(dim, (0, 0)))
        for dim, (size, axes) in enumerate(zip(shape, split, strict=True))
    )


def check_fits(layout: Layout, on: DeviceAxes, shape: Sequence[int | None]) -> None:
    """Raises `ShardingError` if a layout is none of a tensor of global `shape`, as far as sizes are known."""
    split = trimmed(layout.split)
    if len(split) > len(shape):
        raise ShardingError(f"split_axes has {len(split)} lists, the tensor {len(shape)} dimensions")
    for dim, starts in layout.offsets_of(on).items():
        if isinstance(starts[-1], int) and shape[dim] is not None and starts[-1] != shape[dim]:
            raise ShardingError(f"offsets of dimension {dim} end at {starts[-1]}, the dimension has size {shape[dim]}")
    for dim, halo in layout.halo_of.items():
        size, count = shape[dim], on.group_size(split[dim])
        if size is not None and count is not None and halo != (0, 0):
            _check_halo(halo, dim, size, count)


def _check_halo(halo: Halo, dim: int, size: int, count: int) -> None:
    """Halos are copies of what the neighbours own, and all devices' blocks have to be of one length."""
    if size % count:
        raise ShardingError(f"dimension {dim} of size {size} does not split evenly; halos need that")
    largest = max(part for part in (*halo, 0) if isinstance(part, int))
    if largest > size // count:
        raise ShardingError(f"halo size {largest} exceeds the shard size {size // count} of dimension {dim}")


def trimmed(split: tuple[tuple[T, ...], ...]) -> tuple[tuple[T, ...], ...]:
    """Without trailing empty lists."""
    while split and not split[-1]:
        split = split[:-1]
    return split


def check_layout(layout: Layout, on: DeviceAxes) -> None:
    """Raises `ShardingError` if a layout is wrong on its own, whatever the tensor, as far as sizes are known."""
    if not layout.split:
        raise ShardingError("split_axes needs at least one, possibly empty, list")
    _check_partial(layout)
    _check_axes(layout, on)
    if layout.halos and layout.offsets:
        raise ShardingError("halo_sizes and sharded_dims_offsets exclude each other")
    check_halo_sizes(layout.halos, len(layout.split_dimensions))
    if layout.offsets:
        _check_offsets(layout, on)


def _check_partial(layout: Layout) -> None:
    if layout.partial == "generic":
        raise ShardingError("partial = generic is not allowed")
    if (layout.partial is None) != (not layout.partial_axes):
        raise ShardingError("partial needs a kind and at least one axis")
    if layout.partial is not None:
        check_kind(layout.partial)


def _check_axes(layout: Layout, on: DeviceAxes) -> None:
    used: set[int] = set()
    lists = [("split_axes", axes) for axes in layout.split] + [("partial_axes", layout.partial_axes)]
    for attribute, axes in lists:
        for axis in axes:
            check_axis_range(on, (axis,), attribute)
            if axis in used:
                raise ShardingError(f"{on.noun} axis {on.label(axis)} is used twice")
            used.add(axis)


def _check_offsets(layout: Layout, on: DeviceAxes) -> None:
    counts = [on.group_size(layout.split[dim]) for dim in layout.split_dimensions]
    if on.group_size(range(on.rank)) is None:
        raise ShardingError(f"sharded_dims_offsets need a {on.noun} without ?")
    expected = sum((count or 0) + 1 for count in counts)
    if len(layout.offsets) != expected:
        raise ShardingError(f"{len(layout.offsets)} offsets, expected {expected}")
    for dim, starts in layout.offsets_of(on).items():
        if isinstance(starts[0], int) and starts[0]:
            raise ShardingError(f"offsets of dimension {dim} start at {starts[0]}, expected 0")
        known = [(position, start) for position, start in enumerate(starts) if isinstance(start, int)]
        for (_, before), (position, after) in pairwise([(0, 0), *known]):
            if after < before:
                raise ShardingError(f"offsets of dimension {dim} decrease at position {position}")


def normalized(layout: Layout, on: DeviceAxes) -> Layout:
    """The layout in canonical form, so that equivalent layouts are equal."""
    split = trimmed(layout.split)
    return replace(
        layout,
        split=split or ((),),
        partial=layout.partial if layout.partial_axes else None,
        partial_axes=tuple(sorted(layout.partial_axes)),
        halos=layout.halos if any(halo != 0 for halo in layout.halos) else (),
        offsets=() if all(map(_are_even, layout.offsets_of(on).values())) else layout.offsets,
    )


def _are_even(starts: tuple[Any, ...]) -> bool:
    """Whether offsets are those of a layout that gives none."""
    return len(starts) > 1 and isinstance(starts[-1], int) and starts == even_starts(starts[-1], len(starts) - 1)


def buffer_shape(layout: Layout, grid: Grid, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of every device's buffer."""
    return tuple(dimension.length for dimension in dimensions(layout, grid, shape))


def even_shape(layout: Layout, grid: Grid, buffer: Sequence[int]) -> tuple[int, ...]:
    """The global shape of a tensor with such buffers, if blocks without offsets are all as long as they can be."""
    split, halos, offsets = trimmed(layout.split), layout.halo_of, layout.offsets_of(grid)
    if len(split) > len(buffer):
        raise ShardingError(f"split_axes has {len(split)} lists, the tensor {len(buffer)} dimensions")
    found = []
    for dim, length in enumerate(buffer):
        if dim in offsets:
            found.append(offsets[dim][-1])
            continue
        count = grid.group_size(split[dim]) if dim < len(split) else 1
        found.append((length - sum(halos.get(dim, ()))) * count)
    return tuple(found)


# Between shardings of the mesh and shard dialects and those of SDY.
#
# A mesh sharding is exact: its dimensions are closed, and missing lists are empty. SDY has no counterpart of halos
# and offsets, nor of partial averages; parts of axes and open dimensions are SDY's alone.

PARTIAL_IN_SDY: Mapping[str, str] = MappingProxyType({kind: name for kind, name in KINDS.items() if kind != "average"})
"""Kinds of partial tensors, and SDY's names for the reductions of unreduced axes."""

KIND_OF_REDUCTION: Mapping[str, str] = MappingProxyType({name: kind for kind, name in PARTIAL_IN_SDY.items()})


def tensor_sharding(
    split: AxisLists, kind: str | None, partial_axes: tuple[int, ...], mesh: Mesh, rank: int, symbol: str = ""
) -> TensorSharding:
    """The SDY sharding of a tensor of some rank.

    Args:
        split, kind, partial_axes: as in `Layout`; the kind is one that SDY has, None if there are no partial axes.
        mesh: the mesh whose axes the numbers are.
        rank: no less than the lists without trailing empty ones.
        symbol: how the sharding is to name the mesh; by default it holds the mesh itself.
    """
    names = mesh.axis_names

    def refs(axes: tuple[int, ...]) -> tuple[AxisRef, ...]:
        return tuple(AxisRef(names[axis]) for axis in axes)

    lists = trimmed(split)
    lists += ((),) * (rank - len(lists))
    unreduced = refs(tuple(sorted(partial_axes)))
    reduction = PARTIAL_IN_SDY[kind] if kind else "sum"
    return TensorSharding.closed(symbol or mesh, [refs(axes) for axes in lists], unreduced, reduction)


def check_expressible(sharding: TensorSharding, dialect: str) -> None:
    """
    Raises:
        ShardingError: an SDY sharding has an open dimension or a part of an axis, which the dialects have not.
    """
    for axes in (*sharding.axes, sharding.unreduced_axes):
        for axis in axes:
            if axis.sub_axis is not None:
                raise ShardingError(f"axis {axis} is a sub-axis; {dialect} shardings have whole axes only")
    if not sharding.is_fully_closed:
        raise ShardingError(f"<{sharding}> has an open dimension; {dialect} shardings are exact")


def axis_numbers(sharding: TensorSharding, mesh: Mesh, dialect: str) -> tuple[AxisLists, str | None, tuple[int, ...]]:
    """The inverse of `tensor_sharding`: the axes that split each dimension, the kind and the axes that are partial.

    Raises:
        ShardingError: as `check_expressible`.
    """
    check_expressible(sharding, dialect)

    def numbers(axes: tuple[AxisRef, ...]) -> tuple[int, ...]:
        return tuple(mesh.positions[axis.name] for axis in axes)

    partial = numbers(sharding.unreduced_axes)
    kind = KIND_OF_REDUCTION[sharding.reduction] if partial else None
    return tuple(map(numbers, sharding.axes)) or ((),), kind, partial
