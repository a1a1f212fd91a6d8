"""blackjax: a NUTS chain in a scan, and eight HMC chains side by side."""

import blackjax
import jax
import jax.numpy as jnp


def main(placed, batched):
    x = batched(jax.random.normal(jax.random.key(0), (64, 4)))
    y = batched(x @ jnp.arange(4.0) + 1)

    @jax.jit
    def chain(key, x, y):
        def log_density(weights):
            return -0.5 * jnp.sum((y - x @ weights) ** 2) - 0.5 * jnp.sum(weights**2)

        nuts = blackjax.nuts(log_density, 1e-2, jnp.ones(4))

        def one(state, key):
            state, _ = nuts.step(key, state)
            return state, state.position

        return jax.lax.scan(one, nuts.init(jnp.zeros(4)), jax.random.split(key, 5))[1]

    hmc = blackjax.hmc(lambda w: -0.5 * jnp.sum((w - 1) ** 2), 1e-1, jnp.ones(4), 5)
    step = jax.jit(jax.vmap(hmc.step))
    states = jax.vmap(hmc.init)(batched(jnp.zeros((8, 4))))
    for number in range(3):
        states, info = step(batched(jax.random.split(jax.random.key(number), 8)), states)
    return chain(jax.random.key(1), x, y), states.position, info.acceptance_rate
