"""What plans say of pipelines: bytes, waiting, what stages hold, the timeline, time over a slow axis."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.annotate.pipeline_schedules import SCHEDULES, Kind, Mark, mark_in, pipeline_schedule
from sdy_jax.plan.record.program import RecordedPipeline

WIDTH = 8
WEIGHTS = {"w": jax.ShapeDtypeStruct((8, WIDTH, WIDTH), jnp.float32)}
X = jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)


def mesh_of(**sizes: int) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[: int(np.prod([*sizes.values()]))]).reshape(*sizes.values())
    return jax.sharding.Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


MESH = mesh_of(stage=4, data=2)


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w["w"])


def trained(**options: Any) -> Callable[..., Any]:
    options = {"microbatches": 4, "loss": lambda y: jnp.mean(y**2), **options}
    return jax.value_and_grad(lambda w, x: sdy.pipeline(layer, w, x, **options))


def plan_of(function: Callable[..., Any], x: Any = X, mesh: jax.sharding.Mesh = MESH, **options: Any) -> Any:
    return sdy.partition(function, mesh=mesh, in_shardings=(P("stage"), P("data")), **options).plan(WEIGHTS, x)


def pipelines_in(plan: Any) -> tuple[RecordedPipeline, ...]:
    return plan.record().pipelines  # type: ignore[no-any-return]


@pytest.mark.dear(cases=2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_training_step_is_one_run_of_all_rows(schedule: str) -> None:
    plan = plan_of(trained(schedule=schedule))
    (found,) = pipelines_in(plan)
    rounds = 2 if schedule == "interleaved" else 1
    table = pipeline_schedule(schedule, 4, 4, rounds)
    assert (found.schedule, found.axis, found.layers, found.rounds) == (schedule, "stage", 8, rounds)
    assert found.trips == len(table.trips)
    assert found.held == table.held()
    cells = [(row.trip, row.kind, list(zip(row.microbatches, row.rounds, strict=True))) for row in found.rows]
    wanted = [
        (trip, row.kind, [(-1, 0) if cell is None else (cell.microbatch, cell.round) for cell in row.cells])
        for trip, rows in enumerate(table.trips)
        for row in rows
    ]
    assert cells == wanted
    assert found.sent == 2 * 4 * rounds * found.forward_bytes
    assert found.forward_bytes == found.backward_bytes == 16 // 4 // 2 * WIDTH * 4
    assert found.stacks == 8 // 4 * WIDTH * WIDTH * 4
    assert "pipeline" not in " ".join(plan.record().value_of)


@pytest.mark.more("turns that run; their loops are in test_schedules.py")
def test_turns_of_rounds_send_what_is_taken() -> None:
    """A loop around loops; from the last stage to the first one what another round is for."""
    mesh, w, x = mesh_of(stage=2, data=2), np.full((8, WIDTH, WIDTH), 0.1, np.float32), np.eye(12, WIDTH)
    run = trained(schedule="interleaved", microbatches=6)
    step = sdy.partition(run, mesh=mesh, in_shardings=(P("stage"), P("data")))
    plan = step.plan({"w": w}, x)
    (found,) = pipelines_in(plan)
    assert found.sent == 2 * 6 * (2 + 1) * found.forward_bytes
    sends = [each for each in plan.collectives if each.kind == "collective_permute" and each.origin == "user"]
    assert [len(sends), sum(each.times for each in sends)] == [14, 2 * 6 * 2]
    assert min(found.durations) > 0

    def plain(w: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0] ** 2)

    wanted = jax.value_and_grad(plain)({"w": w}, x)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), step({"w": w}, x), wanted)


def of_cast_weights(**options: Any) -> Any:
    """The plan of a step whose layers cast their weights, for TPUs."""
    mesh, weights = mesh_of(stage=2, data=4), {"w": jax.ShapeDtypeStruct((4, 512, 512), jnp.float32)}
    cast = lambda w, x: jnp.tanh(x @ w["w"].astype(x.dtype))  # noqa: E731
    loss = lambda y: jnp.mean(y.astype(jnp.float32) ** 2)  # noqa: E731
    run = lambda w, x: sdy.pipeline(cast, w, x, microbatches=8, loss=loss)  # noqa: E731
    costs, places = sdy.CostModel.of_machine("tpu v5e", mesh.axis_names), (P("stage"), P("data"))
    step = sdy.partition(jax.value_and_grad(run), mesh=mesh, in_shardings=places, costs=costs, **options)
    return step.plan(weights, jax.ShapeDtypeStruct((256, 512), jnp.bfloat16))


def reductions(plan: Any) -> int:
    """How often gradients of a weight are reduced."""
    kinds = "all_reduce", "reduce_scatter"
    return max(each.times for each in plan.collectives if each.kind in kinds and each.total_wire_bytes > 512**2)


@pytest.mark.more("what gradients cost")
def test_gradients_are_summed_before_they_are_reduced() -> None:
    """Those of weights that layers cast, too."""
    assert reductions(of_cast_weights()) == 1


@pytest.mark.slow
def test_what_a_microbatch_makes_is_scattered_where_sums_do_not_fit() -> None:
    limit = int(0.9 * of_cast_weights().memory.peak)
    plan = of_cast_weights(memory=limit)
    assert reductions(plan) == 14 and plan.memory.peak <= limit


@pytest.mark.more("the plan of stages, line by line")
def test_stages_have_their_layers() -> None:
    (found,) = pipelines_in(plan_of(trained(schedule="interleaved")))
    assert found.groups == ("0, 4", "1, 5", "2, 6", "3, 7")
    (found,) = pipelines_in(plan_of(trained()))
    assert found.groups == ("0-1", "2-3", "4-5", "6-7")
    three = Mark.of("1f1b", "stage", pipeline_schedule("1f1b", 4, 4), 3, [Kind.FORWARD])
    assert mark_in(f"jit(f)/jvp({three.scope})/jit(body)/while") == three


@pytest.mark.more("passes that run apart")
def test_passes_apart_are_runs_of_their_own() -> None:
    """gpipe without a loss keeps all microbatches for its backward pass; others run the forward rows once more."""
    for schedule, kinds in {"gpipe": ("backward",), "1f1b": ("forward", "backward")}.items():
        run = partial(sdy.pipeline, layer, microbatches=4, schedule=schedule)
        first, second = pipelines_in(plan_of(jax.grad(lambda w, x, run=run: jnp.sum(run(w, x) ** 2))))
        assert first.kinds == ("forward",)
        assert first.held == ()
        assert second.kinds == kinds
        assert max(second.held) == 4


@pytest.mark.more("a loop around a pipeline")
def test_a_pipeline_in_a_loop_counts_once_per_trip() -> None:
    step = trained()
    many = lambda w, xs: jax.lax.map(lambda x: step(w, x), xs)  # noqa: E731
    xs = jax.ShapeDtypeStruct((3, 16, WIDTH), jnp.float32)
    plan = sdy.partition(many, mesh=MESH, in_shardings=(P("stage"), P(None, "data"))).plan(WEIGHTS, xs)
    (found,), (alone,) = pipelines_in(plan), pipelines_in(plan_of(step))
    assert (found.times, found.sent) == (3, alone.sent)


@pytest.mark.more("the page")
def test_the_page_has_a_line_per_stage() -> None:
    page = str(plan_of(trained(microbatches=8)))
    assert "1f1b over 'stage': 8 layers on 4 stages, 8 microbatches, 14 trips, bubble 27%" in page
    assert "7 microbatches on stage 0 of 4: in every trip all stages run a forward and a backward row" in page
    assert "a boundary  32 B on and 32 B back per microbatch, 512 B in all trips" in page
    assert "stage 0  layers 0-1  holds 7 microbatches at most" in page
    assert "stage 3  layers 6-7  holds 1 microbatch at most" in page


@pytest.mark.more("tables and files")
def test_tables_and_files_have_it(tmp_path: Any) -> None:
    plan = plan_of(trained())
    rows = list(plan.table("pipelines"))
    assert [(row.stage, row.layers, row.microbatches) for row in rows][:2] == [("0", "0-1", "4"), ("1", "2-3", "4")]
    plan.save(tmp_path / "plan.json")
    again = sdy.load_plan(tmp_path / "plan.json")
    assert again.pipelines == pipelines_in(plan)
    assert str(again.table("pipelines")) == str(plan.table("pipelines"))


def test_shard_maps_in_layers_are_none() -> None:
    def inner(w: Any, x: Any) -> Any:
        return layer(w, jax.shard_map(lambda x: 2 * x, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})(x))

    plan = plan_of(lambda w, x: sdy.pipeline(inner, w, x, microbatches=4))
    assert len(pipelines_in(plan)) == 1


def test_a_plan_from_the_cache_is_of_the_schedule_of_now(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward rows alone are one program by all schedules."""
    monkeypatch.setenv("SDY_JAX_CACHE_DIR", str(tmp_path))
    for schedule in ("gpipe", "1f1b"):
        run = partial(sdy.pipeline, layer, microbatches=4, schedule=schedule)
        (found,) = pipelines_in(plan_of(lambda w, x, run=run: run(w, x)))
        assert found.schedule == schedule
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


SLOW = 6.25e9
"""Bytes per second of a network between slices."""


def time_of(microbatches: int, schedule: str = "1f1b") -> Any:
    w = {"w": jax.ShapeDtypeStruct((4, 512, 512), jnp.bfloat16)}
    x = jax.ShapeDtypeStruct((microbatches * 512, 512), jnp.bfloat16)
    costs = sdy.CostModel.of_machine("tpu v5e", ["stage", "data"], {"stage": SLOW})
    step = trained(microbatches=microbatches, schedule=schedule)
    shardings = {"in_shardings": (P("stage"), P("data")), "out_shardings": (P(), P("stage"))}
    return sdy.partition(step, mesh=mesh_of(stage=2, data=4), costs=costs, **shardings).plan(w, x)


@pytest.mark.more("times of a plan")
def test_time_counts_trips_and_the_rates_of_the_slow_axis() -> None:
    """A trip more for each microbatch more; permutes at the rate of the axis that they run over, beside the work."""
    plans = {count: time_of(count) for count in (4, 8, 12)}
    first, second, third = (plan.time.compute for plan in plans.values())
    np.testing.assert_allclose(third - second, second - first, rtol=0.05)
    plan = plans[8]
    permutes = [each for each in plan.collectives if each.kind == "collective_permute"]
    assert sum(each.times for each in permutes) == 2 * 8
    (found,) = pipelines_in(plan)
    once = permutes[0].sending_time(plan.costs, plan.program.mesh)
    assert once > found.forward_bytes / SLOW
    assert plan.time.hidden > 0.5 * 2 * 8 * min(once, *found.durations)


@pytest.mark.more("durations of rows; that time counts trips says the test before")
def test_durations_of_rows_are_by_the_cost_model() -> None:
    """Backward rows take twice the time of forward rows, in two halves where gradients of weights are apart."""
    (whole,), (apart,) = pipelines_in(time_of(8)), pipelines_in(time_of(8, "zero_bubble"))
    forward, backward = whole.durations
    assert 1.9 * forward < backward
    assert apart.durations[0] == pytest.approx(forward)
    assert apart.bubble < whole.bubble == pytest.approx(1 / 9)
