"""An unwanted all-gather: found in the plan, explained, mended, and kept away.

    python examples/unwanted_gather.py

The weights of this model are split over `model`, but somebody left the optimizer's moments as they were, whole on every
device. Numbers are right and nothing warns; every step gathers what it wrote into them. The plan shows the gathers with
their lines, `plan.why` says who asked for them, `plan.fixes` what to change; a `Budget` then refuses plans that gather.
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

BATCH, WIDTH, HIDDEN = 256, 128, 512
SPECS = {"up": P(None, "model"), "down": P("model")}
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
optimizer = optax.adam(1e-3)


def init(key):
    up, down = jax.random.split(key)
    weights = {
        "up": jax.random.normal(up, (WIDTH, HIDDEN)) / WIDTH**0.5,
        "down": jax.random.normal(down, (HIDDEN, WIDTH)) / HIDDEN**0.5,
    }
    return weights, optimizer.init(weights)


def train_step(weights, moments, x):
    def loss_fn(w):
        return jnp.mean((jax.nn.gelu(x @ w["up"]) @ w["down"] - x) ** 2)

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    updates, moments = optimizer.update(gradients, moments, weights)
    return optax.apply_updates(weights, updates), moments, loss


def partitioned(moments, budget=None):
    """The step, with the optimizer's moments in some layout."""
    layouts = {"in_shardings": (SPECS, moments, P("data")), "out_shardings": (SPECS, moments, P())}
    return sdy.partition(train_step, mesh=mesh, budget=budget, **layouts)


weights, moments = init(jax.random.key(0))
x = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))

print("1. the plan shows what is sent, and for which line")
plan = partitioned(P()).plan(weights, moments, x)
print(plan.table("collectives"))

print("\n2. why: what it moves, and for whom; all of the answer says how the value came to lie so")
gather = next(collective for collective in plan.collectives if collective.kind == "all_gather")
print(plan.why(gather).reasons[0])

print("\n3. what would save bytes: changes of one line, each planned before it is offered")
for fix in plan.fixes:
    print("-", fix)

print("\n4. mended: moments lie as their weights")
specs = sdy.like(weights, SPECS)(moments)
no_gather = sdy.Budget(forbid=("all_gather",))
mended = partitioned(specs, no_gather)
after = mended.plan(weights, moments, x)
print(after.table("collectives"))

print("\n5. and kept so: with whole moments and the budget there is no plan")
try:
    partitioned(P(), no_gather).plan(weights, moments, x)
except sdy.ContractError as error:
    print(error)

expected = jax.jit(train_step)(weights, moments, x)
for function in (partitioned(P()), mended):
    np.testing.assert_allclose(function(weights, moments, x)[2], expected[2], rtol=1e-4)
print()
for name, each in (("before", plan), ("after", after)):
    sent, held = each.wire_bytes / 1024, each.memory.arguments / 1024
    print(f"{name:6} {sent:4.0f} KiB sent per step and device, {held:5.0f} KiB of arguments, the same loss")
