"""Several collectives of one kind, group and element type as one, on local arrays.

Blocks of one shape of which the collectives say the same are stacked along a new dimension, and nothing is rearranged.
Else each block becomes rows: one per device of the group for what is exchanged or reduced in parts, one in all for what
is gathered or sent as it is. Rows lie side by side in one array, over which the collective runs once. So dimensions and
orders of axes may differ from member to member, as long as the axes of all make up the same group of devices.

    all_gather of f32[4, 8] along dimension 0 and f32[2, 6] along dimension 1, among 4 devices

    [4, 8] -> [1, 32] --+                              +-> [4, 32] -> [16, 8]
                        +-> [1, 44] -gather-> [4, 44] -+
    [2, 6] -> [1, 12] --+                              +-> [4, 12] -> [2, 24]

All-reduces are not packed: side by side, XLA makes one of them without a copy on any devices (2026-11), as of
other kinds on some (`Collectives.combines`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import jax
from jax import lax

from sdy_jax.lowering.collectives import data_movement, lax_collectives, reductions
from sdy_jax.representation.axes import sort_and_merge
from sdy_jax.representation.mesh import Axes, AxisRef, axes_size
from sdy_jax.representation.sdy_collectives import SdyCollective
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.mesh import RefinedMesh


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
    return data_movement.all_gather(rows, [axes, ()], mesh)


def _scatter(rows: jax.Array, first: PackedCollective, axes: Axes, reduction: str, mesh: RefinedMesh) -> jax.Array:
    return reductions.reduce_scatter(rows, [axes, ()], reduction, mesh)


def _exchange(rows: jax.Array, first: PackedCollective, axes: Axes, reduction: str, mesh: RefinedMesh) -> jax.Array:
    return data_movement.all_to_all(rows, [(axes, 0, 0)], mesh)


def _permute(rows: jax.Array, first: PackedCollective, axes: Axes, reduction: str, mesh: RefinedMesh) -> jax.Array:
    return data_movement.collective_permute(rows, first.source, first.target, mesh)


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
        return [lax_collectives.run_collective(m.said, m.x, reduction, mesh) for m in members]
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
    first, stack = members[0], lax.concatenate([m.x[None] for m in members], 0)
    if first.said.kind == "collective_permute":
        found = data_movement.collective_permute(stack, first.source, first.target, mesh)
    else:
        found = lax_collectives.run_collective(first.said.of_stacks, stack, reduction, mesh)
    return [lax.index_in_dim(found, n, keepdims=False) for n in range(len(members))]


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
