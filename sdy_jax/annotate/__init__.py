"""Annotations of SDY's compiler API, for use inside any JAX function: identities that say something about sharding."""

from sdy_jax.annotate.barrier import propagation_barrier
from sdy_jax.annotate.constraints import data_flow_edge, reshard, sharding_constraint
from sdy_jax.annotate.groups import shard_alike, sharding_group
from sdy_jax.annotate.manual import manual_computation
from sdy_jax.annotate.named import named_computation
from sdy_jax.annotate.ruled import with_sharding_rule

__all__ = [
    "data_flow_edge",
    "manual_computation",
    "named_computation",
    "propagation_barrier",
    "reshard",
    "shard_alike",
    "sharding_constraint",
    "sharding_group",
    "with_sharding_rule",
]
