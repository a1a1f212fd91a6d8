"""flax.linen as in its image examples: a `TrainState` that is donated, convolutions, batch statistics and dropout."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state


class TrainState(train_state.TrainState):
    batch_stats: Any = None


class Network(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(8, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.avg_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1)
        return nn.Dense(10)(nn.Dropout(0.2, deterministic=not train)(x))


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state, images, labels, key):
    def loss_of(params):
        logits, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            images,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": key},
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), updates

    (loss, updates), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients).replace(batch_stats=updates["batch_stats"]), loss


def main(placed, batched):
    network = Network()
    images = batched(jax.random.normal(jax.random.key(0), (16, 8, 8, 1)))
    labels = batched(jnp.arange(16) % 10)
    variables = jax.jit(functools.partial(network.init, train=False))(jax.random.key(1), images)
    state = TrainState.create(
        apply_fn=network.apply,
        params=placed(variables["params"]),
        tx=optax.sgd(0.1, momentum=0.9),
        batch_stats=variables["batch_stats"],
    )
    for step in range(3):
        state, loss = train_step(state, images, labels, jax.random.key(step))
    return loss, state.params, state.batch_stats, state.step
