"""Functions of primitives that jax lowers to others first, as ops of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE

import sdy_jax as sdy

EDGES = np.arange(8.0, dtype=np.float32)


def place(x):
    """In jax 0.12 a search is such a primitive."""
    return jnp.searchsorted(EDGES, x)


PLACE = sdy.custom_op(place, "([i])->([i]) {i=64}")


@pytest.mark.parametrize("how", [jax.jit, lambda fun: sdy.partition(fun, mesh=LINE, in_shardings=P("x"))])
def test_ops_of_users_may_hold_any_primitive(how):
    x = np.linspace(0.0, 8.0, 64, dtype=np.float32)
    np.testing.assert_array_equal(how(lambda x: PLACE(x) + 1)(x), place(x) + 1)


def test_programs_may_hold_any_primitive():
    x = np.linspace(0.0, 8.0, 64, dtype=np.float32)
    partitioned = sdy.partition(lambda x: PLACE(x) * 2, mesh=LINE, in_shardings=P("x"))
    np.testing.assert_array_equal(jax.vmap(partitioned)(np.stack([x, x]))[1], place(x) * 2)
