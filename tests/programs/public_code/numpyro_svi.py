"""numpyro: stochastic variational inference, step by step."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal


def regression(x, y):
    weights = numpyro.sample("weights", dist.Normal(0, 1).expand([4]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ weights, scale), obs=y)


def main(placed, batched):
    x = batched(jax.random.normal(jax.random.key(0), (64, 4)))
    y = batched(x @ jnp.arange(4.0))
    inference = SVI(regression, AutoNormal(regression), numpyro.optim.Adam(0.01), Trace_ELBO(4))
    state, update = inference.init(jax.random.PRNGKey(0), x, y), jax.jit(inference.update)
    for _ in range(3):
        state, loss = update(state, x, y)
    return loss, inference.get_params(state)
