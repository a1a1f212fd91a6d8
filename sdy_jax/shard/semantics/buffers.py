"""Buffers: what a device holds of a tensor under a layout, made from the whole tensor and joined to it again."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.errors import ShardingError
from sdy_jax.lowering.collectives import reductions
from sdy_jax.shard.semantics.grid import Grid, coordinates_in_group, position
from sdy_jax.shard.semantics.layout import Dimension, Layout, dimensions

# The kinds of which copies are no terms, so that all devices but one hold the identity.
COUNTING = {"sum": "sum", "product": "product", "bitwise_xor": "xor"}


def cut(grid: Grid, x: jax.Array, dim: int, dimension: Dimension) -> jax.Array:
    """The device's part of a dimension of a tensor, with its halo."""
    if not dimension.axes:
        return x
    lo, hi = dimension.halo
    widths = [(lo, hi + dimension.core) if d == dim else (0, 0) for d in range(x.ndim)]
    block = grid.group_index(dimension.axes)
    start = jnp.asarray(dimension.starts[:-1], jnp.int32)[block]
    part = lax.dynamic_slice_in_dim(jnp.pad(x, widths), start, dimension.length, axis=dim)
    if dimension.is_even:
        return part
    own = jnp.asarray(dimension.lengths, jnp.int32)[block]
    row = lax.broadcasted_iota(jnp.int32, part.shape, dim)
    return jnp.where(row < own, part, jnp.zeros_like(part))


# On the host: all buffers at once.


def all_buffers(x: np.ndarray, layout: Layout, grid: Grid) -> np.ndarray:
    """The buffers of all devices along a new dimension 0, in the order of their linear index."""
    found = dimensions(layout, grid, x.shape)
    buffers = []
    for device in itertools.product(*map(range, grid.sizes)):
        if layout.partial in COUNTING and any(device[axis] for axis in layout.partial_axes):
            identity = reductions.identity(COUNTING[layout.partial], x.dtype)
            buffers.append(np.full([d.length for d in found], identity, x.dtype))
            continue
        part = x
        for dim, dimension in enumerate(found):
            part = _host_cut(grid, part, dim, dimension, device)
        buffers.append(part)
    return np.stack(buffers)


def _host_cut(grid: Grid, x: np.ndarray, dim: int, dimension: Dimension, device: Sequence[int]) -> np.ndarray:
    lo, hi = dimension.halo
    block = int(position(grid, dimension.axes, device))
    start, end = dimension.starts[block] - lo, dimension.starts[block + 1] + hi
    part = np.take(x, range(max(start, 0), min(end, dimension.size)), axis=dim)
    before = max(-start, 0)
    after = dimension.length - before - part.shape[dim]
    return np.pad(part, [(before, after) if d == dim else (0, 0) for d in range(x.ndim)])


_COMBINE: dict[str, Any] = {
    "sum": np.add,
    "average": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
}


def joined(buffers: np.ndarray, layout: Layout, grid: Grid, shape: Sequence[int]) -> np.ndarray:
    """The tensor of global `shape` of which all devices' buffers are given; partial sums are combined.

    Devices that hold copies of a block must agree; the first one's is taken.
    """
    found = dimensions(layout, grid, shape)
    expected = (int(np.prod(grid.sizes)), *(dimension.length for dimension in found))
    if buffers.shape != expected:
        raise ShardingError(f"got buffers of shape {buffers.shape}, expected {expected}")
    whole = buffers.reshape(*grid.sizes, *buffers.shape[1:])
    terms = [
        _term(whole, found, grid, dict(zip(layout.partial_axes, place, strict=True)))
        for place in itertools.product(*map(range, grid.shape(layout.partial_axes)))
    ]
    total = terms[0]
    for term in terms[1:]:
        total = _COMBINE[layout.partial or "sum"](total, term).astype(total.dtype)
    if layout.partial == "average":
        mean = np.trunc(total / len(terms)) if np.issubdtype(total.dtype, np.integer) else total / len(terms)
        return np.asarray(mean).astype(total.dtype)
    return total


def _term(whole: np.ndarray, found: Sequence[Dimension], grid: Grid, fixed: Mapping[int, int]) -> np.ndarray:
    """What the devices hold whose coordinates along some axes are fixed; those along axes that split nothing are 0."""
    result = np.zeros([dimension.size for dimension in found], whole.dtype)
    for blocks in itertools.product(*(range(len(dimension.lengths)) for dimension in found)):
        device = dict.fromkeys(range(grid.rank), 0) | dict(fixed)
        for dimension, block in zip(found, blocks, strict=True):
            device |= zip(dimension.axes, coordinates_in_group(grid, dimension.axes, block), strict=True)
        pairs = list(zip(found, blocks, strict=True))
        own = [slice(d.halo[0], d.halo[0] + d.lengths[block]) for d, block in pairs]
        here = [slice(d.starts[block], d.starts[block + 1]) for d, block in pairs]
        result[tuple(here)] = whole[tuple(device.values())][tuple(own)]
    return result
