"""Grids: what ops require of their axes and parameters, the groups of devices that axes make, arithmetic on indices."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.base.errors import ShardingError
from sdy_jax.ir.device_orders import groups_of_axes
from sdy_jax.ir.meshes import AxisRef, axes_size
from sdy_jax.lowering.ops.collectives import movement
from sdy_jax.runtime.meshes import RefinedMesh

# What ops require of their parameters, as far as these are known: of text when it is verified, of Python in its trace.
#
# Coordinates and sizes that are no integers are known in the run only; sizes that are None are not known at all.

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


# Integer arithmetic, by names of the arith dialect: of what is known before the run, and of what it computes.


def _truncated(a: int, b: int) -> int:
    return -(-a // b) if (a < 0) != (b < 0) else a // b


def _remainder(a: int, b: int) -> int:
    return a - b * _truncated(a, b)


_CASTS = ("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast", "arith.index_castui")

INTEGER: dict[str, tuple[Callable[..., int], Callable[..., jax.Array]]] = {
    "arith.addi": (operator.add, lax.add),
    "arith.subi": (operator.sub, lax.sub),
    "arith.muli": (operator.mul, lax.mul),
    "arith.divsi": (_truncated, lax.div),
    "arith.divui": (_truncated, lax.div),
    "arith.floordivsi": (operator.floordiv, jnp.floor_divide),
    "arith.ceildivsi": (lambda a, b: -(-a // b), lambda a, b: -jnp.floor_divide(-a, b)),
    "arith.remsi": (_remainder, lax.rem),
    "arith.remui": (_remainder, lax.rem),
    "arith.andi": (operator.and_, lax.bitwise_and),
    "arith.ori": (operator.or_, lax.bitwise_or),
    "arith.xori": (operator.xor, lax.bitwise_xor),
    "arith.maxsi": (max, lax.max),
    "arith.minsi": (min, lax.min),
    "arith.maxui": (max, lax.max),
    "arith.minui": (min, lax.min),
    **dict.fromkeys(_CASTS, (lambda a: a, lambda a: a)),
    "arith.select": (lambda p, a, b: a if p else b, jnp.where),
}
"""What known integers become, and arrays. Operands are as the op sees them: without a sign by `UNSIGNED`."""

UNSIGNED = frozenset(name for name in INTEGER if "ui" in name)


class Arithmetic:
    """Arithmetic on integers and scalars. Subclasses have something else than scalars for what the run computes."""

    def __call__(self, name: str, a: Any, b: Any) -> Any:
        """`arith.addi` and its like of two integers, known if both are."""
        return INTEGER[name][0](a, b) if isinstance(a, int) and isinstance(b, int) else self.computed(name, a, b)

    def pick(self, sizes: Sequence[Any], index: Any) -> Any:
        """The entry of a table."""
        return sizes[index] if isinstance(index, int) else self.computed_entry(sizes, index)

    def computed(self, name: str, a: Any, b: Any) -> Any:
        dtype = jnp.result_type(a, b)
        return INTEGER[name][1](jnp.asarray(a, dtype), jnp.asarray(b, dtype))

    def computed_entry(self, sizes: Sequence[Any], index: Any) -> Any:
        return jnp.asarray(sizes)[index]


NUMBERS = Arithmetic()


# Grids, the groups of devices that lists of their axes make, and what all ops check of their parameters.
#
# The *group* of an op with axes `[a, b]` is the devices that agree on every other axis. The *group index* of a device
# is the row-major number of its coordinates in the order of that list, the first axis outermost. An empty list makes
# groups of one device.

Index = int | jax.Array
Coordinate = int | np.ndarray | jax.Array
"""Known before the run, for all devices or for each (`[devices]`, by linear index), or a scalar computed in the run."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid on the axes of the surrounding `shard_map`.

    Attributes:
        mesh: the mesh of the `shard_map`, which may be refined.
        axes: what each axis of the grid is on that mesh, major to minor. All of them together are all of its axes in
            their order, so that linear indices are the same.
        dialect, by_name: how messages speak of the grid: as a mesh or a grid, whose axes in text are numbers; those of
            Python have names.
    """

    mesh: RefinedMesh
    axes: tuple[tuple[AxisRef, ...], ...]
    dialect: str = "shard"
    by_name: bool = False

    @classmethod
    def of(cls, mesh: RefinedMesh, dialect: str = "shard", by_name: bool = False) -> Grid:
        """The grid whose axes are those of the mesh."""
        return cls(mesh, tuple((AxisRef(name),) for name in mesh.mesh.axis_names), dialect, by_name)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axes_size(refs, self.mesh.mesh) for refs in self.axes)

    @property
    def rank(self) -> int:
        return len(self.axes)

    @property
    def noun(self) -> str:
        return "mesh" if self.dialect == "mesh" else "grid"

    @property
    def subject(self) -> str:
        return f"the {self.noun}"

    def refs(self, axes: AxisIndices) -> tuple[AxisRef, ...]:
        """A list of axes on the mesh, in its order."""
        return tuple(ref for axis in axes for ref in self.axes[axis])

    def names(self, axes: AxisIndices) -> tuple[str, ...]:
        """The jax axis names of a list of axes, in its order."""
        return self.mesh.names(self.refs(axes))

    def shape(self, axes: AxisIndices) -> tuple[int, ...]:
        """The sizes of the axes of a list."""
        return tuple(self.sizes[axis] for axis in axes)

    def group_size(self, axes: AxisIndices) -> int:
        return math.prod(self.shape(axes))

    def group_index(self, axes: AxisIndices) -> Index:
        """The group index of the device that runs this."""
        refs = self.refs(axes)
        return self.mesh.index(refs) if refs else 0

    def label(self, axis: int) -> str:
        return repr(self.axes[axis][0].name) if self.by_name else str(axis)


P = ParamSpec("P")
R = TypeVar("R")


def op(function: Callable[Concatenate[Grid, P], R]) -> Callable[Concatenate[Grid, P], R]:
    """Makes the name of the op, `shard.all_gather`, part of its errors and of what profilers show."""

    @functools.wraps(function)
    def run(grid: Grid, /, *args: P.args, **kwargs: P.kwargs) -> R:
        name = f"{grid.dialect}.{function.__name__.replace('grid', grid.noun)}"
        try:
            with jax.named_scope(name):
                return function(grid, *args, **kwargs)
        except ShardingError as error:
            raise ShardingError(f"{name}: {error}") from None

    return run


def permute(grid: Grid, x: jax.Array, axes: AxisIndices, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """`x` sent from device to device of each group; `pairs` are group indices, sender first."""
    return movement.sent(x, grid.names([axis for axis in axes if grid.sizes[axis] > 1]), pairs)


def shifted(grid: Grid, x: jax.Array, axes: AxisIndices, offset: int) -> jax.Array:
    """What the device has whose group index is lower by `offset`; zeros where there is none."""
    size = grid.group_size(axes)
    return permute(grid, x, axes, [(i, i + offset) for i in range(size) if 0 <= i + offset < size])


def peers(grid: Grid, axes: AxisIndices) -> np.ndarray:
    """The linear indices of the devices in each device's group, in the order of group indices: `[devices, members]`."""
    groups = groups_of_axes(grid.refs(axes), grid.mesh.mesh)
    found = np.empty((groups.size, groups.shape[1]), int)
    for group in groups:
        found[group] = group
    return found


def group_device(grid: Grid, axes: AxisIndices, device: Sequence[Coordinate]) -> Any:
    """The group index of a device given by its coordinates; -1, no device, where one lies outside of its axis.

    It is known, for all devices or for each, if the coordinates are.
    """
    index: Any = 0
    inside: Any = True
    for coordinate, size in zip(device, grid.shape(axes), strict=True):
        index = index * size + coordinate
        inside = (coordinate >= 0) & (coordinate < size) & inside
    if isinstance(index, int):
        return index if inside else -1
    return (np if isinstance(index, np.ndarray) else jnp).where(inside, index, -1)


def position(grid: Grid, axes: AxisIndices, device: Sequence[Coordinate] | Mapping[int, Coordinate]) -> Index:
    """The group index over `axes` of a device given by its coordinates along all axes of the grid."""
    index: Index = group_device(grid, axes, [device[axis] for axis in axes])
    return index


def coordinates_in_group(on: DeviceAxes, axes: AxisIndices, index: Any, arithmetic: Arithmetic = NUMBERS) -> list[Any]:
    """The coordinates along `axes` of the device with a group index."""
    found: list[Any] = []
    for axis in reversed(axes):
        size = on.group_size((axis,)) or 0
        found.append(arithmetic("arith.remsi", index, size))
        index = arithmetic("arith.divsi", index, size)
    return found[::-1]


def only_on(grid: Grid, axes: AxisIndices, device: Sequence[Coordinate], x: jax.Array) -> jax.Array:
    """`x` on a device of each group, zeros on the others."""
    if not axes:
        return x
    return jnp.where(grid.group_index(axes) == group_device(grid, axes, device), x, jnp.zeros_like(x))


# What the ops check.


def check_dimension_of(x: jax.Array, dimension: int, attribute: str) -> None:
    """Raises `ShardingError` if an attribute names no dimension of `x`."""
    if x.ndim == 0:
        raise ShardingError(f"needs a ranked tensor of rank at least 1, got {jax.typeof(x)}")
    check_dimension(x.ndim, dimension, attribute)


def piece_size(grid: Grid, x: jax.Array, dimension: int, axes: AxisIndices) -> int:
    """The length of a device's piece of a dimension that a group shares.

    Raises:
        ShardingError: the pieces would not be equal.
    """
    check_divides(grid, dimension, x.shape[dimension], axes)
    return int(x.shape[dimension]) // grid.group_size(axes)
