"""Shardings of the shard dialect as values, stated for arrays and asked for, and the buffers of arrays under them."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdy_jax.annotate.constraints import sharding_constraint
from sdy_jax.annotate.site import Site, current_mesh, current_site
from sdy_jax.base.errors import ShardingError, UnsupportedError
from sdy_jax.base.jax_calls import api_boundary, api_class
from sdy_jax.ir.jax_shardings import AnyMesh, from_named_sharding
from sdy_jax.ir.locations import caller_line
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.mesh_dialects.python.grids import (
    AxisNames,
    Device,
    axis_numbers,
    call_grid,
    coordinates,
    grid_of,
    listed,
    mesh_terms,
)
from sdy_jax.mesh_dialects.semantics import shards
from sdy_jax.mesh_dialects.semantics.grid import Grid
from sdy_jax.mesh_dialects.semantics.layout import (
    KIND_OF_REDUCTION,
    PARTIAL_IN_SDY,
    Layout,
    check_expressible,
    check_layout,
    even_shape,
    normalized,
    sharding_text,
    tensor_sharding,
    trimmed,
)
from sdy_jax.mesh_dialects.verification import CHAINS, TWICE
from sdy_jax.runtime.meshes import RefinedMesh

# Shardings of the shard dialect: the layout of a tensor on a grid as a value.


@api_class
@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """The layout of a tensor on a grid: `sharding` of the dialect.

    Attributes:
        split_axes: per dimension the grid axes, by name or position, that split it, major to minor; missing trailing
            lists are empty. At least one list.
        grid: the mesh; by default that of where the sharding is used.
        partial: a reduction kind, and the grid axes along which the tensor is unreduced.
        halo_sizes: two numbers per dimension that is split: by how much blocks overlap what lies before and after.
        sharded_dims_offsets: per dimension that is split where each block starts, and the size of the dimension. By
            default all blocks but the last ones have length `ceil(size / n)`.

    Shardings are equal if they mean the same: trailing empty lists, halos of zero, offsets of the default blocks and
    the order of partial axes make no difference. `str` is the dialect's text.

    Raises:
        SdyError: when it is made, if the grid is known, else when it is used: an axis that there is not or is used
            twice, halos beside offsets, or offsets that are not those of the blocks.

    Example:
        >>> print(Sharding([["data"], []], partial=("max", "model"), grid=mesh))
        split_axes = [[0], []] partial = max [1]

    Source: the mesh dialect reference, `mesh.sharding`.
    """

    split_axes: tuple[tuple[int | str, ...], ...]
    _: KW_ONLY
    grid: AnyMesh | None = None
    partial: tuple[str, tuple[int | str, ...]] | None = None
    halo_sizes: tuple[int, ...] = ()
    sharded_dims_offsets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        partial = self.partial and (self.partial[0], tuple(listed(self.partial[1])))
        canonical = {
            "split_axes": tuple(tuple(listed(axes)) for axes in self.split_axes),
            "partial": partial,
            "halo_sizes": tuple(map(operator.index, self.halo_sizes or ())),
            "sharded_dims_offsets": tuple(map(operator.index, self.sharded_dims_offsets or ())),
        }
        for name, value in canonical.items():
            object.__setattr__(self, name, value)
        if self.grid is not None:
            self.layout(grid_of(self.grid))

    def layout(self, grid: Grid) -> Layout:
        """The sharding with the axes of a grid as numbers.

        Raises:
            SdyError: it is none on this grid.
        """
        place = "shard.sharding"
        split = tuple(axis_numbers(place, grid, axes, "split_axes") for axes in self.split_axes)
        kind, axes = self.partial or (None, ())
        partial_axes = axis_numbers(place, grid, axes, "partial_axes")
        layout = Layout(split, kind, partial_axes, self.halo_sizes, self.sharded_dims_offsets)
        try:
            check_layout(layout, grid)
        except ShardingError as error:
            raise ShardingError(f"{place}: {error}") from None
        return layout

    def to_sdy(self, mesh: AnyMesh | Mesh | None = None, *, rank: int | None = None) -> TensorSharding:
        """The SDY sharding with closed dimensions; halos and offsets have no counterpart and are left out.

        Args:
            mesh: the mesh; by default the sharding's own.
            rank: the rank of the tensor, where there may be fewer lists.

        Raises:
            SdyError: no mesh, more lists than dimensions, or a partial average.
        """
        grid = grid_for(self, mesh)
        layout = self.layout(grid)
        split = trimmed(layout.split)
        rank = len(layout.split) if rank is None else rank
        if len(split) > rank:
            raise ShardingError(f"shard.sharding: split_axes has {len(split)} lists, the tensor {rank} dimensions")
        if layout.partial is not None and layout.partial not in PARTIAL_IN_SDY:
            raise UnsupportedError(f"shard.sharding: partial = {layout.partial} has no counterpart in SDY")
        return tensor_sharding(layout.split, layout.partial, layout.partial_axes, grid.mesh.mesh, rank)

    @classmethod
    def from_sdy(cls, sharding: TensorSharding, grid: AnyMesh | None = None) -> Sharding:
        """The sharding that says what an SDY sharding does.

        Args:
            sharding: it names whole axes only, and its dimensions are closed.
            grid: its mesh, where it has none of its own.

        Raises:
            SdyError: a part of an axis, or an open dimension: shardings of the dialect have neither.
        """
        try:
            check_expressible(sharding, "shard")
        except ShardingError as error:
            raise ShardingError(f"shard.sharding: {error}") from None
        if grid is None and isinstance(sharding.mesh, Mesh):
            grid = jax.sharding.AbstractMesh(tuple(sharding.mesh.sizes.values()), sharding.mesh.axis_names)
        names = _names(sharding.unreduced_axes)
        return cls(
            tuple(map(_names, sharding.axes)) or ((),),
            grid=grid,
            partial=(KIND_OF_REDUCTION[sharding.reduction], names) if names else None,
        )

    def _key(self) -> Any:
        if self.grid is None:
            partial = self.partial and (self.partial[0], frozenset(self.partial[1]))
            halos = self.halo_sizes if any(self.halo_sizes) else ()
            return trimmed(self.split_axes), partial, halos, self.sharded_dims_offsets
        grid = grid_of(self.grid)
        return normalized(self.layout(grid), grid), grid

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sharding) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        if self.grid is not None:
            return str(self.layout(grid_of(self.grid)))
        kind, axes = self.partial or (None, ())
        return sharding_text(self.split_axes, kind, axes, self.halo_sizes, self.sharded_dims_offsets)


def grid_for(sharding: Sharding, mesh: AnyMesh | Mesh | None) -> Grid:
    """A mesh as the grid of a sharding; by default its own.

    Raises:
        ShardingError: there is neither.
    """
    if isinstance(mesh, Mesh):
        return Grid.of(RefinedMesh.of(mesh), by_name=True)
    grid = grid_of(mesh or sharding.grid)
    if not grid.rank:
        raise ShardingError(f"shard.sharding: {sharding!r} names no grid; give Sharding(..., grid=mesh)")
    return grid


def _names(axes: Sequence[AxisRef]) -> tuple[str, ...]:
    return tuple(axis.name for axis in axes)


# Shardings of arrays of partitioned functions, stated and asked for.


@api_boundary
def shard(x: Any, sharding: Sharding, *, annotate_for_users: bool = False) -> Any:
    """States how an array of a partitioned function is sharded: `shard` of the dialect.

    Args:
        x: an array.
        sharding: its sharding, on the mesh of the partition.
        annotate_for_users: whether it is how the users of the result see the value, rather than the sharding of the
            value itself. Use one plain `shard` per value, and any number for users.

    Returns:
        `x`, for whose uses the sharding holds. If `x` has no other uses it is also the sharding of `x`. Derivatives and
        `vmap` as for `sharding_constraint`, which this is; outside of a partitioned function nothing happens.

    Raises:
        SdyError: a sharding that does not fit the array or the mesh; or another one for an array that has been given
            one, where the dialect leaves open what that means: two plain ones, two for users in a chain, or a plain one
            after one for users.

    Warns:
        UserWarning: halos, offsets or a partial average. They say how local buffers look, and a partitioned function
            has none to show, so only the axes are stated. `reshard` and `to_local` make such buffers.

    Example:
        >>> @sdy.partition(mesh=mesh)
        ... def layer(x, w):
        ...     x = shard(x, Sharding([["data"]]))
        ...     return shard(x @ w, Sharding([["data"], ["model"]]), annotate_for_users=True)

    Source: the mesh dialect reference, `mesh.shard`.
    """
    if not isinstance(sharding, Sharding):
        raise ShardingError(f"shard.shard: got {sharding!r}, expected a sdy_jax.shard.Sharding")
    given, stated, x = x, sharding, jnp.asarray(x)
    is_average = sharding.partial is not None and sharding.partial[0] not in PARTIAL_IN_SDY
    if sharding.halo_sizes or sharding.sharded_dims_offsets or is_average:
        text = "shard.shard: averages, halos and offsets are of local buffers; of the sharding only its axes are stated"
        warnings.warn(text, UserWarning, stacklevel=2)
    if is_average:
        sharding = replace(sharding, partial=None)
    mesh = sharding.grid if sharding.grid is not None else current_mesh()
    if mesh is None and not grid_of(None).rank:
        return x
    constrained = sharding_constraint(x, sharding.to_sdy(mesh, rank=x.ndim))
    site = current_site()
    if site is not None:
        grid = grid_for(stated, mesh)
        said = normalized(stated.layout(grid), grid), grid.mesh.mesh
        _check_annotations(site, given, constrained, _RecordedShard(said, annotate_for_users, caller_line()))
    return constrained


@dataclass(frozen=True, slots=True)
class _RecordedShard:
    """The sharding that a `shard` stated, and its source line."""

    sharding: tuple[Layout, Mesh]
    for_users: bool
    place: str


def _check_annotations(site: Site, x: Any, constrained: Any, new: _RecordedShard) -> None:
    """Raises `ShardingError` for what the dialect leaves undefined, as in text: see `CHAINS`.

    An array is known by its object. Functions that are traced by themselves see others.
    """
    before = site.recorded("result of shard", x)
    if before is not None and before.sharding != new.sharding:
        mistake = CHAINS.get((before.for_users, new.for_users))
        if mistake is not None:
            raise ShardingError(f"shard.shard: {mistake.format(value='the array', place=before.place)}")
    if not new.for_users and isinstance(x, jax.Array):
        first = site.record("shard", x, new)
        if first.sharding != new.sharding:
            raise ShardingError(f"shard.shard: {TWICE.format(value='the array', place=first.place)}")
    site.record("result of shard", constrained, new)


@api_boundary
def get_sharding(x: Any) -> Sharding:
    """The sharding of an array: `get_sharding` of the dialect.

    Args:
        x: an array with a `NamedSharding`. Of a traced array nothing is known: propagation decides after the function
            has been traced. Ask the plan then (`fun.plan(...)`).

    Returns:
        Its sharding, on its mesh.

    Raises:
        SdyError: the sharding is not known.

    Source: the shard dialect page, `shard.get_sharding`.
    """
    traced = isinstance(x, jax.core.Tracer)
    known = None if traced else getattr(x, "sharding", None)
    if not isinstance(known, jax.sharding.NamedSharding):
        advice = (
            "ask the plan of the function, made after its trace" if traced else "put it on a mesh by jax.device_put"
        )
        raise ShardingError(f"shard.get_sharding: the sharding of {jax.typeof(x)} is not known here; {advice}")
    return Sharding.from_sdy(from_named_sharding(known, x.ndim, "mesh"), known.mesh)


# The buffers that devices hold of a tensor under a sharding: their shapes, and the way to and from them.


@mesh_terms
def shard_shape(
    dims: Sequence[int], sharding: Sharding, device: Device, *, grid: AnyMesh | None = None
) -> tuple[int, ...]:
    """The shape of what a device holds of a tensor, halos included: `shard_shape` of the dialect.

    Args:
        dims: the shape of the tensor.
        sharding: its sharding.
        device: the device's linear index, or its coordinates along all grid axes. Traced ones make traced lengths.
        grid: the mesh, where the sharding has none.

    Returns:
        One length per dimension.

    Raises:
        SdyError: a sharding that does not fit the shape, or a device that there is not.

    Example:
        >>> grid = jax.sharding.AbstractMesh((4,), ("x",))
        >>> [shard_shape((10, 3), Sharding([["x"]]), device, grid=grid) for device in range(4)]
        [(3, 3), (3, 3), (3, 3), (1, 3)]

    Source: the mesh dialect reference, `mesh.shard_shape`.
    """
    here = grid_for(sharding, grid)
    return shards.shard_shape(
        here, tuple(dims), sharding.layout(here), coordinates(device, "shard.shard_shape: device")
    )  # type: ignore[return-value]


@api_boundary
def reshard(x: Any, source: Sharding, target: Sharding, *, shape: Sequence[int] | None = None) -> jax.Array:
    """Moves a tensor from one sharding to another, inside `jax.shard_map`.

    Args:
        x: the device's buffer under `source`: its block, with halos; where blocks are uneven, at the start of a buffer
            as long as the longest, of which the rest does not matter.
        source, target: shardings on one grid.
        shape: the shape of the whole tensor. It is only needed where blocks are uneven and no offsets say so.

    Returns:
        The device's buffer under `target`; padding and halos beyond the tensor's edges are zeros.

    Raises:
        SdyError: while tracing: two grids, shardings that do not fit the tensor, or a call outside of `jax.shard_map`.

    Example:
        >>> body = lambda rows: reshard(rows, Sharding([["model"]]), Sharding([[], ["model"]]))  # an all-to-all
        >>> jax.shard_map(body, mesh=mesh, in_specs=P("model"), out_specs=P(None, "model"))(jnp.ones((4, 8))).shape
        (4, 8)

    Source: the mesh dialect reference, `mesh.shard`: an annotation for users is a reshard.
    """
    if source.grid is not None and target.grid is not None and grid_of(source.grid) != grid_of(target.grid):
        raise ShardingError("shard.reshard: source and target are on two grids; one reshard stays on one")
    here, _ = call_grid("reshard", source.grid or target.grid, _used(source) + _used(target))
    return shards.reshard(here, jnp.asarray(x), source.layout(here), target.layout(here), shape)


def _used(sharding: Sharding) -> list[int | str]:
    partial: AxisNames = sharding.partial[1] if sharding.partial else ()
    return [axis for axes in (*sharding.split_axes, partial) for axis in listed(axes)]


@api_boundary
def to_local(x: Any, sharding: Sharding) -> np.ndarray:
    """The buffers of all devices, on the host.

    Args:
        x: the whole tensor.
        sharding: its sharding, with a grid.

    Returns:
        An array of shape `(devices, *buffer)`, in the order of linear indices. Padding, and halos beyond the tensor's
        edges, are zeros. Of a tensor that is partial by sum, product or bitwise_xor, the first device along the axes
        has the data and the others the identity; else all have the data.

    Raises:
        SdyError: a sharding that does not fit the tensor, or without a grid.

    Example:
        >>> grid = jax.sharding.AbstractMesh((4,), ("x",))
        >>> to_local(np.arange(5), Sharding([["x"]], grid=grid)).tolist()
        [[0, 1], [2, 3], [4, 0], [0, 0]]
    """
    grid = grid_for(sharding, None)
    return shards.all_buffers(np.asarray(x), sharding.layout(grid), grid)


@api_boundary
def to_global(y: Any, sharding: Sharding, *, shape: Sequence[int] | None = None) -> np.ndarray:
    """The tensor of which the buffers of all devices are given, on the host; the inverse of `to_local`.

    Args:
        y: an array of shape `(devices, *buffer)`.
        sharding: its sharding, with a grid.
        shape: the shape of the tensor, where blocks are uneven and no offsets say so.

    Returns:
        The tensor. Of devices with the same block the first one's counts; partial sums are combined.

    Raises:
        SdyError: buffers of another shape than the sharding's, or a sharding without a grid.
    """
    grid, stack = grid_for(sharding, None), np.asarray(y)
    layout = sharding.layout(grid)
    whole = even_shape(layout, grid, stack.shape[1:]) if shape is None else tuple(shape)
    return shards.whole_tensor(stack, layout, grid, whole)
