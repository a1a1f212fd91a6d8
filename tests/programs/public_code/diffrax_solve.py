"""diffrax: an adaptive solver for a batch of initial values, and its gradient by recursive checkpointing."""

import diffrax
import jax
import jax.numpy as jnp


def solve(y, rates):
    return diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, rates: -rates * y + jnp.sin(t)),
        diffrax.Tsit5(),
        t0=0.0,
        t1=2.0,
        dt0=0.1,
        y0=y,
        args=rates,
        saveat=diffrax.SaveAt(ts=jnp.linspace(0.0, 2.0, 5)),
        stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-5),
        max_steps=256,
    ).ys


def main(placed, batched):
    y, rates = batched(jax.random.normal(jax.random.key(0), (8, 16))), jnp.linspace(0.5, 2.0, 16)
    each = jax.jit(jax.vmap(solve, (0, None)))
    gradient = jax.jit(jax.grad(lambda rates, y: jnp.sum(jax.vmap(solve, (0, None))(y, rates) ** 2)))
    return jax.jit(solve)(y, rates), each(y, rates), gradient(rates, y)
