"""update_halo: the borders of blocks, which repeat what the neighbouring devices own.

Along a split dimension a buffer is `lo + core + hi` long; the cells `[lo, lo + core)` are the device's own. The halo
cells get what the devices before and after it own, also over corners. Where there is no such device, they keep what
they hold. Sizes of halos may be computed in the run, where they are the same on all devices: whole buffers are sent
then, instead of strips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from sdy_jax.shard.semantics.checks import AxisIndices, check_halos
from sdy_jax.shard.semantics.grid import Grid, op, shifted

Halo = tuple[int, int]
Size = int | jax.Array
"""The size of a halo that may be known in the run only."""
S = TypeVar("S", int, Size)


@op
def update_halo(grid: Grid, x: jax.Array, split_axes: Sequence[AxisIndices], halo_sizes: Sequence[Size]) -> jax.Array:
    """Fills the halos; `halo_sizes` has two numbers per dimension whose list of axes is not empty."""
    check_halos(grid, x.shape, split_axes, halo_sizes)
    split = [dim for dim, axes in enumerate(split_axes) if axes]
    if not halo_sizes:
        return x
    return exchanged(grid, x, split_axes, dict(zip(split, paired(halo_sizes), strict=True)))


def paired(halo_sizes: Sequence[S]) -> list[tuple[S, S]]:
    """The two sizes of each split dimension."""
    return list(zip(halo_sizes[::2], halo_sizes[1::2], strict=True))


def exchanged(
    grid: Grid, x: jax.Array, split_axes: Sequence[AxisIndices], halos: Mapping[int, tuple[Size, Size]]
) -> jax.Array:
    """The buffer with its halos filled; `halos` by dimension."""
    filled = x
    # A strip spans the other dimensions with the halos that they have by now, so later strips carry corners along.
    for dim in sorted(halos, reverse=True):
        filled = _with_strips(grid, filled, split_axes[dim], dim, halos[dim])
    known = jnp.ones((1,) * x.ndim, bool)
    for dim, halo in halos.items():
        known = known & _known(grid, x, split_axes[dim], dim, halo)
    return jnp.where(known, filled, x)


def _with_strips(grid: Grid, x: jax.Array, axes: AxisIndices, dim: int, halo: tuple[Size, Size]) -> jax.Array:
    lo, hi = halo
    if not isinstance(lo, int) or not isinstance(hi, int):
        return _with_parts_of_buffers(grid, x, axes, dim, halo)
    end = x.shape[dim] - hi
    parts = [lax.slice_in_dim(x, lo, end, axis=dim)]
    if lo:
        strip = lax.slice_in_dim(x, end - lo, end, axis=dim)
        parts.insert(0, shifted(grid, strip, axes, 1))
    if hi:
        strip = lax.slice_in_dim(x, lo, lo + hi, axis=dim)
        parts.append(shifted(grid, strip, axes, -1))
    return jnp.concatenate(parts, axis=dim)


def _with_parts_of_buffers(grid: Grid, x: jax.Array, axes: AxisIndices, dim: int, halo: tuple[Size, Size]) -> jax.Array:
    """The same for halos of any size, of which the neighbours' cells lie one core further on."""
    lo, hi = halo
    length, cell = x.shape[dim], _cells(x, dim)
    core, before, after = length - lo - hi, shifted(grid, x, axes, 1), shifted(grid, x, axes, -1)
    filled = jnp.where(cell < lo, jnp.roll(before, -core, dim), x)
    return jnp.where(cell >= length - hi, jnp.roll(after, core, dim), filled)


def _cells(x: jax.Array, dim: int) -> jax.Array:
    """The number of each cell along a dimension."""
    return lax.broadcasted_iota(jnp.int32, tuple(size if d == dim else 1 for d, size in enumerate(x.shape)), dim)


def _known(grid: Grid, x: jax.Array, axes: AxisIndices, dim: int, halo: tuple[Size, Size]) -> jax.Array:
    """Which cells along a dimension some device owns."""
    length, position = x.shape[dim], grid.group_index(axes)
    cell = _cells(x, dim)
    below = (cell >= halo[0]) | (position > 0)
    above = (cell < length - halo[1]) | (position < grid.group_size(axes) - 1)
    return below & above
