"""StableHLO's collectives: those that a program written per device (the body of a manual computation) holds itself.

They act on what each device holds. So free axes may split any dimension that a collective does not exchange itself, as
long as no group joins devices that differ along a free axis, which is checked first. Groups that some mesh axes make
run over those axes; others are named by mesh position.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func

from sdy_jax.errors import UnsupportedError
from sdy_jax.ir.graph import Op, Value
from sdy_jax.lowering.emission import lax_collectives
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.names import scope_name
from sdy_jax.lowering.emission.reemitted import stablehlo_op_p
from sdy_jax.lowering.emission.replica_groups import axes_of_groups, device_groups, device_pairs, spans
from sdy_jax.lowering.emission.sent import all_reduce_bytes, gathered_bytes
from sdy_jax.lowering.reshard.cost import wire_bytes
from sdy_jax.lowering.strategies.manual import manual_axes_around
from sdy_jax.lowering.strategies.monoids import reduction_kind
from sdy_jax.lowering.strategies.registry import Sent, check, sends
from sdy_jax.representation.axes import braces
from sdy_jax.representation.mesh import AxisRef, Mesh
from sdy_jax.representation.sdy_collectives import CollectiveSummary
from sdy_jax.representation.sharding import TensorSharding

_GROUPED = (
    "stablehlo.all_gather",
    "stablehlo.all_reduce",
    "stablehlo.all_to_all",
    "stablehlo.collective_broadcast",
    "stablehlo.reduce_scatter",
)


@check(*_GROUPED)
def _check_groups(op: Op, mesh: Mesh) -> str | None:
    try:
        groups = device_groups(op, mesh)
    except UnsupportedError as error:
        return str(error)
    return _spanning(op, mesh, groups)


@check("stablehlo.collective_permute")
def _check_pairs(op: Op, mesh: Mesh) -> str | None:
    pairs = device_pairs(op, mesh)
    if any(position < 0 for pair in pairs for position in pair):
        return f"{op.name} names devices that the mesh {mesh} does not have"
    return _spanning(op, mesh, pairs)


def _spanning(op: Op, mesh: Mesh, groups: Sequence[tuple[int, ...]]) -> str | None:
    crossed = [axis for axis in _free_axes(op, mesh) if spans(groups, [axis], mesh)]
    if not crossed:
        return None
    names = ", ".join(map(str, crossed))
    return (
        f"{op.name} joins devices along {names}, but the code around it is not written per device along them; "
        "to fix: put it in a manual computation (jax.shard_map) whose manual axes include them"
    )


def _free_axes(op: Op, mesh: Mesh) -> list[AxisRef]:
    manual = manual_axes_around(op)
    return [axis for axis in _whole_axes(mesh) if axis not in manual]


@check("stablehlo.partition_id")
def _check_partition_id(op: Op, mesh: Mesh) -> str | None:
    free = [axis for axis in _free_axes(op, mesh) if axis.size(mesh) > 1]
    if not free:
        return None
    return (
        f"{op.name} is ambiguous: the code around it is not written per device along {', '.join(map(str, free))}; "
        "to fix: put it in a manual computation over all axes of the mesh, or use jax.lax.axis_index in jax.shard_map"
    )


@dataclass(frozen=True, slots=True)
class _ReplicaGroup:
    """The replica groups of a collective, in lax's terms: all devices along `names`, or `groups` of mesh positions."""

    size: int
    axes: tuple[AxisRef, ...] | None
    names: tuple[str, ...]
    groups: list[list[int]] | None


def _replica_group(local: LocalOp) -> _ReplicaGroup:
    groups = device_groups(local.op, local.mesh.mesh)
    axes = axes_of_groups(groups, local.mesh.all_atoms, local.mesh.mesh)
    if axes is None:
        return _ReplicaGroup(len(groups[0]), None, local.mesh.axis_names, [list(group) for group in groups])
    return _ReplicaGroup(len(groups[0]), axes, local.mesh.names(axes), None)


@sends(*_GROUPED)
def _sent_in_groups(op: Op, mesh: Mesh, operands: Sequence[TensorSharding]) -> list[Sent]:
    """One collective per operand, as they are emitted."""
    groups = device_groups(op, mesh)
    axes, size, kind = axes_of_groups(groups, _whole_axes(mesh), mesh), len(groups[0]), _short(op.name)
    if size == 1:
        return []
    detail = str([list(group) for group in groups]) if axes is None else braces(axes)
    sent = [_bytes_in_groups(op, value, s, mesh, size, axes) for value, s in zip(op.operands, operands, strict=True)]
    return [Sent(CollectiveSummary(kind, axes or (), detail), index, wire) for index, wire in enumerate(sent)]


def _bytes_in_groups(
    op: Op, value: Value, sharding: TensorSharding, mesh: Mesh, size: int, axes: Sequence[AxisRef] | None
) -> float:
    """What a device sends of one operand."""
    shape, kind = sharding.local_shape(value.shape or (), mesh), _short(op.name)
    block = value.itemsize * math.prod(shape)
    if kind == "all_reduce":
        reduction = reduction_kind(op.blocks[0])
        if reduction == "sum" or (reduction is not None and axes is not None):
            return all_reduce_bytes(reduction, shape, value.itemsize, value.dtype, size)
    if kind in ("all_gather", "all_reduce", "collective_broadcast"):
        return gathered_bytes(block, size)
    return wire_bytes(kind, size, block, block)


@sends("stablehlo.collective_permute")
def _sent_in_pairs(op: Op, mesh: Mesh, operands: Sequence[TensorSharding]) -> list[Sent]:
    moved = [pair for pair in device_pairs(op, mesh) if pair[0] != pair[1]]
    axes = tuple(axis for axis in _whole_axes(mesh) if spans(moved, [axis], mesh))
    ((value, sharding),) = zip(op.operands, operands, strict=True)
    block = value.itemsize * math.prod(sharding.local_shape(value.shape or (), mesh))
    return [Sent(CollectiveSummary("collective_permute", axes, braces(axes)), 0, block if moved else 0.0)]


def _short(name: str) -> str:
    return name.removeprefix("stablehlo.")


def _whole_axes(mesh: Mesh) -> list[AxisRef]:
    return [AxisRef(name) for name in mesh.axis_names]


Exchange = Callable[[LocalOp, _ReplicaGroup, jax.Array], jax.Array]


def _collective(name: str) -> Callable[[Exchange], Exchange]:
    """Registers what a collective does to each of its operands; profilers see its name, axes and source line."""

    def register(exchange: Exchange) -> Exchange:
        @emitter(name)
        @functools.wraps(exchange)
        def emit(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
            group = _replica_group(local)
            if group.size == 1:
                return list(operands)
            with jax.named_scope(scope_name(local.op.name, group.axes or (), local.op.source)):
                return [exchange(local, group, x) for x in operands]

        return exchange

    return register


@_collective("stablehlo.all_reduce")
def _all_reduce(local: LocalOp, group: _ReplicaGroup, x: jax.Array) -> jax.Array:
    kind = reduction_kind(local.op.blocks[0])
    if kind is not None and group.axes is not None:
        return lax_collectives.all_reduce(x, group.axes, kind, local.mesh)
    if kind == "sum":
        return lax.psum(x, group.names, axis_index_groups=group.groups)
    return _folded(local, lax.all_gather(x, group.names, axis_index_groups=group.groups, axis=0, tiled=False))


@_collective("stablehlo.reduce_scatter")
def _reduce_scatter(local: LocalOp, group: _ReplicaGroup, x: jax.Array) -> jax.Array:
    dim, kind = local.op.int("scatter_dimension"), reduction_kind(local.op.blocks[0])
    if kind is not None and group.axes is not None:
        return lax_collectives.reduce_scatter(x, _lists(x, dim, group.axes), kind, local.mesh)
    parts = x.reshape(*x.shape[:dim], group.size, x.shape[dim] // group.size, *x.shape[dim + 1 :])
    partials = lax.all_to_all(parts, group.names, dim, dim, axis_index_groups=group.groups, tiled=True)
    return _folded(local, jnp.moveaxis(partials, dim, 0))


@_collective("stablehlo.all_gather")
def _all_gather(local: LocalOp, group: _ReplicaGroup, x: jax.Array) -> jax.Array:
    dim = local.op.int("all_gather_dim")
    if group.axes is not None:
        return lax_collectives.all_gather(x, _lists(x, dim, group.axes), local.mesh)
    return lax.all_gather(x, group.names, axis_index_groups=group.groups, axis=dim, tiled=True)


@_collective("stablehlo.all_to_all")
def _all_to_all(local: LocalOp, group: _ReplicaGroup, x: jax.Array) -> jax.Array:
    split, concat = local.op.int("split_dimension"), local.op.int("concat_dimension")
    if group.axes is not None:
        return lax_collectives.all_to_all(x, [(group.axes, concat, split)], local.mesh)
    return lax.all_to_all(x, group.names, split, concat, axis_index_groups=group.groups, tiled=True)


@_collective("stablehlo.collective_broadcast")
def _collective_broadcast(local: LocalOp, group: _ReplicaGroup, x: jax.Array) -> jax.Array:
    """The first device of each group sends to the others."""
    return lax.all_gather(x, group.names, axis_index_groups=group.groups, axis=0, tiled=False)[0]


@emitter("stablehlo.collective_permute")
def _collective_permute(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    pairs = device_pairs(local.op, local.mesh.mesh)
    with jax.named_scope(scope_name(local.op.name, (), local.op.source)):
        return [lax_collectives.sent(x, local.mesh.axis_names, pairs) for x in operands]


@emitter("stablehlo.partition_id")
def _partition_id(local: LocalOp) -> jax.Array:
    position = lax.axis_index(local.mesh.axis_names)
    ids = local.mesh.mesh.device_ids
    return (jnp.asarray(ids, jnp.uint32)[position] if ids else position).astype(jnp.uint32)


@emitter("stablehlo.replica_id")
def _replica_id(local: LocalOp) -> jax.Array:
    """The program has one replica; its partitions are the devices."""
    return jnp.uint32(0)


def _lists(x: jax.Array, dim: int, axes: tuple[AxisRef, ...]) -> list[tuple[AxisRef, ...]]:
    """One axis list per dimension of `x`: `axes` for `dim`."""
    return [axes if d == dim else () for d in range(x.ndim)]


def _folded(local: LocalOp, partials: jax.Array) -> jax.Array:
    """The partial results along dimension 0, reduced by the collective's own region, first to last."""
    combine = _elementwise_region(local.op, partials[0])
    return functools.reduce(combine, [partials[i] for i in range(partials.shape[0])])


def _elementwise_region(op: Op, example: jax.Array) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The region of two scalars as a function of two arrays like `example`: a `stablehlo.map` of it."""
    text = _map_text(op, example.shape)
    aval = jax.core.ShapedArray(example.shape, example.dtype)
    return lambda a, b: stablehlo_op_p.bind(a, b, name="stablehlo.map", avals=(aval,), text=text)[0]


def _map_text(op: Op, shape: Sequence[int]) -> str:
    """A module with a function `main` of two arrays that maps the op's region over them."""
    with op.mlir.context, op.mlir.location:
        module = ir.Module.create()
        type_ = ir.RankedTensorType.get(list(shape), ir.RankedTensorType(op.results[0].type).element_type)
        with ir.InsertionPoint(module.body):
            entry = func.FuncOp("main", ([type_, type_], [type_])).add_entry_block()
        with ir.InsertionPoint(entry):
            dimensions = ir.DenseI64ArrayAttr.get(list(range(len(shape))))
            mapped = ir.Operation.create(
                "stablehlo.map", [type_], list(entry.arguments), {"dimensions": dimensions}, regions=1
            )
            source = op.mlir.operation.clone()
            source.regions[0].blocks[0].append_to(mapped.regions[0])
            source.erase()
            func.ReturnOp(mapped.results)
    return str(module.operation.get_asm(print_generic_op_form=True))
