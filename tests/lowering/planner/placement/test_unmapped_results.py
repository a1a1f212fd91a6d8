"""Results of partitioned functions that do not depend on what `jax.vmap` maps, beside jit."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_jit import outcome, summary
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

ROWS, ROW = jnp.arange(16.0).reshape(2, 8) / 5, jnp.arange(8.0) / 3


def unmapped(fun, out_axes=(0, None)):
    return jax.vmap(fun, in_axes=(0, None), out_axes=out_axes)


def sine_and_square(x, y):
    return jnp.sin(x) * y, y**2


WITHOUT_THE_MAPPED_AXIS = {
    "of an argument": lambda jit: unmapped(jit(sine_and_square))(ROWS, ROW),
    "constant": lambda jit: unmapped(jit(lambda x, y: (x * y, jnp.ones(3))))(ROWS, ROW),
    "passed through": lambda jit: unmapped(jit(lambda x, y: (x * y, y)))(ROWS, ROW),
    "summed over devices": lambda jit: unmapped(jit(lambda x, y: (x.sum(), y.sum())))(ROWS, ROW),
    "under jit": lambda jit: jax.jit(unmapped(jit(sine_and_square)))(ROWS, ROW),
    "with a name": lambda jit: jax.vmap(lambda x, y: jit(sine_and_square)(x, y)[1], (0, None), None, axis_name="i")(
        ROWS, ROW
    ),
    "mapped twice": lambda jit: jax.vmap(unmapped(jit(sine_and_square)), (None, 0), (0, 0))(ROWS, ROWS),
    "tangents": lambda jit: unmapped(lambda x, y: jax.jvp(jit(sine_and_square), (x, y), (y, x)), ((0, 0), (0, 0)))(
        ROWS, ROW
    ),
    "tangents of the other": lambda jit: unmapped(
        lambda x, y: jax.jvp(lambda y: jit(sine_and_square)(x, y), (y,), (y,)), ((0, None), (0, None))
    )(ROWS, ROW),
    "jvp of it": lambda jit: jax.jvp(unmapped(jit(sine_and_square)), (ROWS, ROW), (ROWS, ROW)),
    "linearize of it": lambda jit: jax.linearize(unmapped(jit(sine_and_square)), ROWS, ROW)[1](ROWS, ROW),
    "vjp of it": lambda jit: jax.vjp(unmapped(jit(sine_and_square)), ROWS, ROW)[1]((ROWS, ROW)),
    "vjp of a sum": lambda jit: jax.vjp(unmapped(jit(lambda x, y: (x + y, y * 2))), ROWS, ROW)[1]((ROWS, ROW)),
    "hessian of it": lambda jit: jax.hessian(lambda y: sum(map(jnp.sum, unmapped(jit(sine_and_square))(ROWS, y))))(ROW),
    "rematerialized": lambda jit: jax.vjp(jax.checkpoint(unmapped(jit(sine_and_square))), ROWS, ROW)[1]((ROWS, ROW)),
    "refused": lambda jit: unmapped(jit(sine_and_square), (None, None))(ROWS, ROW),
}


@pytest.mark.parametrize("name", WITHOUT_THE_MAPPED_AXIS)
def test_results_that_do_not_depend_on_the_mapped_axis_need_not_have_it(name):
    line = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    row, stated = WITHOUT_THE_MAPPED_AXIS[name], jax.sharding.NamedSharding(line, P())
    ours, theirs = (outcome(row, partial(jit, in_shardings=stated), line) for jit in (sdy.partition, jax.jit))
    if isinstance(theirs, Exception):
        assert summary(ours) == summary(theirs)
        return
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), ours, theirs)
    assert jax.tree.map(jax.typeof, ours) == jax.tree.map(jax.typeof, theirs)
