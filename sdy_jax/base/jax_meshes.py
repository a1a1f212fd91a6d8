"""Shardings and axes in jax's own terms: types, errors, mapped axes, functions over the axes of a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
from jax._src import config, core
from jax._src.core import NamedAxisEffect, extend_axis_env_nd, get_axis_env, remove_explicit_mesh_axis_names
from jax._src.lax.lax import _convert_element_type
from jax._src.sharding_impls import SPMDAxisContext, parse_flatten_op_sharding
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from sdy_jax.base.jax_lowering import listed_replica_groups, lowered_in_place

# Shardings of any kind, and the types and errors that speak of them.
#
# * `ShardingTypeError`: what an op raises on Explicit axes whose result may lie in several ways.
# * `parse_flatten_op_sharding`: it reads the shardings of any kind that `custom_partitioning` may return.
# * `_to_xla_hlo_sharding`: how a sharding of any kind splits, before there is a shape.
# * `shard_alike_p`: gives its groups numbers of the process, which would meet the user's; jax 0.12 no longer has it.
# * `_convert_element_type`: the only way to give a result the weak type that the plain function gives it.

try:
    from jax._src import shard_alike  # type: ignore[attr-defined, unused-ignore]
except ImportError:  # jax 0.12 has none
    shard_alike = None  # type: ignore[assignment]
ShardingTypeError = core.ShardingTypeError
shard_alike_p: Any = getattr(shard_alike, "shard_alike_p", None)


def spec_on(mesh: Any, sharding: Any, rank: int) -> PartitionSpec:
    """The spec by which a mesh splits an array as a sharding of any kind, on any mesh of these devices, does.

    As for jit, entries of None beyond the array's dimensions mean nothing: JAX's cuDNN attention returns such.
    """
    if isinstance(sharding, NamedSharding) and sharding.mesh.shape_tuple == mesh.shape_tuple:
        return sharding.spec if any(sharding.spec[rank:]) else PartitionSpec(*sharding.spec[:rank])
    (found, *_) = parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(rank), mesh)
    return PartitionSpec(*found)


def tiles_of(sharding: Any) -> tuple[int, ...]:
    """Into how many blocks a sharding of any kind splits each dimension; nothing where it splits none."""
    found = sharding._to_xla_hlo_sharding(0)
    if found.is_replicated():
        return ()
    tiles = tuple(found.tile_assignment_dimensions())
    return tiles[: len(tiles) - max(len(found.subgroup_types()), found.replicate_on_last_tile_dim())]


def weakly_typed(x: jax.Array) -> jax.Array:
    """The same array with a weak type, as a Python scalar has."""
    return _convert_element_type(x, weak_type=True)


# Axes that something around a function names, and functions over the axes of a mesh.
#
# * `NamedAxisEffect`, `get_axis_env`: of a function that uses an axis which a `jax.vmap` around it names.
# * `extend_axis_env_nd`, `_check_vma`, `SPMDAxisContext` and `jaxpr_subcomp`: a function of blocks that names axes of
#   another mesh of the same devices than the `shard_map` around it.
# * `remove_explicit_mesh_axis_names`: a `shard_map` is to be over all axes of its mesh under `vmap`, too.


def effects_on_axes(found: Set[Any]) -> set[Any]:
    """The axes over which a function communicates that something around it names, by its effects."""
    return {effect.name for effect in found if isinstance(effect, NamedAxisEffect)}


def mapped_axes() -> set[Any]:
    """The axes that `jax.vmap`s and the like around this trace name."""
    return {*get_axis_env().axis_sizes}


def without_named_axes(found: Set[Any]) -> Set[Any]:
    """The effects without those of communicating over axes."""
    return {effect for effect in found if not isinstance(effect, NamedAxisEffect)}


@contextmanager
def in_manual_axes(mesh: Any) -> Iterator[None]:
    """Lets what is traced name the axes of a mesh, as in a `shard_map` over all of them."""
    with extend_axis_env_nd(list(mesh.shape.items())), config._check_vma(False):
        yield


def lowered_on_mesh(ctx: mlir.LoweringRuleContext, mesh: Any, jaxpr: Any, xs: Sequence[Any]) -> Sequence[Any]:
    """Lowers a closed jaxpr without constants whose names of axes are those of `mesh`, all of them manual."""
    context = ctx.module_context.replace(axis_context=SPMDAxisContext(mesh, frozenset(mesh.axis_names)))
    with in_manual_axes(mesh), listed_replica_groups():
        return lowered_in_place(ctx, context, jaxpr.jaxpr, xs)


def with_all_axes() -> AbstractContextManager[Any]:
    """Lets `shard_map` be over all axes of a mesh, also under a `vmap` over a dimension that is split on Explicit axes:
    jax takes these from it before it knows whether its body is along them."""
    mapped: AbstractContextManager[Any] = remove_explicit_mesh_axis_names(get_axis_env().explicit_mesh_axis_names)
    return mapped
