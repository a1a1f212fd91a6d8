"""What errors of floating-point numbers allow, and what they do not."""

import jax
import ml_dtypes
import numpy as np
import pytest

from sdy_jax.calls.load import loads
from sdy_jax.equivalence.arrays import blocks_of, drawn_arguments, whole_of
from sdy_jax.equivalence.comparison import compared, decided_by
from sdy_jax.equivalence.subject import resized, scaled_down, uneven
from sdy_jax.equivalence.trial import _outcome_of
from sdy_jax.equivalence.verification import Fault
from sdy_jax.errors import ShardingError
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.runtime.meshes import RefinedMesh
from sdy_jax.shardy.passes.calls import inline_calls

ONE = np.float32([1.0])


@pytest.mark.parametrize(
    ("found", "exact", "moved", "ok"),
    [
        (1.001, 1.0002, None, True),  # the plain result is itself off by 2e-4
        (1.01, 1.0002, None, False),
        (1.001, 1.0, None, False),
        (1.001, 1.0, 1.0005, True),  # arguments that are rounded otherwise move it as far
        (1.001, 1.01, 1.001, True),
        (1.01, 1.01, 1.0, False),  # the plain one is wrong, and no rounding
        (np.nan, 1.0002, None, False),
    ],
)
def test_what_is_more_exact_decides(found, exact, moved, ok):
    moved = None if moved is None else np.float32([moved])
    assert decided_by(np.float32([found]), ONE, np.float64([exact]), moved).ok is ok


def test_nans_of_the_smallest_floats_are_the_same():
    found, wanted = (np.array([1, np.nan, x], ml_dtypes.float8_e4m3fn) for x in (2, 4))
    assert compared(found, found).ok and compared(found, wanted).problem == "differs in 1 of 3 elements"


def test_integers_are_never_rounded():
    assert not decided_by(np.int32([2]), np.int32([1]), np.int32([3])).ok


def test_roundings_that_add_up_are_no_difference_but_infinities_are():
    fault = Fault("the program", "here:1", "its results differ", "rounding", "roundings add up")
    assert _outcome_of(compared(ONE * 2, ONE), "result", fault).status == "rounding"
    assert _outcome_of(compared(ONE * np.inf, ONE), "result", fault).status == "different"


SPLIT = TensorSharding.closed("mesh", [[AxisRef("x")], [AxisRef("y")]])
PARTIAL = TensorSharding.closed("mesh", [[AxisRef("x")], []], [AxisRef("y")])


@pytest.mark.parametrize("shape", [(4, 6), (5, 7), (1, 1)])
@pytest.mark.parametrize("sharding", [SPLIT, PARTIAL, None], ids=["split", "partial", "whole"])
def test_blocks_of_an_array_make_it_up(shape, sharding):
    mesh = RefinedMesh.of(Mesh.of(x=2, y=3, z=2), [AxisRef("x"), AxisRef("y")])
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    found = whole_of(blocks_of(x, sharding, mesh), shape, sharding, mesh)
    assert len(found) == {SPLIT: 2, PARTIAL: 2, None: 12}[sharding]
    assert all(np.array_equal(each, x) for each in found)


def test_what_one_device_of_many_has_wrong_shows():
    mesh = RefinedMesh.of(Mesh.of(x=2, y=3, z=2))
    blocks = blocks_of(np.ones((4, 6), np.float32), SPLIT, mesh).copy()
    blocks[-1] = 7
    assert [float(each.max()) for each in whole_of(blocks, (4, 6), SPLIT, mesh)] == [1.0, 7.0]


def test_integers_that_index_are_in_bounds_and_keys_are_any_words():
    def indexed(table, i, key, start):
        return table[i] + jax.random.normal(key, (2,)), jax.lax.dynamic_slice_in_dim(table, start, 3, 0)

    types = [jax.ShapeDtypeStruct(*each) for each in (((5, 2), "float32"), ((100,), "int32"), ((2,), "uint32"))]
    text = jax.jit(indexed).lower(*types, jax.ShapeDtypeStruct((), "int32")).as_text()
    module = loads(text).module
    inline_calls(module)
    _, i, key, start = drawn_arguments(Graph(module), [None] * 4, 0)
    assert set(i.tolist()) == set(range(5)) and key.max() > 1000 and 0 <= start < 3


def test_meshes_are_scaled_down_and_made_uneven():
    assert scaled_down(Mesh.of(a=16, b=16)) == Mesh.of(a=2, b=2)
    assert scaled_down(Mesh.of(a=2, b=4)) == Mesh.of(a=2, b=4)
    assert uneven(Mesh.of(a=2, b=4)) == Mesh.of(a=2, b=3) and uneven(Mesh.of(a=8)) == Mesh.of(a=3)
    assert uneven(Mesh.of(a=1)) is None and uneven(Mesh.of(a=3)) is None
    assert uneven(Mesh.of(a=2, b=2, c=2, d=2)).size <= 16
    assert resized(Mesh.of(a=2, b=4), {"b": 5}) == Mesh.of(a=2, b=5)
    with pytest.raises(ShardingError, match="axis 'b' is 0; expected a number of devices"):
        resized(Mesh.of(a=2, b=4), {"b": 0})
