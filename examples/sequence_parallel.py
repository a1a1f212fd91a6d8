"""Attention over a split sequence: each device has an eighth of the tokens of one long sequence.

    python examples/sequence_parallel.py

Attention is written as on one device. Queries of one block need the keys of all, so something has to move: keys and
values may be gathered, or tokens be swapped for heads and back by all_to_all. The plan takes what costs less: with as
many heads of keys as of queries, the swap; with few (grouped queries), the gather. Scores never move.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

jax.config.update("jax_platforms", "cpu")  # eight virtual devices; leave these two lines out on eight GPUs or TPUs
jax.config.update("jax_num_cpu_devices", 8)

BATCH, TOKENS, WIDTH, HEADS, HEAD_WIDTH = 1, 256, 64, 8, 16


def init(key, groups):
    """Weights of attention with `groups` heads of keys and values."""
    q, k, v, out = jax.random.split(key, 4)
    return {
        "q": jax.random.normal(q, (WIDTH, HEADS, HEAD_WIDTH)) * 0.1,
        "k": jax.random.normal(k, (WIDTH, groups, HEAD_WIDTH)) * 0.1,
        "v": jax.random.normal(v, (WIDTH, groups, HEAD_WIDTH)) * 0.1,
        "out": jax.random.normal(out, (HEADS, HEAD_WIDTH, WIDTH)) * 0.1,
    }


def attention(weights, x):
    """Causal attention with grouped queries: [batch, tokens, width] to the same shape."""
    groups = weights["k"].shape[1]
    q = jnp.einsum("btd,dhe->bthe", x, weights["q"]).reshape(BATCH, TOKENS, groups, -1, HEAD_WIDTH)
    k, v = (jnp.einsum("btd,dge->btge", x, weights[name]) for name in "kv")
    scores = jnp.einsum("bqghe,bkge->bghqk", q, k) / HEAD_WIDTH**0.5
    scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bghqk,bkge->bqghe", jax.nn.softmax(scores), v)
    return jnp.einsum("bthe,hed->btd", mixed.reshape(BATCH, TOKENS, HEADS, HEAD_WIDTH), weights["out"])


mesh = jax.make_mesh((8,), ("seq",), axis_types=(AxisType.Auto,))
tokens = P(None, "seq")
partitioned = sdy.partition(attention, mesh=mesh, in_shardings=(P(), tokens), out_shardings=tokens)
x = jax.random.normal(jax.random.key(1), (BATCH, TOKENS, WIDTH))

seen = {}
for groups in (8, 2):
    weights = init(jax.random.key(0), groups)
    plan = partitioned.plan(weights, x)
    print(plan.table("collectives"), "\n")
    np.testing.assert_allclose(partitioned(weights, x), attention(weights, x), atol=1e-4)
    kinds = {collective.kind for collective in plan.collectives if collective.wire_bytes}
    seen[groups] = (sorted(kinds), plan.wire_bytes)

scores = BATCH * HEADS * TOKENS * TOKENS * 4 / 1024
for groups, (kinds, sent) in seen.items():
    print(f"{groups} heads of keys: {sent / 1024:.0f} KiB by {', '.join(kinds)}; all scores are {scores:.0f} KiB")
