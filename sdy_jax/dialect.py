"""The SDY dialect in Python: its ops as functions on global arrays, and its attributes as values.

For those who write collectives and shardings as the dialect has them. All of these are names of `sdy_jax`, too.

    Mesh, MeshAxis, AxisRef                   meshes, their axes, and parts of axes
    TensorSharding, DimensionSharding         shardings, and what they say of one dimension
    OpShardingRule                            how the dimensions of an op's operands and results correspond
    sharding_constraint, reshard              what the sharding of a value is to be
    data_flow_edge, propagation_barrier       where shardings propagate
    sharding_group                            values that are sharded alike
    manual_computation, named_computation     regions
    all_gather, all_slice, all_to_all,
    collective_permute                        collectives that move
    all_reduce, reduce_scatter                collectives that add up
    replicated_to_unreduced,
    sharded_to_unreduced                      values that are sums of what devices have

See also `sdy_jax.shard`, for collectives on local arrays, and `sdy_jax.passes`, for text.
"""

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
from sdy_jax.annotate.computations import manual_computation, named_computation
from sdy_jax.annotate.constraints import (
    data_flow_edge,
    propagation_barrier,
    reshard,
    sharding_constraint,
    sharding_group,
)
from sdy_jax.ir.meshes import AxisRef, Mesh, MeshAxis
from sdy_jax.ir.shardings import DimensionSharding, OpShardingRule, TensorSharding

__all__ = [
    "AxisRef",
    "DimensionSharding",
    "Mesh",
    "MeshAxis",
    "OpShardingRule",
    "TensorSharding",
    "all_gather",
    "all_reduce",
    "all_slice",
    "all_to_all",
    "collective_permute",
    "data_flow_edge",
    "manual_computation",
    "named_computation",
    "propagation_barrier",
    "reduce_scatter",
    "replicated_to_unreduced",
    "reshard",
    "sharded_to_unreduced",
    "sharding_constraint",
    "sharding_group",
]
