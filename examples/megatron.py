"""Tensor parallelism as in Megatron: heads and the width of the MLP over eight devices.

    python examples/megatron.py

Four specifications of weights say it all. Propagation finds that heads stay on their devices from the first product to
the last, likewise the MLP's hidden units, so a layer sends its activations twice: the sums at the end of attention and
of the MLP. A `Budget` keeps it so: a plan that gathers a weight would be refused.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

jax.config.update("jax_platforms", "cpu")  # eight virtual devices; leave these two lines out on eight GPUs or TPUs
jax.config.update("jax_num_cpu_devices", 8)

BATCH, TOKENS, WIDTH, HEADS = 4, 64, 128, 8
SPECS = {
    "qkv": P(None, None, "model"),  # width, 3, heads, head width
    "out": P("model"),  # heads, head width, width
    "up": P(None, "model"),
    "down": P("model"),
}


def init(key):
    shapes = {
        "qkv": (WIDTH, 3, HEADS, WIDTH // HEADS),
        "out": (HEADS, WIDTH // HEADS, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    return {name: jax.random.normal(keys[name], shape) * 0.05 for name, shape in shapes.items()}


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def layer(weights, x):
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dnhk->btnhk", norm(x), weights["qkv"]), 2, 0)
    scores = jnp.einsum("bqhk,bthk->bhqt", q, k) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    mixed = jnp.einsum("bhqt,bthk->bqhk", jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)), v)
    x = x + jnp.einsum("bqhk,hkd->bqd", mixed, weights["out"])
    return x + jax.nn.gelu(norm(x) @ weights["up"]) @ weights["down"]


mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
partitioned = sdy.partition(
    layer,
    mesh=mesh,
    in_shardings=(SPECS, P()),
    out_shardings=P(),
    layouts="local",  # op by op: collectives stay where Megatron has them
    budget=sdy.Budget(forbid=("all_gather", "all_to_all")),
)
weights, x = init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (BATCH, TOKENS, WIDTH))
plan = partitioned.plan(weights, x)
print(plan)
np.testing.assert_allclose(partitioned(weights, x), layer(weights, x), atol=1e-4)

each = 2 * 7 / 8 * x.nbytes  # a ring sends 7/8 of an array to sum it, and 7/8 to give the sum to all
assert [c.kind for c in plan.collectives] == ["all_reduce"] * 2 and plan.wire_bytes == 2 * each
print(f"\na layer sends its activations in 2 all_reduces: {plan.wire_bytes:.0f} bytes per device,")
print(f"and its {sum(w.nbytes for w in weights.values())} bytes of weights stay where they are")
