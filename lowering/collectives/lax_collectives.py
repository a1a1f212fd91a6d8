"""Each sdy collective as lax calls on local arrays, inside a `shard_map` over the refined mesh.

Conventions. `x` is one device's block of a tensor; `axes_per_dim` has one list of axes, major to minor, per dimension;
`mesh` must cut every axis used here (`RefinedMesh.of`). Lists of axes may be in any order and may hold sub-axes. A
local dimension that a collective splits must be divisible by the group: where it is not, the caller pads it first. A
group of devices is numbered by its axes in the order given, first one major, in permutations (`sent`) too. On a mesh
whose devices are in another order than those of the `shard_map`, `mesh` is that order's view (`RefinedMesh.on`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from sdy_jax.lowering.collectives.data_movement import all_gather, all_slice, all_to_all
from sdy_jax.lowering.collectives.reductions import (
    all_reduce,
    reduce_scatter,
    replicated_to_unreduced,
    sharded_to_unreduced,
)
from sdy_jax.representation.sdy_collectives import SdyCollective
from sdy_jax.runtime.mesh import RefinedMesh

_MOVING: dict[str, Callable[..., jax.Array]] = {"all_gather": all_gather, "all_slice": all_slice}

_COMBINING: dict[str, Callable[..., jax.Array]] = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "replicated_to_unreduced": replicated_to_unreduced,
    "sharded_to_unreduced": sharded_to_unreduced,
}


def run_collective(said: SdyCollective, x: jax.Array, reduction: str, mesh: RefinedMesh) -> jax.Array:
    """What an op says, done; not for a collective_permute. `reduction` is the kind by which it combines, or is to."""
    if said.kind == "all_to_all":
        return all_to_all(x, said.params, mesh)
    if said.kind in _MOVING:
        return _MOVING[said.kind](x, said.axes, mesh)
    return _COMBINING[said.kind](x, said.axes, reduction, mesh)
