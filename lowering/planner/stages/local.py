"""The program of one device as a module: local types, StableHLO's collectives, and how a mesh numbers devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from sdy_jax.base.errors import ParseError, UnsupportedError
from sdy_jax.base.jax_calls import jit
from sdy_jax.base.jax_lowering import listed_replica_groups
from sdy_jax.ir.device_orders import device_ids
from sdy_jax.ir.graph import Graph, Value
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.operations import (
    body_of,
    functions,
    main_function,
    module_meshes,
    named,
    pre_order,
    replace_by_body,
    replace_op,
    top_level,
)
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import SIDES, function_shardings, set_function_shardings
from sdy_jax.lowering.ops.emit import local_function, used_axes
from sdy_jax.lowering.ops.re_emission import numpy_dtype
from sdy_jax.lowering.planner.placement.program_placement import partition_locally
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.lowering.planner.stages.reshards import base_mesh
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.runtime.meshes import RefinedMesh
from sdy_jax.shardy.passes.calls import inline_calls

# Whether a mesh's devices are partitions or replicas of an SPMD program.

_BY_CHANNEL = frozenset(f"stablehlo.{name}" for name in ("all_to_all", "collective_broadcast", "collective_permute"))
"""Collectives between partitions where they have a channel, and between replicas where they have none. The groups of
the others are of global ids, which number both."""


def number_devices(module: ir.Operation, base: str, partition_count: str, replica_count: str) -> None:
    """Makes the devices of the mesh replicas, where there are several replicas.

    Raises:
      ParseError: a count is none of the mesh, or there are both partitions and replicas.
    """
    partitions, replicas = _count("partition-count", partition_count), _count("replica-count", replica_count)
    if partitions > 1 and replicas > 1:
        raise ParseError(
            f"partition-count={partitions} and replica-count={replicas}: a mesh is made of partitions or of replicas; "
            "to fix: leave one of them 1"
        )
    size = module_meshes(module)[base].size
    for name, count in (("partition-count", partitions), ("replica-count", replicas)):
        if count not in (1, size):
            raise ParseError(
                f"{name}={count}, and the mesh @{base} has {size} devices; to fix: leave it out, or {size}"
            )
    if replicas > 1:
        _number_replicas(module)


def _count(name: str, text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ParseError(f"{name} cannot be {text!r}; it is a number of devices")
    return int(text)


def _number_replicas(module: ir.Operation) -> None:
    for op in list(pre_order(module)):
        if op.name == "stablehlo.partition_id":
            type_, ip = op.results[0].type, ir.InsertionPoint(op)
            replica = ir.Operation.create("stablehlo.replica_id", [type_], loc=op.location, ip=ip)
            replace_op(op, list(replica.results))
        elif op.name in _BY_CHANNEL and "channel_handle" in op.attributes:
            del op.attributes["channel_handle"]


# The program of one device as a module: local types, and StableHLO's collectives between devices.


def convert_global_to_local(
    module: ir.Operation,
    *,
    partition_count: str = "1",
    replica_count: str = "1",
    per_dim_all_gather: bool = False,
    combine_multi_dimension_reduce_scatter: bool = False,
    enable_rgv3: bool = False,
) -> None:
    """`sdy-convert-global-to-local`: the main function becomes what each device computes.

    Arguments and results get the types of one device's blocks and keep their shardings, which say how the blocks make
    up arrays; those on a mesh with the devices in another order are on the main function's mesh then. Collectives are
    StableHLO's, with groups of partitions, and `stablehlo.partition_id` is the place on the mesh. What is not
    partitioned yet is, so that nothing has to run before, padding neither. Functions that are called are inlined.

    Args:
      module: a `builtin.module` with closed shardings, edited in place.
      partition_count, replica_count: the devices are replicas where there is more than one replica, else partitions. A
        count is that of the mesh's devices, or 1 where it is not stated.
      per_dim_all_gather, combine_multi_dimension_reduce_scatter: change nothing here; both collectives are always one
        per dimension, which send what one for all dimensions does.
      enable_rgv3: changes nothing here; groups are always listed, as every version of StableHLO reads them.

    Raises:
      UnsupportedError: an op cannot be partitioned, or the mesh has device ids of its own.
      ParseError: the devices of the mesh are not so many.
    """
    base = base_mesh(module)
    if base is None:
        return
    mesh = module_meshes(module)[base]
    check_numbering(base, mesh)
    inline_calls(module)
    partition_locally(module, Setting(base, CostModel()))
    main = main_function(module)
    _put_border_on(main, base)
    _replace_functions(module, _lowered(module, mesh))
    number_devices(module, base, partition_count, replica_count)


def check_numbering(base: str, mesh: Mesh) -> None:
    """Raises `UnsupportedError` unless devices are numbered along the mesh, as partitions are."""
    if device_ids(mesh) != tuple(range(mesh.size)):
        raise UnsupportedError(
            f"the mesh @{base} has its devices in the order {list(device_ids(mesh))}, and partitions are numbered "
            "along the mesh; to fix: leave out its device_ids, and place the devices in this order to run"
        )


def _put_border_on(main: ir.Operation, base: str) -> None:
    for side in SIDES:
        stated = enumerate(function_shardings(main, side))
        set_function_shardings(main, side, {i: s and replace(s, mesh=base) for i, s in stated})


def _lowered(module: ir.Operation, mesh: Mesh) -> ir.Module:
    graph = Graph(module)
    refined = RefinedMesh.of(mesh, used_axes(graph))
    stated = [(v, v.sharding or TensorSharding.replicated("", v.rank)) for v in graph.arguments]
    return lowered_on_blocks(local_function(graph, refined), stated, refined, module.context)


def lowered_on_blocks(
    function: Callable[..., Any],
    arguments: Sequence[tuple[Value, TensorSharding]],
    mesh: RefinedMesh,
    context: ir.Context,
) -> ir.Module:
    """A per-device function as jax lowers it: its `main` takes and makes blocks; other functions are private.

    Args:
      function: the function of blocks.
      arguments: the values whose blocks it takes, with their shardings.
      mesh: the mesh on which it runs.
      context: where the module is made.
    """
    automatic = (AxisType.Auto,) * len(mesh.axis_names)
    whole: Any = PartitionSpec()  # the blocks are all that jax sees
    mapped = jax.shard_map(
        function,
        mesh=AbstractMesh(mesh.shape, mesh.axis_names, axis_types=automatic),
        in_specs=whole,
        out_specs=whole,
        check_vma=False,
    )
    with jax.enable_x64(True), listed_replica_groups():
        blocks = [_block(*argument, mesh.mesh) for argument in arguments]
        lowered = jit(mapped, keep_unused=True).trace(*blocks).lower(lowering_platforms=("cpu",))
        text = str(lowered.compiler_ir("stablehlo"))
    module = ir.Module.parse(text, context)
    for computation in named(module.operation, "sdy.manual_computation"):
        replace_by_body(computation, body_of(computation), computation.operands)
    return module


def _block(value: Value, sharding: TensorSharding, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sharding.local_shape(value.shape or (), mesh), numpy_dtype(value.dtype))


def _replace_functions(module: ir.Operation, lowered: ir.Module) -> None:
    """Puts the lowered functions in the place of the module's; main keeps its name and its shardings."""
    old, new = main_function(module), functions(lowered.operation)["main"]
    kept = {name: old.attributes[name] for name in ("sym_name", "sym_visibility", *SIDES) if name in old.attributes}
    for side in SIDES:
        if side in new.attributes:
            del new.attributes[side]
    for name, attribute in kept.items():
        new.attributes[name] = attribute
    for function in functions(module).values():
        function.erase()
    at_end = ir.InsertionPoint(body_of(module))
    for function in top_level(lowered.operation, "func.func"):
        function.detach_from_parent()
        at_end.insert(function)
