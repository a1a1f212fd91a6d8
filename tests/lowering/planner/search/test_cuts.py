"""Programs that cut mesh axes into many parts are planned with whole axes."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.planner.facts.factors import cuts_of, leading_uncut
from sdy_jax.lowering.planner.problem import candidates
from sdy_jax.lowering.planner.search import baseline

HEADS = 2


@pytest.fixture
def few_parts(monkeypatch):
    """Two parts of axes are many."""
    monkeypatch.setattr(baseline, "MOST_ATOMS", 2)


def attention(x, weights):
    """Two heads, which four devices along `x` cannot share out."""
    query, value = (jnp.reshape(x @ weights[name], (*x.shape[:2], HEADS, -1)) for name in ("query", "value"))
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, query))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, value)
    return jnp.tanh(mixed.reshape(x.shape) @ weights["out"])


def arguments(batch=4):
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((16, 16), np.float32) / 4 for name in ("query", "value", "out")}
    return rng.standard_normal((batch, 6, 16), np.float32), weights


PARTS_STATED = """
sdy.mesh @mesh = <["x"=4, "y"=2]>
func.func @main(%a: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x":(1)2}, {}]>}) -> tensor<8x8xf32> {
  %b = stablehlo.tanh %a : tensor<8x8xf32>
  %c = sdy.sharding_constraint %b <@mesh, [{"y"}, {"x":(2)2}]> : tensor<8x8xf32>
  %d = stablehlo.add %b, %c : tensor<8x8xf32>
  return %d : tensor<8x8xf32>
}
"""

SPECS = (P("y"), {"query": P(None, ("x", "y")), "value": P(None, ("x", "y")), "out": P(("x", "y"))})


def planned(function, *args, specs=SPECS):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return sdy.testing.assert_same(function, *args, mesh=mesh, in_shardings=specs)


def cut_ops(stage):
    """The lines of ops whose values are split along parts of axes. Collectives may take parts as steps."""
    lines = [line for line in str(stage).splitlines() if "sdy.all" not in line and "sdy.collective" not in line]
    return [line for line in lines if re.search(r'"\w+":\(', line)]


@pytest.mark.parametrize("function", [attention, jax.grad(lambda x, w: attention(x, w).sum(), argnums=1)])
def test_many_parts_of_axes_give_way_to_whole_ones(few_parts, function):
    plan = planned(function, *arguments())
    assert cut_ops(plan.stages["propagated"])
    assert plan.layouts is not None, "planned op by op"
    assert not cut_ops(plan.stages["partitioned"])


def test_large_programs_are_planned_along_whole_axes(monkeypatch):
    monkeypatch.setattr(baseline, "_LARGE", 1)
    plan = planned(attention, *arguments())
    assert plan.layouts is not None, "planned op by op"
    assert not cut_ops(plan.stages["partitioned"])


def test_a_coarse_search_does_not_cut_axes_first(monkeypatch):
    cut, place = [], baseline._baseline
    monkeypatch.setattr(
        baseline,
        "_baseline",
        lambda graph, setting: cut.append(setting.cuts is None) or place(graph, setting),
    )
    monkeypatch.setattr(baseline, "_LARGE", 1)
    planned(attention, *arguments())
    assert cut and not any(cut)


def test_few_parts_of_axes_stay():
    plan = planned(attention, *arguments())
    assert plan.layouts is not None
    assert plan.wire_bytes <= planned_along_whole_axes().wire_bytes


def planned_along_whole_axes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baseline, "MOST_ATOMS", 2)
        return planned(attention, *arguments())


def test_questions_are_answered_from_the_same_baseline(few_parts):
    plan = planned(attention, *arguments(batch=64))
    assert plan.layouts.chosen
    assert str(plan.why("x"))


def test_parts_that_the_program_states_are_kept(few_parts):
    """On `x:(1)2`, `x:(2)2` and `y` the program is on three axes, all of its own: it is planned op by op."""
    text = PARTS_STATED
    program = sdy.loads(text)
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    function = sdy.partition(program)
    np.testing.assert_allclose(function(x), 2 * np.tanh(x), rtol=1e-5)
    assert '"x":(1)2' in str(function.plan(x).stages["partitioned"])


def test_programs_on_many_axes_are_told():
    """Five axes that a program tells apart: what is not searched is said, once it sends anything."""
    mesh = jax.sharding.AbstractMesh((2,) * 5, tuple("abcde"))
    x, w = jax.ShapeDtypeStruct((64, 64), np.float32), jax.ShapeDtypeStruct((64, 64), np.float32)
    specs = P(("a", "b"), "c"), P("d", "e")
    with pytest.warns(sdy.PartitionWarning, match="layouts are chosen op by op: the mesh has 5 axes"):
        assert sdy.partition(lambda x, w: x @ w, mesh=mesh, in_shardings=specs).plan(x, w).layouts is None
    with warnings.catch_warnings(action="error"):
        sdy.partition(lambda x, w: x @ w, mesh=mesh, in_shardings=specs, layouts="local").plan(x, w)
        sdy.partition(jax.numpy.add, mesh=mesh, in_shardings=P(tuple("abcde"))).plan(x, w)


AXES = ("a", "b", "c")
SPLITS = (P("a", "b"), P("b", "c")), (P(("a", "c")), P(None, "b")), (P(None, AXES), P()), (P("c", "a"), P("c", "b"))


@pytest.mark.parametrize("specs", SPLITS, ids=str)
def test_candidates_near_the_baseline(monkeypatch, specs):
    """On many axes few atoms move at once. Three stand for five here, which eight devices have."""
    for room in (candidates, baseline):
        monkeypatch.setattr(room, "MOST_ATOMS", 2)
    monkeypatch.setattr(baseline, "_MUCH_REPEATED", -1.0)
    mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    costs = sdy.CostModel.of_machine("v5e", mesh)
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((16, 32), np.float32), rng.standard_normal((32, 32), np.float32) / 6

    def step(x, w):
        y, _ = jax.lax.scan(lambda y, _: (jnp.tanh(y @ w), None), x, None, length=3)
        return jnp.sort(y, 1), y.reshape(4, 4, 8, 4).sum((1, 3))

    loss = jax.value_and_grad(lambda x, w: sum(jnp.sum(part**2) for part in step(x, w)), (0, 1))
    function = sdy.partition(loss, mesh=mesh, in_shardings=specs, costs=costs)
    alone = sdy.partition(loss, mesh=mesh, in_shardings=specs, costs=costs, layouts="local").plan(x, w)
    assert function.plan(x, w).layouts is not None
    assert function.plan(x, w).time.total <= alone.time.total
    for found, plain in zip(jax.tree.leaves(function(x, w)), jax.tree.leaves(loss(x, w)), strict=True):
        np.testing.assert_allclose(found, plain, rtol=2e-4, atol=2e-4)


def test_places_near_others():
    """Two atoms of three, each at one of two other places: one with none moved, six with one, twelve with two."""
    near = list(candidates._placed([[-2, 0, 1]] * 3, (0, 0, -2)))
    assert len(near) == len(set(near)) == 1 + 3 * 2 + 3 * 4
    assert all(sum(a != b for a, b in zip(places, (0, 0, -2), strict=True)) <= 2 for places in near)


def test_leading_axes_that_are_cut_nowhere_else():
    mesh = Mesh.of(x=16, y=4)
    half, y = AxisRef.canonical("x", 1, 2, mesh), AxisRef("y")
    assert leading_uncut((y, half), None, mesh) == (y, half)
    assert leading_uncut((y, half), cuts_of([], mesh), mesh) == (y,)
    stated = TensorSharding.closed("mesh", [(AxisRef.canonical("x", 2, 8, mesh),)])
    assert leading_uncut((y, half), cuts_of([stated], mesh), mesh) == (y, half)
