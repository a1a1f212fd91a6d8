"""Decoding with a cache of keys and values that is split over devices, token by token in one loop.

    python examples/decoding.py

Sequences lie over `data`, heads over `model`; so do the caches, one [layers, batch, tokens, heads, width] array each,
which the loop carries and updates in place: they are donated. Per token and layer the plan sends sums of single tokens
and nothing of the caches.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

jax.config.update("jax_platforms", "cpu")  # eight virtual devices; leave these two lines out on eight GPUs or TPUs
jax.config.update("jax_num_cpu_devices", 8)

LAYERS, BATCH, LENGTH, WIDTH, HEADS, WORDS = 2, 4, 64, 64, 8, 128
PROMPT = 4
SPECS = {"embed": P(), "head": P(None, "model"), "qkv": P(None, None, None, "model"), "out": P(None, "model")}
CACHE = P(None, "data", None, "model")


def init(key):
    embed, head, qkv, out = jax.random.split(key, 4)
    return {
        "embed": jax.random.normal(embed, (WORDS, WIDTH)),
        "head": jax.random.normal(head, (WIDTH, WORDS)),
        "qkv": jax.random.normal(qkv, (LAYERS, WIDTH, 3, HEADS, WIDTH // HEADS)) / WIDTH**0.5,
        "out": jax.random.normal(out, (LAYERS, HEADS, WIDTH // HEADS, WIDTH)) / WIDTH**0.5,
    }


def next_token(weights, caches, token, position):
    """The words that follow [batch] words at a position, and the caches with these words in them."""
    x = weights["embed"][token]
    for layer in range(LAYERS):
        q, *new = jnp.moveaxis(jnp.einsum("bd,dnhe->bnhe", x, weights["qkv"][layer]), 1, 0)
        caches = [c.at[layer, :, position].set(kv) for c, kv in zip(caches, new, strict=True)]
        keys, values = (cache[layer] for cache in caches)
        scores = jnp.einsum("bhe,bthe->bht", q, keys) / q.shape[-1] ** 0.5
        scores = jnp.where(jnp.arange(LENGTH) <= position, scores, -jnp.inf)
        mixed = jnp.einsum("bht,bthe->bhe", jax.nn.softmax(scores), values)
        x = x + jnp.einsum("bhe,hed->bd", mixed, weights["out"][layer])
    return jnp.argmax(x @ weights["head"], axis=-1), caches


def decode(weights, caches, tokens):
    """[batch, length] tokens, of which the prompt is given and the rest is found, greedily."""

    def step(position, carried):
        tokens, caches = carried
        word, caches = next_token(weights, caches, tokens[:, position], position)
        known = position + 1 < PROMPT
        return tokens.at[:, position + 1].set(jnp.where(known, tokens[:, position + 1], word)), caches

    return jax.lax.fori_loop(0, LENGTH - 1, step, (tokens, caches))


mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
partitioned = sdy.partition(
    decode,
    mesh=mesh,
    in_shardings=(SPECS, [CACHE, CACHE], P("data")),
    out_shardings=(P("data"), [CACHE, CACHE]),
    donate_argnums=1,
)


def empty():
    return [jnp.zeros((LAYERS, BATCH, LENGTH, HEADS, WIDTH // HEADS)) for _ in range(2)]


weights = init(jax.random.key(0))
prompts = jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, WORDS)
plan = partitioned.plan(weights, empty(), prompts)
print(plan)
tokens, caches = partitioned(weights, empty(), prompts)
expected, _ = jax.jit(decode)(weights, empty(), prompts)
np.testing.assert_array_equal(tokens, expected)

cache = sum(cache.nbytes for cache in caches)
print(f"\n{LENGTH - 1} tokens of {BATCH} sequences are those of one device; first: {tokens[0, PROMPT : PROMPT + 8]}")
print(f"a token sends {plan.wire_bytes / (LENGTH - 1):.0f} bytes per device; of {cache} bytes of caches each has 1/8")
