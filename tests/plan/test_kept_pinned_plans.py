"""Plans that are pinned are found in the cache by the bytes of their files; what is found is what was checked."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from kept_plans import MESH, W, X, noted_searches, partitioned, same

import sdy_jax as sdy
from sdy_jax.calls import planned_call
from sdy_jax.calls.options import Options
from sdy_jax.plan import build
from sdy_jax.plan.record.files import SavedPlan

V5E = sdy.CostModel.of_machine("tpu v5e", MESH.axis_names)


def step(w, x):
    slopes = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2))(w)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, slopes)


def of(fun=step, **options):
    return partitioned(fun, **options)


@pytest.fixture
def file(tmp_path, folder):
    """Of a plan by other costs than those that functions have here."""
    path = tmp_path / "step.plan.json"
    of(costs=V5E).plan(W, X).save(path)
    return path


@pytest.fixture
def work(monkeypatch):
    """What is done: "read" and "followed" for a file, "emitted" for a program."""
    done = []

    def noted(owner, name, what):
        before = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: done.append(what) or before(*args))

    noted(SavedPlan, "__init__", "read")
    noted(build._Making, "followed", "followed")
    noted(planned_call, "local_function", "emitted")
    return done


def test_a_pinned_plan_starts_from_what_is_kept(file, work, monkeypatch):
    searches = noted_searches(monkeypatch)
    runs = [of(plan=file) for _ in range(2)]
    results = [runs[0](W, X)]
    assert work == ["read", "followed", "emitted"]
    results.append(runs[1](W, X))
    assert work == ["read", "followed", "emitted"] and not searches
    made, found = (run.plan(W, X) for run in runs)
    assert found.mlir() == made.mlir() == of(costs=V5E).plan(W, X).mlir() != of().plan(W, X).mlir()
    assert found.planned_with.costs == made.planned_with.costs == V5E
    assert found.record(choices=True) == made.record(choices=True)
    assert not found.diff(sdy.load_plan(file))
    same(results[0], results[1])
    same(results[1], jax.jit(step)(W, X))


def test_layouts_that_were_left_to_the_planner_are_found(tmp_path, folder, work):
    plan = of(in_shardings=sdy.AUTO).plan(W, X)
    plan.save(tmp_path / "auto.json")
    found = [of(in_shardings=sdy.AUTO, plan=tmp_path / "auto.json").plan(W, X) for _ in range(2)]
    assert work.count("followed") == 1
    assert found[0].mlir() == found[1].mlir() == plan.mlir() and found[1].automatic == found[0].automatic is not None


def test_a_file_that_was_changed_is_another_one(file, work):
    of(plan=file).plan(W, X)
    text = file.read_text()
    file.write_text(text.replace('"model"', '"data"', 1))
    with pytest.raises(sdy.PinnedPlanError, match="was edited, or damaged"):
        of(plan=file).plan(W, X)
    of().plan(W, X).save(file)
    assert of(plan=file).plan(W, X).mlir() == of().plan(W, X).mlir()
    file.write_text(text)
    work.clear()
    assert of(plan=file).plan(W, X).mlir() == of(costs=V5E).plan(W, X).mlir() and not work


def test_what_is_refused_is_refused_beside_what_is_kept(file):
    of(plan=file).plan(W, X)
    with pytest.raises(sdy.PinnedPlanError, match="is not the plan of step any more"):
        of(plan=file).plan(W, X[:8])
    with pytest.raises(sdy.PinnedPlanError, match="the function says uneven='error'"):
        of(plan=file, uneven="error").plan(W, X)
    with pytest.raises(sdy.PinnedPlanError, match=r"and memory= allows 1\.0 KiB"):
        of(plan=file, memory=1024).plan(W, X)
    turned = jax.make_mesh((4, 2), MESH.axis_names, axis_types=MESH.axis_types)
    with pytest.raises(sdy.PinnedPlanError, match="is a plan on the mesh"):
        of(plan=file, mesh=turned).plan(W, X)


def test_what_is_planned_anew_is_not_taken_for_what_is_pinned(file, work):
    for _ in range(2):
        with pytest.warns(UserWarning, match="was made anew"):
            of(plan=file, on_change="replan").plan(W, X[:8])
        with pytest.raises(sdy.PinnedPlanError, match="is not the plan of step any more"):
            of(plan=file).plan(W, X[:8])


def test_a_warning_is_given_again(file, monkeypatch):
    target = Options.target
    monkeypatch.setattr(Options, "target", lambda *args: replace(target(*args), memory=4096))
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"on each device, which have 4\.0 KiB"):
            of(plan=file).plan(W, X)
