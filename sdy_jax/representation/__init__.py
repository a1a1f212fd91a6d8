"""The vocabulary: meshes, axis references, shardings and op sharding rules, and what can be said about them.

`axes` has the algebra of axis references, `verify` the dialect's verification rules, `text` the parsers, `named` the
conversions to and from `jax.sharding`, `attributes` those to and from MLIR.
"""

from sdy_jax.representation.mesh import AxisRef, Mesh, MeshAxis, SubAxisInfo, axes_size
from sdy_jax.representation.named import (
    from_named_sharding,
    from_partition_spec,
    has_sub_axes,
    mesh_from_jax,
    to_partition_spec,
)
from sdy_jax.representation.propagation_edges import PropagationEdges
from sdy_jax.representation.rule import FactorType, OpShardingRule, TensorMapping, factor_symbol
from sdy_jax.representation.sharding import CLOSED, OPEN, REDUCTION_KINDS, DimensionSharding, TensorSharding
from sdy_jax.representation.text import (
    parse_axis,
    parse_mesh,
    parse_propagation_edges,
    parse_rule,
    parse_sharding,
    parse_shardings,
)
from sdy_jax.representation.verify import (
    verify_axis_list,
    verify_mesh,
    verify_propagation_edges,
    verify_rule,
    verify_sharding,
)

__all__ = [
    "CLOSED",
    "OPEN",
    "REDUCTION_KINDS",
    "AxisRef",
    "DimensionSharding",
    "FactorType",
    "Mesh",
    "MeshAxis",
    "OpShardingRule",
    "PropagationEdges",
    "SubAxisInfo",
    "TensorMapping",
    "TensorSharding",
    "axes_size",
    "factor_symbol",
    "from_named_sharding",
    "from_partition_spec",
    "has_sub_axes",
    "mesh_from_jax",
    "parse_axis",
    "parse_mesh",
    "parse_propagation_edges",
    "parse_rule",
    "parse_sharding",
    "parse_shardings",
    "to_partition_spec",
    "verify_axis_list",
    "verify_mesh",
    "verify_propagation_edges",
    "verify_rule",
    "verify_sharding",
]
