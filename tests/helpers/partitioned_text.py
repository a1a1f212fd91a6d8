"""Runs a module given as text partitioned over virtual devices, without a JAX function behind it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir
from machine_models import small_costs
from sharding_dump import parse

from sdy_jax.ir.graph import Graph
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.emit import local_function, used_axes
from sdy_jax.lowering.ops.re_emission import numpy_dtype
from sdy_jax.lowering.planner.plan_program import partition_whole
from sdy_jax.lowering.planner.report import PartitionReport
from sdy_jax.lowering.planner.setting import Policy, Setting
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.target import Target
from sdy_jax.runtime.boundary import Boundary
from sdy_jax.runtime.meshes import Forms, RefinedMesh
from sdy_jax.shardy.passes.pipelines import PLAN_EXPORT, plan_import, run_pipeline
from sdy_jax.shardy.passes.propagation import user_priority_propagate

LOCAL = Policy(layouts="local")
"""Layouts are chosen op by op."""


def partitioned(text: str, policy: Policy = LOCAL, machine: str = "") -> ir.Module:
    """The module after all that a plan does with it, for a machine, or for CPU devices."""
    return partition_module(parse(text), policy, machine)


def partition_module(module: ir.Module, policy: Policy = LOCAL, machine: str = "") -> ir.Module:
    """As `partitioned`, of a module; it is changed."""
    if not machine:
        partition_report(module, policy, CostModel.of_platform("cpu"))
        return module
    mesh = Graph(module.operation).meshes["mesh"]
    devices = np.array(jax.devices()[: mesh.size]).reshape([a.size for a in mesh.axes])
    target = Target.of(jax.sharding.Mesh(devices, mesh.axis_names), machine)
    partition_report(module, policy, small_costs(machine, mesh.axis_names), target)
    return module


def partition_report(
    module: ir.Module,
    policy: Policy,
    costs: CostModel,
    target: Target = Target(),  # noqa: B008 - immutable
) -> PartitionReport:
    """What the partitioner says of a module, which is partitioned in place."""
    with module.context, ir.Location.unknown(module.context), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # groups whose members disagree
        run_pipeline(module.operation, plan_import())
        user_priority_propagate(module.operation)
        run_pipeline(module.operation, PLAN_EXPORT)
        return partition_whole(module.operation, Setting("mesh", costs, policy=policy, target=target)).report


def run_partitioned(module: ir.Module, arguments: Sequence[Any], forms: Forms = Forms()) -> list[jax.Array]:  # noqa: B008
    """The results of a partitioned module's `main` on as many devices as its mesh has."""
    graph = Graph(module.operation)
    mesh = graph.meshes["mesh"]
    devices = np.array(jax.devices()[: mesh.size]).reshape([a.size for a in mesh.axes])
    refined = RefinedMesh.of(mesh, used_axes(graph), forms)
    inputs = [v.sharding or TensorSharding.replicated("mesh", v.rank) for v in graph.arguments]
    outputs = [s for s in graph.result_shardings(graph.main) if s is not None]
    boundary = Boundary(jax.sharding.Mesh(devices, mesh.axis_names), refined, inputs, outputs)
    run, types = local_function(graph, refined), types_of(graph.outputs)
    # jit looks for shardings that it is not told on the axes of the arguments' mesh only.
    told = [boundary.named(s) for s in outputs]
    return jax.jit(lambda *xs: boundary(run, xs, types), out_shardings=told)(*arguments)


def types_of(values: Sequence[Any]) -> list[jax.core.ShapedArray]:
    """The abstract arrays of values of a graph."""
    return [jax.core.ShapedArray(v.shape, numpy_dtype(v.dtype)) for v in values]
