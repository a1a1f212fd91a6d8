"""Collectives that combine the arrays of a group."""

from __future__ import annotations

from typing import Any

import jax

from sdy_jax.representation.named import AnyMesh
from sdy_jax.shard.collectives.groups import in_groups
from sdy_jax.shard.grids import AxisNames, Device, coordinates, dimension, mesh_terms
from sdy_jax.shard.semantics import reductions


@mesh_terms
def all_reduce(
    x: Any, *, grid_axes: AxisNames, reduction: str = "sum", dtype: Any = None, grid: AnyMesh | None = None
) -> jax.Array:
    """Combines the arrays of a group element by element, on every device of it.

    Args:
        x: an array.
        grid_axes: the axes whose devices form a group.
        reduction: "sum", "max", "min", "product", "average", "bitwise_and", "bitwise_or" or "bitwise_xor". Integers
            wrap, their average is truncated. Of booleans, sum and max are "or", product and min "and". max and min of
            floats are NaN if an input is; inputs that are equal share the derivative.
        dtype: the element type of the result, to which inputs are converted first; that of `x` by default.
        grid: the mesh.

    Returns:
        An array of the shape of `x`.

    Raises:
        SdyError: while tracing: an unknown kind, a bitwise one of floats, an order of complex numbers, a `dtype` of 64
            bits without `jax_enable_x64`, an axis that there is not, or a call outside of `jax.shard_map`.

    Example:
        >>> body = lambda x: all_reduce(x, grid_axes=("data", "model"), dtype=jnp.float32)
        >>> each = P(("data", "model"))
        >>> jax.jit(jax.shard_map(body, mesh=mesh, in_specs=each, out_specs=each))(jnp.arange(8)).tolist()
        [28.0, 28.0, 28.0, 28.0, 28.0, 28.0, 28.0, 28.0]

    Source: the mesh dialect reference, `mesh.all_reduce`.
    """
    return in_groups(reductions.all_reduce, x, grid, grid_axes, reduction, dtype)


@mesh_terms
def reduce(
    x: Any,
    *,
    grid_axes: AxisNames,
    root: Device,
    reduction: str = "sum",
    dtype: Any = None,
    grid: AnyMesh | None = None,
) -> jax.Array:
    """Combines the arrays of a group on one device of it; the others get zeros.

    Args:
        x: an array.
        grid_axes: the axes whose devices form a group.
        root: the coordinates of the root, as in `broadcast`.
        reduction: as in `all_reduce`.
        dtype: as in `all_reduce`.
        grid: the mesh.

    Returns:
        An array of the shape of `x`.

    Raises:
        SdyError: as for `all_reduce` and `broadcast`.

    Example:
        >>> body = lambda x: reduce(x, grid_axes="data", root=0, reduction="max")
        >>> each = P(("data", "model"))  # the parts of the roots are shown
        >>> jax.jit(jax.shard_map(body, mesh=mesh, in_specs=each, out_specs=each))(jnp.arange(8))[:4].tolist()
        [4, 5, 6, 7]

    Source: the mesh dialect reference, `mesh.reduce`.
    """
    return in_groups(reductions.reduce, x, grid, grid_axes, coordinates(root, "shard.reduce: root"), reduction, dtype)


@mesh_terms
def reduce_scatter(
    x: Any,
    *,
    grid_axes: AxisNames,
    scatter_axis: int,
    reduction: str = "sum",
    dtype: Any = None,
    grid: AnyMesh | None = None,
) -> jax.Array:
    """Combines the arrays of a group; each device keeps its piece of the result.

    Args:
        x: an array of rank 1 or more.
        grid_axes: the axes whose devices form a group.
        scatter_axis: the dimension, of length `n`, that the devices share.
        reduction: as in `all_reduce`.
        dtype: as in `all_reduce`.
        grid: the mesh.

    Returns:
        An array with dimension `scatter_axis` of length `n / g`.

    Raises:
        SdyError: as for `all_reduce` and `all_slice`.

    Example:
        >>> body = lambda x: reduce_scatter(x, grid_axes="model", scatter_axis=0, reduction="max")
        >>> each = P(("data", "model"))
        >>> jax.jit(jax.shard_map(body, mesh=mesh, in_specs=each, out_specs=each))(jnp.arange(32)).tolist()
        [12, 13, 14, 15, 28, 29, 30, 31]

    Source: the mesh dialect reference, `mesh.reduce_scatter`.
    """
    return in_groups(reductions.reduce_scatter, x, grid, grid_axes, dimension(x, scatter_axis), reduction, dtype)
