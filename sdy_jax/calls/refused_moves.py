"""Arrays that are not brought to where `in_shardings` state them, as jit brings none: from one memory to another, and
from other devices to a part of it each."""

from __future__ import annotations

from collections.abc import Iterable

import jax
from jax.sharding import NamedSharding

from sdy_jax.annotate.arguments import Leaf
from sdy_jax.annotate.automatic import AUTO
from sdy_jax.annotate.specs import PARTITION, resolve
from sdy_jax.errors import ShardingError
from sdy_jax.representation.mesh import axes_size
from sdy_jax.representation.named import AnyMesh, mesh_from_jax
from sdy_jax.runtime.function_mesh import is_whole_elsewhere


def check_moves(leaves: Iterable[Leaf], mesh: AnyMesh) -> None:
    """Whether jit takes arrays where shardings are stated for them.

    Args:
        leaves: the arguments as they were given.
        mesh: that of the function.

    Raises:
        ShardingError: an array is in another kind of memory than is stated, or whole on other devices than the mesh's
            and stated to be split.
    """
    for leaf in leaves:
        if leaf.spec in (None, AUTO) or not _is_array(leaf.value) or not isinstance(mesh, jax.sharding.Mesh):
            continue
        _check_memory(leaf, mesh)
        if is_whole_elsewhere(leaf.value, mesh):
            _check_whole(leaf, mesh)


def _is_array(x: object) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def _check_memory(leaf: Leaf, mesh: jax.sharding.Mesh) -> None:
    own, stated = leaf.value.sharding.memory_kind, _stated_memory(leaf, mesh)
    if own != stated:
        raise ShardingError(
            f"`{leaf.path}` is in {own} memory, and in_shardings state {stated} memory: memory kinds do not match, and "
            f"no call moves an array between them; to fix: move it first, by jax.device_put(x, NamedSharding(mesh, "
            f"..., memory_kind={stated!r})), or state memory_kind={own!r} and move it inside"
        )


def _stated_memory(leaf: Leaf, mesh: jax.sharding.Mesh) -> str | None:
    """The kind of memory that a specification is about: that of its sharding, else what devices compute in."""
    kind = leaf.spec.memory_kind if isinstance(leaf.spec, NamedSharding) else None
    default: str | None = mesh.devices.flat[0].default_memory().kind
    return kind or default


def _check_whole(leaf: Leaf, mesh: jax.sharding.Mesh) -> None:
    base = mesh_from_jax(mesh)
    stated = resolve(leaf, leaf.value.ndim, base, PARTITION, "in_shardings", mesh)
    if stated is not None and any(axes_size(axes, base) > 1 for axes in stated.axes):
        count = leaf.value.sharding.num_devices
        where = "a single device" if count == 1 else f"each of {count} devices"
        raise ShardingError(
            f"`{leaf.path}` lies whole on {where}, and in_shardings state <{stated}>, which does not match; to fix: "
            "move it first, by jax.device_put(x, NamedSharding(mesh, ...)), or state P(), to which each call copies it"
        )
