"""optimistix: least squares, minimisation, a fixed point, and the implicit derivative of a root."""

import jax
import jax.numpy as jnp
import optimistix as optx


def residuals(x, data):
    matrix, target = data
    return jnp.tanh(matrix @ x) - target


def main(placed, batched):
    matrix = batched(jax.random.normal(jax.random.key(0), (32, 8)) / 4)
    data = (matrix, batched(jnp.tanh(matrix @ jnp.linspace(-1.0, 1.0, 8))))

    def fitted(x, data):
        return optx.least_squares(residuals, optx.LevenbergMarquardt(1e-6, 1e-6), x, data).value

    def minimum(x, data):
        return optx.minimise(lambda x, d: jnp.sum(residuals(x, d) ** 2), optx.BFGS(1e-6, 1e-6), x, data).value

    def fixed(y, scale):
        return optx.fixed_point(lambda y, s: jnp.cos(y) * s, optx.FixedPointIteration(1e-6, 1e-6), y, scale).value

    def root(a):
        return optx.root_find(lambda y, a: y**3 + y - a, optx.Newton(1e-6, 1e-6), jnp.ones(8), a).value

    scale = batched(jnp.full((8, 4), 0.5))
    return (
        jax.jit(fitted)(jnp.zeros(8), data),
        jax.jit(minimum)(jnp.zeros(8), data),
        jax.jit(fixed)(jnp.ones((8, 4)), scale),
        jax.jit(jax.grad(lambda a: jnp.sum(root(a))))(batched(jnp.arange(8.0))),
    )
