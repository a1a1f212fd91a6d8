"""update_halo: the borders of blocks, which repeat what the neighbouring devices own.

Along a split dimension a buffer is `lo + core + hi` long; the cells `[lo, lo + core)` are the device's own. The halo
cells get what the devices before and after it own, also over corners. Where there is no such device, they keep what
they hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from sdy_jax.dialects.semantics.grid import Axes, Grid, check_axes, op, permute
from sdy_jax.errors import ShardingError

Halo = tuple[int, int]


@op
def update_halo(grid: Grid, x: jax.Array, split_axes: Sequence[Axes], halo_sizes: Sequence[int]) -> jax.Array:
    """Fills the halos; `halo_sizes` has two numbers per dimension whose list of axes is not empty."""
    check_axes(grid, [axis for axes in split_axes for axis in axes], "split_axes")
    if x.ndim == 0 or len(split_axes) > x.ndim:
        raise ShardingError(f"split_axes has {len(split_axes)} lists, the tensor {x.ndim} dimensions")
    split = [dim for dim, axes in enumerate(split_axes) if axes]
    if not halo_sizes:
        return x
    halos = paired(halo_sizes, len(split))
    for dim, halo in zip(split, halos, strict=True):
        _core(x, dim, halo)
    return exchanged(grid, x, split_axes, dict(zip(split, halos, strict=True)))


def paired(halo_sizes: Sequence[int], count: int) -> list[Halo]:
    """The two sizes of each of `count` split dimensions.

    Raises:
        ShardingError: another number of sizes, or negative ones.
    """
    if len(halo_sizes) != 2 * count:
        raise ShardingError(f"{len(halo_sizes)} halo sizes for {count} split dimensions, expected {2 * count}")
    for size in halo_sizes:
        if size < 0:
            raise ShardingError(f"halo size {size} is negative")
    return list(zip(halo_sizes[::2], halo_sizes[1::2], strict=True))


def exchanged(grid: Grid, x: jax.Array, split_axes: Sequence[Axes], halos: dict[int, Halo]) -> jax.Array:
    """The buffer with its halos filled; `halos` by dimension."""
    filled = x
    # A strip spans the other dimensions with the halos that they have by now, so later strips carry corners along.
    for dim in sorted(halos, reverse=True):
        filled = _with_strips(grid, filled, split_axes[dim], dim, halos[dim])
    known = jnp.ones((1,) * x.ndim, bool)
    for dim, halo in halos.items():
        known = known & _known(grid, x, split_axes[dim], dim, halo)
    return jnp.where(known, filled, x)


def _with_strips(grid: Grid, x: jax.Array, axes: Axes, dim: int, halo: Halo) -> jax.Array:
    lo, hi = halo
    end, last = lo + _core(x, dim, halo), grid.group_size(axes) - 1
    parts = [lax.slice_in_dim(x, lo, end, axis=dim)]
    if lo:
        strip = lax.slice_in_dim(x, end - lo, end, axis=dim)
        parts.insert(0, permute(grid, strip, axes, [(i, i + 1) for i in range(last)]))
    if hi:
        strip = lax.slice_in_dim(x, lo, lo + hi, axis=dim)
        parts.append(permute(grid, strip, axes, [(i + 1, i) for i in range(last)]))
    return jnp.concatenate(parts, axis=dim)


def _known(grid: Grid, x: jax.Array, axes: Axes, dim: int, halo: Halo) -> jax.Array:
    """Which cells along a dimension some device owns."""
    length, position = x.shape[dim], grid.group_index(axes)
    cell = lax.broadcasted_iota(jnp.int32, tuple(length if d == dim else 1 for d in range(x.ndim)), dim)
    below = (cell >= halo[0]) | (position > 0)
    above = (cell < length - halo[1]) | (position < grid.group_size(axes) - 1)
    return below & above


def _core(x: jax.Array, dim: int, halo: Halo) -> int:
    size = int(x.shape[dim])
    core = size - sum(halo)
    if core < max(halo):
        raise ShardingError(
            f"dimension {dim} of size {size} leaves a core of {core}, smaller than halo size {max(halo)}"
        )
    return core
