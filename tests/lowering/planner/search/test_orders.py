"""Ops that look at the order of elements along a split dimension: scans, sorts, candidates, extremes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import agreed, check_inside, rarely, sorted_downwards, split
from jax import lax
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE
from uneven_blocks import normal

import sdy_jax as sdy
from sdy_jax.lowering.ops import reductions as cumulative
from sdy_jax.lowering.ops.collectives import reductions
from sdy_jax.testing import assert_same

pytestmark = pytest.mark.usefixtures("poisoned_padding")


def integers(*shape, dtype=jnp.int32):
    return jax.random.randint(jax.random.key(sum(shape)), shape, -50, 50).astype(dtype)


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
    check_inside(lambda x: scan(split(x, "x"), axis=0), x, sent_by=SCAN)
    check_inside(lambda x: scan(split(x, None, ("y", "x")), axis=1), x.T, sent_by=SCAN, mesh=PLANE)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.bfloat16, *rarely(jnp.uint32, jnp.float16, jnp.complex64)])
def test_cumulative_ops_of_any_type(dtype):
    x = integers(16, 2).astype(dtype) if dtype != jnp.complex64 else normal(16, 2) + 1j * normal(2, 16).T

    def function(x):
        x = split(x, "x")
        return lax.cumsum(x, 0), lax.cumprod(x % 3 if x.dtype != jnp.complex64 else x, 0, reverse=True)

    check_inside(function, x, sent_by=SCAN, rtol=4e-2)


@pytest.mark.parametrize("size", [1, 3, 9, *rarely(2, 8, 17)])
def test_cumulative_ops_with_empty_and_single_element_shards(size):
    for reverse in (False, True):
        sent_by = SCAN if size > 1 else None
        check_inside(lambda x, reverse=reverse: lax.cumsum(split(x, "x"), 0, reverse), integers(size), sent_by=sent_by)


def test_a_cumulative_maximum_propagates_nan_and_infinity():
    x = normal(16).at[jnp.array([3, 9])].set(jnp.array([jnp.inf, jnp.nan]))
    for scan in SCANS.values():
        agreed(scan, x, spec=P("x"), out=P("x"))


@pytest.mark.parametrize("mesh", [LINE, PLANE], ids=["line", "plane"])
@pytest.mark.parametrize("reverse", [True, *rarely(False)])
def test_long_rows_of_totals_are_passed_on(monkeypatch, mesh, reverse):
    monkeypatch.setattr(cumulative, "_LONG_ROW", 1)
    spec = P(mesh.axis_names[::-1])
    plan = agreed(lambda x: lax.cumsum(x, 0, reverse), integers(24, 5), spec=spec, out=spec, mesh=mesh)
    assert plan.wire_bytes == 4 * 5 * 4
    check_inside(lambda x: lax.cumsum(split(x, *spec), 0, reverse), integers(21, 5), sent_by=SCAN, mesh=mesh)


def test_rows_of_other_dimensions_stay_split():
    plan = agreed(lambda x: lax.cummax(x, 1), normal(6, 16, 2), spec=P("x", "y"), out=P("x", "y"), mesh=PLANE)
    assert plan.wire_bytes == 3 * 3 * 2 * 4


def test_sub_axes_of_a_scanned_dimension(mesh=LINE):
    def function(x):
        y = lax.cumsum(split(x, "x"), 0)
        return split(y.reshape(4, 4, 3), "x") + 1

    check_inside(function, integers(16, 3))


@pytest.mark.parametrize("name", ["sum", "product", *rarely("max", "min", "logsumexp")])
def test_gradients_of_cumulative_ops(name):
    def loss(x):
        return (SCANS[name](split(x, "x"), axis=0) ** 2).sum()

    check_inside(jax.grad(loss), normal(13, 2), rtol=1e-4)


def test_a_cumulative_sum_in_a_loop():
    def function(x):
        return lax.scan(lambda c, _: (jnp.cumsum(c, 0) % 7, None), split(x, "x"), None, length=3)[0]

    check_inside(function, integers(19, 2))


SORT = "stablehlo.sort"
SIX = jax.sharding.Mesh(np.array(jax.devices()[:6]), ("x",))


def with_ties(*shape, dtype=jnp.float32):
    return (integers(*shape) % 5).astype(dtype)


def test_a_sort_exchanges_blocks_instead_of_gathering_them():
    plan = agreed(jnp.sort, normal(1024), spec=P("x"), out=P("x"))
    assert plan.wire_bytes == 6 * 128 * 4


def test_a_sort_moves_to_another_dimension_where_one_is_free():
    for axis, mesh in (("x", LINE), ("y", PLANE)):
        options = {"spec": P(None, axis), "out": P(None, axis), "mesh": mesh}
        plan = agreed(lambda x: jnp.sort(x, 1), normal(8, 64), **options, layouts="local")
        assert [c.kind for c in plan.collectives] == ["all_to_all", "all_to_all"]
        assert agreed(lambda x: jnp.sort(x, 1), normal(8, 64), **options).wire_bytes <= plan.wire_bytes


@pytest.mark.parametrize("mesh", [LINE, PLANE, SIX], ids=["line", "plane", "six"])
@pytest.mark.parametrize("size", [29, *rarely(48, 9, 3)])
def test_sorts_of_several_operands_are_stable(mesh, size):
    def function(x, y, z):
        return lax.sort((split(x, axes), y, z), dimension=0, num_keys=2)

    axes = mesh.axis_names[::-1]
    operands = with_ties(size), with_ties(size, dtype=jnp.int8), jnp.arange(size, dtype=jnp.bfloat16)
    check_inside(function, *operands, sent_by=SORT, mesh=mesh)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float32, *rarely(jnp.bool_, jnp.uint32, jnp.float16, jnp.complex64)])
def test_sorts_of_any_type(dtype):
    x = with_ties(21, dtype=dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        x = x.at[jnp.array([2, 5, 13])].set(jnp.array([jnp.nan, jnp.inf, -jnp.inf], dtype))
    elif dtype != jnp.bool_:
        x = x.at[jnp.array([2, 5])].set(jnp.iinfo(dtype).max)
    check_inside(lambda x: (lax.sort(split(x, "x")), jnp.argsort(split(x, "x"))), x, sent_by=SORT)
    check_inside(lambda x: lax.sort((split(x, "x"), jnp.arange(21) * 2 + x.real.astype(int))), x, sent_by=SORT)


def test_orders_that_are_not_ascending():
    x = with_ties(19, 2)
    check_inside(lambda x: jnp.sort(split(x, "x"), axis=0, descending=True), x, sent_by=SORT)
    check_inside(lambda x: jnp.argsort(split(x, "x"), axis=0, descending=True), x, sent_by=SORT)
    check_inside(lambda x: lax.sort((split(x, "x"), x * 2), dimension=0, is_stable=False), x, sent_by=SORT)


@pytest.mark.parametrize("mesh", [LINE, PLANE], ids=["line", "plane"])
def test_a_comparator_of_ones_own_compares_blocks(mesh):
    spec = P(mesh.axis_names[::-1])
    plan = agreed(sorted_downwards("true"), integers(16), spec=spec, out=spec, mesh=mesh)
    assert plan.wire_bytes == 6 * 2 * 4
    x = jnp.arange(16, dtype=jnp.float32) * 7 % 16
    partitioned = sdy.partition(
        sorted_downwards("false", 2, "16xf32"), mesh=mesh, in_shardings=spec, out_shardings=spec
    )
    found, other = partitioned(x, -x)
    np.testing.assert_array_equal(found, jnp.arange(15.0, -1, -1))
    np.testing.assert_array_equal(other, -found)


def test_a_comparator_of_ones_own_that_has_to_be_stable_sorts_whole_blocks():
    x = integers(16) % 4
    plan = agreed(sorted_downwards("true", 2), x, jnp.arange(16, dtype=jnp.int32), spec=P("x"), out=P("x"))
    assert {c.kind for c in plan.collectives if c.wire_bytes} == {"all_gather"}


def test_zeros_of_both_signs_are_all_kept():
    x = jnp.array([0.0, -0.0, 1.0, -0.0] * 6)
    found = sdy.partition(jnp.sort, mesh=LINE, in_shardings=P("x"), out_shardings=P("x"))(x)
    assert jnp.signbit(found).sum() == 12


@pytest.mark.more("derivatives")
def test_gradients_of_sorts():
    def loss(x):
        return (jnp.sort(split(x, "x"), 0) * jnp.arange(13.0)[:, None]).sum() + jnp.median(split(x, "x"))

    check_inside(jax.grad(loss), normal(13, 2), rtol=1e-4)


@pytest.mark.parametrize("size", [13, *rarely(16)])
def test_medians_and_quantiles(size):
    def function(x):
        x = split(x, "x")
        return jnp.median(x), jnp.median(x, 0), jnp.quantile(x, jnp.array([0.1, 0.9]), 0), jnp.percentile(x, 30)

    check_inside(function, normal(size, 3))


def test_unique_elements():
    def function(x):
        x = split(x, "x")
        return jnp.unique(x, size=6, return_index=True, return_inverse=True, return_counts=True)

    check_inside(function, integers(21) % 5)


TOP_K = "chlo.top_k"


def test_top_k_sends_candidates():
    plan = agreed(lambda x: lax.top_k(x, 4), normal(2, 8192), spec=P(None, "x"))
    assert plan.wire_bytes == 448 == 2 * 7 * 4 * 2 * 4


@pytest.mark.parametrize("k", [2, 13, *rarely(1, 5)])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float32, *rarely(jnp.bfloat16)])
def test_top_k_prefers_lower_indices(k, dtype):
    x = jnp.stack([with_ties(13, dtype=dtype), jnp.full(13, reductions.identity("max", dtype), dtype)])
    check_inside(lambda x: lax.top_k(split(x, None, ("y", "x")), k), x, mesh=PLANE, sent_by=TOP_K)


def test_top_k_with_batches_that_are_split_too():
    plan = agreed(lambda x: lax.top_k(x, 3), normal(6, 32), spec=P("x", "y"), out=P("x"), mesh=PLANE)
    assert plan.wire_bytes == 3 * 3 * 3 * 8


def test_gradients_of_top_k():
    check_inside(jax.grad(lambda x: (lax.top_k(split(x, None, "x"), 3)[0] ** 2).sum()), normal(2, 21), rtol=1e-4)


@pytest.mark.parametrize("size", [61, *rarely(64)])
@pytest.mark.parametrize("search", [lax.approx_max_k, lax.approx_min_k])
def test_approximate_top_k_sends_candidates(search, size):
    for k in (3, 12):
        plan = check_inside(lambda x, k=k: search(split(x, "x"), k, reduction_dimension=0), normal(size, 2))
        assert " for ApproxTopK" in str(plan.table("collectives"))


def test_of_equal_elements_approximate_top_k_takes_the_first():
    x = integers(1001) % 50
    plan = check_inside(lambda x: lax.approx_max_k(split(x.astype(jnp.float32), "x"), 20), x)
    assert " for ApproxTopK" in str(plan.table("collectives"))


LEAST, MOST = lax.approx_min_k, lax.approx_max_k
TAKING_ANY = [(MOST, jnp.bfloat16), (LEAST, jnp.float32), *rarely((LEAST, jnp.bfloat16), (MOST, jnp.float16))]


@pytest.mark.parametrize("case", TAKING_ANY, ids=lambda case: f"{case[0].__name__}-{case[1].__name__}")
def test_where_it_takes_any_they_are_at_the_indices_that_it_says(case):
    """XLA's sort, by which it looks for these, is not stable: which ones jit takes depends on the array's length."""
    search, dtype = case
    x = (integers(1000) % 50).astype(dtype)
    values, indices = sdy.partition(lambda x: search(x, 20), mesh=LINE, in_shardings=P("x"))(x)
    np.testing.assert_array_equal(values, search(x, 20)[0])
    np.testing.assert_array_equal(values, x[indices])
    assert len(set(indices.tolist())) == 20


def test_all_elements_by_approximate_top_k_come_in_their_order():
    x = normal(8, 2)
    for aggregate in (True, False):
        search = partial(lax.approx_max_k, k=8, reduction_dimension=0, aggregate_to_topk=aggregate)
        check_inside(lambda x, search=search: search(split(x, "x")), x)


@pytest.mark.dear
@pytest.mark.parametrize("size", [8187, *rarely(8192)])
@pytest.mark.parametrize("find", [jnp.argmax, jnp.argmin])
def test_an_extreme_is_found_among_pairs(find, size):
    plan = assert_same(lambda x: find(x[:, :size], axis=1), integers(16, 8192), mesh=LINE, in_shardings=P(None, "x"))
    assert plan.wire_bytes <= 16 * 8 * 8


@pytest.mark.parametrize("rows", [13, *rarely(16)])
def test_many_partial_results_are_combined_in_chunks_of_them(rows):
    """Of few every device receives all; of more each device a chunk, also of flags beside them."""
    x = jnp.ones((rows, 301), jnp.float32) + integers(301) % 5

    def function(x):
        x = split(x, "x")
        pair = lax.reduce(
            (x, -x), (jnp.float32(9), jnp.float32(9)), lambda a, b: (jnp.minimum(a[0], b[0]), a[1] + b[1]), (0,)
        )
        return x.argmax(0), x.argmin(0), (x > 3).argmax(0), x.prod(0), pair

    check_inside(function, x, sent_by="stablehlo.reduce")
    check_inside(function, x[:, :3], sent_by="stablehlo.reduce")
