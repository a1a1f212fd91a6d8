"""Data parallelism: the batch over eight devices, the weights on each of them.

    python examples/data_parallel.py

All that is said about devices is `in_shardings`: the batch is split, the training state is whole. What follows from
that is one sum per step, of the gradients, which plans show before anything runs. Losses are those of one device.
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

BATCH, INPUTS, WIDTH = 512, 32, 128
optimizer = optax.adam(1e-2)


def init(key):
    first, second = jax.random.split(key)
    weights = {
        "up": jax.random.normal(first, (INPUTS, WIDTH)) / INPUTS**0.5,
        "bias": jnp.zeros(WIDTH),
        "down": jax.random.normal(second, (WIDTH, 1)) / WIDTH**0.5,
    }
    return {"weights": weights, "optimizer": optimizer.init(weights)}


def loss_fn(weights, x, y):
    h = jax.nn.gelu(x @ weights["up"] + weights["bias"])
    return jnp.mean((h @ weights["down"] - y) ** 2)


def train_step(state, x, y):
    loss, gradients = jax.value_and_grad(loss_fn)(state["weights"], x, y)
    updates, moments = optimizer.update(gradients, state["optimizer"], state["weights"])
    return {"weights": optax.apply_updates(state["weights"], updates), "optimizer": moments}, loss


def batches(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        x = rng.normal(size=(BATCH, INPUTS)).astype(np.float32)
        yield x, np.sin(x.sum(axis=1, keepdims=True))


mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
partitioned = sdy.partition(
    train_step, mesh=mesh, in_shardings=(P(), P("data"), P("data")), out_shardings=(P(), P()), donate_argnums=0
)
plain = jax.jit(train_step)

state, alone = init(jax.random.key(0)), init(jax.random.key(0))
plan = partitioned.plan(state, *next(batches(1)))
print(plan.summary())
for step, batch in enumerate(batches(20), 1):
    state, loss = partitioned(state, *batch)
    alone, expected = plain(alone, *batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-3)
    if step in (1, 10, 20):
        print(f"step {step:2}: loss {loss:.4f}, on one device {expected:.4f}")

gradients = sum(leaf.size * 4 for leaf in jax.tree.leaves(state["weights"]))
sums = [collective for collective in plan.collectives if collective.wire_bytes]
assert {collective.kind for collective in sums} == {"all_reduce"}
print(f"\na step sums {gradients} bytes of gradients, and the loss, in {len(sums)} all_reduces over 8 devices")
print(f"a device sends {plan.wire_bytes:.0f} bytes, {plan.wire_bytes / gradients:.2f} times the gradients: 2 x 7/8")
