"""Kernels in programs that cut an axis of the mesh: what they were traced with names the whole axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cudnn_on_cpus import on_cpus
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.testing import assert_same

__all__ = ["on_cpus"]

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
CUT = jnp.arange(16.0).reshape(2, 8)
"""Its first dimension can be split along a part of `model` only."""


def body(x_ref: Any, y_ref: Any) -> None:
    """Values of its refs go into branches and loops, with a number of its grid."""
    x = x_ref[...]
    shifted = jax.lax.cond(pl.program_id(0) % 2 == 0, lambda x: jnp.where(x > 0, x, -x), lambda x: x + 1, x)
    y_ref[...] = jax.lax.fori_loop(0, 3, lambda _, y: y + jnp.max(x, axis=1, keepdims=True), shifted)


def rows(x: jax.Array) -> jax.Array:
    block = pl.BlockSpec((2, 8), lambda i: (i, 0))
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    found: jax.Array = pl.pallas_call(
        body, grid=(x.shape[0] // 2,), in_specs=[block], out_specs=block, out_shape=out, interpret=True
    )(x)
    return found


def attention(x: jax.Array) -> jax.Array:
    q = x.reshape(*x.shape[:2], 4, -1).astype(jnp.bfloat16)
    return jax.nn.dot_product_attention(q, q, q, implementation="cudnn").astype(x.dtype)


@pytest.mark.parametrize("is_mapped", [True, False], ids=["mapped", "plain"])
@pytest.mark.parametrize(("kernel", "shape"), [(rows, (32, 8)), (attention, (8, 16, 32))], ids=["pallas", "cudnn"])
@pytest.mark.usefixtures("on_cpus")
def test_numbers(kernel: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], is_mapped: bool) -> None:
    run = jax.shard_map(kernel, mesh=MESH, in_specs=P("data"), out_specs=P("data"), check_vma=False)

    def step(x: jax.Array, cut: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (run if is_mapped else kernel)(jnp.sin(x)), cut * 2

    x = jax.random.normal(jax.random.key(0), shape)
    plan = sdy.partition(step, mesh=MESH, in_shardings=(P("data"), P("model"))).plan(x, CUT)
    assert "model:(1)2" in str(plan)
    assert_same(step, x, CUT, mesh=MESH, in_shardings=(P("data"), P("model")), rtol=2e-2)
