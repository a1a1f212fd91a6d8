"""What a device holds where one kernel reads rows and writes what is normalized by their sums, as those of GPUs do."""

import jax
import jax.numpy as jnp
import pytest

import sdy_jax as sdy
from sdy_jax.lowering.planner.memory.live_ranges import peak_of
from sdy_jax.lowering.targets.family import Compiler, Family, Fusion
from sdy_jax.lowering.targets.target import Target

ROWS, LENGTH, WIDTH = 64, 32, 2
SCORES = 4 * ROWS * LENGTH


def softmax(s):
    return jax.nn.softmax(s, -1)


def by_columns(s):
    return jax.nn.softmax(s, 0)


def layer_norm(s):
    s = s - s.mean(-1, keepdims=True)
    return s * jax.lax.rsqrt((s * s).mean(-1, keepdims=True) + 1e-6)


def halves(s):
    return jnp.tanh(s) / 2


def scaled_by_another(s):
    return s / jnp.arange(1.0, LENGTH + 1).sum(-1)


def buffers(fun, rows, specs=(None, None, None), sizes=None):
    """Of how many arrays of scores a device has the memory at most, between two products."""
    mesh = sdy.Mesh.of(a=sizes or 1)
    types = [jax.ShapeDtypeStruct(s, "float32") for s in ((ROWS, WIDTH), (WIDTH, LENGTH), (LENGTH, WIDTH))]
    function = sdy.partition(lambda q, k, v: fun(q @ k) @ v, mesh=mesh, in_shardings=specs, layouts="propagated")
    plan = function.plan(*types)
    target = Target(Family("some", compiler=Compiler(Fusion(rows=rows))))
    return peak_of(plan.graph, target).bytes // (SCORES // (sizes or 1))


@pytest.mark.parametrize("fun", [softmax, layer_norm])
def test_rows_are_not_written_over_what_their_sums_were_taken_of(fun):
    assert buffers(fun, LENGTH) == 2


@pytest.mark.parametrize("fun", [softmax, layer_norm])
def test_longer_rows_are_read_once_more_and_written_over(fun):
    assert buffers(fun, LENGTH - 1) == 1
    assert buffers(fun, 0) == 1


@pytest.mark.parametrize("fun", [by_columns, halves, scaled_by_another])
def test_what_is_not_normalized_along_rows_is_written_over_what_it_is_computed_of(fun):
    assert buffers(fun, max(LENGTH, ROWS)) == 1


def test_rows_are_those_of_a_device():
    split = jax.sharding.PartitionSpec("a")
    assert buffers(softmax, LENGTH, (split, None, None), 8) == 2
    across = jax.sharding.PartitionSpec(None, "a")
    assert buffers(softmax, LENGTH, (None, across, split), 8) == 1, "sums of all devices lie between two kernels"
