"""A kernel of your own in a training step: RMS norm forward and backward, split by nothing but its grid.

    python examples/pallas_kernel.py

Both passes are `pallas_call`s over blocks of rows, joined by a `jax.custom_vjp`. Nothing says how they may be split,
and nothing is in `jax.shard_map`: their index maps say that blocks of rows are independent of each other, so each
device runs the steps of its own rows. On CPU devices kernels are interpreted, elsewhere they are compiled.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

jax.config.update("jax_platforms", "cpu")  # eight virtual devices; leave these two lines out on eight GPUs or TPUs
jax.config.update("jax_num_cpu_devices", 8)

ROWS, WIDTH, TILE = 2048, 128, 16


def forward_kernel(x_ref, y_ref):
    x = x_ref[...]
    y_ref[...] = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def backward_kernel(x_ref, g_ref, dx_ref):
    x, g = x_ref[...], g_ref[...]
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    dx_ref[...] = scale * (g - x * scale**2 * jnp.mean(g * x, axis=-1, keepdims=True))


def on_rows(kernel, *arrays):
    """Runs a kernel on blocks of TILE rows of [rows, width]."""
    shape, rows = arrays[0], pl.BlockSpec((TILE, WIDTH), lambda i: (i, 0))
    call = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(shape.shape, shape.dtype),
        grid=(shape.shape[0] // TILE,),
        in_specs=[rows] * len(arrays),
        out_specs=rows,
        interpret=jax.default_backend() == "cpu",
    )
    return call(*arrays)


@jax.custom_vjp
def rms_norm(x):
    return on_rows(forward_kernel, x)


rms_norm.defvjp(lambda x: (rms_norm(x), x), lambda x, g: (on_rows(backward_kernel, x, g),))


def plain_norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def step(weights, x, target, norm=rms_norm):
    def loss(weights):
        hidden = jax.nn.gelu((norm(x) * weights["scale"]) @ weights["up"])
        return jnp.mean((x + norm(hidden @ weights["down"]) - target) ** 2)

    value, slopes = jax.value_and_grad(loss)(weights)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, slopes)


mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
specs = {"scale": P(), "up": P(None, "model"), "down": P("model")}
partitioned = sdy.partition(step, mesh=mesh, in_shardings=(specs, P("data"), P("data")), out_shardings=(P(), specs))

up, down, data, goal = jax.random.split(jax.random.key(0), 4)
weights = {
    "scale": jnp.linspace(0.5, 1.5, WIDTH),
    "up": jax.random.normal(up, (WIDTH, 4 * WIDTH)) * 0.1,
    "down": jax.random.normal(down, (4 * WIDTH, WIDTH)) * 0.1,
}
x, target = (jax.random.normal(key, (ROWS, WIDTH)) for key in (data, goal))
plan = partitioned.plan(weights, x, target)
print(plan)

found = partitioned(weights, x, target)
expected = jax.jit(functools.partial(step, norm=plain_norm))(weights, x, target)
jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), found, expected)
kernels = [row for row in plan.table("ops") if "custom_call" in row.op or "_kernel" in row.op]
assert kernels and all("2048@" in row.type for row in kernels), plan.table("ops")
steps = ROWS // TILE // 4
print(f"\n{len(kernels)} kernels run on blocks of {kernels[0].type}, up to {steps} steps of their grids on a device;")
print("what is sent is that of the products alone, and the step is that of plain jax.numpy")
