"""numpyro: NUTS on a linear regression, a whole run of MCMC under one jit."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS


def regression(x, y=None):
    weights = numpyro.sample("weights", dist.Normal(jnp.zeros(4), 1.0).to_event(1))
    bias = numpyro.sample("bias", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(x @ weights + bias, 0.5), obs=y)


def main(placed, batched):
    x = batched(jax.random.normal(jax.random.key(0), (64, 4)))
    y = batched(x @ jnp.arange(4.0) + 1)

    @jax.jit
    def samples(key, x, y):
        run = MCMC(NUTS(regression), num_warmup=5, num_samples=3, progress_bar=False)
        run.run(key, x, y)
        return run.get_samples()

    return samples(jax.random.PRNGKey(2), x, y)
