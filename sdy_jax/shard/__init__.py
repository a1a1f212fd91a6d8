"""The mesh and shard dialects for Python: collectives on local arrays, and shardings with halos, offsets and terms.

The collectives are for the bodies of `jax.shard_map` and `sdy.manual_computation`, also in partitioned functions. They
can be differentiated, batched and jitted.

    mesh = jax.make_mesh((2, 4), ("data", "model"))

    def body(x):  # (2, 3) per device
        y = sdy.shard.all_gather(x, grid_axes="model", gather_axis=1)  # (2, 12)
        return sdy.shard.reduce_scatter(y, grid_axes="model", scatter_axis=1, reduction="max")  # (2, 3)

    jax.shard_map(body, mesh=mesh, in_specs=P("data", "model"), out_specs=P("data", "model"))
"""

from sdy_jax.ir import hidden_frames  # noqa: F401  (source lines are those of the caller)
from sdy_jax.shard.annotations import get_sharding, shard
from sdy_jax.shard.buffers import reshard, shard_shape, to_global, to_local
from sdy_jax.shard.collectives.movement import all_gather, all_slice, all_to_all, broadcast, gather, scatter
from sdy_jax.shard.collectives.neighbors import send_recv, shift, update_halo
from sdy_jax.shard.collectives.reductions import all_reduce, reduce, reduce_scatter
from sdy_jax.shard.grids import with_grid
from sdy_jax.shard.local_program import run_local
from sdy_jax.shard.queries import grid_shape, neighbors_linear_indices, process_linear_index, process_multi_index
from sdy_jax.shard.sharding import Sharding

__all__ = [
    "Sharding",
    "all_gather",
    "all_reduce",
    "all_slice",
    "all_to_all",
    "broadcast",
    "gather",
    "get_sharding",
    "grid_shape",
    "neighbors_linear_indices",
    "process_linear_index",
    "process_multi_index",
    "reduce",
    "reduce_scatter",
    "reshard",
    "run_local",
    "scatter",
    "send_recv",
    "shard",
    "shard_shape",
    "shift",
    "to_global",
    "to_local",
    "update_halo",
    "with_grid",
]
