"""The sizes of mesh axes, for what depends on whether a size can be divided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from sdy_jax.errors import ShardingError
from sdy_jax.jax_internals import context_mesh
from sdy_jax.representation.named import mesh_from_jax

AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


def axis_sizes(mesh: AnyMesh | None, params: Any) -> Mapping[str, int] | None:
    """The sizes of axes by name: those of `mesh`, of `jax.set_mesh`, or of the mesh on which the parameters lie.

    None if there is no mesh.
    """
    around = context_mesh()
    found = around if mesh is None and around is not None and not around.empty else mesh
    if found is None:
        found = next(filter(None, map(_mesh_of, jax.tree.leaves(params))), None)
    return None if found is None else mesh_from_jax(found).sizes


def _mesh_of(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def check_axis(axis: str, sizes: Mapping[str, int], place: str) -> None:
    """Raises `ShardingError` if there is no such axis."""
    if axis not in sizes:
        raise ShardingError(f"{place} names the axis {axis!r}, which the mesh lacks; its axes are: {', '.join(sizes)}")
