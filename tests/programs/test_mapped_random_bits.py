"""`jax.vmap` of partitioned functions that generate random bits is that of jax: all are those of the first state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

STATES = np.arange(12, dtype=np.uint32).reshape(3, 4)


@pytest.mark.parametrize("dtype", [jnp.uint32, jnp.uint8])
@pytest.mark.parametrize("algorithm", ["RNG_DEFAULT", "RNG_THREE_FRY"])
@pytest.mark.parametrize("spec", [P("data"), P(None, ("data", "model"))])
def test_states_and_bits_are_those_of_jax(mesh, dtype, algorithm, spec):
    def function(state):
        state, bits = lax.rng_bit_generator(state, (6, 16), dtype, lax.RandomAlgorithm[algorithm])
        return state, bits, lax.rng_bit_generator(state, (4,), jnp.uint16)[1]

    f = sdy.partition(function, mesh=mesh, out_shardings=(None, spec, None))
    for wrap, states in ((jax.vmap, STATES), (lambda g: g, STATES[1])):
        for found, wanted in zip(wrap(f)(states), wrap(function)(states), strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_numbers_from_mapped_rbg_keys_are_those_of_jax(mesh):
    def function(key, x):
        return x + jax.random.normal(key, x.shape)

    keys = jax.random.split(jax.random.key(3, impl="rbg"), 5)
    x = np.linspace(0, 1, 5 * 8 * 12, dtype=np.float32).reshape(5, 8, 12)
    f = sdy.partition(function, mesh=mesh, in_shardings=(None, P("data", "model")))
    np.testing.assert_allclose(jax.vmap(f)(keys, x), jax.vmap(function)(keys, x), rtol=1e-6)
    np.testing.assert_allclose(f(keys[1], x[1]), function(keys[1], x[1]), rtol=1e-6)
