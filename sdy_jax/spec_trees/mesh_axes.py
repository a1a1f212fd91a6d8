"""The sizes of mesh axes, for what depends on whether a size can be divided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from sdy_jax.errors import ShardingError
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.named import AnyMesh, mesh_from_jax

SizedMesh = AnyMesh | Mesh
"""A mesh of jax, with devices or without, or one of ours: its axes have sizes."""


def axis_sizes(mesh: SizedMesh | None, params: Any) -> Mapping[str, int] | None:
    """The sizes of axes by name: those of `mesh`, of `jax.set_mesh`, or of the mesh on which the parameters lie.

    None if there is no mesh.
    """
    around = jax.sharding.get_abstract_mesh()
    if mesh is None and not around.empty:
        mesh = around
    if mesh is None:
        mesh = next(filter(None, map(_mesh_of, jax.tree.leaves(params))), None)
    if mesh is None or isinstance(mesh, Mesh):
        return None if mesh is None else mesh.sizes
    return mesh_from_jax(mesh).sizes


def _mesh_of(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def check_axis(axis: str, sizes: Mapping[str, int], place: str) -> None:
    """Raises `ShardingError` if there is no such axis."""
    if axis not in sizes:
        raise ShardingError(f"{place} names the axis {axis!r}, which the mesh lacks; its axes are: {', '.join(sizes)}")
