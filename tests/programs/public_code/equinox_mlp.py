"""An equinox model trained by `eqx.filter_value_and_grad`, its arrays split from the rest; and attention."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax


def main(placed, batched):
    model = eqx.nn.MLP(8, 4, 64, 2, activation=jax.nn.gelu, key=jax.random.key(0))
    optimizer = optax.adamw(1e-2)
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)

    @jax.jit
    def train_step(arrays, state, x, y):
        @eqx.filter_value_and_grad
        def loss_of(model):
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        loss, gradients = loss_of(eqx.combine(arrays, rest))
        updates, state = optimizer.update(eqx.filter(gradients, eqx.is_inexact_array), state, arrays)
        return eqx.apply_updates(arrays, updates), state, loss

    x = batched(jax.random.normal(jax.random.key(1), (16, 8)))
    arrays, y = placed(arrays), batched(jnp.tanh(x[:, :4]))
    state = optimizer.init(arrays)
    for _ in range(3):
        arrays, state, loss = train_step(arrays, state, x, y)

    attention = eqx.nn.MultiheadAttention(4, 32, inference=True, key=jax.random.key(2))
    weights, shell = eqx.partition(attention, eqx.is_array)
    attend = jax.jit(lambda weights, x: jax.vmap(eqx.combine(weights, shell))(x, x, x))
    sequence = batched(jax.random.normal(jax.random.key(3), (8, 16, 32)))
    return loss, jax.tree.leaves(arrays), attend(placed(weights), sequence)
