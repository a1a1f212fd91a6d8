"""Shardings as mesh and shard ops state them: what a value of type `!mesh.sharding` is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from jax.extend.mlir import ir

from sdy_jax.shard.meshes import DeviceMesh
from sdy_jax.shard.view import DialectOp, is_dialect_op, view

Size: TypeAlias = int | ir.Value
"""A number, or the value that has it in the run."""


@dataclass(frozen=True, slots=True)
class StatedSharding:
    """What a `sharding` op says.

    Attributes:
        dialect: `mesh` or `shard`.
        mesh: the symbol of the mesh.
        split: the axes that split each dimension, major to minor; missing trailing lists are empty.
        partial, partial_axes: the kind of reduction, and the axes along which the tensor is unreduced.
        halos: two sizes per split dimension, or none.
        offsets: per split dimension where its shards start, and where the last one ends; or none.
    """

    dialect: str
    mesh: str
    split: tuple[tuple[int, ...], ...]
    partial: str | None = None
    partial_axes: tuple[int, ...] = ()
    halos: tuple[Size, ...] = ()
    offsets: tuple[Size, ...] = ()

    @property
    def lists(self) -> tuple[tuple[int, ...], ...]:
        """`split` without trailing empty lists."""
        end = next((n for n in range(len(self.split), 0, -1) if self.split[n - 1]), 0)
        return self.split[:end]

    @property
    def split_dimensions(self) -> tuple[int, ...]:
        return tuple(d for d, axes in enumerate(self.split) if axes)

    def halo_of(self, dimension: int) -> tuple[Size, Size]:
        """The sizes of the halos of a dimension, before and after its own part."""
        if not self.halos or dimension not in self.split_dimensions:
            return 0, 0
        number = 2 * self.split_dimensions.index(dimension)
        return self.halos[number], self.halos[number + 1]

    def offsets_of(self, mesh: DeviceMesh) -> dict[int, tuple[Size, ...]]:
        """The offsets of each split dimension, if they are given; the mesh has no unknown sizes."""
        found: dict[int, tuple[Size, ...]] = {}
        start = 0
        for dimension in self.split_dimensions if self.offsets else ():
            end = start + (mesh.group_size(self.split[dimension]) or 0) + 1
            found[dimension] = self.offsets[start:end]
            start = end
        return found

    def means_the_same(self, other: StatedSharding, mesh: DeviceMesh, shape: Sequence[int | None]) -> bool:
        """Whether two shardings of a tensor of this shape are the same, however they are written."""
        return normalized(self, mesh, shape) == normalized(other, mesh, shape)


def stated_sharding(value: ir.Value) -> StatedSharding | None:
    """What a value of a sharding type is; None if the program does not say that here.

    Raises:
      RuleError: the op that states it is malformed.
    """
    op = defining(value, "sharding", "get_sharding")
    if op is None:
        return None
    if op.name == "get_sharding":
        shard = defining(op["source"], "shard")
        return stated_sharding(shard["sharding"]) if shard else None
    return StatedSharding(
        op.dialect,
        op.mesh,
        op["split_axes"],
        op["partial_type"],
        op["partial_axes"],
        op["static_halo_sizes"],
        op["static_sharded_dims_offsets"],
    )


def defining(value: ir.Value, *names: str) -> DialectOp | None:
    """The op that makes a value, if it is one of the dialects with one of these names."""
    if isinstance(value, ir.BlockArgument) or not is_dialect_op(value.owner.operation):
        return None
    op = view(value.owner.operation)
    return op if op.name in names else None


def normalized(sharding: StatedSharding, mesh: DeviceMesh, shape: Sequence[int | None]) -> StatedSharding:
    """The sharding in canonical form: constants resolved, defaults left out."""
    folded = replace(
        sharding,
        split=sharding.lists,
        partial=sharding.partial if sharding.partial_axes else None,
        partial_axes=tuple(sorted(sharding.partial_axes)),
        halos=tuple(map(folded_size, sharding.halos)),
        offsets=tuple(map(folded_size, sharding.offsets)),
    )
    halos = folded.halos if any(halo != 0 for halo in folded.halos) else ()
    offsets = () if _are_usual(folded.offsets_of(mesh), shape) else folded.offsets
    return replace(folded, halos=halos, offsets=offsets)


def _are_usual(offsets: Mapping[int, tuple[Size, ...]], shape: Sequence[int | None]) -> bool:
    """Whether offsets are those of a sharding that gives none: blocks of one size, but for the last ones."""
    for dimension, given in offsets.items():
        size = shape[dimension] if dimension < len(shape) else None
        if size is None or len(given) < 2:
            return False
        block = -(-size // (len(given) - 1))
        if any(offset != min(number * block, size) for number, offset in enumerate(given)):
            return False
    return True


def folded_size(size: Size) -> Size:
    """The number that a value is, if it is a constant."""
    if isinstance(size, (int, ir.BlockArgument)):
        return size
    op = size.owner.operation
    if op.name != "arith.constant" or not isinstance(op.attributes["value"], ir.IntegerAttr):
        return size
    return int(ir.IntegerAttr(op.attributes["value"]).value)
