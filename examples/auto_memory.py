"""Layouts that nobody wrote: `sdy.AUTO` for the whole training state, under less and less memory.

    python examples/auto_memory.py

The planner chooses how weights, momentum and the batch lie. With room it gathers each weight once, for the forward and
the backward pass; with less it frees what it gathered and gathers it again, which sends more and holds less. If nothing
fits, the error says how much the least would be. What is chosen prints as specifications to paste.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import sdy_jax as sdy

jax.config.update("jax_platforms", "cpu")  # eight virtual devices; leave these two lines out on eight GPUs or TPUs
jax.config.update("jax_num_cpu_devices", 8)

LAYERS, WIDTH, BATCH = 4, 256, 1024


def init(key):
    up, down = jax.random.split(key)
    weights = {
        "up": jax.random.normal(up, (LAYERS, WIDTH, 2 * WIDTH)) / WIDTH**0.5,
        "down": jax.random.normal(down, (LAYERS, 2 * WIDTH, WIDTH)) / (2 * WIDTH) ** 0.5,
    }
    return {"weights": weights, "momentum": jax.tree.map(jnp.zeros_like, weights)}


def train_step(state, x):
    def loss_fn(weights):
        h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w["up"]) @ w["down"], None), x, weights)
        return jnp.mean(h**2)

    loss, gradients = jax.value_and_grad(loss_fn)(state["weights"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
    weights = jax.tree.map(lambda w, m: w - 0.1 * m, state["weights"], momentum)
    return {"weights": weights, "momentum": momentum}, loss


mesh = jax.make_mesh((8,), ("devices",), axis_types=(AxisType.Auto,))
state, x = init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (BATCH, WIDTH))


def partitioned(memory):
    return sdy.partition(
        train_step, mesh=mesh, in_shardings=sdy.AUTO, out_shardings=sdy.AUTO, memory=memory, donate_argnums=0
    )


_, expected = jax.jit(train_step)(state, x)
for memory in ("64MiB", "6MiB"):
    step = partitioned(memory)
    plan = step.plan(state, x)
    (specs, data), _ = plan.input_specs
    held, sent = plan.memory.peak / 2**20, plan.wire_bytes / 2**20
    print(f"{memory:>6}: a device holds {held:4.1f} MiB and sends {sent:4.1f} MiB")
    print(f"        weights {specs['weights']}, batch {data}")
    _, loss = step(init(jax.random.key(0)), x)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)

try:
    partitioned("1MiB").plan(state, x)
except sdy.MemoryLimitError as error:
    print(f"  1MiB: {str(error).partition('. ')[0]}")
    print(f"\nthe loss is {expected:.4f} in each layout, and no layout holds less than {error.least / 2**20:.1f} MiB")
