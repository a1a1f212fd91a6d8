"""Resharding on local buffers: the plan's steps, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.errors import ShardingError
from sdy_jax.lowering.emission import collectives
from sdy_jax.shard.semantics import reshard_plan as steps
from sdy_jax.shard.semantics.buffers import as_terms, cut
from sdy_jax.shard.semantics.grid import Grid, coordinates_in_group, op, permute, position
from sdy_jax.shard.semantics.halo import exchanged
from sdy_jax.shard.semantics.layout import AxisLists, Layout, buffer_shape, check_layout, even_shape
from sdy_jax.shard.semantics.movement import along
from sdy_jax.shard.semantics.reductions import combined, combined_pieces


@op
def reshard(grid: Grid, x: jax.Array, source: Layout, target: Layout, shape: Sequence[int] | None = None) -> jax.Array:
    """The buffer under `target` of a tensor of which `x` is the buffer under `source`.

    Args:
        grid: the grid of both layouts.
        x: the device's buffer.
        source, target: the layouts.
        shape: the global shape; needed where blocks are uneven without offsets that say so.
    """
    check_layout(source, grid)
    check_layout(target, grid)
    whole = even_shape(source, grid, x.shape) if shape is None else tuple(shape)
    expected = buffer_shape(source, grid, whole)
    if x.shape != expected:
        raise ShardingError(
            f"got a buffer of shape {x.shape}, but {source} of a tensor of shape {whole} has {expected}"
        )
    for step in steps.plan(source, target, grid, whole):
        x = _RUN[type(step)](grid, x, step)
    return x


def _halos_off(grid: Grid, x: jax.Array, step: steps.HalosOff) -> jax.Array:
    for dim, dimension in enumerate(step.before):
        lo = dimension.halo[0]
        x = lax.slice_in_dim(x, lo, lo + dimension.core, axis=dim)
    return x


def _join(grid: Grid, x: jax.Array, step: steps.Join) -> jax.Array:
    before = step.before
    blocks = collectives.all_gather(x, along(grid, x, before.axes, step.dim), grid.mesh)
    rows = [i * before.core + r for i, length in enumerate(before.lengths) for r in range(length)]
    return jnp.take(blocks, np.array(rows, np.int32), axis=step.dim)


def _all_reduce(grid: Grid, x: jax.Array, step: steps.AllReduce) -> jax.Array:
    return combined(grid, x, step.axes, step.kind)


def _reduce_scatter(grid: Grid, x: jax.Array, step: steps.ReduceScatter) -> jax.Array:
    return combined_pieces(grid, x, step.axes, step.dim, step.kind)


def _permute(grid: Grid, x: jax.Array, step: steps.Permute) -> jax.Array:
    axes, pairs = permutation(step.before, step.after, grid)
    return permute(grid, x, axes, pairs)


def _move(grid: Grid, x: jax.Array, step: steps.Move) -> jax.Array:
    return collectives.all_to_all(x, [(grid.refs(step.axes), step.concat, step.split)], grid.mesh)


def _slice(grid: Grid, x: jax.Array, step: steps.Slice) -> jax.Array:
    return collectives.all_slice(x, along(grid, x, step.axes, step.dim), grid.mesh)


def _gather(grid: Grid, x: jax.Array, step: steps.Gather) -> jax.Array:
    return collectives.all_gather(x, along(grid, x, step.axes, step.dim), grid.mesh)


def _cut(grid: Grid, x: jax.Array, step: steps.Cut) -> jax.Array:
    return cut(grid, x, step.dim, step.after)


def _make_terms(grid: Grid, x: jax.Array, step: steps.MakeTerms) -> jax.Array:
    return as_terms(grid, x, step.kind, step.axes)


def _halos_on(grid: Grid, x: jax.Array, step: steps.HalosOn) -> jax.Array:
    x = jnp.pad(x, [dimension.halo for dimension in step.after])
    halos = {dim: dimension.halo for dim, dimension in enumerate(step.after) if any(dimension.halo)}
    return exchanged(grid, x, [dimension.axes for dimension in step.after], halos)


_RUN: dict[type, Callable[[Grid, jax.Array, Any], jax.Array]] = {
    steps.HalosOff: _halos_off,
    steps.Join: _join,
    steps.AllReduce: _all_reduce,
    steps.ReduceScatter: _reduce_scatter,
    steps.Permute: _permute,
    steps.Move: _move,
    steps.Slice: _slice,
    steps.Gather: _gather,
    steps.Cut: _cut,
    steps.MakeTerms: _make_terms,
    steps.HalosOn: _halos_on,
}


def permutation(before: AxisLists, after: AxisLists, grid: Grid) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """The axes and the (sender, receiver) pairs by which every device gets the block it needs.

    Devices that hold what they need keep it; the others pair in order. Only devices that agree on all axes that split
    nothing exchange blocks.
    """
    axes = tuple(sorted({axis for axes in (*before, *after) for axis in axes}))
    have, want = _owners(before, axes, grid), _owners(after, axes, grid)
    pairs = [pair for block, owners in have.items() for pair in _paired(owners, want[block])]
    return axes, sorted(pairs)


def _owners(lists: AxisLists, axes: tuple[int, ...], grid: Grid) -> dict[tuple[int, ...], list[int]]:
    """The devices of a group, by the block that they hold."""
    owners: dict[tuple[int, ...], list[int]] = {}
    for device in range(grid.group_size(axes)):
        coordinates = dict(zip(axes, coordinates_in_group(grid, axes, device), strict=True))
        block = tuple(int(position(grid, one, coordinates)) for one in lists)
        owners.setdefault(block, []).append(device)
    return owners


def _paired(holders: Sequence[int], needers: Sequence[int]) -> list[tuple[int, int]]:
    staying = set(holders) & set(needers)
    senders = [device for device in holders if device not in staying]
    receivers = [device for device in needers if device not in staying]
    return [*((device, device) for device in sorted(staying)), *zip(senders, receivers, strict=True)]
