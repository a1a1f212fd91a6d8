"""Shardings of arrays of partitioned functions, stated and asked for."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from sdy_jax.annotate.constraints import sharding_constraint
from sdy_jax.annotate.site import Site, current_mesh, current_site
from sdy_jax.errors import ShardingError
from sdy_jax.ir.hidden_frames import caller_line
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.named import from_named_sharding
from sdy_jax.shard.grids import grid_of
from sdy_jax.shard.semantics.layout import Layout, normalized
from sdy_jax.shard.sharding import Sharding, grid_for
from sdy_jax.shard.to_sdy import PARTIAL_IN_SDY
from sdy_jax.shard.verification.annotations import CHAINS, TWICE


def shard(x: Any, sharding: Sharding, *, annotate_for_users: bool = False) -> Any:
    """States how an array of a partitioned function is sharded: `shard` of the dialect.

    Args:
        x: an array.
        sharding: its sharding, on the mesh of the partition.
        annotate_for_users: whether it is how the users of the result see the value, rather than the sharding of the
            value itself. Use one plain `shard` per value, and any number for users.

    Returns:
        `x`, for whose uses the sharding holds. If `x` has no other uses it is also the sharding of `x`. Derivatives and
        `vmap` as for `sharding_constraint`, which this is; outside of a partitioned function nothing happens.

    Raises:
        SdyError: a sharding that does not fit the array or the mesh; or another one for an array that has been given
            one, where the dialect leaves open what that means: two plain ones, two for users in a chain, or a plain one
            after one for users.

    Warns:
        UserWarning: halos, offsets or a partial average. They say how local buffers look, and a partitioned function
            has none to show, so only the axes are stated. `reshard` and `to_local` make such buffers.

    Example:
        >>> @sdy.partition(mesh=mesh)
        ... def layer(x, w):
        ...     x = shard(x, Sharding([["data"]]))
        ...     return shard(x @ w, Sharding([["data"], ["model"]]), annotate_for_users=True)

    Source: the mesh dialect reference, `mesh.shard`.
    """
    if not isinstance(sharding, Sharding):
        raise ShardingError(f"shard.shard: got {sharding!r}, expected a sdy_jax.shard.Sharding")
    given, stated, x = x, sharding, jnp.asarray(x)
    is_average = sharding.partial is not None and sharding.partial[0] not in PARTIAL_IN_SDY
    if sharding.halo_sizes or sharding.sharded_dims_offsets or is_average:
        text = "shard.shard: averages, halos and offsets are of local buffers; of the sharding only its axes are stated"
        warnings.warn(text, UserWarning, stacklevel=2)
    if is_average:
        sharding = replace(sharding, partial=None)
    mesh = sharding.grid if sharding.grid is not None else current_mesh()
    if mesh is None and not grid_of(None).rank:
        return x
    constrained = sharding_constraint(x, sharding.to_sdy(mesh, rank=x.ndim))
    site = current_site()
    if site is not None:
        grid = grid_for(stated, mesh)
        said = normalized(stated.layout(grid), grid), grid.mesh.mesh
        _check_annotations(site, given, constrained, _RecordedShard(said, annotate_for_users, caller_line()))
    return constrained


@dataclass(frozen=True, slots=True)
class _RecordedShard:
    """The sharding that a `shard` stated, and its source line."""

    sharding: tuple[Layout, Mesh]
    for_users: bool
    place: str


def _check_annotations(site: Site, x: Any, constrained: Any, new: _RecordedShard) -> None:
    """Raises `ShardingError` for what the dialect leaves undefined, as in text: see `CHAINS`.

    An array is known by its object. Functions that are traced by themselves see others.
    """
    before = site.recorded("result of shard", x)
    if before is not None and before.sharding != new.sharding:
        mistake = CHAINS.get((before.for_users, new.for_users))
        if mistake is not None:
            raise ShardingError(f"shard.shard: {mistake.format(value='the array', place=before.place)}")
    if not new.for_users and isinstance(x, jax.Array):
        first = site.record("shard", x, new)
        if first.sharding != new.sharding:
            raise ShardingError(f"shard.shard: {TWICE.format(value='the array', place=first.place)}")
    site.record("result of shard", constrained, new)


def get_sharding(x: Any) -> Sharding:
    """The sharding of an array: `get_sharding` of the dialect.

    Args:
        x: an array with a `NamedSharding`. Of a traced array nothing is known: propagation decides after the function
            has been traced. Ask the plan then (`fun.plan(...)`).

    Returns:
        Its sharding, on its mesh.

    Raises:
        SdyError: the sharding is not known.

    Source: the shard dialect page, `shard.get_sharding`.
    """
    traced = isinstance(x, jax.core.Tracer)
    known = None if traced else getattr(x, "sharding", None)
    if not isinstance(known, jax.sharding.NamedSharding):
        advice = (
            "ask the plan of the function, made after its trace" if traced else "put it on a mesh by jax.device_put"
        )
        raise ShardingError(f"shard.get_sharding: the sharding of {jax.typeof(x)} is not known here; {advice}")
    return Sharding.from_sdy(from_named_sharding(known, x.ndim, "mesh"), known.mesh)
