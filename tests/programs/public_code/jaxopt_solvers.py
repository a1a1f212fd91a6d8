"""jaxopt: L-BFGS, projected gradients, and the derivative of a solution with respect to a hyperparameter."""

import jax
import jax.numpy as jnp
import jaxopt


def ridge(params, penalty, x, y):
    return jnp.mean((x @ params - y) ** 2) + penalty * jnp.sum(params**2)


def main(placed, batched):
    x = batched(jax.random.normal(jax.random.key(0), (32, 8)))
    y = batched(x @ jnp.linspace(-1.0, 1.0, 8))
    descent = jaxopt.GradientDescent(ridge, maxiter=100, tol=1e-6)
    projected = jaxopt.ProjectedGradient(ridge, jaxopt.projection.projection_non_negative, maxiter=50)

    @jax.jit
    def fitted(start, penalty, x, y):
        return jaxopt.LBFGS(ridge, maxiter=20).run(start, penalty=penalty, x=x, y=y).params

    @jax.jit
    def non_negative(penalty, x, y):
        return projected.run(jnp.zeros(8), penalty=penalty, x=x, y=y).params

    norm = jax.jit(jax.grad(lambda penalty, x, y: jnp.sum(descent.run(jnp.zeros(8), penalty, x, y).params ** 2)))
    return fitted(jnp.zeros(8), 0.1, x, y), non_negative(0.1, x, y), norm(0.1, x, y)
