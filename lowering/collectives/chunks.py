"""Blocks of local arrays: cut into chunks per device, put side by side, or sent as bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from sdy_jax.errors import InternalError
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.runtime.mesh import RefinedMesh

AxisSequence = Sequence[AxisRef]
AxesPerDim = Sequence[AxisSequence]


Collective = Callable[..., jax.Array]

TWO_BITS = {np.dtype(ml_dtypes.int2): jnp.int8, np.dtype(ml_dtypes.uint2): jnp.uint8}
FOUR_BITS = {np.dtype(ml_dtypes.int4): jnp.int8, np.dtype(ml_dtypes.uint4): jnp.uint8}


def as_bytes(carriers: dict[np.dtype[Any], Any]) -> Callable[[Collective], Collective]:
    """Lets small integers travel as bytes, of which their bits are the lowest.

    The CPU's collectives of two-bit integers give other numbers and corrupt memory (jax 0.10 and 0.12); lax reduces
    four-bit integers by some kinds only.
    """

    def wrap(collective: Collective) -> Collective:
        @functools.wraps(collective)
        def run(x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
            carrier = carriers.get(np.dtype(x.dtype))
            if carrier is None:
                return collective(x, *args, **kwargs)
            return collective(x.astype(carrier), *args, **kwargs).astype(x.dtype)

        return run

    return wrap


def cut_dims(axes_per_dim: AxesPerDim) -> list[int]:
    return [dim for dim, axes in enumerate(axes_per_dim) if axes]


@as_bytes(TWO_BITS)
def stacked(x: jax.Array, axes: AxisSequence, mesh: RefinedMesh) -> jax.Array:
    """What the devices of the group have, along a new dimension 0."""
    return lax.all_gather(x, **mesh.group(axes), axis=0, tiled=False) if axes else x[None]


def along(x: jax.Array, dim: int, axes: AxisSequence) -> list[AxisSequence]:
    """One list of axes per dimension of `x`: `axes` for `dim`."""
    return [axes if d == dim else () for d in range(x.ndim)]


def chunks_of(x: jax.Array, dims: Sequence[int], groups: Sequence[int]) -> jax.Array:
    """The chunks of dimensions that are cut into so many each, along one new leading dimension, first one major."""
    for number, (target, count) in enumerate(zip(dims, groups, strict=True)):
        dim = target + number
        x = jnp.moveaxis(split_dim(x, dim, count), dim, number)
    return x.reshape(math.prod(groups), *x.shape[len(groups) :])


def merge_before(x: jax.Array, sources: Sequence[int]) -> jax.Array:
    """Makes leading dimension `i` the major part of dimension `sources[i]` of the others."""
    count = len(sources)
    leading = {source: number for number, source in enumerate(sources)}
    parts = [[leading[dim], count + dim] if dim in leading else [count + dim] for dim in range(x.ndim - count)]
    shape = [math.prod(x.shape[i] for i in part) for part in parts]
    return x.transpose([i for part in parts for i in part]).reshape(shape)


def chunk(x: jax.Array, dim: int, group: int) -> int:
    """The length of each of `group` parts of a dimension."""
    if x.shape[dim] % group:
        raise InternalError(
            f"dimension {dim} of a block of shape {x.shape} is split into {group} parts without padding"
        )
    return int(x.shape[dim]) // group


def split_dim(x: jax.Array, dim: int, group: int) -> jax.Array:
    """Dimension `dim` as two: `group` parts, and what is in them."""
    return x.reshape(*x.shape[:dim], group, chunk(x, dim, group), *x.shape[dim + 1 :])
