"""The collectives that only move blocks: gathers, slices, exchanges, permutes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.errors import InternalError
from sdy_jax.lowering.collectives.chunks import (
    TWO_BITS,
    AxesPerDim,
    AxisSequence,
    as_bytes,
    chunk,
    chunks_of,
    cut_dims,
    merge_before,
    split_dim,
    stacked,
)
from sdy_jax.lowering.collectives.compiler_forms import computed_apart
from sdy_jax.representation.mesh import axes_size
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.mesh import RefinedMesh


@as_bytes(TWO_BITS)
def all_gather(x: jax.Array, axes_per_dim: AxesPerDim, mesh: RefinedMesh) -> jax.Array:
    """Joins the blocks along the given minor axes of each dimension."""
    dims = cut_dims(axes_per_dim)
    if len(dims) > 1 and mesh.forms.at_once:
        return gathered_at_once(x, axes_per_dim, dims, mesh)
    for dim in dims:
        x = lax.all_gather(x, **mesh.group(axes_per_dim[dim]), axis=dim, tiled=True)
    return x


def gathered_at_once(x: jax.Array, axes_per_dim: AxesPerDim, dims: Sequence[int], mesh: RefinedMesh) -> jax.Array:
    sizes = [axes_size(axes_per_dim[dim], mesh.mesh) for dim in dims]
    blocks = stacked(x, [axis for dim in dims for axis in axes_per_dim[dim]], mesh)
    return merge_before(blocks.reshape(*sizes, *x.shape), dims)


def all_slice(x: jax.Array, axes_per_dim: AxesPerDim, mesh: RefinedMesh) -> jax.Array:
    """Keeps this device's part along axes appended to each dimension; nothing is sent."""
    for dim, axes in enumerate(axes_per_dim):
        if axes:
            size = chunk(x, dim, axes_size(axes, mesh.mesh))
            start = lax.mul(mesh.index(axes), np.int32(size))
            starts = [start if d == dim else np.int32(0) for d in range(x.ndim)]
            sizes = [size if d == dim else n for d, n in enumerate(x.shape)]
            x = lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)
    return x


@as_bytes(TWO_BITS)
def all_to_all(x: jax.Array, params: Sequence[tuple[AxisSequence, int, int]], mesh: RefinedMesh) -> jax.Array:
    """Moves axes between dimensions: each of `params` is (axes, source dimension, target dimension).

    No dimension occurs twice. The axes are the minor ones of their source and become the minor ones of their target.
    Several moves are one collective over the product of their axes, which sends less than one after the other.
    """
    if len(params) != 1:
        return _combined_all_to_all(x, params, mesh)
    axes, source, target = params[0]
    chunk(x, target, axes_size(axes, mesh.mesh))
    return _exchanged(x, axes, split=target, concat=source, mesh=mesh)


def _combined_all_to_all(x: jax.Array, params: Sequence[tuple[AxisSequence, int, int]], mesh: RefinedMesh) -> jax.Array:
    # The chunks of all targets are numbered by one leading dimension. After the exchange the digits of that number say
    # where a chunk came from, and each belongs directly before its source dimension.
    if not params:
        return x
    groups = [axes_size(axes, mesh.mesh) for axes, _, _ in params]
    group = [axis for axes, _, _ in params for axis in axes]
    chunks = chunks_of(x, [target for _, _, target in params], groups)
    x = _exchanged(chunks, group, split=0, concat=0, mesh=mesh)
    return merge_before(x.reshape(*groups, *chunks.shape[1:]), [source for _, source, _ in params])


def _exchanged(x: jax.Array, axes: AxisSequence, split: int, concat: int, mesh: RefinedMesh) -> jax.Array:
    return lax.all_to_all(
        computed_apart(x, mesh.forms), **mesh.group(axes), split_axis=split, concat_axis=concat, tiled=True
    )


def collective_permute(x: jax.Array, source: TensorSharding, target: TensorSharding, mesh: RefinedMesh) -> jax.Array:
    """Sends every block to the devices that own it under `target`, which splits each dimension as often as `source`."""
    return sent(x, mesh.axis_names, permutation_pairs(source, target, mesh))


def permutation_pairs(source: TensorSharding, target: TensorSharding, mesh: RefinedMesh) -> list[tuple[int, int]]:
    """(sender, receiver) mesh positions, all of them; devices that own their block already keep it."""
    have, want = _owners(source, mesh), _owners(target, mesh)
    if have.keys() != want.keys():
        raise InternalError(f"a permutation from <{source}> to <{target}> changes the number of blocks")
    return sorted(pair for block, owners in have.items() for pair in _match(owners, want[block]))


def _owners(sharding: TensorSharding, mesh: RefinedMesh) -> dict[tuple[int, ...], list[int]]:
    """The mesh positions that hold each block; each term of an unreduced value is a block of its own."""
    lists = (*sharding.axes, *((axis,) for axis in mesh.atoms(sharding.unreduced_axes)))
    blocks = [mesh.on(sharding.mesh).block_indices(axes) for axes in lists]
    owners: dict[tuple[int, ...], list[int]] = {}
    for position, block in enumerate(zip(*blocks, strict=True)):
        owners.setdefault(tuple(map(int, block)), []).append(position)
    return owners or {(): list(range(mesh.mesh.size))}


def _match(senders: list[int], receivers: list[int]) -> list[tuple[int, int]]:
    stay = set(senders) & set(receivers)
    moved = zip((p for p in senders if p not in stay), (p for p in receivers if p not in stay), strict=True)
    return [*((p, p) for p in sorted(stay)), *moved]


@as_bytes(TWO_BITS)
def sent(x: jax.Array, names: Sequence[str], pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """`x` sent from device to device; `pairs` are (sender, receiver), numbered along `names`, the first one major.

    Devices that nobody sends to get zeros. `lax.ppermute` numbers devices in the order of the surrounding mesh,
    whatever the order of the names that it is given, so the numbers are translated.
    """
    if not pairs:
        return jnp.zeros_like(x)
    around = jax.sharding.get_abstract_mesh().axis_names
    order = tuple(sorted(names, key=around.index))
    sizes = {name: lax.axis_size(name) for name in names}
    if all(sender == receiver for sender, receiver in pairs) and len(pairs) == math.prod(sizes.values()):
        return x
    numbers = np.arange(math.prod(sizes.values())).reshape([sizes[name] for name in order])
    along = numbers.transpose([order.index(name) for name in names]).ravel().tolist()
    return lax.ppermute(x, order, [(along[sender], along[receiver]) for sender, receiver in pairs])


def permuted(x: jax.Array, axes: AxisSequence, pairs: Sequence[tuple[int, int]], mesh: RefinedMesh) -> jax.Array:
    """`sent` among the devices along `axes`, of which `pairs` are positions; on every mesh."""
    if not mesh.device_permutation:
        return sent(x, mesh.names(axes), pairs)
    groups = mesh.group(axes)["axis_index_groups"] or []
    return sent(x, mesh.axis_names, [(group[u], group[t]) for group in groups for u, t in pairs])


@as_bytes(TWO_BITS)
def partials_of_chunk(x: jax.Array, axes: AxisSequence, dim: int, mesh: RefinedMesh) -> jax.Array:
    """Along a new dimension `dim`, what each device of the group has of this device's chunk of that dimension."""
    parts = split_dim(x, dim, axes_size(axes, mesh.mesh))
    return _exchanged(parts, axes, split=dim, concat=dim, mesh=mesh)
