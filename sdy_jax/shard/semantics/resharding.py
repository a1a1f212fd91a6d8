"""Resharding on local buffers: the plan's steps, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.errors import InternalError, ShardingError
from sdy_jax.lowering.emission import lax_collectives
from sdy_jax.representation.mesh import Mesh
from sdy_jax.runtime.mesh import RefinedMesh
from sdy_jax.shard.semantics import reshard_plan as steps
from sdy_jax.shard.semantics.buffers import COUNTING, cut
from sdy_jax.shard.semantics.grid import Grid, op
from sdy_jax.shard.semantics.halo import exchanged
from sdy_jax.shard.semantics.layout import Layout, buffer_shape, check_layout, even_shape
from sdy_jax.shard.semantics.reductions import combined, combined_pieces
from sdy_jax.shard.to_sdy import KIND_OF_REDUCTION


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
    blocks = lax_collectives.all_gather(x, lax_collectives.along(x, step.dim, grid.refs(before.axes)), grid.mesh)
    rows = [i * before.core + r for i, length in enumerate(before.lengths) for r in range(length)]
    return jnp.take(blocks, np.array(rows, np.int32), axis=step.dim)


def _average(grid: Grid, x: jax.Array, step: steps.Average) -> jax.Array:
    if step.dim is None:
        return combined(grid, x, grid.refs(step.axes), "average")
    return combined_pieces(grid, x, lax_collectives.along(x, step.dim, grid.refs(step.axes)), "average")


def _exchange(grid: Grid, x: jax.Array, step: steps.Exchange) -> jax.Array:
    done, mesh = step.collective, grid.mesh
    match done.kind:
        case "all_reduce":
            return combined(grid, x, done.op.axes, KIND_OF_REDUCTION[done.reduction])
        case "reduce_scatter":
            return combined_pieces(grid, x, done.op.axes, KIND_OF_REDUCTION[done.reduction])
        case "all_to_all":
            return lax_collectives.all_to_all(x, done.op.params, mesh)
        case "collective_permute":
            return lax_collectives.collective_permute(x, step.before, done.result, _used(step, mesh))
        case "all_gather":
            return lax_collectives.all_gather(x, done.op.axes, mesh)
        case "all_slice":
            return lax_collectives.all_slice(x, done.op.axes, mesh)
        case "replicated_to_unreduced" if done.reduction not in COUNTING.values():
            return x  # copies are terms
        case "replicated_to_unreduced":
            return lax_collectives.replicated_to_unreduced(x, done.op.axes, done.reduction, mesh)
        case "sharded_to_unreduced":
            return lax_collectives.sharded_to_unreduced(x, done.op.axes, done.reduction, mesh)
    raise InternalError(f"there is no collective {done.kind}")


def _used(step: steps.Exchange, mesh: RefinedMesh) -> RefinedMesh:
    """The axes that a step uses: along others devices may hold different values, or not be the program's at all."""
    ends = (step.before, step.collective.result)
    names = {axis.name for end in ends for axes in (*end.axes, end.unreduced_axes) for axis in axes}
    axes = [(axis, cuts) for axis, cuts in zip(mesh.mesh.axes, mesh.cuts, strict=True) if axis.name in names]
    return RefinedMesh(Mesh(tuple(axis for axis, _ in axes)), tuple(cuts for _, cuts in axes))


def _cut(grid: Grid, x: jax.Array, step: steps.Cut) -> jax.Array:
    return cut(grid, x, step.dim, step.after)


def _halos_on(grid: Grid, x: jax.Array, step: steps.HalosOn) -> jax.Array:
    x = jnp.pad(x, [dimension.halo for dimension in step.after])
    halos = {dim: dimension.halo for dim, dimension in enumerate(step.after) if any(dimension.halo)}
    return exchanged(grid, x, [dimension.axes for dimension in step.after], halos)


_RUN: dict[type, Callable[[Grid, jax.Array, Any], jax.Array]] = {
    steps.HalosOff: _halos_off,
    steps.Join: _join,
    steps.Average: _average,
    steps.Exchange: _exchange,
    steps.Cut: _cut,
    steps.HalosOn: _halos_on,
}
