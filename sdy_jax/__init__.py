"""Shardy's tensor partitioning in Python, on JAX: explicit collectives and a plan you can read.

    import jax, sdy_jax as sdy
    from jax.sharding import AxisType, PartitionSpec as P

    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    @sdy.partition(mesh=mesh, in_shardings=(P("data"), P(None, "model")))
    def layer(x, w):
        return jax.nn.relu(x @ w)

    print(layer.plan(x, w))   # what is sharded how, which collectives run, why; nothing runs
    y = layer(x, w)           # runs it

Partition a function
    partition                 over a mesh: like jax.jit, with a plan
    install                   partition in place of jax.jit, in code that stays as it is
    AUTO                      in in_shardings and out_shardings: the planner chooses
    Budget, strict            what plans may send and hold, and where
    CostModel                 what communication costs; plans for machines that are not there
    pipeline                  layers over a mesh axis, in microbatches
    pack_layers               weights of layers that differ, for it
    pipeline_schedule         the table of such a schedule

Look at a plan
    show                      as a page in a notebook, as text in a terminal
    load_plan                 a plan that was saved
    verify                    compares partitioned and plain results, forward and backward
    Plan, PartitionedFunction
                              what `plan` and `partition` return, with their methods

Inside of a function
    sharding_constraint       the sharding of a value
    reshard                   moves a value to a sharding
    shard_alike               two values are sharded alike
    manual_computation        a part that is written per device
    named_computation         a part with a name and shardings of its own
    show_sharding             prints how a value lies
    custom_op                 an op of your own, with its rule and its code
    partition_like            a kernel that is split as a plain function is
    with_sharding_rule        how one op can be split

Specifications for whole models
    rules                     by names of dimensions
    fsdp                      by size
    tensor_parallel           by path
    like                      as other trees, for optimizer states

Programs
    load, loads               programs from files and bytes: MLIR, jax.export

Errors
    SdyError                  the base of all; `errors` has them

Modules
    errors                    the exceptions, and what they tell
    dialect                   ops and attributes of the SDY dialect as functions and values
    shard                     collectives on local arrays: the mesh and shard dialects
    passes                    passes on MLIR text
    testing                   assertions on plans and results

On the command line: python -m sdy_jax
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from sdy_jax.base.version import __version__ as __version__
from sdy_jax.cli import extensions as _extensions  # noqa: F401 - says which rooms offer what others call

if _TYPE_CHECKING:
    from sdy_jax import dialect, errors, passes, shard, testing
    from sdy_jax.annotate.arguments import AUTO
    from sdy_jax.annotate.callbacks import show_sharding
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
    from sdy_jax.annotate.computations import manual_computation, named_computation, strict
    from sdy_jax.annotate.constraints import (
        data_flow_edge,
        propagation_barrier,
        reshard,
        shard_alike,
        sharding_constraint,
        sharding_group,
    )
    from sdy_jax.annotate.custom_ops import custom_op, with_sharding_rule
    from sdy_jax.annotate.dimension_names import rules
    from sdy_jax.annotate.parameters import fsdp, like, tensor_parallel
    from sdy_jax.annotate.pipeline_schedules import pipeline_schedule
    from sdy_jax.annotate.program import Program
    from sdy_jax.calls.load import load, loads
    from sdy_jax.calls.partition import install, partition
    from sdy_jax.calls.partitioned_function import PartitionedFunction
    from sdy_jax.equivalence.verification import Verification
    from sdy_jax.equivalence.verify import verify
    from sdy_jax.errors import (
        ArgumentError,
        ContractError,
        DeletedArrayError,
        InternalError,
        MemoryLimitError,
        MissingMeshError,
        ParseError,
        PartitionWarning,
        PinnedPlanError,
        ProcessError,
        SdyError,
        ShardingError,
        UnsupportedError,
        VerificationError,
    )
    from sdy_jax.ir.meshes import AxisRef, Mesh, MeshAxis
    from sdy_jax.ir.shardings import DimensionSharding, OpShardingRule, TensorSharding
    from sdy_jax.lowering.planner.references.kernel_call import partition_like
    from sdy_jax.lowering.targets.cost_model import CostModel
    from sdy_jax.pipelines.different_layers import PackedLayers, pack_layers
    from sdy_jax.pipelines.pipeline import pipeline
    from sdy_jax.plan.contracts import Budget
    from sdy_jax.plan.page.html import show
    from sdy_jax.plan.plan import Plan
    from sdy_jax.plan.record.files import load_plan
    from sdy_jax.plan.record.record import PlanRecord

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
    "MissingMeshError",
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
    "dialect",
    "errors",
    "fsdp",
    "install",
    "like",
    "load",
    "load_plan",
    "loads",
    "manual_computation",
    "named_computation",
    "pack_layers",
    "partition",
    "partition_like",
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
    "show",
    "show_sharding",
    "strict",
    "tensor_parallel",
    "testing",
    "verify",
    "with_sharding_rule",
]

# Names are imported when they are first used, so that the command line's `--help` need not wait for jax.
_MODULES = {
    "sdy_jax.annotate.arguments": ("AUTO",),
    "sdy_jax.annotate.constraints": (
        "data_flow_edge",
        "propagation_barrier",
        "reshard",
        "shard_alike",
        "sharding_constraint",
        "sharding_group",
    ),
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
    "sdy_jax.annotate.custom_ops": ("custom_op", "with_sharding_rule"),
    "sdy_jax.annotate.computations": ("manual_computation", "named_computation", "strict"),
    "sdy_jax.annotate.program": ("Program",),
    "sdy_jax.annotate.callbacks": ("show_sharding",),
    "sdy_jax.plan.contracts": ("Budget",),
    "sdy_jax.calls.partition": ("install", "partition"),
    "sdy_jax.lowering.planner.references.kernel_call": ("partition_like",),
    "sdy_jax.equivalence.verification": ("Verification",),
    "sdy_jax.equivalence.verify": ("verify",),
    "sdy_jax.calls.partitioned_function": ("PartitionedFunction",),
    "sdy_jax.errors": (
        "ArgumentError",
        "ContractError",
        "DeletedArrayError",
        "InternalError",
        "MemoryLimitError",
        "MissingMeshError",
        "ParseError",
        "PartitionWarning",
        "PinnedPlanError",
        "ProcessError",
        "SdyError",
        "ShardingError",
        "UnsupportedError",
        "VerificationError",
    ),
    "sdy_jax.calls.load": ("load", "loads"),
    "sdy_jax.lowering.targets.cost_model": ("CostModel",),
    "sdy_jax.pipelines.different_layers": ("PackedLayers", "pack_layers"),
    "sdy_jax.pipelines.pipeline": ("pipeline",),
    "sdy_jax.annotate.pipeline_schedules": ("pipeline_schedule",),
    "sdy_jax.plan.page.html": ("show",),
    "sdy_jax.plan.plan": ("Plan",),
    "sdy_jax.plan.record.files": ("load_plan",),
    "sdy_jax.plan.record.record": ("PlanRecord",),
    "sdy_jax.ir.meshes": ("AxisRef", "Mesh", "MeshAxis"),
    "sdy_jax.ir.shardings": ("DimensionSharding", "OpShardingRule", "TensorSharding"),
    "sdy_jax.annotate.parameters": ("fsdp", "like", "tensor_parallel"),
    "sdy_jax.annotate.dimension_names": ("rules",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
_FACES = ("dialect", "errors", "passes", "shard", "testing")

_ELSEWHERE = {
    *(name for name in _MODULES["sdy_jax.errors"] if name != "SdyError"),
    *(name for module, names in _MODULES.items() if module.startswith("sdy_jax.ir.") for name in names),
    *_MODULES["sdy_jax.annotate.collectives"],
    *("data_flow_edge", "propagation_barrier", "sharding_group"),
    *("PackedLayers", "PlanRecord", "Program", "Verification"),
}
"""Names of `__all__` that `dir` leaves out: `errors` and `dialect` have them, or functions return them."""


def __getattr__(name: str) -> _Any:
    if name in _FACES:
        return _import_module(f"sdy_jax.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'sdy_jax' has no attribute {name!r}", name=name, obj=_import_module("sdy_jax"))
    found = globals()[name] = getattr(_import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({"__doc__", "__file__", "__name__", "__path__", "__version__", *__all__} - _ELSEWHERE)
