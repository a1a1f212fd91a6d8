"""Programs called under `jax.set_mesh`: what is computed while they are traced does not depend on the mesh around."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.lowering.ops import sorting

X = jnp.asarray(np.random.default_rng(3).standard_normal((8, 16)), jnp.float32)


def larger(a, b):
    first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
    return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])


def pairs(x, *inits):
    return lax.reduce((x, lax.broadcasted_iota(jnp.int32, x.shape, 1)), inits, larger, (1,))


def positions(x):
    return x.argmax(1), x.argmin(1), x.argmax(), jnp.nanargmax(x, 0)


def reducers(x):
    """Bodies of no known kind, with constants and with reductions inside."""
    none = np.float32(0)
    return {
        "from an identity": pairs(x, np.float32(-np.inf), np.int32(0)),
        "from a value": pairs(x, np.float32(0.5), np.int32(3)),
        "chosen": lax.reduce(x, none, lambda a, b: jnp.where(a > b, a, b), (1,)),
        "with constants": lax.reduce(x, none, lambda a, b: a + b + 0 * jnp.arange(3.0).sum(), (1,)),
    }


def windows(x):
    sums = lax.reduce_window((x, x), (np.float32(0),) * 2, added_and_larger, (1, 4), (1, 2), "VALID")
    picked = jax.grad(lambda y: (lax.reduce_window(y, -jnp.inf, lax.max, (1, 3), (1, 2), "SAME") ** 2).sum())(x)
    return sums, picked, lax.cummax(x, 1), lax.cumlogsumexp(x, 1)


def added_and_larger(a, b):
    return a[0] + b[0], jnp.maximum(a[1], b[1])


def sorted_(x):
    complex_ = lax.sort(x + 1j * x[:, ::-1], dimension=1)
    return jnp.sort(x, 1), jnp.argsort(x, 0), lax.sort((x.astype(jnp.int32), x), num_keys=2), complex_, lax.top_k(x, 3)


def scattered(x):
    at = x.at[:, jnp.array([0, 2, 5])]
    return at.add(1.0), at.max(0.3), at.apply(lambda v: jnp.sin(v) + 2), jax.ops.segment_max(x, jnp.arange(8) % 3, 3)


def loops(x):
    return lax.map(jnp.argmax, x), lax.cond(x.sum() > 0, lambda y: y.argmax(1), lambda y: y.argmin(1), x)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("function", [positions, reducers, windows, sorted_, scattered, loops])
def test_functions_run_under_set_mesh(function, kind):
    sorting._comparator.cache_clear()
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        found = sdy.partition(function, in_shardings=P("x", "y"))(X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-5), found, jax.jit(function)(X))
