"""Arrays without elements, split along any dimension: every family of ops gives what jit gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_ops import PLANE

import sdy_jax as sdy

ROWS, NONE, FULL = jnp.zeros((4, 0)), jnp.zeros((0, 8)), jnp.arange(32.0).reshape(4, 8)
INDICES = jnp.zeros(0, jnp.int32)
BATCH = jnp.zeros((0, 4, 4))


def elementwise(x):
    return x + 1, jnp.where(x > 0, x, 2.0), x.astype(jnp.bfloat16), x + jnp.arange(0.0), lax.reduce_precision(x, 5, 7)


def reductions(x):
    pairs = (x, lax.broadcasted_iota(jnp.int32, x.shape, 1)), (np.float32(2), np.int32(3))
    return {
        "sum": (x.sum(1), x.sum(0), x.sum()),
        "identities": (x.prod(1), (x > 0).any(1), (x > 0).all(1), lax.reduce_max(x, (1,)), x.max(1, initial=3.0)),
        "no known kind": lax.reduce(*pairs, lambda a, b: (a[0] * b[0], a[1] + b[1]), (1,)),
        "mean": x.mean(1),
    }


def along_rows(x):
    return x.max(1), x.argmax(1), jnp.sort(x, 1), jnp.argsort(x, 0), lax.top_k(x, 2), jnp.cumsum(x, 0), lax.cummax(x, 1)


def joined(x, y):
    return jnp.concatenate([x, y]), jnp.concatenate([x, x]), jnp.stack([x, x])


def indexed(x, i, rows):
    return {
        "gather": (x[i], x[:, i], jnp.take(x, i, axis=0, fill_value=1.0)),
        "scatter": (x.at[i].add(rows), x.at[i].set(rows), jax.ops.segment_sum(rows, i, num_segments=8)),
    }


def cut(x):
    return x[:, 2:2], x[4:], lax.dynamic_slice(x, (1, 0), (2, 0)), lax.dynamic_update_slice(x, x[:0], (1, 0)), x[:0]


def reshaped(x):
    padded = jnp.pad(x, ((0, 0), (2, 2)), constant_values=7.0)
    return x.reshape(0, 4), x.reshape(8, 0, 2), x.ravel(), x.T, padded, jnp.pad(x, ((0, 4), (0, 0))), x[::-1]


def products(x, y):
    gradients = jax.grad(lambda a, b: (a @ b).sum(), (0, 1))(x, y)
    return x @ y, gradients, y @ jnp.ones((8, 4)), jnp.ones((8, 4)) @ x, jnp.outer(x.ravel(), y)


def windows(x):
    pooled = lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "VALID")
    picked = jax.grad(lambda y: lax.reduce_window(y, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID").sum())(x)
    return pooled, picked, jnp.fft.fft(x, axis=1), jnp.fft.rfft(x, axis=1)


def convolutions(batch, features, kernels, no_kernels):
    run = lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME")  # noqa: E731
    return run(batch, kernels), run(features, no_kernels[:, :0]), run(jnp.ones((4, 4, 8)), no_kernels)


def loops(carry, xs, x):
    return {
        "no step": lax.scan(lambda c, r: (c + r, c * 2), carry, xs),
        "empty state": lax.fori_loop(0, 3, lambda i, c: c + i, x),
        "mapped": lax.map(jnp.sum, xs),
        "branches": lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    }


def decompositions(x):
    return jnp.linalg.cholesky(x), jnp.linalg.svd(x), jnp.linalg.solve(x, x), jnp.linalg.qr(x)


CASES = [
    (elementwise, ROWS),
    (reductions, ROWS),
    (along_rows, NONE),
    (joined, NONE, FULL),
    (indexed, FULL, INDICES, NONE),
    (cut, FULL),
    (reshaped, ROWS),
    (products, ROWS, NONE),
    (windows, NONE),
    (convolutions, jnp.zeros((0, 4, 8)), jnp.zeros((4, 0, 8)), jnp.ones((4, 4, 3)), jnp.zeros((0, 4, 3))),
    (loops, jnp.arange(8.0), NONE, ROWS),
    (decompositions, BATCH),
    (lambda keys: (keys, jax.vmap(jax.random.normal)(keys)), jax.random.split(jax.random.key(0), 0)),
]


def same(found, wanted):
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if jnp.issubdtype(found.dtype, jax.dtypes.prng_key):
        found, wanted = map(jax.random.key_data, (found, wanted))
    np.testing.assert_allclose(np.asarray(found), wanted, 1e-5)


@pytest.mark.filterwarnings("ignore::sdy_jax.PartitionWarning")
@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x")], ids="-".join)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__.strip("<>"))
def test_arrays_without_elements_give_what_jit_gives(case, axes):
    function, *args = case
    specs = tuple(P(*axes[: x.ndim]) if x.ndim > 1 else P(axes[0]) for x in args)
    found = sdy.partition(function, mesh=PLANE, in_shardings=specs)(*args)
    jax.tree.map(same, found, jax.jit(function)(*args))


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("x", "y")])
def test_a_product_over_nothing_is_zero_however_it_is_split(spec):
    product = sdy.partition(jnp.matmul, mesh=PLANE, in_shardings=(spec, P()))
    np.testing.assert_array_equal(product(ROWS, jnp.zeros((0, 3))), np.zeros((4, 3)))


def test_what_has_no_elements_is_not_split_and_nothing_is_noted_of_it():
    plan = sdy.partition(jnp.negative, mesh=PLANE, in_shardings=P("x", "y"), out_shardings=P("x")).plan(ROWS)
    assert not plan.notes and "result  f32[4,0]" in str(plan)


def test_arrays_without_elements_on_explicit_axes_can_be_fetched():
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    with jax.set_mesh(mesh):
        found = sdy.partition(lambda a: (a * 2, a.sum(1)), in_shardings=P("x"))(ROWS)
    same(found[0], ROWS)
    same(found[1], jnp.zeros(4))


@pytest.mark.parametrize("spec", [P("x"), P(None, "y"), P("y", "x"), P()])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_without_elements_lie_as_is_stated(spec, kind):
    """As the empty fields of the models of physics simulators."""
    stated = NamedSharding(jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2), spec)
    x, full = jnp.zeros((8, 0)), jnp.ones((8, 4))
    found = [jit(lambda x, y: (x * 2, y + 1), out_shardings=stated)(x, full) for jit in (sdy.partition, jax.jit)]
    for ours, theirs in zip(*found, strict=True):
        assert ours.sharding == theirs.sharding and ours.shape == theirs.shape
        np.testing.assert_array_equal(ours, theirs)
