"""`like=`: a function is planned for other sizes with the layouts of a plan that it has, and the plan says what that
costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
RNG = np.random.default_rng(0)


def array(*shape):
    return jnp.array(RNG.normal(size=shape) / shape[0] ** 0.5, jnp.float32)


W = {"up": array(32, 64), "down": array(64, 32)}


def step(w, x):
    def loss(w):
        return jnp.mean((x + jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)

    return jax.tree.map(lambda a, b: a - 0.1 * b, w, jax.grad(loss)(w))


def of(fun=step, **options):
    return sdy.partition(fun, **{"mesh": MESH, "on_unknown": "ignore", **options})


def same(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def border(plan):
    return {value.path: value.sharding.axes for value in (*plan.arguments, *plan.results)}


AUTO = {"in_shardings": sdy.AUTO, "out_shardings": sdy.AUTO}


@pytest.mark.dear
@pytest.mark.parametrize("rows", [8, 24, 64, 4096])
@pytest.mark.parametrize("costs", [None, sdy.CostModel.of_machine("tpu v5e", MESH.axis_names)], ids=["bytes", "v5e"])
def test_state_keeps_its_layouts_whatever_the_size_of_the_batch(rows, costs, tmp_path):
    first = of(**AUTO, costs=costs).plan(W, array(16, 32))
    first.save(tmp_path / "first.json")
    x = array(rows, 32)
    alike = of(**AUTO, costs=costs, like=tmp_path / "first.json")
    assert border(alike.plan(W, x)) == border(first)
    same(alike(W, x), step(W, x))


def test_ops_run_as_they_do_in_the_plan(monkeypatch):
    """Weights that are gathered for a large batch are gathered for a small one, for which to move it would be less."""
    monkeypatch.setattr("sdy_jax.lowering.planner.search.layout_search._TOLERATED", 0.01)
    given = {"in_shardings": ({"up": P("data", "model"), "down": P("model", "data")}, P("data"))}
    large = of(**given).plan(W, array(4096, 32))
    small = array(8, 32)
    free, alike = of(**given).plan(W, small), of(**given, like=large).plan(W, small)
    kinds = [[c.kind for c in plan.collectives if c.wire_bytes] for plan in (large, free, alike)]
    assert kinds[2] == kinds[0] != kinds[1]
    assert any(
        "layouts of the plan that like= gives are kept: the program costs" in note.message for note in alike.notes
    )
    assert "like=" not in str(free)
    assert "f32[32,64@model] and f32[32@data,64@model] instead of f32[32@data,64@model]" in str(alike.why("w['up']"))
    same(of(**given, like=large)(W, small), step(W, small))


def test_nothing_is_said_where_it_costs_nothing():
    plan = of(**AUTO).plan(W, array(16, 32))
    assert not [n for n in of(**AUTO, like=plan).plan(W, array(16, 32)).notes if "like=" in n.message]


def test_what_is_stated_stays():
    plan = of(in_shardings=({"up": P("data"), "down": P("model")}, P("data"))).plan(W, array(16, 32))
    found = of(in_shardings=({"up": P(None, "model"), "down": None}, None), like=plan).plan(W, array(8, 32))
    assert found.input_specs[0][0]["up"] == P(None, "model")
    assert border(found)["w['down']"] == border(plan)["w['down']"]
    assert border(found)["x"] == border(plan)["x"]


def test_what_does_not_divide_is_cut_back():
    plan = of(in_shardings=(None, P("data"))).plan(W, array(16, 32))
    x = array(7, 32)
    alike = of(like=plan)
    assert border(alike.plan(W, x))["x"] == ((), ())
    same(alike(W, x), step(W, x))


def test_on_another_mesh_nothing_is_kept():
    plan = of(in_shardings=(None, P("data"))).plan(W, array(16, 32))
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    found = of(mesh=mesh, like=plan).plan(W, array(8, 32))
    assert set(border(found).values()) == {((), ())}


def test_bad_plans_are_refused(tmp_path):
    with pytest.raises(sdy.SdyError, match="like is an int; expected a plan"):
        of(like=3)
    with pytest.raises(sdy.SdyError, match="plan= says all layouts, and like= those to keep"):
        of(like="a", plan="b")
    with pytest.raises(sdy.SdyError, match=r"nowhere.json cannot be read"):
        of(like=tmp_path / "nowhere.json").plan(W, array(8, 32))
    with pytest.raises(sdy.PinnedPlanError, match="the plan that like= gives says no choices"):
        of(like=of().plan(W, array(8, 32)).record()).plan(W, array(8, 32))
