"""Reductions over a replica group. The inputs are converted to the result's element type, then reduced.

Integers wrap. Of booleans, sum, max and bitwise_or are "or"; product, min and bitwise_and are "and"; bitwise_xor is the
parity. Of floats, max and min are NaN if one input is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.errors import ShardingError
from sdy_jax.lowering.collectives import chunks, reductions
from sdy_jax.lowering.emission.re_emission import mlir_name
from sdy_jax.representation.mesh import AxisRef, axes_size
from sdy_jax.runtime.mesh import RefinedMesh
from sdy_jax.shard.semantics.checks import AxisIndices, check_axes, check_device, check_element
from sdy_jax.shard.semantics.grid import (
    Coordinate,
    Grid,
    check_dimension,
    only_on,
    op,
    piece_size,
)

# The dialect's reduction kinds, and the kind of the collective that computes each; an average is a sum, divided.
KINDS = {
    "sum": "sum",
    "max": "max",
    "min": "min",
    "product": "product",
    "average": "sum",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
}


@op
def all_reduce(grid: Grid, x: jax.Array, axes: AxisIndices, reduction: str = "sum", dtype: Any = None) -> jax.Array:
    """The reduction of the group's inputs, on every device of the group."""
    check_axes(grid, axes)
    return combined(grid, x, grid.refs(axes), reduction, dtype)


@op
def reduce(
    grid: Grid, x: jax.Array, axes: AxisIndices, root: Sequence[Coordinate], reduction: str = "sum", dtype: Any = None
) -> jax.Array:
    """The reduction of the group's inputs on the root; zeros on the other devices."""
    check_axes(grid, axes)
    check_device(grid, axes, root, "root")
    return only_on(grid, axes, root, combined(grid, x, grid.refs(axes), reduction, dtype))


@op
def reduce_scatter(
    grid: Grid, x: jax.Array, axes: AxisIndices, scatter_axis: int, reduction: str = "sum", dtype: Any = None
) -> jax.Array:
    """The device's piece, along `scatter_axis`, of the reduction of the group's inputs: `n -> n/g`."""
    check_axes(grid, axes)
    check_dimension(x, scatter_axis, "scatter_axis")
    piece_size(grid, x, scatter_axis, axes)
    return combined_pieces(grid, x, chunks.along(x, scatter_axis, grid.refs(axes)), reduction, dtype)


def combined(grid: Grid, x: jax.Array, axes: tuple[AxisRef, ...], reduction: str, dtype: Any = None) -> jax.Array:
    """`all_reduce` without the checks: `axes` must be axes of the mesh, each once."""
    x = converted(x, reduction, dtype)
    kind = KINDS[reduction]
    if kind in ("max", "min") and jnp.issubdtype(x.dtype, jnp.floating):
        return _extreme(x, axes, kind, grid.mesh)
    return _finished(reductions.all_reduce(x, axes, kind, grid.mesh), reduction, axes_size(axes, grid.mesh.mesh))


def combined_pieces(
    grid: Grid, x: jax.Array, axes_per_dim: chunks.AxesPerDim, reduction: str, dtype: Any = None
) -> jax.Array:
    """`reduce_scatter` without the checks: the axes of each dimension must divide it."""
    x = converted(x, reduction, dtype)
    pieces = reductions.reduce_scatter(x, axes_per_dim, KINDS[reduction], grid.mesh)
    return _finished(pieces, reduction, axes_size(chain.from_iterable(axes_per_dim), grid.mesh.mesh))


def converted(x: jax.Array, reduction: str, dtype: Any) -> jax.Array:
    """The input in the element type of the result, in which the reduction computes.

    Raises:
        ShardingError: an unknown kind, a type that the kind does not work on, or one that jax would make smaller.
    """
    check_kind(reduction)
    wanted = np.dtype(x.dtype if dtype is None else dtype)
    if jax.dtypes.canonicalize_dtype(wanted) != wanted:
        raise ShardingError(f"result element type {mlir_name(wanted)} needs jax_enable_x64")
    if jnp.iscomplexobj(x) and not jnp.issubdtype(wanted, jnp.complexfloating):
        raise ShardingError(f"input element type {mlir_name(x.dtype)} does not convert to {mlir_name(wanted)}")
    check_element("reduction", reduction, mlir_name(wanted))
    return x.astype(wanted)


def check_kind(reduction: str) -> None:
    """Raises `ShardingError` unless `reduction` is a kind that has a computation."""
    if reduction == "generic":
        raise ShardingError("reduction = generic names no computation that can be run")
    if reduction not in KINDS:
        raise ShardingError(f"attribute reduction must be one of {', '.join(KINDS)}; got {reduction!r}")


_WIDE = 32
"""Given: bits of an integer that counts the devices of any group."""


def _finished(x: jax.Array, reduction: str, group: int) -> jax.Array:
    """An average from its sum; integers are divided truncating toward zero."""
    if reduction != "average":
        return x
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < _WIDE:  # which the group may be too large for
        return lax.div(x.astype(jnp.int32), jnp.int32(group)).astype(x.dtype)
    return lax.div(x, jnp.full_like(x, group))


@partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _extreme(x: jax.Array, axes: tuple[AxisRef, ...], kind: str, mesh: RefinedMesh) -> jax.Array:
    """The maximum or minimum over the group, of floats. Its derivative is our own: jax has none of this collective."""
    return reductions.all_reduce(x, axes, kind, mesh)


@_extreme.defjvp
def _extreme_jvp(
    axes: tuple[AxisRef, ...],
    kind: str,
    mesh: RefinedMesh,
    primals: tuple[jax.Array],
    tangents: tuple[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Inputs that equal the extreme value share its derivative evenly, as in a local maximum."""
    (x,), (tangent,) = primals, tangents
    found = _extreme(x, axes, kind, mesh)
    chosen = (x == found).astype(x.dtype)
    count = reductions.all_reduce(chosen, axes, "sum", mesh)
    return found, reductions.all_reduce(chosen / count * tangent, axes, "sum", mesh)
