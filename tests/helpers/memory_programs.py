"""Steps that hold more than they need to."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P


def layer(h, weights):
    up, down = weights
    return h + jnp.tanh(h @ up) @ down


def step_of(blocks):
    """A step of gradient descent on the mean square of what `blocks(weights, x)` leaves to `y`."""

    def step(weights, x, y):
        value, gradients = jax.value_and_grad(lambda w: jnp.mean((blocks(w, x) - y) ** 2))(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    return step


def unrolled(weights, x):
    for each in weights:
        x = layer(x, each)
    return x


def attention(h, weights):
    """A layer of a transformer, whose weights are taken transposed, and in bfloat16."""
    qkv, out, up, down = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    h = h.astype(jnp.bfloat16)
    q, k, v = jnp.split(h @ qkv.T, 3, axis=-1)
    h = h + jax.nn.softmax(jnp.einsum("bsd,btd->bst", q, k)) @ v @ out.T
    return (h + jax.nn.gelu(h @ up.T) @ down.T).astype(jnp.float32)


def transformer(weights, x):
    for each in weights:
        x = attention(x, each)
    return x


def scanned(weights, x):
    return jax.lax.scan(lambda h, each: (layer(h, each), None), x, weights)[0]


def checkpointed(weights, x):
    return jax.lax.scan(jax.checkpoint(lambda h, each: (layer(h, each), None)), x, weights)[0]


def drawn(*sizes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(0, 0.1, size), jnp.float32) for size in sizes]


def unrolled_layers(layers, d, rows):
    return [tuple(drawn((d, 4 * d), (4 * d, d)))] * layers, *drawn((rows, d), (rows, d))


def stacked_layers(layers, d, rows):
    return tuple(drawn((layers, d, 4 * d), (layers, 4 * d, d))), *drawn((rows, d), (rows, d))


FIRST, SECOND = P("x"), P(None, "x")
PROGRAMS = {
    "unrolled": (unrolled, unrolled_layers(6, 64, 1024), FIRST),
    "scanned": (scanned, stacked_layers(6, 64, 1024), SECOND),
    "scanned and checkpointed": (checkpointed, stacked_layers(6, 64, 1024), SECOND),
}


def specs(spec):
    return {"in_shardings": (spec, FIRST, FIRST), "out_shardings": (spec, P())}


def size_of(weights):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
