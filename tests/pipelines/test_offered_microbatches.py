"""`microbatches=[...]`: the planner takes the number whose plan fits and takes least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.calls import meshes

STAGES, WIDTH = 4, 8
OFFERED = (2, 4, 8)


def mesh_of(data: int) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[: STAGES * data]).reshape(STAGES, data)
    return jax.sharding.Mesh(devices, ("stage", "data"), axis_types=(AxisType.Auto,) * 2)


MESH, BOTH_AXES = mesh_of(1), mesh_of(2)
"""Numbers are chosen on the first, where planning each takes a quarter of the time."""
W = np.random.default_rng(0).normal(size=(8, WIDTH, WIDTH)).astype(np.float32) / 3
X = np.random.default_rng(1).normal(size=(16, WIDTH)).astype(np.float32)
SLOW = sdy.CostModel(latency=1e4)
"""Each trip costs a latency: the fewest microbatches take least."""
BUSY = sdy.CostModel(flop=1e6)
"""Work alone takes time: stages wait less with more microbatches."""
BOTH = sdy.CostModel(flop=1e6, latency=1e8)
"""Work and each trip take time: neither the fewest microbatches of a step take least, nor the most."""


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def square(x: Any) -> Any:
    return jnp.mean(x**2)


def piped(microbatches: Any = OFFERED, **options: Any) -> Callable[..., Any]:
    return lambda w, x: sdy.pipeline(layer, w, x, microbatches=microbatches, **{"loss": square, **options})


def trained(microbatches: Any = OFFERED, **options: Any) -> Callable[..., Any]:
    return jax.value_and_grad(piped(microbatches, **options))


def of(function: Callable[..., Any], **options: Any) -> Any:
    return sdy.partition(function, **{"mesh": MESH, "in_shardings": (P("stage"), P("data")), **options})


def taken(plan: Any) -> list[int]:
    return [each.microbatches for each in plan.record().pipelines]


def scanned(w: Any, x: Any) -> Any:
    return square(jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0])


def assert_trains(step: Any) -> None:
    for found, wanted in zip(step(W, X), jax.value_and_grad(scanned)(W, X), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.dear(cases=1)
@pytest.mark.more("plans of several numbers each")
@pytest.mark.parametrize(("costs", "best"), [(SLOW, 2), (BOTH, 4)])
def test_the_number_with_the_plan_that_takes_least_is_taken(costs: sdy.CostModel, best: int) -> None:
    alone = {n: of(trained(n), costs=costs).plan(W, X) for n in OFFERED}
    assert min(alone, key=lambda n: alone[n].time.total) == best
    step = of(trained(), costs=costs)
    plan = step.plan(W, X)
    assert plan.mlir() == alone[best].mlir()
    tried = plan.record().tried
    assert [each.microbatches for each in tried] == [(n,) for n in OFFERED]
    assert [(each.time, each.peak) for each in tried] == [(p.time.total, p.memory.peak) for p in alone.values()]
    assert [each.microbatches[0] for each in tried if each.chosen] == taken(plan) == [best]
    assert f"\n  microbatches: {best} takes least of what fits, of 3 that were planned  " in str(plan)
    assert_trains(step)
    with jax.set_mesh(MESH):
        assert_trains(step)
    assert {(*taken(call.plan),) for call in step.plans} == {(best,)}


@pytest.mark.more("a limit of memory beside the time")
def test_a_number_that_does_not_fit_is_not_taken() -> None:
    x = np.tile(X, (16, 1))
    alone = {n: of(trained(n, schedule="gpipe"), costs=SLOW).plan(W, x) for n in OFFERED}
    limit = sorted(each.memory.peak for each in alone.values())[1]
    times = {n: each.time.total for n, each in alone.items() if each.memory.peak <= limit}
    assert 2 not in times and alone[2].time.total < min(times.values())
    plan = of(trained(schedule="gpipe"), costs=SLOW, memory=int(limit), recompute=False).plan(W, x)
    assert taken(plan) == [min(times, key=lambda n: times[n])]
    assert plan.memory.peak <= limit
    with pytest.raises(sdy.errors.MemoryLimitError):
        of(trained(schedule="gpipe"), costs=SLOW, memory=64, recompute=False).plan(W, x)


@pytest.mark.more("ties")
def test_of_equal_plans_the_first_is_taken() -> None:
    plans = [SimpleNamespace(rank=(False, time)) for time in (2.0, 1.0, 1.0)]
    number, plan, compared = meshes.best_of(3, plans.__getitem__, lambda number, plan: plan, lambda *_: None)  # type: ignore
    assert (number, plan, compared) == (1, plans[1], tuple(plans))


@pytest.mark.more("traces that jax keeps")
@pytest.mark.parametrize("wrapped", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
def test_traces_that_jax_keeps_are_not_taken_for_another_number(wrapped: Callable[..., Any]) -> None:
    plan = of(jax.value_and_grad(wrapped(piped([2, 4], schedule="gpipe"))), costs=BOTH).plan(W, X)
    assert {*taken(plan)} == {4}
    assert len({each.time for each in plan.record().tried}) == 2


@pytest.mark.more("other ways to offer the same numbers")
def test_in_any_order_and_of_numpys_numbers() -> None:
    for given in ([8, 2, 4, 2], np.array([4, 8, 2]), range(2, 9)):
        tried = of(piped(given), costs=SLOW).plan(W, X).record().tried
        assert [each.microbatches for each in tried if each.chosen] == [(2,)]
        assert [each.microbatches for each in tried] == [(2,), (4,), (8,)]


@pytest.mark.more("derivatives from outside")
def test_derivatives_of_the_partitioned_function_have_its_number() -> None:
    step = of(piped(), costs=BUSY)
    assert_trains(jax.value_and_grad(step))
    (call,) = step.plans
    assert {n for each in (call, *call.derivatives) for n in taken(each.plan)} == {8}


@pytest.mark.more("several pipelines in one program")
def test_pipelines_of_several_lines_are_tried_in_all_combinations() -> None:
    def both(w: Any, x: Any) -> Any:
        first = sdy.pipeline(layer, w, x, microbatches=[2, 4])
        return sdy.pipeline(layer, w, first, microbatches=[4, 8], loss=square)

    plan = of(both, costs=BUSY).plan(W, X)
    tried = plan.record().tried
    assert [each.microbatches for each in tried] == [(2, 4), (2, 8), (4, 4), (4, 8)]
    (chosen,) = (each for each in tried if each.chosen)
    assert chosen.time == min(each.time for each in tried if each.time is not None)
    assert chosen.microbatches == tuple(taken(plan)) == (4, 8)
    assert len({*chosen.lines}) == 2


@pytest.mark.more("auxiliary results")
def test_shapes_of_auxiliary_results_are_those_of_the_number_taken() -> None:
    with_aux = lambda w, x: (layer(w, x), jnp.sum(x))  # noqa: E731
    step = of(lambda w, x: sdy.pipeline(with_aux, w, x, microbatches=[4, 2], has_aux=True), costs=BUSY)
    assert step.eval_shape(W, X)[1].shape == step(W, X)[1].shape == (STAGES * 2, 4)


@pytest.mark.more("pinned plans of such pipelines")
def test_a_pinned_plan_has_its_number(tmp_path: Any) -> None:
    file = tmp_path / "step.plan.json"
    plan = of(piped(), costs=BUSY).plan(W, X)
    plan.save(file)
    assert taken(plan) == [8]
    assert of(piped(), plan=file).plan(W, X).mlir() == plan.mlir()


@pytest.mark.more("lists of meshes")
def test_of_several_meshes_each_has_its_number() -> None:
    """The mesh and the number that take least are taken together; `tried` is of that mesh."""
    devices = BOTH_AXES.devices.reshape(2, STAGES)
    other = jax.sharding.Mesh(devices, BOTH_AXES.axis_names, axis_types=BOTH_AXES.axis_types)
    step = of(trained([2, 4]), mesh=[BOTH_AXES, other], in_shardings=(P("stage"), sdy.AUTO), costs=BUSY)
    plan = step.plan(W, X)
    tried = {each.microbatches: each for each in plan.record().tried}
    (chosen,) = (each for each in tried.values() if each.chosen)
    assert chosen.time == min(each.time.total for each in plan.meshes) == min(each.time for each in tried.values())
    assert chosen.microbatches == (4,) == tuple(taken(plan))
    assert [axis.size for axis in plan.program.mesh.axes] == [STAGES, 2]
    assert_trains(step)


@pytest.mark.more("verify, a process of its own")
def test_verify_compares_the_program_with_the_number_taken() -> None:
    found = sdy.verify(
        of(trained([2, 8]), mesh=BOTH_AXES, costs=BUSY), W, X, targets=["cpu"], derivatives=False, uneven=False
    )
    assert found, str(found)
    assert "stage=4, data=2" in str(found)


@pytest.mark.more("vmap")
def test_vmap_of_such_pipelines() -> None:
    """Inside of the partitioned function, whose number is the best for all of it, and of one that has its own."""
    xs = np.stack([X, 2 * X])
    wanted = jax.vmap(jax.value_and_grad(scanned), (None, 0))(W, xs)
    inside = of(jax.vmap(trained([2, 8]), (None, 0)), mesh=BOTH_AXES, in_shardings=(P("stage"), P()), costs=BOTH)
    outside = of(trained([2, 8]), mesh=BOTH_AXES, costs=BOTH)
    for run in (inside, jax.vmap(outside, (None, 0))):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), run(W, xs), wanted)
    assert [taken(step.plans[0].plan) for step in (inside, outside)] == [[8], [2]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([2, 3], "does not divide into 3 microbatches; to fix: microbatches=2 or 4"),
        ([], r"microbatches is \[\], which is empty"),
        (range(9, 15), r"range\(9, 15\), which has no divisor of the batch of 16 in `x`"),
        ([2, 4.0], "microbatches is 4.0; expected a positive integer"),
        ("48", "microbatches is '48'; expected a positive integer"),
    ],
)
def test_what_is_offered_has_to_divide_the_batch(given: Any, message: str) -> None:
    with pytest.raises(sdy.errors.ArgumentError, match=message):
        of(trained(given)).plan(W, X)


def test_where_nothing_is_planned_one_number_is_asked_for() -> None:
    message = r"microbatches is \(2, 4, 8\).*to fix: sdy.partition around the function, or microbatches=8"
    with jax.set_mesh(MESH), pytest.raises(sdy.errors.ArgumentError, match=message):
        jax.jit(trained())(W, X)
    only: Sequence[int] = [4]
    with jax.set_mesh(MESH):
        assert_trains(jax.jit(trained(only)))


@pytest.mark.more("a mesh that only the pipeline names")
def test_the_mesh_may_be_that_of_the_pipeline() -> None:
    step = of(piped(mesh=MESH), mesh=None, in_shardings=None, costs=BUSY)
    assert taken(step.plan(W, X)) == [8]
