"""`mesh=[...]`: several meshes of the same devices, of which the planner takes the one with the best plan."""

import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE

import sdy_jax as sdy
from sdy_jax.calls import planned_function
from sdy_jax.lowering.planner import plan_program as blocking
from sdy_jax.plan.estimates import ComparedMesh, EstimatedTime

MESHES = [LINE, PLANE]


def loss(weights, x, y):
    for layer in weights:
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    return jnp.mean((x - y) ** 2)


def step(weights, x, y):
    value, gradients = jax.value_and_grad(loss)(weights, x, y)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def arguments(batch, width=32):
    rng = np.random.default_rng(batch)
    shapes = {"up": (width, 4 * width), "down": (4 * width, width)}
    weights = [{k: rng.normal(size=v).astype(np.float32) / 8 for k, v in shapes.items()} for _ in range(2)]
    return weights, *(rng.normal(size=(batch, width)).astype(np.float32) for _ in range(2))


def automatic(fun=step, mesh=MESHES, **options):
    chosen = {"in_shardings": sdy.AUTO, "out_shardings": sdy.AUTO, "on_unknown": "ignore"} | options
    return sdy.partition(fun, mesh=mesh, **chosen)


def assert_close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def used_mesh(results):
    return jax.tree.leaves(results)[0].sharding.mesh


@pytest.mark.dear
@pytest.mark.parametrize("batch", [8, 256])
def test_the_mesh_with_the_plan_that_takes_least_is_used(batch):
    args = arguments(batch)
    auto, alone = automatic(), [automatic(mesh=mesh).plan(*args) for mesh in MESHES]
    plan = auto.plan(*args)
    times = [each.time.total for each in alone]
    assert [each.time.total for each in plan.meshes] == times
    assert [each.wire_bytes for each in plan.meshes] == [each.wire_bytes for each in alone]
    assert [each.peak for each in plan.meshes] == [each.memory.peak for each in alone]
    best = times.index(min(times))
    assert plan.mlir() == alone[best].mlir()
    results = auto(*args)
    assert used_mesh(results) == MESHES[best]
    assert_close(results, step(*args))
    assert len(auto.plans) == 1


@pytest.mark.more("calls of several kinds")
def test_each_kind_of_call_has_its_mesh(monkeypatch):
    """Also where arrays lie as those of another call do."""
    small, large = arguments(8), arguments(16)
    lines = {8: 0, 16: 1}
    best_plan = planned_function.best_plan

    def forced(meshes, planned):
        number, plan = best_plan(meshes, planned)
        wanted = lines[plan.program.in_info[-1].shape[0]]
        return (number, plan) if number == wanted else (wanted, planned(wanted))

    monkeypatch.setattr(planned_function, "best_plan", forced)
    auto = automatic()
    for args in (small, large, small, large):
        results = auto(*args)
        assert used_mesh(results) == MESHES[lines[len(args[1])]]
        assert_close(results, step(*args))


@pytest.mark.more("ties between meshes")
def test_of_equal_meshes_the_first_is_used():
    other = jax.sharding.Mesh(LINE.devices, ("z",))
    args = arguments(64)
    assert automatic(mesh=[other, LINE]).plan(*args).program.mesh.axis_names == ("z",)
    assert automatic(mesh=[LINE, other]).plan(*args).program.mesh.axis_names == LINE.axis_names


@pytest.mark.more("limits of memory between meshes")
def test_a_mesh_on_which_a_plan_fits_is_used(monkeypatch):
    monkeypatch.setattr(blocking, "_in_parts", lambda *_: ())  # in parts, the step fits on both
    args = arguments(128)
    plan = automatic(memory="63KiB", recompute=False).plan(*args)
    assert plan.program.mesh.axis_names == ("x", "y") and plan.memory.peak <= 63 * 1024
    line, plane = plan.meshes
    assert line.time is None and not line.fits and line.peak > 63 * 1024
    assert plane.fits
    assert "no plan fits" in str(plan)


def test_what_fits_comes_first_then_what_takes_least_then_what_holds_least():
    def compared(time, peak, fits):
        return ComparedMesh(sdy.Mesh.of(x=8), time and EstimatedTime(time, 0.0, "seconds"), 0.0, peak, fits)

    found = [compared(0.5, 11, False), compared(2.0, 3, True), compared(None, 10, False), compared(1.0, 9, True)]
    assert [each.peak for each in sorted(found, key=lambda each: each.rank)] == [9, 3, 10, 11]


@pytest.mark.more("a limit of memory")
def test_where_nothing_fits_the_error_is_that_of_the_least():
    args = arguments(16)
    with pytest.raises(sdy.MemoryLimitError, match="memory=1000 B is not enough") as refused:
        automatic(memory=1000).plan(*args)
    alone = []
    for mesh in MESHES:
        with pytest.raises(sdy.MemoryLimitError) as one:
            automatic(mesh=mesh, memory=1000).plan(*args)
        alone.append(one.value.least)
    assert refused.value.least == min(alone)


@pytest.mark.more("figures of all meshes")
def test_the_plan_says_what_all_meshes_take(tmp_path):
    args = arguments(64)
    plan = automatic().plan(*args)
    best, other = sorted(plan.meshes, key=lambda each: each.rank)
    section = str(plan).partition("\nmeshes\n")[2].partition("\n\n")[0].splitlines()
    assert len(section) == 2
    chosen = str(plan.record().mesh)
    for line in section:
        is_chosen = line.strip().startswith(f"{chosen} ")
        assert line.rstrip().endswith("chosen" if is_chosen else f"{other.time.total / best.time.total:.2f} of that")
    rows = list(plan.table("meshes"))
    assert [row.mesh for row in rows] == ["x=8", "x=2, y=4"]
    assert [row.bytes for row in rows] == [each.wire_bytes for each in plan.meshes]
    plan.save(tmp_path / "step.json")
    assert sdy.load_plan(tmp_path / "step.json").meshes == plan.record().meshes
    assert "meshes" not in str(automatic(mesh=[LINE]).plan(*args)).splitlines()


def test_derivatives_and_outer_functions():
    args = arguments(64)
    auto = automatic(loss, out_shardings=None)
    assert_close(jax.grad(auto)(*args), jax.grad(loss)(*args))
    used = auto.plan(*args).program.mesh.axis_names
    for mesh in MESHES:
        outer = sdy.partition(lambda *args: auto(*args) + 1, mesh=mesh, on_unknown="ignore")
        assert_close(outer(*args), loss(*args) + 1)
    assert auto.plan(*args).program.mesh.axis_names == used
    other = jax.make_mesh((4, 2), ("x", "y"))
    with pytest.raises(sdy.ShardingError, match=r'on the mesh <\["x"=8\]> or <\["x"=2, "y"=4\]>'):
        sdy.partition(lambda *args: auto(*args) + 1, mesh=other).plan(*args)


@pytest.mark.more("results as arguments")
def test_results_go_in_again_on_another_mesh():
    weights, x, y = arguments(64)
    placed = jax.device_put(weights, NamedSharding(PLANE, P("x")))
    auto = automatic()
    assert_close(auto(placed, x, y), step(weights, x, y))


@pytest.mark.more("axes that not all meshes have")
def test_stated_axes_are_those_of_all_meshes():
    args = arguments(64)
    stated = automatic(in_shardings=(sdy.AUTO, P("x"), P("x")))
    plan = stated.plan(*args)
    assert plan.input_specs[0][1] == P("x")
    assert_close(stated(*args), step(*args))
    with pytest.raises(
        sdy.ShardingError, match=r'on mesh\[0\], <\["x"=8\]>: in_shardings for `x`.*axis \'y\'.*all meshes'
    ):
        automatic(in_shardings=(sdy.AUTO, P("y"), P())).plan(*args)


def test_constraints_inside_name_the_mesh_that_lacks_their_axis():
    auto = automatic(lambda x: jax.lax.with_sharding_constraint(x, P("y")))
    with pytest.raises(ValueError, match="y") as refused:
        auto.plan(jnp.ones(8))
    assert any('mesh[0], <["x"=8]>' in note for note in refused.value.__notes__)


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        (MESHES, {"in_shardings": P("x"), "out_shardings": None}, r"2 meshes.*in_shardings=AUTO"),
        ([], {}, r"mesh=\[\] has no mesh"),
        ([LINE, AbstractMesh((2, 2), ("x", "y"))], {}, r"mesh\[1\].*other devices than mesh\[0\]"),
        ([LINE, 3], {}, "int 3"),
        (MESHES, {"costs": sdy.CostModel(bandwidth={"x": 1e9})}, r"no bandwidth for the axis 'y' of mesh\[1\]"),
    ],
)
def test_what_cannot_be_chosen_among_is_refused(mesh, options, message):
    with pytest.raises(sdy.ShardingError, match=message):
        automatic(mesh=mesh, **options)


def test_loaded_programs_have_one_mesh():
    program = sdy.load(b"func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> { return %x : tensor<8xf32> }")
    with pytest.raises(sdy.ShardingError, match="main is a loaded program, which is partitioned on one mesh"):
        sdy.partition(program, mesh=MESHES, in_shardings=sdy.AUTO)


@pytest.mark.more("abstract meshes")
def test_meshes_without_devices_take_those_of_arguments():
    args = arguments(64)
    auto = automatic(mesh=[AbstractMesh((8,), ("x",)), AbstractMesh((2, 4), ("x", "y"))])
    assert auto.plan(*args).meshes == automatic().plan(*args).meshes
    placed = jax.device_put(args, NamedSharding(LINE, P()))
    results = auto(*placed)
    assert used_mesh(results).devices.size == 8
    assert_close(results, step(*args))


@pytest.mark.more("pickling")
def test_a_function_of_several_meshes_is_pickled():
    again = pickle.loads(pickle.dumps(automatic()))
    args = arguments(64)
    assert again.plan(*args).meshes == automatic().plan(*args).meshes


@pytest.mark.more("what is freed")
def test_only_one_plan_is_kept(monkeypatch):
    """Of three meshes, when the third one is planned, the best of the first two is there, and no other."""
    made, plans, kept = planned_function.PlannedFunction._made, [], []

    def remembered(self, arguments):
        kept.append(sum(plan() is not None for plan in plans))
        plan = made(self, arguments)
        plans.append(weakref.ref(plan))
        return plan

    monkeypatch.setattr(planned_function.PlannedFunction, "_made", remembered)
    plan = automatic(mesh=[*MESHES, jax.make_mesh((4, 2), ("x", "y"))]).plan(*arguments(24))
    assert kept == [0, 1, 1] and len(plan.meshes) == 3
