"""Windows over split dimensions: convolutions, pooling, and their gradients, in padded blocks on eight devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE
from test_totals import OPTIONS
from test_uneven import PARTITIONED, check, poisoned_padding, split  # noqa: F401

import sdy_jax as sdy
from sdy_jax.plan.hlo import collectives_in_hlo, totals

LAYOUT = ("NHWC", "HWIO", "NHWC")
WITHOUT_MERGING = {k: v for k, v in OPTIONS.items() if k == "compiler_options"}


def floats(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def integers(*shape):
    return np.random.default_rng(sum(shape)).integers(-9, 9, shape).astype(np.int32)


def convolution(x, kernel, strides=(1, 1), padding="SAME", **options):
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=LAYOUT, **options)


def measured(function, *args, mesh=LINE):
    """The plan, the wire bytes and the flops of a device as compiled, and the flops of one device alone."""
    token = PARTITIONED.set(True)
    partitioned = sdy.partition(function, mesh=mesh, **WITHOUT_MERGING)
    plan, compiled = partitioned.plan(*args), partitioned.lower(*args).compile()
    PARTITIONED.reset(token)
    alone = jax.jit(lambda *xs: function(*xs)).lower(*args).compile()
    sent = totals(collectives_in_hlo(compiled.as_text())).wire_bytes
    assert plan.wire_bytes == pytest.approx(sent), plan
    return plan, sent, compiled.cost_analysis()["flops"], alone.cost_analysis()["flops"]


IMAGE, KERNEL = floats(4, 64, 32, 8), floats(3, 3, 8, 8)
COUNTED = {
    "3x3": (lambda x: convolution(split(x, None, "x"), KERNEL), 8192),
    "3x3 with stride 2": (lambda x: convolution(split(x, None, "x"), KERNEL, (2, 2)), 4096),
    "2x2 with stride 2": (lambda x: convolution(split(x, None, "x"), KERNEL[:2, :2], (2, 2)), 0),
    "2x2 max pool": (
        lambda x: lax.reduce_window(split(x, None, "x"), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        0,
    ),
    "transposed 2x2": (
        lambda x: lax.conv_transpose(split(x, None, "x"), KERNEL[:2, :2], (2, 2), "SAME", dimension_numbers=LAYOUT),
        0,
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_bytes_and_flops_of_an_image_split_over_rows(name):
    function, expected = COUNTED[name]
    check(function, IMAGE, atol=1e-5)
    _, sent, flops, alone = measured(function, IMAGE)
    assert sent == expected
    assert flops < alone / 8 * 1.1 + 1000
