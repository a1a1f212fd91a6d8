"""Kernels on pages and in tables of plans: their names, what they compute and move, and how long that takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.ir.jax_shardings import flops_text
from sdy_jax.plan.page.tables import table_of
from sdy_jax.plan.record.files import load_plan

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
HEADS, X = P("data", "model"), jax.ShapeDtypeStruct((8, 4, 256, 128), jnp.bfloat16)
V5E = sdy.CostModel.of_machine("tpu v5e", MESH)


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return flash_attention(q, k, v, causal=True)


def planned(costs: sdy.CostModel | None = None, spec: P = HEADS) -> sdy.Plan:
    given = {} if costs is None else {"costs": costs}
    step = sdy.partition(attend, mesh=MESH, in_shardings=spec, out_shardings=spec, **given)
    return step.plan(X, X, X)


def test_a_page_names_kernels_with_what_they_take() -> None:
    plan = planned(V5E)
    (row,) = plan.table("kernels")
    lines = str(plan).splitlines()
    shown = lines[lines.index("kernels (per device, in all executions)") + 1]
    assert "_flash_attention_kernel" in row.kernel and row.kernel in shown
    whole = 4 * 8 * 4 * 256 * 256 * 128
    assert row.flops == pytest.approx(0.75 * whole / 8, rel=0.1)  # three of four blocks, on one of eight devices
    assert row.time and row.time in shown and "of memory" in shown
    assert plan.time.compute == pytest.approx(V5E.work_time(row.flops / 2 / 0.6, row.bytes) + V5E.product_launch)


def test_a_causal_kernel_split_over_queries_takes_as_long_as_its_last_ones() -> None:
    queries, long = P(None, None, "data"), jax.ShapeDtypeStruct((1, 1, 1024, 128), jnp.bfloat16)
    step = sdy.partition(attend, mesh=MESH, in_shardings=(queries, P(), P()), out_shardings=queries, costs=V5E)
    (row,) = step.plan(long, long, long).table("kernels")
    pairs = 4 * 128 * 128 * 128
    assert row.flops == pytest.approx((7 + 8) * pairs, rel=0.1)  # blocks of keys, for the last two of queries


def test_costs_in_bytes_know_no_time_of_kernels() -> None:
    (row,) = planned().table("kernels")
    assert row.flops and row.bytes and not row.time


def test_a_saved_plan_has_its_kernels(tmp_path) -> None:
    plan = planned(V5E)
    plan.save(tmp_path / "plan.json")
    read = load_plan(tmp_path / "plan.json")
    assert str(table_of(read, "kernels")).splitlines()[1:] == str(plan.table("kernels")).splitlines()[1:]


def test_why_not_says_what_a_kernel_performs_that_is_in_the_way() -> None:
    step = sdy.partition(attend, mesh=MESH, in_shardings=(P("data"), P("model"), P("data")))
    (found,) = step.plan(X, X, X).why_not("k", "data")
    (row,) = planned().table("kernels")
    assert f"whole it performs {flops_text(8 * row.flops)}" in found.text and "of memory" in found.text
