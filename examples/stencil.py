"""A stencil: the heat equation on a grid that is split in blocks over 2 x 4 devices.

    python examples/stencil.py

The update is written with slices of the whole grid, as with numpy, in a `fori_loop`. A block needs the rows and columns
that lie next to it, so each step sends halos to the neighbours by collective_permute; the plan has the bytes of a trip,
and how many there are. What is written into the interior stays on its devices, but for strips at their borders: blocks
of the interior begin a little later than those of the grid.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

jax.config.update("jax_platforms", "cpu")  # eight virtual devices; leave these two lines out on eight GPUs or TPUs
jax.config.update("jax_num_cpu_devices", 8)

ROWS, COLUMNS, STEPS = 96, 128, 50


def diffused(grid):
    """The grid after some steps of explicit Euler; the border keeps its temperature."""

    def step(_, u):
        inner = u[1:-1, 1:-1]
        around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
        return u.at[1:-1, 1:-1].set(inner + 0.2 * (around - 4 * inner))

    return jax.lax.fori_loop(0, STEPS, step, grid)


mesh = jax.make_mesh((2, 4), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)
blocks = P("rows", "columns")
partitioned = sdy.partition(diffused, mesh=mesh, in_shardings=blocks, out_shardings=blocks)
grid = jnp.zeros((ROWS, COLUMNS)).at[0].set(100.0).at[40:60, 30:60].set(50.0)
plan = partitioned.plan(grid)
print(plan)
result = partitioned(grid)
np.testing.assert_allclose(result, diffused(grid), atol=1e-3)

for row in result[:: ROWS // 12]:
    print("".join(" .:-=+*#%@"[int(min(t, 99) / 10)] for t in row[::2]))
assert {collective.kind for collective in plan.collectives if collective.wire_bytes} == {"collective_permute"}
print(f"\neach of {STEPS} steps sends {plan.wire_bytes / STEPS:.0f} bytes per device in collective_permutes;")
print(f"a device has a block of {grid.nbytes // 8} bytes")
