"""Shardings of any kind, and the types and errors that speak of them.

* `ShardingTypeError`: what an op raises on Explicit axes whose result may lie in several ways.
* `parse_flatten_op_sharding`: it reads the shardings of any kind that `custom_partitioning` may return.
* `_to_xla_hlo_sharding`: how a sharding of any kind splits, before there is a shape.
* `shard_alike_p`: gives its groups numbers of the process, which would meet the user's; jax 0.12 no longer has it.
* `_convert_element_type`: the only way to give a result the weak type that the plain function gives it.
"""

from __future__ import annotations

from typing import Any

import jax
from jax._src import core
from jax._src.lax.lax import _convert_element_type
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax.sharding import NamedSharding, PartitionSpec

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
