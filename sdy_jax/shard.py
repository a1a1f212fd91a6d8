"""The mesh and shard dialects for Python: collectives on local arrays, and shardings with halos, offsets and terms.

The collectives are for the bodies of `jax.shard_map` and `sdy.manual_computation`, also in partitioned functions. They
can be differentiated, batched and jitted.

    mesh = jax.make_mesh((2, 4), ("data", "model"))

    def body(x):  # (2, 3) per device
        y = sdy.shard.all_gather(x, grid_axes="model", gather_axis=1)  # (2, 12)
        return sdy.shard.reduce_scatter(y, grid_axes="model", scatter_axis=1, reduction="max")  # (2, 3)

    jax.shard_map(body, mesh=mesh, in_specs=P("data", "model"), out_specs=P("data", "model"))
"""

from sdy_jax.mesh_dialects.local_program import run_local
from sdy_jax.mesh_dialects.python.collectives import (
    all_gather,
    all_reduce,
    all_slice,
    all_to_all,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
    send_recv,
    shift,
    update_halo,
)
from sdy_jax.mesh_dialects.python.grids import (
    grid_shape,
    neighbors_linear_indices,
    process_linear_index,
    process_multi_index,
    with_grid,
)
from sdy_jax.mesh_dialects.python.sharding import (
    Sharding,
    get_sharding,
    reshard,
    shard,
    shard_shape,
    to_global,
    to_local,
)

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
