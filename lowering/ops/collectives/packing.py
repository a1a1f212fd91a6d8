"""The sdy collectives of a program: each as lax calls, several of one kind as one, and the bytes that they send."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from sdy_jax.ir.attributes import reduction_from_attributes
from sdy_jax.ir.collectives import (
    BUCKET,
    BY_STRIPS,
    COLLECTIVE_OPS,
    PACKED,
    RING,
    UNREDUCING,
    SdyCollective,
    collective_from_attributes,
)
from sdy_jax.ir.graph import Value
from sdy_jax.ir.meshes import Axes, AxisRef, Mesh, axes_size, sort_and_merge
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.collectives import movement, reductions
from sdy_jax.lowering.ops.collectives.movement import (
    Gathered,
    Product,
    Ring,
    all_gather,
    all_slice,
    all_to_all,
    permutation_pairs,
)
from sdy_jax.lowering.ops.collectives.reductions import (
    all_reduce,
    gathers_partials,
    has_native_all_reduce,
    reduce_scatter,
    replicated_to_unreduced,
    sharded_to_unreduced,
)
from sdy_jax.lowering.ops.control_flow import apart_along, manual_axes_around
from sdy_jax.lowering.ops.re_emission import numpy_dtype
from sdy_jax.lowering.ops.registry import LocalOp, emitter
from sdy_jax.lowering.ops.shards import lengthened, relaid
from sdy_jax.lowering.reshard.planner import Collective
from sdy_jax.lowering.targets.rates import wire_bytes
from sdy_jax.runtime.meshes import RefinedMesh

# Each sdy collective as lax calls on local arrays, inside a `shard_map` over the refined mesh.
#
# Conventions. `x` is one device's block of a tensor; `axes_per_dim` has one list of axes, major to minor, per
# dimension; `mesh` must cut every axis used here (`RefinedMesh.of`). Lists of axes may be in any order and may hold
# sub-axes. A local dimension that a collective splits must be divisible by the group: where it is not, the caller
# pads it first. A group of devices is numbered by its axes in the order given, first one major, in permutations
# (`sent`) too. On a mesh whose devices are in another order than those of the `shard_map`, `mesh` is that order's
# view (`RefinedMesh.on`).

_MOVING: dict[str, Callable[..., jax.Array]] = {"all_gather": all_gather, "all_slice": all_slice}

_COMBINING: dict[str, Callable[..., jax.Array]] = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "replicated_to_unreduced": replicated_to_unreduced,
    "sharded_to_unreduced": sharded_to_unreduced,
}


def run_collective(said: SdyCollective, x: jax.Array, reduction: str, mesh: RefinedMesh) -> jax.Array:
    """What an op says, done; not for a collective_permute. `reduction` is the kind by which it combines, or is to."""
    if said.kind == "all_to_all":
        return all_to_all(x, said.params, mesh)
    if said.kind in _MOVING:
        return _MOVING[said.kind](x, said.axes, mesh)
    return _COMBINING[said.kind](x, said.axes, reduction, mesh)


# Several collectives of one kind, group and element type as one, on local arrays.
#
# Blocks of one shape of which the collectives say the same are stacked along a new dimension, and nothing is
# rearranged. Else each block becomes rows: one per device of the group for what is exchanged or reduced in parts, one
# in all for what is gathered or sent as it is. Rows lie side by side in one array, over which the collective runs
# once. So dimensions and orders of axes may differ from member to member, as long as the axes of all make up the same
# group of devices.
#
#     all_gather of f32[4, 8] along dimension 0 and f32[2, 6] along dimension 1, among 4 devices
#
#     [4, 8] -> [1, 32] --+                              +-> [4, 32] -> [16, 8]
#                         +-> [1, 44] -gather-> [4, 44] -+
#     [2, 6] -> [1, 12] --+                              +-> [4, 12] -> [2, 24]
#
# All-reduces are not packed: side by side, XLA makes one of them without a copy on any devices (2026-11), as of other
# kinds on some (`Collectives.combines`).


class PackedCollective(NamedTuple):
    """A collective of several: its operand, what it says, and the shardings between which it runs."""

    x: jax.Array
    said: SdyCollective
    source: TensorSharding
    target: TensorSharding


AxesOfDims = Mapping[int, Axes]
"""The axes along which some dimensions are cut, or joined."""


class _Packing(NamedTuple):
    """How blocks of a kind become rows, what runs over all rows at once, and how rows become blocks.

    `cut`, `joined`: the axes along which the dimensions of a member's block are cut, and joined again.
    """

    cut: Callable[[SdyCollective], AxesOfDims]
    run: Callable[[jax.Array, PackedCollective, Axes, str, RefinedMesh], jax.Array]
    joined: Callable[[SdyCollective], AxesOfDims]


def _per_dim(said: SdyCollective) -> AxesOfDims:
    return {dim: axes for dim, axes in enumerate(said.axes) if axes}


def _nowhere(said: SdyCollective) -> AxesOfDims:
    return {}


def _gather(rows: jax.Array, first: PackedCollective, axes: Axes, reduction: str, mesh: RefinedMesh) -> jax.Array:
    return movement.all_gather(rows, [axes, ()], mesh)


def _scatter(rows: jax.Array, first: PackedCollective, axes: Axes, reduction: str, mesh: RefinedMesh) -> jax.Array:
    return reductions.reduce_scatter(rows, [axes, ()], reduction, mesh)


def _exchange(rows: jax.Array, first: PackedCollective, axes: Axes, reduction: str, mesh: RefinedMesh) -> jax.Array:
    return movement.all_to_all(rows, [(axes, 0, 0)], mesh)


def _permute(rows: jax.Array, first: PackedCollective, axes: Axes, reduction: str, mesh: RefinedMesh) -> jax.Array:
    return movement.collective_permute(rows, first.source, first.target, mesh)


_PACKINGS: Mapping[str, _Packing] = {
    "all_gather": _Packing(_nowhere, _gather, _per_dim),
    "reduce_scatter": _Packing(_per_dim, _scatter, _nowhere),
    "all_to_all": _Packing(
        lambda said: {target: axes for axes, _, target in said.params},
        _exchange,
        lambda said: {source: axes for axes, source, _ in said.params},
    ),
    "collective_permute": _Packing(_nowhere, _permute, _nowhere),
}

PACKABLE = frozenset(_PACKINGS)
"""The kinds whose operands can be copied side by side."""


def run_together(
    members: Sequence[PackedCollective], reduction: str, mesh: RefinedMesh, packs: bool
) -> list[jax.Array]:
    """What the collectives make of their operands, which have the block that they need, padding included.

    All are of one kind over the same devices, and their operands of one element type; permutes have the same pairs.
    `packs`: operands are copied side by side; else XLA makes one of the collectives.
    """
    first = members[0]
    if not packs:
        return [run_collective(m.said, m.x, reduction, mesh) for m in members]
    if stacks(first.said) and all(m.x.shape == first.x.shape and m.said == first.said for m in members):
        return _run_stacked(members, reduction, mesh)
    packing, axes = _PACKINGS[first.said.kind], sort_and_merge(first.said.all_axes, mesh.mesh)
    parts = [_cut(m.x, packing.cut(m.said), axes, mesh) for m in members]
    rows = lax.concatenate([part.reshape(part.shape[0], -1) for part in parts], 1)
    rows = packing.run(rows, first, axes, reduction, mesh)
    ends = list(accumulate(part[0].size for part in parts))
    pieces = (lax.slice_in_dim(rows, end - part[0].size, end, axis=1) for part, end in zip(parts, ends, strict=True))
    return [
        _joined(piece.reshape(rows.shape[0], *part.shape[1:]), packing.joined(m.said), axes, mesh)
        for m, part, piece in zip(members, parts, pieces, strict=True)
    ]


def stacks(said: SdyCollective) -> bool:
    """Whether collectives that say this run as one over a stack: of several dimensions each is gathered, or scattered,
    for itself."""
    return sum(map(bool, said.lists)) <= 1


def _run_stacked(members: Sequence[PackedCollective], reduction: str, mesh: RefinedMesh) -> list[jax.Array]:
    first = members[0]
    dim = _stacked_at(first.said)
    stack = lax.concatenate([lax.expand_dims(m.x, [dim]) for m in members], dim)
    if first.said.kind == "collective_permute":
        found = movement.collective_permute(stack, first.source, first.target, mesh)
    else:
        found = run_collective(first.said.of_stacks(dim), stack, reduction, mesh)
    return [lax.index_in_dim(found, n, dim, keepdims=False) for n in range(len(members))]


def _stacked_at(said: SdyCollective) -> int:
    """The dimension along which blocks are stacked. It is behind the one that is gathered: with two blocks in front of
    it, XLA makes all-reduces of gathers among many devices (two of bfloat16[4096, 1024] among 64 chips of v5e take 620
    us so, and 299 behind it; libtpu 0.0.52, 2026-11)."""
    return 1 + next(dim for dim, axes in enumerate(said.axes) if axes) if said.kind == "all_gather" else 0


def _cut(x: jax.Array, cuts: AxesOfDims, group: Axes, mesh: RefinedMesh) -> jax.Array:
    """The parts of a block, along a new dimension 0 in the order of the group's devices."""
    if not cuts:
        return x[None]
    shape, places = list[int](), dict[AxisRef, int]()
    for dim, size in enumerate(x.shape):
        atoms = mesh.atoms(cuts.get(dim, ()))
        places.update({atom: len(shape) + n for n, atom in enumerate(atoms)})
        shape += [*_sizes(atoms, mesh), size // axes_size(atoms, mesh.mesh)]
    leading = [places[atom] for atom in mesh.atoms(group)]
    rest = [dim for dim in range(len(shape)) if dim not in leading]
    parts = x.reshape(shape).transpose([*leading, *rest])
    return parts.reshape(-1, *parts.shape[len(leading) :])


def _joined(parts: jax.Array, joins: AxesOfDims, group: Axes, mesh: RefinedMesh) -> jax.Array:
    """The block whose parts are numbered by dimension 0; without joins there is one part."""
    if not joins:
        return parts[0]
    numbers = {atom: n for n, atom in enumerate(mesh.atoms(group))}
    parts = parts.reshape(*_sizes(mesh.atoms(group), mesh), *parts.shape[1:])
    order, shape = list[int](), list[int]()
    for dim, size in enumerate(parts.shape[len(numbers) :]):
        atoms = mesh.atoms(joins.get(dim, ()))
        order += [*(numbers[atom] for atom in atoms), len(numbers) + dim]
        shape.append(size * math.prod(_sizes(atoms, mesh)))
    return parts.transpose(order).reshape(shape)


def _sizes(atoms: Sequence[AxisRef], mesh: RefinedMesh) -> list[int]:
    return [atom.size(mesh.mesh) for atom in atoms]


# Emitters of the sdy collectives: each under a scope that names it and the source line that caused it.
#
# A dimension that does not divide is padded before it is cut into blocks, and rid of the padding where it is whole
# again.


@emitter(*(COLLECTIVE_OPS - {"sdy.collective_permute"}))
def _collective(local: LocalOp, x: jax.Array) -> jax.Array | Gathered:
    if RING in local.op.attributes:
        return _in_ring(local, x)
    if not x.size:
        return lax.full(local.result_shape(), 0, x.dtype)  # lax does not gather what has no elements
    said = _said(local)
    result, reduction = local.result_shardings[0], reduction_from_attributes(local.op.attributes)
    if said.kind in UNREDUCING and result is not None:
        reduction = result.reduction
    x, order = _padded(local, x), _turned_before(local)
    if order is None:
        return _trimmed(local, run_collective(said, x, reduction, local.mesh))
    back = sorted(range(len(order)), key=order.__getitem__)
    found = reductions.reduce_scatter(x.transpose(back), [said.axes[d] for d in back], reduction, local.mesh)
    return _trimmed(local, found.transpose(order))


def _turned_before(local: LocalOp) -> Sequence[int] | None:
    """The permutation by which what a collective left is transposed before an op scatters it, in lanes: XLA joins both
    into a scatter along another dimension, of which it may make an all-reduce. Scattered first, it is what it seems."""
    op, turn = local.op, local.op.operands[0].defining_op
    if (
        op.name != "sdy.reduce_scatter"
        or not local.mesh.forms.in_lanes
        or turn is None
        or turn.name != "stablehlo.transpose"
    ):
        return None
    maker = turn.operands[0].defining_op
    return turn.ints("permutation") if maker is not None and maker.name in COLLECTIVE_OPS else None


def _in_ring(local: LocalOp, x: jax.Array | Product) -> jax.Array | Gathered:
    """What a product takes, or has made, in a ring."""
    said = collective_from_attributes(local.op.name, local.op.attributes)
    dim = next(dim for dim, axes in enumerate(said.axes) if axes)
    ring = Ring(said.axes[dim], local.mesh)
    return x.scattered(dim, ring) if isinstance(x, Product) else Gathered(x, dim, ring)


@emitter("sdy.collective_permute")
def _collective_permute(local: LocalOp, x: jax.Array) -> jax.Array:
    return movement.collective_permute(x, *_ends(local), local.mesh)


@emitter(BUCKET)
def _bucket(members: Sequence[LocalOp], operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Collectives that run as one."""
    reduction, packs = reduction_from_attributes(members[0].op.attributes), PACKED in members[0].op.attributes
    pairs = list(zip(members, operands, strict=True))
    given = [PackedCollective(_padded(local, x), _said(local), *_ends(local)) for local, x in pairs]
    found = run_together(given, reduction, members[0].mesh, packs)
    return [_trimmed(local, x) for local, x in zip(members, found, strict=True)]


def _said(local: LocalOp) -> SdyCollective:
    return collective_from_attributes(local.op.name, local.op.attributes)


def _ends(local: LocalOp) -> tuple[TensorSharding, TensorSharding]:
    """The shardings between which a collective runs, with blocks of their own for devices that hold other values."""
    target = local.result_shardings[0]
    assert target is not None
    source = local.operand_shardings[0] or TensorSharding.replicated(target.mesh, target.rank)
    apart = manual_axes_around(local.op)
    return apart_along(source, apart), apart_along(target, apart)


@emitter(f"sdy.{BY_STRIPS}")
def _reshard(local: LocalOp, x: jax.Array) -> jax.Array:
    return relaid(local, x) if x.size else lax.full(local.result_shape(), 0, x.dtype)


def _padded(local: LocalOp, x: jax.Array) -> jax.Array:
    """The operand, with dimensions as long as all the blocks together into which they are cut."""
    mesh, blocks = local.mesh.mesh, local.result_shape()
    for dim, block in enumerate(blocks):
        before, after = (axes_size(axes(0, dim), mesh) for axes in (local.operand_axes, local.result_axes))
        missing = block * (after // before) - x.shape[dim]
        if missing > 0:
            x = lengthened(x, dim, missing)
    return x


def _trimmed(local: LocalOp, x: jax.Array) -> jax.Array:
    """The result without the padding of dimensions that are whole now."""
    shape = local.result_shape()
    return x if x.shape == shape else lax.slice(x, (0,) * x.ndim, shape)


# Bytes that collectives on local arrays send: the counterpart of the collectives, in numbers.
#
# Shapes are those of one device's blocks; `group` is the number of devices that a collective joins.


def sent_by_step(step: Collective, value: Value, mesh: Mesh) -> float:
    """What a device sends in one step of a reshard of a value."""
    if step.kind != "all_reduce":
        return step.wire_bytes
    shape = step.result.local_shape(value.shape or (), mesh)
    return all_reduce_bytes(step.reduction, shape, value.itemsize, value.dtype, axes_size(step.op.axes, mesh))


def sent_at_border(value: Value, sharding: TensorSharding, mesh: Mesh, meshes: Mapping[str, Mesh]) -> float:
    """What a device sends to bring an argument from `mesh`, that of the `shard_map`, to its own, or a result back."""
    axes = [*(axis for axes in sharding.axes for axis in axes), *sharding.unreduced_axes]
    refined = RefinedMesh.of(mesh, axes).with_meshes(meshes)
    if not refined.on(sharding.mesh).device_permutation:
        return 0.0
    pairs = permutation_pairs(replace(sharding, mesh=mesh), sharding, refined)
    if all(sender == receiver for sender, receiver in pairs):
        return 0.0
    return value.itemsize * math.prod(sharding.local_shape(value.shape or (), mesh))


def all_reduce_bytes(kind: str, shape: Sequence[int], itemsize: float, dtype: str, group: int) -> float:
    """What a device sends in `collectives.all_reduce`; `dtype` is MLIR's."""
    if has_native_all_reduce(kind, numpy_dtype(dtype)):
        block = itemsize * math.prod(shape)
        return wire_bytes("all_reduce", group, block, block)
    return reduce_by_bytes(shape, itemsize, group)


def reduce_by_bytes(shape: Sequence[int], itemsize: float, group: int, is_used: bool = True) -> float:
    """What a device sends in `collectives.all_reduce_by`, which is made of moves, for one array.

    A result that `is_used` by nothing takes part in the reduction of chunks, but is not gathered again.
    """
    size = math.prod(shape)
    if gathers_partials(size, group):
        return gathered_bytes(itemsize * size, group)
    chunks = itemsize * -(-size // group) * group
    return wire_bytes("all_reduce" if is_used else "all_to_all", group, chunks, chunks)


def gathered_bytes(block: float, group: int) -> float:
    """What a device sends in an all_gather of blocks."""
    return wire_bytes("all_gather", group, block, group * block)


# The collectives that a per-device function runs, read off its jaxpr.

_KINDS = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "ragged_all_to_all",
    "ppermute": "collective_permute",
}
"""The primitives of lax."""

Sent = Counter[tuple[str, tuple[str, ...]]]
"""Bytes by the kind of collective and its axes."""


def sent_along(jaxpr: Jaxpr, sizes: Mapping[str, int]) -> Sent:
    """The bytes that a device sends in collectives, `sizes` being those of the axes.

    A loop whose trips are not known counts once, of a branch the sum of all cases.
    """
    found: Sent = Counter()
    for eqn in jaxpr.eqns:
        joined = collective_kind(eqn.primitive.name, eqn.params, sizes)
        if joined is not None:
            kind, axes, group = joined
            found[kind, axes] += _sent(eqn, kind, group)  # type: ignore[assignment]
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in _inner(eqn.params.values()):
            found.update({k: times * n for k, n in sent_along(inner, sizes).items()})
    return found


def collective_kind(
    primitive: str, params: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[str, tuple[str, ...], int] | None:
    """The kind of a primitive that is a collective, its axes, and how many devices it joins; None for others."""
    kind = _KINDS.get(primitive)
    if kind is None:
        return None
    names = params["axes"] if "axes" in params else params["axis_name"]
    names = tuple(n for n in (names if isinstance(names, tuple) else (names,)) if isinstance(n, str))
    groups = params.get("axis_index_groups")
    return kind, names, len(groups[0]) if groups else math.prod(sizes[name] for name in names)


def _inner(values: Any) -> Iterator[Jaxpr]:
    for value in values:
        inner = getattr(value, "jaxpr", value)  # of a closed one, which jax 0.12 no longer tells apart
        if isinstance(inner, Jaxpr):
            yield inner
        elif isinstance(value, (tuple, list)):
            yield from _inner(value)


def _sent(eqn: JaxprEqn, kind: str, group: int) -> float:
    if kind == "collective_permute" and all(sender == receiver for sender, receiver in eqn.params["perm"]):
        return 0.0
    moved = eqn.invars[:1] if kind == "ragged_all_to_all" else eqn.invars  # beside places, and numbers of rows
    before, after = (sum(map(_bytes, ends)) for ends in (moved, eqn.outvars))
    return wire_bytes(kind, group, before, after)


def _bytes(variable: Any) -> float:
    return float(math.prod(variable.aval.shape) * variable.aval.dtype.itemsize)
