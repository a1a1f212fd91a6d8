"""GPT-2 from `transformers` (flax.linen), trained for a few steps with dropout."""

import jax
import jax.numpy as jnp
import optax
from transformers import FlaxGPT2LMHeadModel, GPT2Config


def main(placed, batched):
    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=128, n_positions=32)
    model = FlaxGPT2LMHeadModel(config, seed=0)
    optimizer = optax.sgd(0.1, momentum=0.9)

    @jax.jit
    def train_step(params, state, tokens, key):
        def loss_of(params):
            logits = model(tokens, params=params, dropout_rng=key, train=True).logits
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params, losses = placed(model.params), []
    state, tokens = optimizer.init(params), batched(jax.random.randint(jax.random.key(1), (8, 16), 0, 128))
    for step in range(3):
        params, state, loss = train_step(params, state, tokens, jax.random.fold_in(jax.random.key(2), step))
        losses.append(loss)
    return jnp.stack(losses), params
