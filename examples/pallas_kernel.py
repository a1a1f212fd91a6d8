"""A kernel of your own: a Pallas kernel for RMS norm that every device runs on its rows.

    python examples/pallas_kernel.py

A compiler cannot look into a kernel to see how it may be split. `sdy.custom_op` says it by a sharding rule: rows are
independent of each other, so `i` may lie over any axes, and `j`, along a row, is whole. Propagation goes through the
op, and the plan has nothing to gather. On CPU devices the kernel is interpreted, elsewhere it is compiled.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

jax.config.update("jax_platforms", "cpu")  # eight virtual devices; leave these two lines out on eight GPUs or TPUs
jax.config.update("jax_num_cpu_devices", 8)

ROWS, WIDTH, TILE = 64, 128, 8


def kernel(x_ref, scale_ref, out_ref):
    x = x_ref[...]
    mean = jnp.mean(x * x, axis=-1, keepdims=True)
    out_ref[...] = x * jax.lax.rsqrt(mean + 1e-6) * scale_ref[...]


def rms_norm(x, scale):
    """[rows, width] normalized; called with whole arrays or with the rows of one device."""
    rows = pl.BlockSpec((TILE, WIDTH), lambda i: (i, 0))
    call = pl.pallas_call(
        kernel,
        grid=(x.shape[0] // TILE,),
        in_specs=[rows, pl.BlockSpec((WIDTH,), lambda i: (0,))],
        out_specs=rows,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=jax.default_backend() == "cpu",
    )
    return call(x, scale)


ruled = sdy.custom_op(rms_norm, f"([i, j], [j])->([i, j]) {{i={ROWS}, j={WIDTH}}} need_replication={{j}}")


def layer(weights, x, norm=ruled):
    return x + jax.nn.gelu(norm(x, weights["scale"]) @ weights["up"]) @ weights["down"]


mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
specs = {"scale": P(), "up": P(None, "model"), "down": P("model")}
partitioned = sdy.partition(layer, mesh=mesh, in_shardings=(specs, P("data")), out_shardings=P("data"))

up, down, data = jax.random.split(jax.random.key(0), 3)
weights = {
    "scale": jnp.linspace(0.5, 1.5, WIDTH),
    "up": jax.random.normal(up, (WIDTH, 4 * WIDTH)) * 0.1,
    "down": jax.random.normal(down, (4 * WIDTH, WIDTH)) * 0.1,
}
x = jax.random.normal(data, (ROWS, WIDTH))
plan = partitioned.plan(weights, x)
print(plan)

expected = layer(weights, x, norm=lambda x, scale: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale)
np.testing.assert_allclose(partitioned(weights, x), expected, atol=1e-4)
plan.assert_collectives(all_reduce=1, all_gather=0)
blocks = next(row for row in plan.table("ops") if "custom" in row.op).type
print(f"\nthe kernel runs on blocks of {blocks}; the plan has one all_reduce, of the second product,")
print("and the result is that of plain jax.numpy")
