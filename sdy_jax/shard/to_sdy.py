"""Between shardings of the mesh and shard dialects and those of SDY.

A mesh sharding is exact: its dimensions are closed, and missing lists are empty. SDY has no counterpart of halos and
offsets, nor of partial averages; parts of axes and open dimensions are SDY's alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sdy_jax.errors import ShardingError
from sdy_jax.representation.mesh import AxisRef, Mesh
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.shard.semantics.layout import AxisLists, trimmed
from sdy_jax.shard.semantics.reductions import KINDS

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
