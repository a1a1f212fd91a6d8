"""Shardings of the shard dialect: the layout of a tensor on a grid as a value."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax

from sdy_jax.errors import ShardingError, UnsupportedError
from sdy_jax.representation.mesh import AxisRef, Mesh
from sdy_jax.representation.named import AnyMesh
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.mesh import RefinedMesh
from sdy_jax.shard.grids import axis_numbers, grid_of, listed
from sdy_jax.shard.semantics.grid import Grid
from sdy_jax.shard.semantics.layout import Layout, check_layout, normalized, sharding_text, trimmed
from sdy_jax.shard.to_sdy import KIND_OF_REDUCTION, PARTIAL_IN_SDY, check_expressible, tensor_sharding


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
