"""The mesh of a function that is given none: that of its shardings, of `jax.set_mesh`, or of its arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding

from sdy_jax.jax_internals import context_mesh
from sdy_jax.representation.named import AnyMesh
from sdy_jax.runtime.boundary import checked_mesh
from sdy_jax.runtime.layouts import layout_of


def stated_mesh(*specs: Any) -> jax.sharding.Mesh | None:
    """The mesh of the first `NamedSharding` on devices in trees of specifications."""
    return _first_mesh(jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, NamedSharding)))


def mesh_of_call(values: Iterable[Any]) -> AnyMesh:
    """The mesh of `jax.set_mesh`, else that of the first of the values that lies on one.

    Raises:
        ShardingError: there is none.
    """
    around = context_mesh()
    if around is None or around.empty:
        around = _first_mesh(map(layout_of, values)) or around
    return checked_mesh(around)


def _first_mesh(shardings: Iterable[Any]) -> jax.sharding.Mesh | None:
    meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, jax.sharding.Mesh) and not mesh.empty), None)
