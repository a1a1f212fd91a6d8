"""StableHLO's collectives, which a program written per device holds itself, and the device groups that they name."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func

from sdy_jax.base.errors import UnsupportedError
from sdy_jax.ir.collectives import CollectiveSummary
from sdy_jax.ir.custom_ops import RAGGED
from sdy_jax.ir.device_orders import block_indices
from sdy_jax.ir.device_orders import groups_of_axes as mesh_groups
from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.meshes import Axes, AxisRef, Mesh, braces
from sdy_jax.ir.operations import copied
from sdy_jax.ir.shardings import OpShardingRule, TensorSharding
from sdy_jax.lowering.ops.collectives import movement, reductions
from sdy_jax.lowering.ops.collectives.packing import all_reduce_bytes, gathered_bytes
from sdy_jax.lowering.ops.control_flow import not_manual
from sdy_jax.lowering.ops.elementwise import reduction_kind
from sdy_jax.lowering.ops.re_emission import scope_name, stablehlo_op_p
from sdy_jax.lowering.ops.registry import (
    LocalOp,
    Strategy,
    WrittenCollective,
    check,
    emitter,
    pass_through_factors,
    sends,
    strategies,
)
from sdy_jax.lowering.targets.rates import wire_bytes
from sdy_jax.runtime.meshes import RefinedMesh
from sdy_jax.shardy.rules.slicing import CONSTANT_OPS

# The groups of devices that StableHLO's collectives name, and the mesh axes that make them.
#
# A group is a tuple of mesh positions (row-major over the axes in mesh order) in the order in which the collective
# joins them. On a mesh x=2, y=4 the groups of `y` are (0, 1, 2, 3) and (4, 5, 6, 7), those of `y, x` the one group
# (0, 4, 1, 5, 2, 6, 3, 7).

Groups = tuple[tuple[int, ...], ...]

_CHANNEL = re.compile(r"handle = (-?\d+)")
_AXIS = re.compile(r'name = "([^"]+)"(?:, sub_axis_info = \((\d+)\)(\d+))?')
_REPLICAS_TIMES_PARTITIONS = frozenset({"stablehlo.all_reduce", "stablehlo.all_gather", "stablehlo.reduce_scatter"})


def groups_of_axes(axes: Sequence[AxisRef], mesh: Mesh) -> Groups:
    """The groups of all devices that differ only along `axes`, which number the members (first axis major)."""
    return tuple(map(tuple, mesh_groups(axes, mesh).tolist()))


def axes_of_groups(groups: Groups, atoms: Sequence[AxisRef], mesh: Mesh) -> tuple[AxisRef, ...] | None:
    """The list made of `atoms` (all of a mesh's, in mesh order) whose groups are these; None if there is none."""
    strides: dict[int, AxisRef] = {}
    stride = 1
    for atom in reversed(atoms):
        if atom.size(mesh) > 1:
            strides[stride] = atom
            stride *= atom.size(mesh)
    found: list[AxisRef] = []
    rest = groups[0]
    while len(rest) > 1:
        minor = strides.get(rest[1] - rest[0])
        if minor is None:
            return None
        found.insert(0, minor)
        rest = rest[:: minor.size(mesh)]
    return tuple(found) if groups_of_axes(found, mesh) == tuple(sorted(groups)) else None


def spans(groups: Sequence[Sequence[int]], axes: Sequence[AxisRef], mesh: Mesh) -> bool:
    """Whether a group joins devices that differ along `axes`."""
    block = block_indices(axes, mesh)
    return any(block[member] != block[group[0]] for group in groups for member in group)


def device_groups(op: Op, mesh: Mesh) -> Groups:
    """The groups of a StableHLO collective, in a program of one replica whose partitions are the devices of `mesh`.

    Raises:
        UnsupportedError: not every device is in exactly one group, groups differ in size, they are given by axes that
            the mesh does not have, or name replicas that there are not.
    """
    everybody = tuple(range(mesh.size))
    if op.key == RAGGED:
        return _ragged_groups(op, mesh)
    if not _has_channel(op):
        _check_replicas(op, "replica_groups", "a channel_handle with a positive handle")
        return tuple((position,) for position in everybody)  # the groups are of replicas, and there is only one
    if op.name in _REPLICAS_TIMES_PARTITIONS and "use_global_device_ids" not in op.attributes:
        _check_replicas(op, "replica_groups", "use_global_device_ids")
        return (everybody,)  # the groups are of replicas, each with all its partitions
    given = op.attributes.get("replica_groups")
    if "replica_group_mesh_axes" in str(given):
        return groups_of_axes(_named_axes(str(given), op, mesh), mesh)
    ids = op.ints("replica_groups")
    if not ids:
        return (everybody,)
    width = given.type.shape[1]  # type: ignore[union-attr]
    return _of_all_devices(op, tuple(_positions(ids[i : i + width], mesh) for i in range(0, len(ids), width)), mesh)


def groups_and_axes(op: Op, mesh: Mesh) -> tuple[Groups, Axes | None]:
    """The groups of a StableHLO collective, and the axes that they are along: none where each device is alone, None
    where no axes are."""
    groups = device_groups(op, mesh)
    return groups, axes_of_groups(groups, _whole_axes(mesh), mesh)


def _check_replicas(op: Op, attribute: str, missing: str) -> None:
    given = op.attributes.get(attribute)
    named = [] if given is None or "mesh_axes" in str(given) else op.ints(attribute)
    if any(number > 0 for number in named):
        raise UnsupportedError(
            f"{attribute} of {op.name} name replica {max(named)}, and a partitioned program is one replica, 0; to fix: "
            f"give the op {missing}, by which they name devices"
        )


def _ragged_groups(op: Op, mesh: Mesh) -> Groups:
    """Those of jax's ragged exchange, which says them in its backend configuration, between partitions."""
    said = ir.DictAttr(op.attributes["backend_config"])
    if "channel_id" not in said:
        return tuple((position,) for position in range(mesh.size))
    ids = np.array(ir.DenseIntElementsAttr(said["replica_groups"]))
    return _of_all_devices(op, tuple(_positions(group.tolist(), mesh) for group in ids), mesh)


def _of_all_devices(op: Op, groups: Groups, mesh: Mesh) -> Groups:
    """Groups of one size that hold each device once.

    Raises:
        UnsupportedError: they are none.
    """
    everybody = range(mesh.size)
    if sorted(member for group in groups for member in group) != list(everybody):
        raise UnsupportedError(
            f"replica_groups {[list(group) for group in groups]} of {op.name}; expected groups of one size that hold "
            f"each of the {mesh.size} devices of the mesh {mesh} once"
        )
    return groups


def device_pairs(op: Op, mesh: Mesh) -> list[tuple[int, int]]:
    """The (sender, receiver) mesh positions of a StableHLO `collective_permute`."""
    ids = op.ints("source_target_pairs")
    if not _has_channel(op):
        _check_replicas(op, "source_target_pairs", "a channel_handle with a positive handle")
        return [(p, p) for p in range(mesh.size)] if ids else []  # pairs of replicas, of which there is one
    positions = _positions(ids, mesh)
    return list(zip(positions[::2], positions[1::2], strict=True))


def _positions(ids: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
    """Mesh positions of partition numbers; -1 for what is none."""
    numbers = mesh.device_ids or tuple(range(mesh.size))
    at = {number: position for position, number in enumerate(numbers)}
    return tuple(at.get(number, -1) for number in ids)


def _has_channel(op: Op) -> bool:
    """Without a channel a collective works across replicas, with one across partitions."""
    match = _CHANNEL.search(str(op.attributes.get("channel_handle")))
    return match is not None and int(match[1]) > 0


def _named_axes(text: str, op: Op, mesh: Mesh) -> tuple[AxisRef, ...]:
    """The axes of `#stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [...]>`."""
    found = [(name, int(pre or 1), size) for name, pre, size in _AXIS.findall(text)]
    unknown = [name for name, _, _ in found if name not in mesh.sizes]
    if unknown:
        raise UnsupportedError(f"replica_groups of {op.name} name the axis {unknown[0]}; the mesh is {mesh}")
    return tuple(AxisRef.canonical(n, pre, int(size or mesh.sizes[n]), mesh) for n, pre, size in found)


# StableHLO's collectives: those that a program written per device (the body of a manual computation) holds itself.
#
# They act on what each device holds. So free axes may split any dimension that a collective does not exchange itself,
# as long as no group joins devices that differ along a free axis, which is checked first. Groups that some mesh axes
# make run over those axes; others are named by mesh position.

_GROUPED = (
    "stablehlo.all_gather",
    "stablehlo.all_reduce",
    "stablehlo.all_to_all",
    "stablehlo.collective_broadcast",
    "stablehlo.reduce_scatter",
)


@check(*_GROUPED, RAGGED)
def _check_groups(op: Op, mesh: Mesh) -> str | None:
    try:
        groups = device_groups(op, mesh)
    except UnsupportedError as error:
        return str(error)
    return _spanning(op, mesh, groups)


@check("stablehlo.collective_permute")
def _check_pairs(op: Op, mesh: Mesh) -> str | None:
    try:
        pairs = device_pairs(op, mesh)
    except UnsupportedError as error:
        return str(error)
    if any(position < 0 for pair in pairs for position in pair):
        return f"{op.name} names devices that the mesh {mesh} does not have"
    return _spanning(op, mesh, pairs)


def _spanning(op: Op, mesh: Mesh, groups: Sequence[tuple[int, ...]]) -> str | None:
    crossed = [axis.name for axis in _whole_axes(mesh) if spans(groups, [axis], mesh)]
    return not_manual(op, crossed, mesh, "joins devices along {axes}, but")


@check("stablehlo.partition_id")
def _check_partition_id(op: Op, mesh: Mesh) -> str | None:
    wrong = not_manual(op, (axis.name for axis in mesh.axes if axis.size > 1), mesh, "is ambiguous:")
    return wrong and f"{wrong}, or use jax.lax.axis_index in jax.shard_map"


@strategies(*_GROUPED, RAGGED, "stablehlo.collective_permute")
def _exchange(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """What devices exchange is priced as sent; they compute nothing of it, however many factors it has."""
    return [Strategy("exchange", pass_through_factors(rule), work=frozenset())]


@sends(*_GROUPED)
def _sent_in_groups(op: Op, mesh: Mesh, operands: Sequence[TensorSharding]) -> list[WrittenCollective]:
    """One collective per operand, as they are emitted."""
    groups, axes = groups_and_axes(op, mesh)
    size, kind = len(groups[0]), _short(op.name)
    if size == 1:
        return []
    detail = str([list(group) for group in groups]) if axes is None else braces(axes)
    sent = [_bytes_in_groups(op, value, s, mesh, size) for value, s in zip(op.operands, operands, strict=True)]
    return [
        WrittenCollective(CollectiveSummary(kind, axes or (), detail), index, wire) for index, wire in enumerate(sent)
    ]


def _bytes_in_groups(op: Op, value: Value, sharding: TensorSharding, mesh: Mesh, size: int) -> float:
    """What a device sends of one operand."""
    shape, kind = sharding.local_shape(value.shape or (), mesh), _short(op.name)
    block = value.itemsize * math.prod(shape)
    if kind == "all_reduce":
        reduction = reduction_kind(op.blocks[0])
        if reduction is not None:
            return all_reduce_bytes(reduction, shape, value.itemsize, value.dtype, size)
    if kind in ("all_gather", "all_reduce", "collective_broadcast"):
        return gathered_bytes(block, size)
    return wire_bytes(kind, size, block, block)


@sends(RAGGED)
def _sent_by_rows(op: Op, mesh: Mesh, operands: Sequence[TensorSharding]) -> list[WrittenCollective]:
    """As many rows as a device is said to send where that is constant, else all that it has, and there is room for: of
    these the share that goes to others."""
    groups, axes = groups_and_axes(op, mesh)
    size = len(groups[0])
    if size == 1:
        return []
    given, taken = zip(op.operands[:2], operands[:2], strict=True)
    (rows, *width), (room, *_) = (s.local_shape(value.shape or (), mesh) for value, s in (given, taken))
    rows = min([rows, *_constant_sums(op.operands[_SEND_SIZES])])
    block = op.operands[0].itemsize * min(rows, room) * math.prod(width)
    detail = str([list(group) for group in groups]) if axes is None else braces(axes)
    return [WrittenCollective(CollectiveSummary(RAGGED, axes or (), detail), 0, wire_bytes(RAGGED, size, block, block))]


_SEND_SIZES = 3
"""Given (`lax.ragged_all_to_all`): the operand that has the numbers of rows which a device sends to the others."""


def _constant_sums(value: Value) -> list[int]:
    """The sum of a vector that is constant, or one number everywhere; none of others."""
    op, times = value.defining_op, 1
    if op is not None and op.name == "stablehlo.broadcast_in_dim" and not op.operands[0].shape:
        op, times = op.operands[0].defining_op, math.prod(value.shape or ())
    if op is None or op.name not in CONSTANT_OPS:
        return []
    return [times * int(np.array(ir.DenseIntElementsAttr(op.attributes["value"])).sum())]


@sends("stablehlo.collective_permute")
def _sent_in_pairs(op: Op, mesh: Mesh, operands: Sequence[TensorSharding]) -> list[WrittenCollective]:
    moved = [pair for pair in device_pairs(op, mesh) if pair[0] != pair[1]]
    axes = tuple(axis for axis in _whole_axes(mesh) if spans(moved, [axis], mesh))
    ((value, sharding),) = zip(op.operands, operands, strict=True)
    block = value.itemsize * math.prod(sharding.local_shape(value.shape or (), mesh))
    return [WrittenCollective(CollectiveSummary("collective_permute", axes, braces(axes)), 0, block if moved else 0.0)]


def _short(name: str) -> str:
    return name.removeprefix("stablehlo.")


def _whole_axes(mesh: Mesh) -> list[AxisRef]:
    return [AxisRef(name) for name in mesh.axis_names]


Exchange = Callable[[LocalOp, RefinedMesh, Sequence[AxisRef], jax.Array], jax.Array]
"""What a collective does to an operand among devices along axes of a mesh: the program's, or a view of it."""


def _collective(name: str) -> Callable[[Exchange], Exchange]:
    """Registers what a collective does to each of its operands; profilers see its name, axes and source line."""

    def register(exchange: Exchange) -> Exchange:
        @emitter(name)
        @functools.wraps(exchange)
        def emit(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
            groups = device_groups(local.op, local.mesh.mesh)
            axes = axes_of_groups(groups, local.mesh.all_atoms, local.mesh.mesh)
            if len(groups[0]) == 1:
                return list(operands)
            mesh, along = (local.mesh, axes) if axes else (local.mesh.in_groups(groups), (AxisRef("member"),))
            with jax.named_scope(scope_name(local.op.name, axes or (), local.op.source)):
                return [exchange(local, mesh, along, x) for x in operands]

        return exchange

    return register


@_collective("stablehlo.all_reduce")
def _all_reduce(local: LocalOp, mesh: RefinedMesh, axes: Sequence[AxisRef], x: jax.Array) -> jax.Array:
    kind = reduction_kind(local.op.blocks[0])
    if kind is not None:
        return reductions.all_reduce(x, axes, kind, mesh)
    return _folded(local, movement.stacked(x, axes, mesh))


@_collective("stablehlo.reduce_scatter")
def _reduce_scatter(local: LocalOp, mesh: RefinedMesh, axes: Sequence[AxisRef], x: jax.Array) -> jax.Array:
    dim, kind = local.op.int("scatter_dimension"), reduction_kind(local.op.blocks[0])
    if kind is not None:
        return reductions.reduce_scatter(x, movement.along(x, dim, axes), kind, mesh)
    return _folded(local, jnp.moveaxis(movement.partials_of_chunk(x, axes, dim, mesh), dim, 0))


@_collective("stablehlo.all_gather")
def _all_gather(local: LocalOp, mesh: RefinedMesh, axes: Sequence[AxisRef], x: jax.Array) -> jax.Array:
    dim = local.op.int("all_gather_dim")
    return movement.all_gather(x, movement.along(x, dim, axes), mesh)


@_collective("stablehlo.all_to_all")
def _all_to_all(local: LocalOp, mesh: RefinedMesh, axes: Sequence[AxisRef], x: jax.Array) -> jax.Array:
    split, concat = local.op.int("split_dimension"), local.op.int("concat_dimension")
    return movement.all_to_all(x, [(axes, concat, split)], mesh)


@_collective("stablehlo.collective_broadcast")
def _collective_broadcast(local: LocalOp, mesh: RefinedMesh, axes: Sequence[AxisRef], x: jax.Array) -> jax.Array:
    """The first device of each group sends to the others."""
    return movement.stacked(x, axes, mesh)[0]


@emitter("stablehlo.collective_permute")
def _collective_permute(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    pairs = device_pairs(local.op, local.mesh.mesh)
    with jax.named_scope(scope_name(local.op.name, (), local.op.source)):
        return [movement.sent(x, local.mesh.axis_names, pairs) for x in operands]


@emitter("stablehlo.partition_id")
def _partition_id(local: LocalOp) -> jax.Array:
    position = lax.axis_index(local.mesh.axis_names)
    ids = local.mesh.mesh.device_ids
    return (jnp.asarray(ids, jnp.uint32)[position] if ids else position).astype(jnp.uint32)


@emitter("stablehlo.replica_id")
def _replica_id(local: LocalOp) -> jax.Array:
    """The program has one replica; its partitions are the devices."""
    return jnp.uint32(0)


@emitter(RAGGED)
def _ragged_all_to_all(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    groups = device_groups(local.op, local.mesh.mesh)
    axes = axes_of_groups(groups, local.mesh.all_atoms, local.mesh.mesh)
    mesh, along = (local.mesh, axes) if axes is not None else (local.mesh.in_groups(groups), (AxisRef("member"),))
    with jax.named_scope(scope_name(RAGGED, axes or (), local.op.source)):
        return [lax.ragged_all_to_all(*operands, **mesh.group(along))]


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
            source = copied(op.mlir)
            source.regions[0].blocks[0].append_to(mapped.regions[0])
            source.erase()
            func.ReturnOp(mapped.results)
    return str(module.operation.get_asm(print_generic_op_form=True))
