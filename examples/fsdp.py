"""Fully sharded data parallelism: batch, weights and optimizer state over the same eight devices.

    python examples/fsdp.py

`sdy.fsdp` splits each weight along its largest dimension, `sdy.like` lays the optimizer's moments out as the weights.
A device then holds an eighth of the state. Each layer's weights are gathered where they are used, and their gradients
leave by a reduce-scatter. The layers are a `lax.scan`: the plan shows collectives of one trip, and how often they run.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

jax.config.update("jax_platforms", "cpu")  # eight virtual devices; leave these two lines out on eight GPUs or TPUs
jax.config.update("jax_num_cpu_devices", 8)

LAYERS, WIDTH, BATCH = 6, 128, 512
optimizer = optax.adamw(1e-3)


def init(key):
    up, down = jax.random.split(key)
    weights = {
        "up": jax.random.normal(up, (LAYERS, WIDTH, 4 * WIDTH)) / WIDTH**0.5,
        "down": jax.random.normal(down, (LAYERS, 4 * WIDTH, WIDTH)) / (4 * WIDTH) ** 0.5,
    }
    return {"weights": weights, "optimizer": optimizer.init(weights)}


def loss_fn(weights, x, y):
    def layer(x, w):
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(layer, x, weights)
    return jnp.mean((x - y) ** 2)


def train_step(state, x, y):
    loss, gradients = jax.value_and_grad(loss_fn)(state["weights"], x, y)
    updates, moments = optimizer.update(gradients, state["optimizer"], state["weights"])
    return {"weights": optax.apply_updates(state["weights"], updates), "optimizer": moments}, loss


def planned(specs):
    """The step with its state in a layout, and its plan."""
    step = sdy.partition(
        train_step, mesh=mesh, in_shardings=(specs, P("data"), P("data")), out_shardings=(specs, P()), donate_argnums=0
    )
    return step, step.plan(shapes, batch, batch)


mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
shapes = jax.eval_shape(init, jax.random.key(0))
batch = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)

weights = sdy.fsdp(shapes["weights"], axis="data", mesh=mesh)
specs = sdy.like(shapes["weights"], weights)(shapes)
print("weights:", weights)
step, sharded = planned(specs)
_, whole = planned(P())
print(sharded.table("collectives"))

x, y = (jax.random.normal(key, batch.shape) for key in jax.random.split(jax.random.key(1)))
state, alone, plain = init(jax.random.key(0)), init(jax.random.key(0)), jax.jit(train_step)
for _ in range(3):
    state, loss = step(state, x, y)
    alone, expected = plain(alone, x, y)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
print(f"loss after three steps: {loss:.4f}, on one device {expected:.4f}")

print(f"\nstate and batch on a device: {sharded.memory.arguments / 2**20:.1f} MiB", end=", ")
print(f"with whole weights {whole.memory.arguments / 2**20:.1f} MiB")
print(f"sent by a device per step:   {sharded.wire_bytes / 2**20:.1f} MiB", end=", ")
print(f"with whole weights {whole.wire_bytes / 2**20:.1f} MiB")
