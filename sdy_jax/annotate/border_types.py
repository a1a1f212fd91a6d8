"""Types of arguments and results on Explicit axes: as the function sees them, and as they are stated."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.sharding import NamedSharding, PartitionSpec

from sdy_jax.annotate.arguments import Leaf
from sdy_jax.annotate.automatic import AUTO
from sdy_jax.annotate.specs import PARTITION, padded, resolve
from sdy_jax.errors import ShardingError
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.named import AnyMesh
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.types import explicit_axes, own_type, sharding_in, sharding_of_type, typed, typed_part


def argument_type(leaf: Leaf, mesh: Mesh, jax_mesh: AnyMesh) -> jax.ShapeDtypeStruct:
    """The type of an argument as the function sees it.

    Raises:
        ShardingError: it is unreduced, and stated to be reduced.
    """
    value: jax.ShapeDtypeStruct = leaf.value
    if leaf.unreduced:
        _check_terms(leaf, resolve(leaf, len(value.shape), mesh, PARTITION, "in_shardings", jax_mesh))
    if not explicit_axes(jax_mesh):
        return value
    type_ = _stated_type(leaf, "in_shardings", mesh, jax_mesh) if leaf.is_moved else leaf.type
    return value if type_ is None else typed(value, type_)


def on_mesh(value: jax.ShapeDtypeStruct, mesh: AnyMesh) -> jax.ShapeDtypeStruct:
    """A type that shows the mesh, as those of arrays on Auto axes do."""
    return typed(value, NamedSharding(mesh.abstract_mesh, PartitionSpec(*(None,) * len(value.shape))))


def as_seen(value: jax.ShapeDtypeStruct, leaf: Leaf, mesh: AnyMesh, shown: AnyMesh | None) -> jax.ShapeDtypeStruct:
    """The type of an argument on Auto axes as the function sees it: on the mesh that all types are `shown` on, else on
    that which its own type shows."""
    shown = leaf.shown if shown is None else shown
    return in_memory(value if shown is None or value.sharding else on_mesh(value, shown), leaf, mesh)


def in_memory(value: jax.ShapeDtypeStruct, leaf: Leaf, mesh: AnyMesh) -> jax.ShapeDtypeStruct:
    """The type of an argument that shows the memory in which it is."""
    if not leaf.is_on_host:
        return value
    return typed(value, (value.sharding or on_mesh(value, mesh).sharding).with_memory_kind("pinned_host"))


def in_stated_type(leaf: Leaf, mesh: Mesh, jax_mesh: AnyMesh) -> Any:
    """A result that has a type, in the one that is stated for it."""
    own = own_type(jax.typeof(leaf.value), jax_mesh)
    type_ = None if own is None else _stated_type(leaf, "out_shardings", mesh, jax_mesh)
    return leaf.value if type_ is None or type_ == own else jax.sharding.reshard(leaf.value, type_)


def with_type(info: Any, aval: Any) -> jax.ShapeDtypeStruct:
    """jax's record of a result, with the sharding in the type that it was traced with."""
    return typed(info, sharding_in(aval))


def type_of_result(leaf: Leaf, type_: ir.Type, mesh_name: str, jax_mesh: AnyMesh) -> TensorSharding | None:
    """The sharding in the type of a result, unless the planner chooses it."""
    own = own_type(leaf.value, jax_mesh)
    if leaf.spec is AUTO or own is None:
        return None
    return padded(sharding_of_type(own, len(leaf.value.shape), mesh_name), ir.RankedTensorType(type_).rank)


def _stated_type(leaf: Leaf, where: str, mesh: Mesh, jax_mesh: AnyMesh) -> NamedSharding | None:
    """What types can say of a specification; None where nothing is stated."""
    shape = jnp.shape(leaf.value)
    sharding = resolve(leaf, len(shape), mesh, PARTITION, where, jax_mesh)
    return None if sharding is None else typed_part(sharding, shape, jax_mesh)


def _check_terms(leaf: Leaf, sharding: TensorSharding | None) -> None:
    """The sharding of an array that is unreduced by its type: unreduced along the same axes, by the same kind."""
    stated = sharding.unreduced_axes if sharding else ()
    is_said = {axis for axis in stated if axis.sub_axis is None and axis.name in leaf.unreduced}
    if len(is_said) < max(len(stated), len(leaf.unreduced)) or (sharding and sharding.reduction != leaf.reduction):
        raise ShardingError(
            f"`{leaf.path}` holds terms of a {leaf.reduction} along {', '.join(sorted(leaf.unreduced))}, in_shardings "
            f"says <{sharding}>; to fix: say so there as well, or reduce the array first, by jax.reshard"
        )
