"""Haiku: a network with batch statistics and dropout that is trained, attention, and an unrolled LSTM."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax


def network(x, train):
    x = hk.Linear(64)(x)
    x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, train))
    if train:
        x = hk.dropout(hk.next_rng_key(), 0.1, x)
    return hk.Linear(4)(x)


def attention(x):
    return hk.MultiHeadAttention(4, 8, w_init=hk.initializers.VarianceScaling(1.0))(x, x, x)


def recurrent(x):
    core = hk.LSTM(16)
    return hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))[0]


def main(placed, batched):
    trained, optimizer = hk.transform_with_state(network), optax.sgd(0.1, momentum=0.9)
    x, y = batched(jax.random.normal(jax.random.key(1), (16, 8))), batched(jnp.arange(16) % 4)
    init = jax.jit(trained.init, static_argnums=2)
    params, state = init(jax.random.PRNGKey(0), x, True)

    @jax.jit
    def train_step(params, state, moments, key, x, y):
        def loss_of(params):
            logits, new = trained.apply(params, state, key, x, True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new

        (loss, new), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, moments = optimizer.update(gradients, moments)
        return optax.apply_updates(params, updates), new, moments, loss

    params = placed(params)
    moments = optimizer.init(params)
    for step in range(3):
        params, state, moments, loss = train_step(params, state, moments, jax.random.PRNGKey(step), x, y)

    attend, unroll = (hk.without_apply_rng(hk.transform(f)) for f in (attention, recurrent))
    sequence = batched(jax.random.normal(jax.random.key(3), (8, 6, 32)))
    steps = jax.random.normal(jax.random.key(4), (6, 8, 16))
    attended = jax.jit(attend.apply)(placed(attend.init(jax.random.PRNGKey(1), sequence)), sequence)
    unrolled = jax.jit(unroll.apply)(placed(unroll.init(jax.random.PRNGKey(1), steps)), steps)
    return loss, state, attended, unrolled
