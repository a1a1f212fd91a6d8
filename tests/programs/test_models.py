"""Whole models, partitioned over eight devices in the usual ways and in odd ones, against the plain ones."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from sdy_jax.testing import assert_same

MESHES = {
    "8": ((8,), ("data",)),
    "2x4": ((2, 4), ("data", "model")),
    "2x2x2": ((2, 2, 2), ("data", "model", "seq")),
}


def gradients(**options):
    """A decorator: the function's value and its gradients. At module level, so that jit compiles the plain one once."""
    return functools.partial(jax.value_and_grad, **options)


def check(fun, args, mesh_name, in_shardings, rtol=2e-4, **options):
    """Results are the same over the named mesh; gradients reassociate more sums than `assert_same` allows for."""
    shape, axes = MESHES[mesh_name]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(shape), axes)
    return assert_same(fun, *args, mesh=mesh, in_shardings=in_shardings, rtol=rtol, atol=1e-6, **options)


def cases(*triples):
    """Parameters `(mesh, in_shardings)` named by how the model is sharded."""
    return pytest.mark.parametrize(
        ("mesh_name", "specs"), [pytest.param(m, s, id=f"{name}-{m}") for name, m, s in triples]
    )


def floats(seed, *shape, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def weights(seed, **shapes):
    """A dictionary of weights, each scaled by its first dimension."""
    return {
        name: floats(seed + i, *shape, scale=shape[0] ** -0.5) for i, (name, shape) in enumerate(sorted(shapes.items()))
    }


# --- feed-forward -----------------------------------------------------------------------------------------------------

MLP = weights(0, up=(16, 32), up_bias=(32,), down=(32, 16))


@gradients(argnums=(0, 1))
def mlp(params, x):
    hidden = jax.nn.gelu(x @ params["up"] + params["up_bias"])
    return jnp.square(hidden @ params["down"] - x).mean()


@cases(
    ("batch", "8", (None, P("data"))),
    ("megatron", "2x4", ({"up": P(None, "model"), "up_bias": P("model"), "down": P("model")}, P("data"))),
    ("fsdp", "8", ({"up": P("data"), "up_bias": P("data"), "down": P(None, "data")}, P("data"))),
    ("mixed", "2x2x2", ({"up": P("seq", "model"), "up_bias": P(), "down": P("model", "seq")}, P("data"))),
    ("features", "2x4", ({"up": P("model"), "up_bias": P("data"), "down": P("data", "model")}, P(None, "model"))),
)
def test_mlp_gradients(mesh_name, specs):
    check(mlp, (MLP, floats(9, 16, 16)), mesh_name, specs)


# --- attention --------------------------------------------------------------------------------------------------------

ATTENTION = weights(10, qkv=(16, 3, 4, 8), out=(4, 8, 16))


def attention(params, x):
    """Causal self-attention of four heads: [batch, sequence, 16] to the same shape."""
    q, k, v = jnp.moveaxis(jnp.einsum("bsd,dnhk->bsnhk", x, params["qkv"]), 2, 0)
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) / math.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    probabilities = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    return jnp.einsum("bhqs,bshk,hkd->bqd", probabilities, v, params["out"])


@gradients(argnums=(0, 1), has_aux=True)
def attention_loss(params, x):
    y = attention(params, x)
    return (y * jnp.cos(x)).sum(), y


@pytest.mark.dear
@cases(
    ("batch", "8", (None, P("data"))),
    ("heads", "2x4", ({"qkv": P(None, None, "model"), "out": P("model")}, P("data"))),
    ("fsdp", "2x4", ({"qkv": P("data", None, "model"), "out": P("model", None, "data")}, P("data"))),
    ("sequence", "8", (None, P(None, "data"))),
    ("mixed", "2x2x2", ({"qkv": P(None, None, "model"), "out": P("model")}, P("data", "seq"))),
    ("head width", "2x4", ({"qkv": P(None, None, None, "model"), "out": P(None, "model")}, P(None, "data", "model"))),
)
def test_attention_gradients(mesh_name, specs):
    check(attention_loss, (ATTENTION, floats(12, 8, 8, 16)), mesh_name, specs)


@pytest.mark.dear
@cases(
    ("batch and sequence", "2x4", (None, P("data", "model"))),
    ("heads", "8", ({"qkv": P(None, None, "data"), "out": P("data")}, P())),
)
def test_attention_gradients_where_sizes_do_not_divide(mesh_name, specs):
    check(attention_loss, (ATTENTION, floats(13, 5, 7, 16)), mesh_name, specs)


# --- convolutions -----------------------------------------------------------------------------------------------------

CONV = weights(20, first=(3, 3, 4, 8), second=(3, 3, 8, 8), head=(8, 4))


def conv(x, kernel, strides=(1, 1)):
    return jax.lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def batch_norm(x):
    mean = x.mean((0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(jnp.square(x - mean).mean((0, 1, 2)) + 1e-3), mean


@gradients(has_aux=True)
def conv_net(params, images):
    """The loss of a small convolutional network, and its batch statistics."""
    x, mean = batch_norm(conv(images, params["first"]))
    x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    x = jax.nn.relu(conv(x, params["second"], (2, 2)))
    x = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME") / 9
    logits = x.mean((1, 2)) @ params["head"]
    return -jax.nn.log_softmax(logits)[:, 1].mean(), mean


@cases(
    ("batch", "8", (None, P("data"))),
    (
        "channels",
        "2x4",
        ({"first": P(None, None, None, "model"), "second": P(None, None, "model"), "head": P()}, P("data")),
    ),
    ("space", "2x4", (None, P(None, "data", "model"))),
    ("mixed", "2x2x2", ({"first": P(None, None, None, "model"), "second": P(), "head": P("seq")}, P("data", "seq"))),
)
@pytest.mark.more("a convolutional network beside a transformer")
def test_conv_net_gradients(mesh_name, specs):
    check(conv_net, (CONV, floats(25, 8, 8, 8, 4)), mesh_name, specs, rtol=1e-3)


# --- scans over layers and over time ----------------------------------------------------------------------------------

STACK = weights(30, up=(3, 16, 32), down=(3, 32, 16))


@jax.checkpoint
def layer(x, w):
    x = x + jnp.tanh(x @ w["up"] * 0.3) @ w["down"] * 0.3
    return x, x.mean()


@gradients(argnums=(0, 1))
def layers(params, x):
    y, means = jax.lax.scan(layer, x, params)
    return jnp.square(y).mean() + (means * jnp.arange(3.0)).sum()


@pytest.mark.dear
@cases(
    ("batch", "8", (None, P("data"))),
    ("megatron", "2x4", ({"up": P(None, None, "model"), "down": P(None, "model")}, P("data"))),
    ("fsdp", "2x2x2", ({"up": P(None, "data", "model"), "down": P(None, "model", "data")}, P(("data", "seq")))),
    ("features", "2x4", ({"up": P(None, "model"), "down": P()}, P(None, "model"))),
)
def test_scan_over_rematerialised_layers(mesh_name, specs):
    check(layers, (STACK, floats(33, 16, 16)), mesh_name, specs)


RNN = weights(40, input=(8, 16), recurrent=(16, 16))


def step(params, state, x):
    gate = jax.nn.sigmoid(x @ params["input"])
    state = gate * state + (1 - gate) * jnp.tanh(state @ params["recurrent"] + x.sum(-1, keepdims=True))
    return state, state[:, 0]


@gradients(has_aux=True)
def recurrent(params, xs):
    start = jnp.zeros((xs.shape[1], 16))
    last, outputs = jax.lax.scan(lambda s, x: step(params, s, x), start, xs)
    return jnp.square(last).sum() + outputs.mean(), outputs


@pytest.mark.dear
@cases(
    ("batch", "8", (None, P(None, "data"))),
    ("hidden", "2x4", ({"input": P(None, "model"), "recurrent": P(None, "model")}, P(None, "data"))),
    ("rows", "2x4", ({"input": P("data"), "recurrent": P("model")}, P())),
    ("time", "2x2x2", (None, P("seq", "data", "model"))),
)
def test_recurrent_network_gradients(mesh_name, specs):
    check(recurrent, (RNN, floats(43, 4, 8, 8)), mesh_name, specs)


# --- a training step --------------------------------------------------------------------------------------------------

TRANSFORMER = {**ATTENTION, **MLP, "embed": floats(50, 32, 16)}
TOKENS = np.random.default_rng(51).integers(0, 32, (8, 9)).astype(np.int32)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.01, eps=1e-4))


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def next_token_loss(params, window):
    x = params["embed"][window[:, :-1]]
    x = x + attention(params, norm(x))
    x = x + jax.nn.gelu(norm(x) @ params["up"] + params["up_bias"]) @ params["down"]
    logits = norm(x) @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:]).mean()


def train_step(params, state, window):
    loss, gradients = jax.value_and_grad(next_token_loss)(params, window)
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


def transformer_specs(data, model):
    return {
        "qkv": P(data, None, model),
        "out": P(model, None, data),
        "up": P(data, model),
        "up_bias": P(model),
        "down": P(model, data),
        "embed": P(model, data),
    }


@pytest.mark.dear
@cases(
    ("megatron", "2x4", (transformer_specs(None, "model"), None, P("data"))),
    ("fsdp", "2x4", (transformer_specs("data", "model"), None, P("data"))),
    ("sequence", "2x2x2", (transformer_specs("seq", "model"), None, P("data"))),
)
def test_training_step_with_clipped_adamw(mesh_name, specs):
    state = OPTIMIZER.init(TRANSFORMER)
    check(train_step, (TRANSFORMER, state, TOKENS), mesh_name, specs, rtol=1e-3)


@gradients()
def bfloat16_loss(params, window):
    return next_token_loss(jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), window).astype(jnp.float32)


@cases(("megatron", "2x4", (transformer_specs(None, "model"), P("data"))))
def test_mixed_precision_gradients(mesh_name, specs):
    """Weights are float32, the computation is bfloat16: gradients come back in float32, rounded like bfloat16."""

    check(bfloat16_loss, (TRANSFORMER, TOKENS), mesh_name, specs, rtol=5e-2)


# --- experts and randomness -------------------------------------------------------------------------------------------

EXPERTS = weights(60, router=(16, 8), up=(8, 16, 8), down=(8, 8, 16))


@gradients(has_aux=True)
def experts(params, x):
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
    dispatch = jax.nn.one_hot(chosen, 8)
    combine = jnp.einsum("tk,tke->te", gates, dispatch)
    routed = jnp.einsum("te,td->etd", dispatch.sum(1), x)
    hidden = jax.nn.relu(jnp.einsum("etd,edh->eth", routed, params["up"]))
    y = jnp.einsum("eth,ehd,te->td", hidden, params["down"], combine)
    return jnp.square(y).mean(), (chosen, dispatch.sum((0, 1)))


@pytest.mark.dear
@cases(
    ("batch", "8", (None, P("data"))),
    ("experts", "8", ({"router": P(), "up": P("data"), "down": P("data")}, P("data"))),
    ("experts and width", "2x4", ({"router": P(), "up": P("model", None, "data"), "down": P("model", "data")}, P())),
    ("mixed", "2x2x2", ({"router": P(None, "model"), "up": P("model"), "down": P("model")}, P(("data", "seq")))),
)
def test_mixture_of_experts_gradients(mesh_name, specs):
    check(experts, (EXPERTS, floats(64, 16, 16)), mesh_name, specs)


@gradients(has_aux=True)
def dropout(params, x, key):
    first, second = jax.random.split(key)
    x = jnp.where(jax.random.bernoulli(first, 0.5, x.shape), x / 0.5, 0)
    hidden = jax.nn.gelu(x @ params["up"] + params["up_bias"])
    hidden = hidden * jax.random.bernoulli(second, 0.8, hidden.shape) + jax.random.normal(second, hidden.shape)
    return jnp.square(hidden @ params["down"]).mean(), jax.random.fold_in(key, 1)


@pytest.mark.dear
@cases(
    ("megatron", "2x4", ({"up": P(None, "model"), "up_bias": P("model"), "down": P("model")}, P("data"), None)),
    ("features", "2x2x2", (None, P("data", ("seq", "model")), None)),
)
def test_dropout_draws_the_same_numbers(mesh_name, specs):
    check(dropout, (MLP, floats(70, 16, 16), jax.random.key(7)), mesh_name, specs)
