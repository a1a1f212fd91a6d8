"""Grids, the groups of devices that lists of their axes make, and arithmetic on indices of devices."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.base.errors import ShardingError
from sdy_jax.ir.device_orders import groups_of_axes
from sdy_jax.ir.meshes import AxisRef, axes_size
from sdy_jax.lowering.ops.collectives import movement
from sdy_jax.mesh_dialects.semantics import checks
from sdy_jax.mesh_dialects.semantics.checks import AxisIndices, DeviceAxes
from sdy_jax.runtime.meshes import RefinedMesh

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


def check_dimension(x: jax.Array, dimension: int, attribute: str) -> None:
    """Raises `ShardingError` if an attribute names no dimension of `x`."""
    if x.ndim == 0:
        raise ShardingError(f"needs a ranked tensor of rank at least 1, got {jax.typeof(x)}")
    checks.check_dimension(x.ndim, dimension, attribute)


def piece_size(grid: Grid, x: jax.Array, dimension: int, axes: AxisIndices) -> int:
    """The length of a device's piece of a dimension that a group shares.

    Raises:
        ShardingError: the pieces would not be equal.
    """
    checks.check_divides(grid, dimension, x.shape[dimension], axes)
    return int(x.shape[dimension]) // grid.group_size(axes)
