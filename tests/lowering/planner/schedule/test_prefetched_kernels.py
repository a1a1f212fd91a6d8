"""Layers that loops gather one trip ahead, behind kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE

import sdy_jax as sdy

ROWS, WIDTH, LAYERS = 512, 256, 8
TIMED = sdy.CostModel(latency=1e-7, flop=1e-11, bandwidth={"x": 1e9}, memory=1e-13)
"""A machine on which sending a layer takes a tenth of a millisecond."""


def kernel(x: jax.Array, w: jax.Array, repeats: int) -> jax.Array:
    """A product in one block of rows per device, done so many times over."""

    def body(x: Any, w: Any, out: Any) -> None:
        def once(_: Any, sums: Any) -> Any:
            return sums + jnp.dot(x[...], w[...])

        out[...] = jax.lax.fori_loop(0, repeats, once, jnp.zeros(out.shape, out.dtype))

    rows = pl.BlockSpec((ROWS // 8, WIDTH), lambda i: (i, 0))
    whole = pl.BlockSpec((WIDTH, WIDTH), lambda i: (0, 0))
    return pl.pallas_call(body, grid=(8,), in_specs=[rows, whole], out_specs=rows, out_shape=x, interpret=True)(x, w)


def planned(repeats: int) -> Any:
    def step(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (kernel(x, w, repeats), None), x, weights)[0]

    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    weights = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    specs, memory = (P("x"), P(None, "x")), "3MiB"
    step = sdy.partition(step, mesh=LINE, in_shardings=specs, out_shardings=P("x"), costs=TIMED, memory=memory)
    return step.plan(x, weights)


@pytest.mark.filterwarnings("ignore::sdy_jax.PartitionWarning")
@pytest.mark.parametrize("repeats", [1, 40])
def test_a_layer_is_gathered_while_a_kernel_runs_for_the_one_before(repeats: int) -> None:
    plan = planned(repeats)
    (gather,) = [record for record in plan.collectives if record.kind == "all_gather"]
    (row,) = plan.table("kernels")
    assert row.flops == pytest.approx(repeats * LAYERS * 2 * ROWS * WIDTH * WIDTH / 8, rel=0.02)
    assert gather.depth == 1 and gather.is_ahead
    trip = TIMED.work_time(row.flops / 2 / 0.986, row.bytes) / LAYERS
    sent = gather.sending_time(TIMED, plan.program.mesh)
    assert plan.time.hidden / LAYERS == pytest.approx(min(sent, trip), rel=0.05)
