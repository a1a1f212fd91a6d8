"""Shardy's tensor partitioning in Python, on JAX: explicit collectives and a plan you can read.

import jax, sdy_jax as sdy
from jax.sharding import AxisType, PartitionSpec as P

mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

@sdy.partition(mesh=mesh, in_shardings=(P("data"), P(None, "model")))
def layer(x, w):
    return jax.nn.relu(x @ w)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sdy_jax.registration import extensions as _extensions  # noqa: F401 - says which rooms offer what others call

if TYPE_CHECKING:
    from sdy_jax import passes, shard, testing
    from sdy_jax.annotate.automatic import AUTO
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
    from sdy_jax.annotate.program import Program
    from sdy_jax.annotate.sharding_display import show_sharding
    from sdy_jax.annotate.sharding_rules import with_sharding_rule
    from sdy_jax.annotate.strict import strict
    from sdy_jax.calls.partition import partition
    from sdy_jax.calls.partitioned_function import PartitionedFunction
    from sdy_jax.contracts.budget import Budget
    from sdy_jax.equivalence.verification import Verification, VerificationError
    from sdy_jax.equivalence.verify import verify
    from sdy_jax.errors import (
        ArgumentError,
        ContractError,
        DeletedArrayError,
        InternalError,
        MemoryLimitError,
        ParseError,
        PinnedPlanError,
        ProcessError,
        SdyError,
        ShardingError,
        UnsupportedError,
    )
    from sdy_jax.loading.load import load, loads
    from sdy_jax.lowering.costs.cost_model import CostModel
    from sdy_jax.pipelines.packed_layers import PackedLayers, pack_layers
    from sdy_jax.pipelines.pipeline import pipeline
    from sdy_jax.pipelines.schedules.tables import pipeline_schedule
    from sdy_jax.plan.plan import Plan
    from sdy_jax.plan.record.files import load_plan
    from sdy_jax.plan.record.record import PlanRecord
    from sdy_jax.plan.warn import PartitionWarning
    from sdy_jax.representation.mesh import AxisRef, Mesh, MeshAxis
    from sdy_jax.representation.rule import OpShardingRule
    from sdy_jax.representation.sharding import DimensionSharding, TensorSharding
    from sdy_jax.spec_trees.fsdp import fsdp
    from sdy_jax.spec_trees.like import like
    from sdy_jax.spec_trees.rules import rules
    from sdy_jax.spec_trees.tensor_parallel import tensor_parallel

__all__ = [
    "AUTO",
    "ArgumentError",
    "AxisRef",
    "Budget",
    "ContractError",
    "CostModel",
    "DeletedArrayError",
    "DimensionSharding",
    "InternalError",
    "MemoryLimitError",
    "Mesh",
    "MeshAxis",
    "OpShardingRule",
    "PackedLayers",
    "ParseError",
    "PartitionWarning",
    "PartitionedFunction",
    "PinnedPlanError",
    "Plan",
    "PlanRecord",
    "ProcessError",
    "Program",
    "SdyError",
    "ShardingError",
    "TensorSharding",
    "UnsupportedError",
    "Verification",
    "VerificationError",
    "all_gather",
    "all_reduce",
    "all_slice",
    "all_to_all",
    "collective_permute",
    "custom_op",
    "data_flow_edge",
    "fsdp",
    "like",
    "load",
    "load_plan",
    "loads",
    "manual_computation",
    "named_computation",
    "pack_layers",
    "partition",
    "passes",
    "pipeline",
    "pipeline_schedule",
    "propagation_barrier",
    "reduce_scatter",
    "replicated_to_unreduced",
    "reshard",
    "rules",
    "shard",
    "shard_alike",
    "sharded_to_unreduced",
    "sharding_constraint",
    "sharding_group",
    "show_sharding",
    "strict",
    "tensor_parallel",
    "testing",
    "verify",
    "with_sharding_rule",
]

# Names are imported when they are first used, so that the command line's `--help` need not wait for jax.
_MODULES = {
    "sdy_jax.annotate.automatic": ("AUTO",),
    "sdy_jax.annotate.barrier": ("propagation_barrier",),
    "sdy_jax.annotate.collectives": (
        "all_gather",
        "all_reduce",
        "all_slice",
        "all_to_all",
        "collective_permute",
        "reduce_scatter",
        "replicated_to_unreduced",
        "sharded_to_unreduced",
    ),
    "sdy_jax.annotate.constraints": ("data_flow_edge", "reshard", "sharding_constraint"),
    "sdy_jax.annotate.custom_ops": ("custom_op",),
    "sdy_jax.annotate.groups": ("shard_alike", "sharding_group"),
    "sdy_jax.annotate.manual": ("manual_computation",),
    "sdy_jax.annotate.named": ("named_computation",),
    "sdy_jax.annotate.program": ("Program",),
    "sdy_jax.annotate.sharding_rules": ("with_sharding_rule",),
    "sdy_jax.annotate.sharding_display": ("show_sharding",),
    "sdy_jax.annotate.strict": ("strict",),
    "sdy_jax.contracts.budget": ("Budget",),
    "sdy_jax.calls.partition": ("partition",),
    "sdy_jax.equivalence.verification": ("Verification", "VerificationError"),
    "sdy_jax.equivalence.verify": ("verify",),
    "sdy_jax.calls.partitioned_function": ("PartitionedFunction",),
    "sdy_jax.errors": (
        "ArgumentError",
        "ContractError",
        "DeletedArrayError",
        "InternalError",
        "MemoryLimitError",
        "ParseError",
        "PinnedPlanError",
        "ProcessError",
        "SdyError",
        "ShardingError",
        "UnsupportedError",
    ),
    "sdy_jax.loading.load": ("load", "loads"),
    "sdy_jax.lowering.costs.cost_model": ("CostModel",),
    "sdy_jax.pipelines.packed_layers": ("PackedLayers", "pack_layers"),
    "sdy_jax.pipelines.pipeline": ("pipeline",),
    "sdy_jax.pipelines.schedules.tables": ("pipeline_schedule",),
    "sdy_jax.plan.plan": ("Plan",),
    "sdy_jax.plan.warn": ("PartitionWarning",),
    "sdy_jax.plan.record.files": ("load_plan",),
    "sdy_jax.plan.record.record": ("PlanRecord",),
    "sdy_jax.representation.mesh": ("AxisRef", "Mesh", "MeshAxis"),
    "sdy_jax.representation.rule": ("OpShardingRule",),
    "sdy_jax.representation.sharding": ("DimensionSharding", "TensorSharding"),
    "sdy_jax.spec_trees.fsdp": ("fsdp",),
    "sdy_jax.spec_trees.like": ("like",),
    "sdy_jax.spec_trees.rules": ("rules",),
    "sdy_jax.spec_trees.tensor_parallel": ("tensor_parallel",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in ("passes", "shard", "testing"):
        return import_module(f"sdy_jax.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'sdy_jax' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
