"""Sums that are scattered over chips that do not lie in a line: along one dimension of their torus after the other."""

import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from machine_models import planned_for, small_costs
from partitioned_ops import LINE, mesh_of

import sdy_jax as sdy
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.reshard.planner import along_lines, plan_reshard
from sdy_jax.lowering.targets import target
from sdy_jax.runtime.devices import torus_lines


def chips(*sizes, order=None):
    """A mesh of chips of a torus, its last axis the quickest to change; `order`: that of the torus's dimensions."""
    places = [*itertools.product(*(range(size) for size in sizes))]
    found = [SimpleNamespace(coords=tuple(place[d] for d in order or range(len(sizes)))) for place in places]
    array = np.empty(len(found), object)
    array[:] = found
    return array


def mesh(array, **axes):
    return SimpleNamespace(devices=array.reshape(*axes.values()), axis_names=tuple(axes))


@pytest.mark.parametrize(
    ("array", "axes", "lines"),
    [
        (chips(4, 4), {"x": 16}, {"x": ((4, 0, 1), (4, 1, 1))}),
        (chips(4, 4), {"x": 4, "y": 4}, {"x": ((4, 0, 1),), "y": ((4, 1, 1),)}),
        (chips(4, 4, order=(1, 0)), {"x": 2, "y": 8}, {"x": ((2, 1, 2),), "y": ((2, 1, 1), (4, 0, 1))}),
        (chips(2, 4, 4), {"x": 32, "y": 1}, {"x": ((2, 0, 1), (4, 1, 1), (4, 2, 1))}),
        (chips(4, 8), {"x": 8, "y": 4}, {"x": ((4, 0, 1), (2, 1, 4)), "y": ((4, 1, 1),)}),
        (chips(4, 4)[[0, 1, 2, 3, 7, 6, 5, 4, 8, 9, 10, 11, 15, 14, 13, 12]], {"x": 16}, {"x": ()}),  # as a snake
    ],
)
def test_which_parts_of_axes_lie_along_dimensions_of_a_torus(array, axes, lines):
    assert dict(torus_lines(mesh(array, **axes))) == lines


def test_devices_that_do_not_know_their_place_have_no_lines():
    assert torus_lines(LINE) == () == torus_lines(AbstractMesh((8,), ("x",)))


def test_an_axis_over_slices_has_no_lines():
    """Chips of all slices have the same coordinates."""
    assert torus_lines(mesh(np.concatenate([chips(4), chips(4)]), slice=2, x=4)) == (("x", ((4, 0, 1),)),)


MESH = Mesh.of(x=16, y=4)
X, Y = AxisRef("x"), AxisRef("y")
LINES = {"x": ((4, 0, 1), (4, 1, 1)), "y": ((4, 2, 1),)}


def scattered(shape, dims, axes):
    source = TensorSharding.closed("m", [[] for _ in shape], axes)
    (step,) = plan_reshard(shape, 4, source, TensorSharding.closed("m", dims), MESH).steps
    return step, along_lines(step, source, shape, 4, LINES, MESH)


@pytest.mark.parametrize(
    ("shape", "dims", "axes", "texts"),
    [
        ((64, 8), ([X], []), (X,), ['[{"x":(1)4}, {}]', '[{"x":(4)4}, {}]']),
        ((64, 8), ([], [Y]), (Y,), ['[{}, {"y"}]']),
        ((64, 8), ([X, Y], []), (X, Y), ['[{"x":(1)4}, {}]', '[{"x":(4)4}, {}]', '[{"y"}, {}]']),
        ((60, 8), ([X], []), (X,), ['[{"x"}, {}]']),  # padded blocks of blocks are no blocks
    ],
)
def test_a_scatter_is_cut_where_its_axes_turn(shape, dims, axes, texts):
    step, steps = scattered(shape, dims, axes)
    assert [str(each) for each in steps] == texts
    assert steps[-1].result == step.result
    if len(steps) > 1:
        assert sum(each.wire_bytes for each in steps) == pytest.approx(step.wire_bytes)


@pytest.mark.parametrize(("axis", "times"), [(X, 2), (Y, 1)])
def test_a_scatter_around_a_torus_is_counted_as_the_all_reduce_that_it_becomes(axis, times):
    """Of few chips it stays what it is."""
    source = TensorSharding.closed("m", [[], []], (axis,))
    (step,) = plan_reshard((64, 8), 4, source, TensorSharding.closed("m", ([axis], [])), MESH).steps
    (found,) = along_lines(step, source, (64, 8), 4, {"x": (), "y": ()}, MESH)
    assert (found.op, found.wire_bytes) == (step.op, times * step.wire_bytes)


def test_axes_along_one_dimension_stay_together():
    lines = {"x": ((16, 0, 4),), "y": ((4, 0, 1),)}
    source = TensorSharding.closed("m", [[], []], (X, Y))
    (step,) = plan_reshard((64, 8), 4, source, TensorSharding.closed("m", [[X, Y], []]), MESH).steps
    assert along_lines(step, source, (64, 8), 4, lines, MESH) == (step,)
    assert along_lines(step, source, (64, 8), 4, {}, MESH) == (step,)


@pytest.mark.parametrize(
    ("axes", "texts"),
    [
        ((X,), ['[{"x"}, {}]']),  # the half of a line of eight, with the next chip four neighbours on
        ((X, Y), ['[{"x":(1)4}, {}]', '[{"x":(4)4, "y"}, {}]']),  # with the other axis it is all of the line
        ((AxisRef.canonical("x", 1, 8, MESH),), ['[{"x":(1)8}, {}]']),
        ((AxisRef.canonical("x", 1, 4, MESH),), ['[{"x":(1)4}, {}]']),
    ],
)
def test_a_scatter_over_chips_with_others_between_them_stays_one(axes, texts):
    """XLA sends it around one ring; cut, the major part would send most, and far."""
    lines = {"x": ((4, 0, 1), (4, 1, 4)), "y": ((4, 1, 1),)}
    source = TensorSharding.closed("m", [[], []], axes)
    (step,) = plan_reshard((64, 8), 4, source, TensorSharding.closed("m", [axes, []]), MESH).steps
    assert [str(each) for each in along_lines(step, source, (64, 8), 4, lines, MESH)] == texts


def gradients(x, y):
    return x.T @ y


def test_numbers_and_bytes_stay(monkeypatch):
    monkeypatch.setattr(target, "torus_lines", lambda mesh: (("x", ((2, 0, 1), (4, 1, 1))),))
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((64, n)).astype(np.float32) for n in (32, 16))
    costs = small_costs("tpu v5e", ["x"])
    given = {"mesh": LINE, "in_shardings": (P("x"), P("x")), "out_shardings": P("x"), "costs": costs}
    with planned_for("tpu v5e"):
        step = sdy.partition(gradients, **given)
        plan, found = step.plan(x, y), step(x, y)
    np.testing.assert_allclose(found, x.T @ y, rtol=1e-5, atol=1e-5)
    assert [(c.kind, *map(str, c.axes)) for c in plan.collectives] == [
        ("reduce_scatter", '"x":(1)2'),
        ("reduce_scatter", '"x":(2)4'),
    ]
    assert plan.wire_bytes == 7 / 8 * 32 * 16 * 4
    assert plan.wire_bytes == sdy.partition(gradients, **given).plan(x, y).wire_bytes


def test_over_two_axes(monkeypatch):
    monkeypatch.setattr(target, "torus_lines", lambda mesh: (("x", ((2, 0, 1),)), ("y", ((4, 1, 1),))))
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((64, n)).astype(np.float32) for n in (32, 16))
    with planned_for("tpu v5e"):
        step = sdy.partition(
            gradients, mesh=mesh_of(2, 4), in_shardings=(P(("x", "y")),) * 2, out_shardings=P(("x", "y"))
        )
        np.testing.assert_allclose(step(x, y), jax.jit(gradients)(x, y), rtol=1e-5, atol=1e-5)
