"""Which grid a call means, its axes and devices, and what a device asks of it: sizes, coordinates, neighbours."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, SupportsIndex, TypeVar

import jax
import numpy as np

from sdy_jax.annotate.site import traced_manual_axes
from sdy_jax.base.errors import ShardingError
from sdy_jax.base.jax_calls import api_boundary, explaining_misfits
from sdy_jax.ir.jax_shardings import AnyMesh, mesh_from_jax
from sdy_jax.mesh_dialects.semantics import shards
from sdy_jax.mesh_dialects.semantics.grid import AxisIndices, Coordinate, Grid, Index
from sdy_jax.runtime.meshes import RefinedMesh

# Which grid a call means, and which of its axes and devices: what users write, as the semantics take it.

AxisNames = int | str | Sequence[int | str]
"""Grid axes by position or name, singly or in the order that counts."""

Device = Any
"""Coordinates of a device: an integer, or a sequence of integers and scalars, one per axis."""

_current: ContextVar[AnyMesh | None] = ContextVar("sdy_jax_grid", default=None)

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def with_grid(mesh: AnyMesh) -> Iterator[None]:
    """While this lasts, calls without `grid` mean `mesh` instead of the mesh of the surrounding `shard_map`.

    Args:
        mesh: a `jax.sharding.Mesh` or `AbstractMesh`. Its axes have names of the surrounding mesh's, and their sizes;
            their order, which may be another, is that of linear indices, and what integers as axes refer to.

    Example:
        >>> mesh = jax.sharding.AbstractMesh((10, 20, 30), ("x", "y", "z"))
        >>> with with_grid(mesh):
        ...     sdy.shard.neighbors_linear_indices((1, 2, 3), split_axes="y")
        (633, 693)
    """
    token = _current.set(mesh)
    try:
        yield
    finally:
        _current.reset(token)


_INTEGERS = ("gather_axis", "slice_axis", "scatter_axis", "split_axis", "concat_axis", "offset")


def mesh_terms(function: Callable[P, R]) -> Callable[P, R]:
    """Lets `mesh` and `mesh_axes` be said for `grid` and `grid_axes`, and keywords of integers be integers only."""

    explained = explaining_misfits(function)

    @api_boundary
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for term in ("mesh", "mesh_axes"):
            if term in kwargs:
                name = term.replace("mesh", "grid")
                if name in kwargs:
                    raise ShardingError(f"shard.{function.__name__}: got both {name} and {term}; give one of them")
                kwargs[name] = kwargs.pop(term)
        for name in kwargs.keys() & _INTEGERS:
            kwargs[name] = integer(kwargs[name], f"shard.{function.__name__}: {name}")
        return explained(*args, **kwargs)

    return call


def integer(value: Any, what: str) -> int:
    """An integer that a user gave.

    Raises:
        ShardingError: it is none, or not known while tracing.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise ShardingError(f"{what} is {value!r}, expected an integer that is known while tracing") from None


def grid_of(mesh: AnyMesh | None) -> Grid:
    """The grid that a call means: `mesh` if it is given, else that of `with_grid`, else that of the `shard_map`."""
    if not isinstance(mesh, AnyMesh | None):
        raise ShardingError(f"grid is {mesh!r}, expected a jax.sharding.Mesh or AbstractMesh")
    return _grid_on(mesh or _current.get() or jax.sharding.get_abstract_mesh())


@functools.lru_cache(maxsize=64)
def _grid_on(mesh: AnyMesh) -> Grid:
    return Grid.of(RefinedMesh.of(mesh_from_jax(mesh)), by_name=True)


def call_grid(op: str, mesh: AnyMesh | None, names: AxisNames) -> tuple[Grid, tuple[int, ...]]:
    """The grid of a call that devices make, and the axes that it lists.

    Raises:
        ShardingError: an axis that the grid lacks, or that the code around the call is not manual on.
    """
    grid, given = grid_of(mesh), listed(names)
    if not grid.rank:
        what = f"grid axis {given[0]!r}" if given else "the grid"
        raise ShardingError(f"shard.{op}: {what} is not manual here; call it inside jax.shard_map")
    axes = axis_numbers(f"shard.{op}", grid, given)
    _check_manual(op, grid, axes)
    return grid, axes


def on_every_axis(op: str, mesh: AnyMesh | None) -> tuple[Grid, tuple[int, ...]]:
    """The grid of a call that devices make, and all its axes; raises as `on_devices`."""
    return call_grid(op, mesh, range(grid_of(mesh).rank))


def _check_manual(op: str, grid: Grid, axes: AxisIndices) -> None:
    manual = traced_manual_axes()
    surrounding = jax.sharding.get_abstract_mesh()
    sizes = dict(zip(map(str, surrounding.axis_names), surrounding.axis_sizes, strict=True))
    for axis in axes:
        (name,) = grid.names((axis,))
        if name not in manual:
            raise ShardingError(f"shard.{op}: grid axis {name!r} is not manual here; call it inside jax.shard_map")
        if sizes[name] != grid.sizes[axis]:
            raise ShardingError(
                f"shard.{op}: grid axis {name!r} has size {grid.sizes[axis]}, but {sizes[name]} devices lie along it"
            )


def listed(names: AxisNames) -> list[int | str]:
    if isinstance(names, (str, SupportsIndex)):
        return [names]  # type: ignore[list-item]
    if not isinstance(names, Iterable):
        raise ShardingError(f"got {names!r} for grid axes, expected names or positions of axes")
    return list(names)


def axis_numbers(place: str, grid: Grid, names: AxisNames, attribute: str = "grid_axes") -> tuple[int, ...]:
    """Axes given by position or name, as positions. Positions out of range are left to the op to refuse."""
    return tuple(_axis_number(place, grid, name, attribute) for name in listed(names))


def _axis_number(place: str, grid: Grid, name: int | str, attribute: str) -> int:
    positions = grid.mesh.mesh.positions
    if not isinstance(name, str):
        number = integer(name, f"{place}: an entry of {attribute}")
        if not 0 <= number < grid.rank:
            raise ShardingError(f"{place}: {attribute} contains {number}, but the grid has axes 0..{grid.rank - 1}")
        return number
    if name not in positions:
        raise ShardingError(
            f"{place}: {attribute} contains {name!r}, but the axes of the grid are {', '.join(positions)}"
        )
    return positions[name]


def coordinates(device: Device, what: str) -> tuple[Coordinate, ...]:
    """The coordinates of a device: integers as far as they are known while tracing. `what` names them in errors."""
    if not isinstance(device, (list, tuple)) and np.ndim(device) == 0:
        return (_coordinate(device, what),)
    return tuple(_coordinate(value, what) for value in device)


def _coordinate(value: Any, what: str) -> Coordinate:
    return value if isinstance(value, jax.core.Tracer) else integer(value, what)


def dimension(x: Any, axis: int) -> int:
    """A tensor axis, of which negative ones count from the end. What is out of range is left to the op to refuse."""
    return axis + np.ndim(x) if -np.ndim(x) <= axis < 0 else axis


# What a device asks of the grid, as functions: its sizes, the coordinates of the device, its neighbours.


@mesh_terms
def grid_shape(axes: AxisNames = (), *, grid: AnyMesh | None = None) -> tuple[int, ...]:
    """The sizes of grid axes in the listed order, of all if none is listed. It can be called anywhere.

    Raises:
        SdyError: an axis that there is not, or that is listed twice.

    Example:
        >>> grid_shape(("model", "data"), grid=jax.sharding.AbstractMesh((2, 4), ("data", "model")))
        (4, 2)

    Source: the mesh dialect reference, `mesh.mesh_shape`.
    """
    here = grid_of(grid)
    return shards.grid_shape(here, axis_numbers("shard.grid_shape", here, axes, "axes"))


@mesh_terms
def process_multi_index(axes: AxisNames = (), *, grid: AnyMesh | None = None) -> tuple[jax.Array, ...]:
    """The device's coordinates along grid axes in the listed order, along all if none is listed: integer scalars.

    Raises:
        SdyError: while tracing: an axis that there is not or is listed twice, or a call outside of `jax.shard_map`.

    Example:
        >>> body = lambda: process_multi_index()[1][None]
        >>> jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=P(("data", "model"))))().tolist()
        [0, 1, 2, 3, 0, 1, 2, 3]

    Source: the mesh dialect reference, `mesh.process_multi_index`.
    """
    given = listed(axes)
    here, numbers = (
        call_grid("process_multi_index", grid, given) if given else on_every_axis("process_multi_index", grid)
    )
    return shards.process_multi_index(here, numbers)


@mesh_terms
def process_linear_index(*, grid: AnyMesh | None = None) -> jax.Array:
    """The row-major number of the device's coordinates, the last axis fastest: an integer scalar.

    It is a position in the grid, not the id of a `jax.Device`.

    Raises:
        SdyError: while tracing: a call outside of `jax.shard_map`, or in one that is not manual on all axes.

    Example:
        >>> body = lambda: process_linear_index()[None]
        >>> jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=P(("data", "model"))))().tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]

    Source: the mesh dialect reference, `mesh.process_linear_index`.
    """
    here, _ = on_every_axis("process_linear_index", grid)
    return shards.process_linear_index(here)


@mesh_terms
def neighbors_linear_indices(
    device: Device = None, *, split_axes: AxisNames, grid: AnyMesh | None = None
) -> tuple[Index, Index]:
    """The linear indices of the devices before and after one, as the blocks of a dimension follow each other.

    Args:
        device: coordinates along all grid axes; those of the device that runs this by default.
        split_axes: the axes that split the dimension, major to minor.
        grid: the mesh.

    Returns:
        The device before and the one after; -1 where there is none. Integers for integers, else integer scalars.

    Raises:
        SdyError: an axis that there is not or is listed twice, no axes, or coordinates of another number than axes.

    Example:
        >>> grid = jax.sharding.AbstractMesh((10, 20, 30), ("x", "y", "z"))
        >>> neighbors_linear_indices((1, 2, 3), split_axes="y", grid=grid)
        (633, 693)

    Source: the mesh dialect reference, `mesh.neighbors_linear_indices`.
    """
    if device is None:
        here, every = on_every_axis("neighbors_linear_indices", grid)
        device = shards.process_multi_index(here, every)
    here = grid_of(grid)
    axes = axis_numbers("shard.neighbors_linear_indices", here, split_axes, "split_axes")
    return shards.neighbors_linear_indices(here, coordinates(device, "shard.neighbors_linear_indices: device"), axes)
