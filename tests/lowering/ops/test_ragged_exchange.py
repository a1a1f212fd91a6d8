"""`lax.ragged_all_to_all` in `jax.shard_map`: a collective whose bytes count, by the rows that are known.

XLA for CPUs has no such op, so programs with it are planned and lowered here, and run by none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

MESH = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
ROWS, WIDTH, ROOM = P(("data", "expert")), 64, 128
V5E = sdy.CostModel.of_machine("tpu v5e", MESH)


def exchanged(sizes: jax.Array, axes: Any = "expert", room: int = ROOM) -> Callable[..., jax.Array]:
    """Rows exchanged among experts, or among all devices: to each as many as `sizes` say."""

    def body(x: jax.Array, sizes: jax.Array) -> jax.Array:
        starts = jnp.cumsum(sizes) - sizes
        at = lax.all_to_all(starts, axes, 0, 0, tiled=True)
        received = lax.all_to_all(sizes, axes, 0, 0, tiled=True)
        out = jnp.zeros((room, x.shape[1]), x.dtype)
        return lax.ragged_all_to_all(x, out, starts, sizes, at, received, axis_name=axes)

    def step(x: jax.Array, given: jax.Array) -> jax.Array:
        own = given if sizes is None else sizes
        return jax.shard_map(body, mesh=MESH, in_specs=(ROWS, P()), out_specs=ROWS, check_vma=False)(x, own)

    return step


def planned(step: Callable[..., Any], count: int = 4) -> Any:
    f = sdy.partition(step, mesh=MESH, in_shardings=(ROWS, P()), out_shardings=ROWS, costs=V5E)
    arguments = jax.ShapeDtypeStruct((8 * 128, WIDTH), jnp.float32), jax.ShapeDtypeStruct((count,), jnp.int32)
    return f, arguments, f.plan(*arguments)


def of_rows(plan: Any) -> Any:
    return next(record for record in plan.collectives if record.kind == "ragged_all_to_all")


@pytest.mark.parametrize(("room", "rows"), [(ROOM, ROOM), (4 * ROOM, ROOM), (32, 32)])
def test_all_rows_count_that_there_are_and_that_there_is_room_for(room: int, rows: int) -> None:
    plan = planned(exchanged(None, room=room))[2]
    record = of_rows(plan)
    assert record.wire_bytes == 3 / 4 * rows * WIDTH * 4
    assert [axis.name for axis in record.axes] == ["expert"] and record.origin == "user"
    assert plan.wire_bytes > record.wire_bytes  # and the numbers of rows
    assert "in 1 ragged_all_to_all" in str(plan)


def test_nothing_is_computed_more_than_once() -> None:
    plan = planned(exchanged(None))[2]
    assert not plan.notes and not plan.repeated_flops


def test_numbers_of_rows_that_are_constant_count() -> None:
    def body(x: jax.Array) -> jax.Array:
        sizes = jnp.full((4,), 16, jnp.int32)
        starts = jnp.arange(4, dtype=jnp.int32) * 16
        return lax.ragged_all_to_all(x, jnp.zeros_like(x), starts, sizes, starts, sizes, axis_name="expert")

    def step(x: jax.Array, _: jax.Array) -> jax.Array:
        return jax.shard_map(body, mesh=MESH, in_specs=ROWS, out_specs=ROWS, check_vma=False)(x)

    assert of_rows(planned(step)[2]).wire_bytes == 3 / 4 * 4 * 16 * WIDTH * 4


def test_an_exchange_takes_the_time_of_an_all_to_all() -> None:
    record, mesh = of_rows(planned(exchanged(None))[2]), sdy.Mesh.of(data=2, expert=4)
    own, other = (V5E.sending_time(kind, record.axes, mesh, 1e6) for kind in ("ragged_all_to_all", "all_to_all"))
    assert own == pytest.approx(other, rel=0.5)


@pytest.mark.parametrize(("axes", "count"), [("expert", 4), (("data", "expert"), 8), ("data", 2)])
def test_it_is_lowered_with_the_groups_that_jit_gives_it(axes: Any, count: int) -> None:
    step = exchanged(None, axes)
    f, arguments, plan = planned(step, count)
    ours, theirs = (g.lower(*arguments).as_text() for g in (f, jax.jit(step)))
    groups = re.compile(r"ragged_all_to_all.*?replica_groups = (dense<.*?> : tensor<\S+>)")
    assert groups.findall(ours) == groups.findall(theirs) != []
    assert of_rows(plan).wire_bytes == (count - 1) / count * ROOM * WIDTH * 4
    assert "lax.ragged_all_to_all(" in plan.to_python()
