"""Shardy's tensor partitioning in Python, on JAX: explicit collectives and a plan you can read.

import jax, sdy_jax as sdy
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((2, 4), ("data", "model"))

@sdy.partition(mesh=mesh, in_shardings=(P("data"), P(None, "model")))
def layer(x, w):
    return jax.nn.relu(x @ w)
"""

from sdy_jax import testing
from sdy_jax.api import PartitionedFunction, PartitionWarning, partition
from sdy_jax.errors import InternalError, ParseError, SdyError, ShardingError, UnsupportedError
from sdy_jax.lowering.cost import CostModel
from sdy_jax.plan.plan import Plan
from sdy_jax.representation import AxisRef, DimensionSharding, Mesh, MeshAxis, OpShardingRule, TensorSharding

__all__ = [
    "AxisRef",
    "CostModel",
    "DimensionSharding",
    "InternalError",
    "Mesh",
    "MeshAxis",
    "OpShardingRule",
    "ParseError",
    "PartitionWarning",
    "PartitionedFunction",
    "Plan",
    "SdyError",
    "ShardingError",
    "TensorSharding",
    "UnsupportedError",
    "partition",
    "testing",
]
