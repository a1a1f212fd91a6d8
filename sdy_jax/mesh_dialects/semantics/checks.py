"""What ops require of their parameters, as far as these are known: of text when it is verified, of Python in its trace.

Coordinates and sizes that are no integers are known in the run only; sizes that are None are not known at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol

from sdy_jax.base.errors import ShardingError

AxisIndices = Sequence[int]


class DeviceAxes(Protocol):
    """What checks know of a grid: of the devices of a `shard_map`, or of one that text declares."""

    @property
    def rank(self) -> int: ...

    @property
    def noun(self) -> str:
        """`mesh` or `grid`."""

    @property
    def subject(self) -> str:
        """What messages call it."""

    def label(self, axis: int) -> str:
        """What messages call an axis."""

    def group_size(self, axes: AxisIndices) -> int | None:
        """How many devices differ along these axes alone; None where that is known in the run only."""


def labels(on: DeviceAxes, axes: AxisIndices) -> str:
    """A list of axes in a message."""
    return f"[{', '.join(map(on.label, axes))}]"


def check_axes(on: DeviceAxes, axes: AxisIndices, attribute: str | None = None, text: str | None = None) -> None:
    """Raises `ShardingError` if an axis is not one of the grid, or listed twice. `text` is the list in messages."""
    attribute = attribute or f"{on.noun}_axes"
    check_axis_range(on, axes, attribute)
    for axis in axes:
        if list(axes).count(axis) > 1:
            raise ShardingError(f"{attribute} = {text or labels(on, axes)} repeats axis {on.label(axis)}")


def check_axis_range(on: DeviceAxes, axes: AxisIndices, attribute: str) -> None:
    for axis in axes:
        if not 0 <= axis < on.rank:
            raise ShardingError(f"{attribute} contains {axis}, but {on.subject} has axes 0..{on.rank - 1}")


def check_shift_axis(on: DeviceAxes, axes: AxisIndices, shift_axis: int) -> None:
    if shift_axis not in axes:
        raise ShardingError(f"shift_axis = {on.label(shift_axis)} is not among {on.noun}_axes = {labels(on, axes)}")


def check_dimension(rank: int, dimension: int, attribute: str) -> None:
    """Raises `ShardingError` if an attribute names no dimension of a tensor."""
    if not 0 <= dimension < rank:
        raise ShardingError(f"{attribute} = {dimension} is outside 0..{rank - 1}")


def check_divides(on: DeviceAxes, dimension: int, size: int | None, axes: AxisIndices) -> None:
    """Raises `ShardingError` if the pieces of a dimension that a group shares are not equal."""
    group = on.group_size(axes)
    if size is not None and group is not None and size % group:
        raise ShardingError(
            f"dimension {dimension} of size {size} does not split into {group} equal pieces "
            f"({on.noun} axes {labels(on, axes)})"
        )


def check_device(on: DeviceAxes, axes: AxisIndices, device: Sequence[Any], attribute: str) -> None:
    """Raises `ShardingError` if coordinates along `axes` are not those of a device in its group."""
    if len(device) != len(axes):
        raise ShardingError(f"{attribute} has {len(device)} coordinates for {len(axes)} {on.noun} axes")
    for position, (axis, coordinate) in enumerate(zip(axes, device, strict=True)):
        if _is_outside(coordinate, size := on.group_size((axis,))):
            raise ShardingError(
                f"{attribute}[{position}] = {coordinate} is outside 0..{_last(size)}, "
                f"the range of {on.noun} axis {on.label(axis)}"
            )


def check_whole_device(on: DeviceAxes, device: Sequence[Any], linear: bool = False) -> None:
    """Raises `ShardingError` if coordinates, or where that is allowed a linear index alone, are those of no device."""
    if linear and len(device) == 1:
        if _is_outside(device[0], count := on.group_size(range(on.rank))):
            raise ShardingError(f"device {device[0]} is outside 0..{_last(count)}")
        return
    if len(device) != on.rank:
        raise ShardingError(f"{len(device)} device coordinates for a {on.noun} of rank {on.rank}")
    check_device(on, range(on.rank), device, "device")


def _is_outside(coordinate: Any, size: int | None) -> bool:
    return isinstance(coordinate, int) and (coordinate < 0 or (size is not None and coordinate >= size))


def _last(size: int | None) -> str:
    return "?" if size is None else str(size - 1)


def check_neighbors(on: DeviceAxes, split_axes: AxisIndices, device: Sequence[Any]) -> None:
    check_axes(on, split_axes, "split_axes")
    if not split_axes:
        raise ShardingError("split_axes is empty")
    check_whole_device(on, device)


def check_halos(
    on: DeviceAxes, shape: Sequence[int | None], split_axes: Sequence[AxisIndices], sizes: Sequence[Any]
) -> None:
    """Raises `ShardingError` if halos are none of a buffer of `shape`: two per split dimension, each no larger than the
    core, of which the neighbours' halos are copies."""
    lists = f"[{', '.join(labels(on, axes) for axes in split_axes)}]"
    check_axes(on, [*chain.from_iterable(split_axes)], "split_axes", lists)
    if not shape or len(split_axes) > len(shape):
        raise ShardingError(f"split_axes has {len(split_axes)} lists, the tensor {len(shape)} dimensions")
    split = [dim for dim, axes in enumerate(split_axes) if axes]
    check_halo_sizes(sizes, len(split))
    for number, dim in enumerate(split if sizes else ()):
        size, halo = shape[dim], sizes[2 * number : 2 * number + 2]
        if size is None or not all(isinstance(part, int) for part in halo):
            continue
        core = size - sum(halo)
        if core < max(halo):
            raise ShardingError(
                f"dimension {dim} of size {size} leaves a core of {core}, smaller than halo size {max(halo)}"
            )


def check_halo_sizes(sizes: Sequence[Any], split: int) -> None:
    """Raises `ShardingError` unless there are two sizes per split dimension, or none at all."""
    if sizes and len(sizes) != 2 * split:
        raise ShardingError(f"{len(sizes)} halo sizes for {split} split dimensions, expected {2 * split}")
    for size in sizes:
        if isinstance(size, int) and size < 0:
            raise ShardingError(f"halo size {size} is negative")


def check_element(attribute: str, kind: str, element: str) -> None:
    """Raises `ShardingError` if a kind of reduction does not work on elements of a type, given by MLIR's name."""
    if kind.startswith("bitwise") and not re.fullmatch(r"[su]?i\d+|index", element):
        raise ShardingError(f"{attribute} = {kind} needs integers, got {element}")
    if kind in ("max", "min") and element.startswith("complex"):
        raise ShardingError(f"{attribute} = {kind} needs ordered values, got {element}")
    if kind == "average" and element == "i1":
        raise ShardingError(f"{attribute} = average needs numbers, got {element}")
