"""Dimensions that do not divide: values lie in padded blocks, and nothing that is seen depends on the padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, setting
from uneven_blocks import PARTITIONED, assert_close, normal, split

import sdy_jax as sdy
from sdy_jax.errors import SdyError, ShardingError
from sdy_jax.lowering.ops import shards

pytestmark = pytest.mark.usefixtures("poisoned_padding")


def integers(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).integers(-50, 50, shape, dtype=np.int32))


def check(function, x, **options):
    """Compares with the plain function. The argument is longer, split, and cut to its length inside: an array of the
    true size would enter whole."""
    junk = jnp.full((-len(x) % 8, *x.shape[1:]), shards.padding_value(x.dtype))
    long = jnp.concatenate([x, junk])
    partitioned = sdy.partition(lambda long: function(long[: len(x)]), mesh=LINE, in_shardings=P("x"))
    with setting(PARTITIONED, True):
        plan, found = partitioned.plan(long), partitioned(long)
    assert_close(found, jax.jit(lambda x: function(x))(x), **options)
    assert plan.padding, plan
    return plan


OPS = {
    "elementwise": (lambda x: jnp.exp(split(x, "x")), normal(65, 4)),
    "sum": (lambda x: split(x, "x").sum(0), normal(65, 4)),
    "sum of integers": (lambda x: split(x, "x").sum(0), integers(7, 4)),
    "max": (lambda x: split(x, "x").max(), normal(65, 4) - 9),
    "min": (lambda x: split(x, "x").min(0), normal(9, 4) + 9),
    "product": (lambda x: split(x, "x").prod(0), integers(13, 4)),
    "any": (lambda x: (split(x, "x") > 100).any(0), integers(13, 4)),
    "all": (lambda x: (split(x, "x") < 100).all(0), integers(13, 4)),
    "argmax": (lambda x: split(x, "x").argmax(0), normal(65, 4)),
    "argmin": (lambda x: split(x, "x").argmin(0), normal(3, 4)),
    "logsumexp": (lambda x: jax.nn.logsumexp(split(x, "x"), axis=0), normal(65, 4)),
    "softmax": (lambda x: jax.nn.softmax(split(x, "x"), axis=0), normal(65, 4)),
    "variance": (lambda x: split(x, "x").var(0), normal(65, 4)),
    "mean of each": (lambda x: split(x, "x").mean(1), normal(65, 4)),
    "contraction": (lambda x: split(x, "x").T @ split(x, "x"), normal(65, 4)),
    "outer product": (lambda x: split(x, "x") @ x.T, normal(65, 4)),
    "transpose": (lambda x: split(x, "x").T * 2, normal(65, 4)),
    "from dim to dim": (lambda x: split(jnp.sin(split(x, "x")), None, "x"), normal(9, 7)),
    "iota": (lambda x: jnp.arange(65) * split(x, "x")[:, 0].astype(int), normal(65, 4)),
    "lookup in": (lambda x: split(x, "x")[jnp.array([64, 0, -1, 7, 99])], normal(65, 4)),
    "lookup at": (lambda x: x[split(jnp.arange(13) * 3, "x")], normal(65, 4)),
    "scatter to": (lambda x: split(x, "x").at[jnp.array([64, 0, 7, 7])].add(1.0), normal(65, 4)),
    "scatter from": (lambda x: x.at[split(jnp.arange(13) % 5, "x")].add(split(x[:13], "x")), normal(65, 4)),
    "one-hot": (lambda x: jax.nn.one_hot(split(jnp.arange(13), "x"), 9).T @ x[:13], normal(65, 4)),
    "segment_sum": (lambda x: jax.ops.segment_sum(split(x, "x"), jnp.arange(65) % 6, 6), normal(65, 4)),
    "dynamic slice": (lambda x: jax.lax.dynamic_slice_in_dim(split(x, "x"), 60, 7, 0), normal(65, 4)),
    "dynamic update": (lambda x: jax.lax.dynamic_update_slice_in_dim(split(x, "x"), x[:3] * 0, 63, 0), normal(65, 4)),
    "sort of each": (lambda x: jnp.sort(split(x, "x"), axis=1), normal(65, 4)),
    "top_k of each": (lambda x: jax.lax.top_k(split(x, "x"), 2), normal(65, 4)),
    "cumsum of each": (lambda x: jnp.cumsum(split(x, "x"), axis=1), normal(65, 4)),
    "convolution of each": (
        lambda x: jax.lax.conv(split(x[:, None], "x"), jnp.ones((1, 1, 3)), (1,), "SAME"),
        normal(13, 8),
    ),
    "reshape of the rest": (lambda x: split(x, "x").reshape(13, 2, 4) + 1, normal(13, 8)),
    "reshape to one": (lambda x: split(x, "x").reshape(-1) + 1, normal(13, 8)),
    "new dimension": (lambda x: split(x, "x")[:, None] * split(x, "x")[None], normal(13, 4)),
    "random bits": (lambda x: split(jax.random.normal(jax.random.key(0), (13, 4)), "x") + x, normal(13, 4)),
    "whole loop": (lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(y), split(x, "x")).sum(0), normal(13, 4)),
    "scan along": (lambda x: jax.lax.scan(lambda c, r: (c + r, c.sum()), x[0] * 0, split(x, "x")), normal(13, 4)),
    "scan beside": (lambda x: jax.lax.scan(lambda c, r: (c + r, c), x[0] * 0, split(x, None, "x")), normal(4, 13)),
    "cond": (lambda x: jax.lax.cond(split(x, "x").sum() > 0, jnp.sin, jnp.cos, split(x, "x")), normal(13, 4)),
    "batched solve": (
        lambda x: jnp.linalg.solve(split(x, "x").reshape(5, 3, 3) + 9 * jnp.eye(3), jnp.ones((5, 3, 1))),
        normal(5, 9),
    ),
    "reverse of each": (lambda x: split(x, "x")[:, ::-1], normal(13, 4)),
    "fft of each": (lambda x: jnp.fft.fft(split(x, "x")), normal(13, 4)),
}


WITHOUT_GRADIENTS = ("sum of integers", "product", "any", "all", "argmax", "argmin", "iota")


@pytest.mark.dear(cases=14)
@pytest.mark.parametrize("name", OPS)
def test_numbers_do_not_depend_on_padding(name):
    function, x = OPS[name]
    check(function, x, atol=1e-5)


@pytest.mark.dear(cases=12)
@pytest.mark.parametrize("name", [name for name in OPS if name not in WITHOUT_GRADIENTS])
def test_gradients_do_not_depend_on_padding(name):
    function, x = OPS[name]

    def loss(x):
        leaves = [y for y in jax.tree.leaves(function(x)) if jnp.issubdtype(y.dtype, jnp.inexact)]
        return sum((jnp.abs(y) ** 2).sum() for y in leaves) + 0.0 * x.sum()

    check(jax.grad(loss), x, rtol=1e-4, atol=1e-4)


def squares(x):
    return (jnp.sin(split(x, "x")) ** 2).sum(0)


@pytest.mark.parametrize("uneven, block", [("pad", 9), ("replicate", 65)])
def test_what_becomes_of_axes_that_do_not_divide(uneven, block):
    with setting(PARTITIONED, True):
        f = sdy.partition(squares, mesh=LINE, uneven=uneven)
        text, plan = f.lower(normal(65, 4)).as_text(), f.plan(normal(65, 4))
    assert (f"tensor<{block}x4xf32>" in text) and ("tensor<9x4xf32>" in text) == (uneven == "pad")
    assert bool(plan.padding) == bool(plan.padded_bytes) == ("padding (bytes per device)" in str(plan)) == (block == 9)
    assert ("8 does not divide 65" in str(plan)) == (uneven == "replicate")


def test_padding_is_counted_per_device():
    with setting(PARTITIONED, True):
        plan = sdy.partition(squares, mesh=LINE).plan(normal(65, 4))
    assert {(value.type, value.bytes) for value in plan.padding} == {("f32[65@x,4]", 4 * 4 * (9 - 65 / 8))}
    assert "f32[65@x,4]" in str(plan).partition("padding (bytes per device)")[2]


def test_uneven_axes_can_be_refused():
    with setting(PARTITIONED, True):
        with pytest.raises(
            ShardingError, match=r"uneven_blocks.py:\d+.* 8 does not divide 65; .* To fix: pad it to 72, or"
        ):
            sdy.partition(squares, mesh=LINE, uneven="error").plan(normal(65, 4))
        with pytest.raises(ShardingError, match=r"dim 0 of `x`, f32\[65@x,4\], cannot be split"):
            sdy.partition(lambda x: x * 2, mesh=LINE, in_shardings=P("x"), uneven="error").plan(normal(65, 4))
        sdy.partition(squares, mesh=LINE, uneven="error").plan(normal(64, 4))
    with pytest.raises(SdyError, match="uneven='drop'; expected 'pad', 'replicate' or 'error'"):
        sdy.partition(squares, mesh=LINE, uneven="drop")
