"""Ops that look at the order of elements along a split dimension: scans, sorts, candidates, extremes."""

from contextvars import ContextVar
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE
from test_uneven import assert_close, normal

import sdy_jax as sdy
from sdy_jax.lowering.reshard.cost import CostModel
from sdy_jax.lowering.strategies import collective, cumulative, shards
from sdy_jax.plan.hlo import collectives_in_hlo, totals

MERGING = "cse,while-loop-invariant-code-motion,cpu-all-reduce-combiner"


@pytest.fixture(autouse=True)
def poisoned_padding(monkeypatch):
    """Padding that spoils whatever depends on it."""

    def poison(dtype):
        if jnp.issubdtype(dtype, jnp.inexact):
            return jnp.array(jnp.nan, dtype)
        return jnp.array(True) if dtype == np.bool_ else jnp.array(jnp.iinfo(dtype).max, dtype)

    for module in (shards, collective):
        monkeypatch.setattr(module, "padding_value", poison)


def integers(*shape, dtype=jnp.int32):
    return jax.random.randint(jax.random.key(sum(shape)), shape, -50, 50).astype(dtype)


def agreed(function, *args, spec, out=None, mesh=LINE, **tolerances):
    """Numbers are the plain function's, and what the plan says is sent is what the compiled program sends."""
    options = {"compiler_options": {"xla_disable_hlo_passes": MERGING}, "on_unknown": "ignore"}
    partitioned = sdy.partition(function, mesh=mesh, in_shardings=spec, out_shardings=out, **options)
    assert_close(partitioned(*args), jax.jit(function)(*args), **tolerances)
    plan = partitioned.plan(*args)
    assert plan.wire_bytes == totals(collectives_in_hlo(partitioned.lower(*args).compile().as_text())).wire_bytes, plan
    return plan


MESH = ContextVar("MESH", default=None)


def split(x, *spec):
    """Constrains an array inside a partitioned function; the plain function that it is compared with has no mesh."""
    return x if MESH.get() is None else lax.with_sharding_constraint(x, NamedSharding(MESH.get(), P(*spec)))


def check_inside(function, *args, op=None, mesh=LINE, **tolerances):
    """The numbers of a function that splits its values itself, computed where every repeated operation is expensive.

    `op` is one that communicates by itself.
    """
    partitioned = sdy.partition(function, mesh=mesh, costs=CostModel(flop=100.0), on_unknown="ignore")
    token = MESH.set(mesh)
    plan, found = partitioned.plan(*args), partitioned(*args)
    MESH.reset(token)
    assert_close(found, jax.jit(lambda *xs: function(*xs))(*args), **tolerances)
    assert op is None or f" for {op}" in str(plan), plan
    return plan


SCAN = "stablehlo.reduce_window"
SCANS = {
    "sum": lax.cumsum,
    "product": lax.cumprod,
    "max": lax.cummax,
    "min": lax.cummin,
    "logsumexp": lax.cumlogsumexp,
}


def test_a_cumulative_sum_sends_totals():
    plan = agreed(lambda x: jnp.cumsum(x, 1), integers(8, 1024), spec=P(None, "x"), out=P(None, "x"))
    assert plan.wire_bytes == 224


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", SCANS)
def test_cumulative_ops(name, reverse):
    x = normal(13, 3) if name == "logsumexp" else normal(13, 3) * 2
    scan = partial(SCANS[name], reverse=reverse)
    check_inside(lambda x: scan(split(x, "x"), axis=0), x, op=SCAN)
    check_inside(lambda x: scan(split(x, None, ("y", "x")), axis=1), x.T, op=SCAN, mesh=PLANE)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint32, jnp.float16, jnp.bfloat16, jnp.complex64])
def test_cumulative_ops_of_any_type(dtype):
    x = integers(16, 2).astype(dtype) if dtype != jnp.complex64 else normal(16, 2) + 1j * normal(2, 16).T

    def function(x):
        x = split(x, "x")
        return lax.cumsum(x, 0), lax.cumprod(x % 3 if x.dtype != jnp.complex64 else x, 0, reverse=True)

    check_inside(function, x, op=SCAN, rtol=4e-2)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 9, 17])
def test_cumulative_ops_with_empty_and_single_element_shards(size):
    for reverse in (False, True):
        op = SCAN if size > 1 else None
        check_inside(lambda x, reverse=reverse: lax.cumsum(split(x, "x"), 0, reverse), integers(size), op=op)


def test_a_cumulative_maximum_propagates_nan_and_infinity():
    x = normal(16).at[jnp.array([3, 9])].set(jnp.array([jnp.inf, jnp.nan]))
    for scan in SCANS.values():
        agreed(scan, x, spec=P("x"), out=P("x"))


@pytest.mark.parametrize("mesh", [LINE, PLANE], ids=["line", "plane"])
@pytest.mark.parametrize("reverse", [False, True])
def test_long_rows_of_totals_are_passed_on(monkeypatch, mesh, reverse):
    monkeypatch.setattr(cumulative, "_LONG_ROW", 1)
    spec = P(mesh.axis_names[::-1])
    plan = agreed(lambda x: lax.cumsum(x, 0, reverse), integers(24, 5), spec=spec, out=spec, mesh=mesh)
    assert plan.wire_bytes == 4 * 5 * 4
    check_inside(lambda x: lax.cumsum(split(x, *spec), 0, reverse), integers(21, 5), op=SCAN, mesh=mesh)


def test_rows_of_other_dimensions_stay_split():
    plan = agreed(lambda x: lax.cummax(x, 1), normal(6, 16, 2), spec=P("x", "y"), out=P("x", "y"), mesh=PLANE)
    assert plan.wire_bytes == 3 * 3 * 2 * 4


def test_sub_axes_of_a_scanned_dimension(mesh=LINE):
    def function(x):
        y = lax.cumsum(split(x, "x"), 0)
        return split(y.reshape(4, 4, 3), "x") + 1

    check_inside(function, integers(16, 3))


@pytest.mark.parametrize(
    "name", ["sum", "product", *(pytest.param(name, marks=pytest.mark.slow) for name in ("max", "min", "logsumexp"))]
)
def test_gradients_of_cumulative_ops(name):
    def loss(x):
        return (SCANS[name](split(x, "x"), axis=0) ** 2).sum()

    check_inside(jax.grad(loss), normal(13, 2), rtol=1e-4)


def test_a_cumulative_sum_in_a_loop():
    def function(x):
        return lax.scan(lambda c, _: (jnp.cumsum(c, 0) % 7, None), split(x, "x"), None, length=3)[0]

    check_inside(function, integers(19, 2))
