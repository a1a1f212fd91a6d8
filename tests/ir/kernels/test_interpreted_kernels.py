"""Kernels that are interpreted have integers as in the user's program, whatever a device's program is lowered with."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from partitioned_ops import PLANE
from uneven_blocks import assert_close, normal

import sdy_jax as sdy


def doubled_to(x, out):
    """Twice the first hundred columns of each row, a row at a time."""
    mask = lax.broadcasted_iota(jnp.int32, (1, 128), 1) < 100
    out[...] = x[...]

    def row(i, _):
        pltpu.store(out.at[pl.ds(i, 1)], x[pl.ds(i, 1)] * 2, mask=mask)

    lax.fori_loop(0, 8, row, None)


def doubled(x):
    spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return pl.pallas_call(
        doubled_to,
        grid=(x.shape[0] // 8,),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=True,
    )(x)


def test_indices_of_masked_stores():
    x = np.asarray(normal(64, 128))
    assert_close(sdy.partition(doubled, mesh=PLANE, in_shardings=P("x"))(x), doubled(x))


def test_with_64_bit_types():
    with jax.enable_x64(True):
        x = np.asarray(normal(16, 128), np.float64)
        twice = pl.pallas_call(
            lambda x, out: out.__setitem__(..., x[...] * 2),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            interpret=True,
        )
        assert_close(sdy.partition(twice, mesh=PLANE, in_shardings=P("x"), on_unknown="ignore")(x), 2 * x)
