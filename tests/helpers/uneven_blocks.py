"""Arrays in blocks of unequal sizes."""

from contextvars import ContextVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE

PARTITIONED = ContextVar("PARTITIONED", default=False)


def normal(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32))  # compiles nothing


def split(x, *spec, mesh=LINE):
    """Constrains an array inside a partitioned function; the plain function that it is compared with has no mesh."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec))) if PARTITIONED.get() else x


def assert_close(found, wanted, rtol=2e-5, atol=0.0):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if jnp.issubdtype(x.dtype, jnp.inexact):
            np.testing.assert_allclose(x, y, rtol, atol + rtol * np.abs(y).max())
        else:
            np.testing.assert_array_equal(x, y)
