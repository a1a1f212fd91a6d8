"""Specifications by size: each large parameter split along its largest dimension that can be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from sdy_jax.errors import ShardingError
from sdy_jax.jax_internals.tracebacks import api_boundary
from sdy_jax.spec_trees.leaves import Entries, TreeLeaf, axes_in, entries_of, mapped, spec_of, stated_specs
from sdy_jax.spec_trees.mesh_axes import SizedMesh, axis_sizes, check_axis

MIN_SIZE = 2**14
"""The elements from which on a parameter is split: 64 KiB of float32. Published (links of a TPU v5e, 45 GB/s): they
send that in about the time that a collective takes to start. Biases and scales of norms are smaller in most models;
with less, each of these is a collective; with more, weights stay whole."""


@api_boundary
def fsdp(
    params: Any,
    axis: str | Sequence[str] = "data",
    *,
    mesh: SizedMesh | None = None,
    specs: Any = None,
    min_size: int = MIN_SIZE,
) -> Any:
    """Specifications that split the parameters themselves over the axis of the batch: fully sharded data parallelism.

    Each parameter is split along its largest dimension that is not split yet and that the axis divides, the first of
    several; where there is none, along one that is split already and that both divide. What no dimension allows, and
    what has less than `min_size` elements, stays as it is.

    Args:
        params: arrays, types of arrays (`jax.eval_shape`), or boxes of them.
        axis: the mesh axis, or several that split one dimension together.
        mesh: the mesh, for the sizes of its axes; by default that of `jax.set_mesh`, or on which the parameters lie.
        specs: a prefix tree of specifications to add the axis to, such as those of `tensor_parallel`.
        min_size: the number of elements from which on a parameter is split.

    Returns:
        The tree with a `PartitionSpec` for each parameter.

    Raises:
        ShardingError: no mesh, an axis that it lacks, or `specs` that do not fit the parameters.

    Example:
        >>> fsdp({"w": jnp.ones((128, 512)), "b": jnp.ones(512)}, axis="data", mesh=mesh)
        {'b': P(), 'w': P(None, 'data')}

    See also:
        `tensor_parallel`: by path.
        `like`: for optimizer states.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020 (stage 3).
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    sizes = _sizes(axes, mesh, params)
    stated = iter(stated_specs(specs, params, "params", "fsdp"))

    def split(leaf: TreeLeaf) -> PartitionSpec | None:
        spec, shape = next(stated), leaf.shape
        if shape is None:
            return None
        entries = entries_of(spec or PartitionSpec(), shape, f"fsdp: `{leaf.path}`")
        if math.prod(shape) >= min_size and not set(axes) & set(axes_in(entries)):
            _split_one(entries, shape, axes, sizes)
        return spec_of(entries)

    return mapped(split, params, "params")


def _sizes(axes: tuple[str, ...], mesh: SizedMesh | None, params: Any) -> Mapping[str, int]:
    """The sizes of the mesh's axes, `axes` among them.

    Raises:
        ShardingError: no mesh, an axis that it lacks, or one that is named twice.
    """
    sizes = axis_sizes(mesh, params)
    if sizes is None:
        raise ShardingError(
            f"fsdp: the size of {axes[0]!r} is not known; to fix: pass mesh=, or call it in jax.set_mesh"
        )
    for axis in axes:
        check_axis(axis, sizes, "fsdp")
        if axes.count(axis) > 1:
            raise ShardingError(f"fsdp: axis={axes} has {axis!r} twice; an axis splits a value once")
    return sizes


def _split_one(entries: Entries, shape: Sequence[int], axes: tuple[str, ...], sizes: Mapping[str, int]) -> None:
    """Adds the axes to the largest dimension that they divide, to one that is not split yet rather than to others."""
    able = [dim for dim in range(len(shape)) if _divides(entries[dim], shape[dim], axes, sizes)]
    if able:
        dim = max(able, key=lambda dim: (not entries[dim], shape[dim]))
        entries[dim] = (*entries[dim], *axes)


def _divides(entry: Any, size: int, axes: tuple[str, ...], sizes: Mapping[str, int]) -> bool:
    if entry is PartitionSpec.UNCONSTRAINED:
        return False
    return size % math.prod(sizes[axis] for axis in (*entry, *axes)) == 0
