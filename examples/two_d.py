"""Two dimensions: weights split over both mesh axes, by tensor parallelism over one and FSDP over the other.

    python examples/two_d.py

`sdy.tensor_parallel` splits weights by patterns of their paths, `sdy.fsdp` adds the axis of the batch to what is left.
The same step is planned in three layouts, and the plans say what each sends and holds: no devices are needed for that.
The last one runs, and is compared with one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

jax.config.update("jax_platforms", "cpu")  # eight virtual devices; leave these two lines out on eight GPUs or TPUs
jax.config.update("jax_num_cpu_devices", 8)

LAYERS, WIDTH, BATCH, TOKENS = 4, 64, 16, 32


def init(key):
    def layer(key):
        up, gate, down = jax.random.split(key, 3)
        return {
            "up": jax.random.normal(up, (WIDTH, 4 * WIDTH)) / WIDTH**0.5,
            "gate": jax.random.normal(gate, (WIDTH, 4 * WIDTH)) / WIDTH**0.5,
            "down": jax.random.normal(down, (4 * WIDTH, WIDTH)) / (4 * WIDTH) ** 0.5,
        }

    return {"layers": [layer(k) for k in jax.random.split(key, LAYERS)], "scale": jnp.ones(WIDTH)}


def loss_fn(weights, x, y):
    for w in weights["layers"]:
        x = x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]
    return jnp.mean((x * weights["scale"] - y) ** 2)


def train_step(weights, x, y):
    loss, gradients = jax.value_and_grad(loss_fn)(weights, x, y)
    return jax.tree.map(lambda w, g: w - 0.05 * g, weights, gradients), loss


mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
shapes = jax.eval_shape(init, jax.random.key(0))
batch = jax.ShapeDtypeStruct((BATCH, TOKENS, WIDTH), jnp.float32)

patterns = {"up|gate": P(None, "model"), "down": P("model")}
tensor = sdy.tensor_parallel(shapes, patterns, mesh=mesh)
both = sdy.fsdp(shapes, axis="data", specs=tensor, mesh=mesh)
layouts = {
    "batch over data": (P(), P("data")),
    "and MLPs over model": (tensor, P("data")),
    "and weights over data": (both, P("data")),
}
print("a layer's weights:", both["layers"][0], "\n")

plans = {}
for name, (specs, data) in layouts.items():
    step = sdy.partition(
        train_step, mesh=mesh, in_shardings=(specs, data, data), out_shardings=(specs, P()), donate_argnums=0
    )
    plans[name] = plan = step.plan(shapes, batch, batch)
    kinds = sorted({collective.kind for collective in plan.collectives if collective.wire_bytes})
    print(f"{name:22} {plan.wire_bytes / 1024:5.0f} KiB sent per device, ", end="")
    print(f"{plan.memory.arguments / 1024:5.0f} KiB of arguments; {', '.join(kinds)}")

weights = init(jax.random.key(0))
x, y = (jax.random.normal(key, batch.shape) for key in jax.random.split(jax.random.key(1)))
expected, expected_loss = jax.jit(train_step)(weights, x, y)
new, loss = step(weights, x, y)
np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), new, expected)

first, _, last = (plan.memory.arguments for plan in plans.values())
print(f"\nloss {loss:.4f}, on one device {expected_loss:.4f}")
print(f"split over both axes, weights and batch take {last / first:.2f} of the memory of whole weights")
