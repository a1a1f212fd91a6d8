"""Annotations of SDY's compiler API, for use inside any JAX function: identities that say something about sharding."""

from sdy_jax.annotate import custom_partitioning  # noqa: F401 - registers what it emits
from sdy_jax.annotate.barrier import propagation_barrier
from sdy_jax.annotate.collectives import (
    all_gather,
    all_reduce,
    all_slice,
    all_to_all,
    collective_permute,
    reduce_scatter,
    replicated_to_unreduced,
    sharded_to_unreduced,
)
from sdy_jax.annotate.constraints import data_flow_edge, reshard, sharding_constraint
from sdy_jax.annotate.custom_ops import custom_op
from sdy_jax.annotate.groups import shard_alike, sharding_group
from sdy_jax.annotate.manual import manual_computation
from sdy_jax.annotate.named import named_computation
from sdy_jax.annotate.ruled import with_sharding_rule

__all__ = [
    "all_gather",
    "all_reduce",
    "all_slice",
    "all_to_all",
    "collective_permute",
    "custom_op",
    "data_flow_edge",
    "manual_computation",
    "named_computation",
    "propagation_barrier",
    "reduce_scatter",
    "replicated_to_unreduced",
    "reshard",
    "shard_alike",
    "sharded_to_unreduced",
    "sharding_constraint",
    "sharding_group",
    "with_sharding_rule",
]
