"""Plans beside what their programs do: `plan.analyze`."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE

import sdy_jax as sdy
from sdy_jax.errors import SdyError
from sdy_jax.plan.profile import _last_call, instructions, module_name, scopes

X, W = jnp.ones((64, 32)), jnp.ones((32, 64))


def layer(x, w):
    h = jnp.tanh(x @ w)
    return jnp.sum(h * h)


SPECS = (P("x", "y"), P("y"))


@pytest.fixture(scope="module")
def analyzed():
    step = sdy.partition(layer, mesh=PLANE, in_shardings=SPECS)
    plan = step.plan(X, W)
    return plan, plan.analyze(X, W)


def test_each_collective_of_the_plan_is_measured(analyzed):
    plan, found = analyzed
    assert sum(row.planned for row in found.collectives) == sum(r.times for r in plan.collectives if r.wire_bytes)
    assert sum(row.wire_bytes for row in found.collectives) == plan.wire_bytes
    assert all(row.measured > 0 for row in found.collectives)
    assert found.seconds > 0


def test_estimates_of_bytes_are_shares_of_what_was_measured(analyzed):
    _, found = analyzed
    estimated = sum(map(found.estimated_seconds, found.collectives))
    assert estimated == pytest.approx(sum(row.measured for row in found.collectives))


def test_memory_is_what_the_compiler_says(analyzed):
    plan, found = analyzed
    assert found.memory.arguments == plan.memory.arguments
    assert found.memory.results == plan.memory.results


def test_the_text_says_both(analyzed):
    plan, found = analyzed
    text = str(found)
    assert text.startswith(plan.headline)
    assert "a call" in text
    assert str(plan.time) in text
    assert all(row.name in text for row in found.collectives)


def test_a_call_over_time_is_in_the_record_from_then_on(analyzed, tmp_path):
    plan, found = analyzed
    run = plan.record().run
    assert run is found.run and run.seconds == found.seconds and run.device == plan.device_kind
    assert run.slices == tuple(sorted(run.slices, key=lambda each: each.start)) and run.slices[0].start >= 0
    assert {each.lane for each in run.slices if each.collective is None} == {0}
    for each in run.slices:
        if each.collective is not None:
            axes = {axis.name for axis in plan.collectives[each.collective].axes}
            assert set(run.lanes[each.lane].axes) == axes
    sent = {each.collective for each in run.slices if each.collective is not None}
    assert sent == {n for n, record in enumerate(plan.collectives) if record.wire_bytes}
    plan.save(tmp_path / "plan.json")
    read = sdy.load_plan(tmp_path / "plan.json")
    assert read.run == run and read == plan.record()
    another = sdy.partition(layer, mesh=PLANE, in_shardings=SPECS).plan(X, W)
    assert another.record().run is None


def test_of_three_profiled_calls_the_last_one_is_kept_with_all_trips_of_loops():
    def events(call):
        return [("a.1", 1, 10.0 * call, 1.0), *[("b.2", 1, 10.0 * call + 2 + trip, 0.5) for trip in range(4)]]

    found = _last_call([event for call in range(3) for event in (*events(call), ("a.1", 2, 10.0 * call, 9.0))])
    assert found == [("a.1", 0.0, 1.0), *[("b.2", 2.0 + trip, 0.5) for trip in range(4)]]


def test_each_scope_of_the_model_is_measured():
    def model(w, x):
        for number in range(2):
            with jax.named_scope(f"layer_{number}"):
                x = jnp.tanh(x @ w) @ w.T
        return jnp.sum(x * x)

    def step(w, x):
        slope = jax.grad(model)(w, x)
        with jax.named_scope("optimizer"):
            return w - 0.1 * slope

    train = sdy.partition(step, mesh=PLANE, in_shardings=(P(None, "y"), P("x")), out_shardings=P(None, "y"))
    found = train.plan(W, X).analyze(W, X)
    scopes = {scope.name: scope for scope in found.scopes}
    assert {"layer_0", "layer_1", "optimizer"} <= scopes.keys()
    assert all(0 < scopes[name].backward < scopes[name].seconds for name in ("layer_0", "layer_1"))
    assert 0 < scopes["layer_0"].sending < scopes["layer_0"].seconds
    assert "optimizer" in str(found)


def test_a_model_of_bytes_is_compared_with_no_times(analyzed):
    """It says of no collective how long it takes to start, which is all that one of seven bytes takes."""
    _, found = analyzed
    small = [dataclasses.replace(row, measured=1.0, estimated=1e-6) for row in found.collectives]
    changed = dataclasses.replace(found, collectives=tuple(small))
    assert changed.warnings == () and {changed.off(row) for row in changed.collectives} == {None}
    assert "the cost model counts bytes" in str(changed)


def test_warnings_name_what_is_off_by_more_than_twice_by_a_model_of_time():
    costs = sdy.CostModel.of_machine("h100", PLANE.axis_names)
    plan = sdy.partition(layer, mesh=PLANE, in_shardings=SPECS, costs=costs).plan(X, W)
    found = plan.analyze(X, W)
    assert found.scale == 1.0 and "counts bytes" not in str(found)
    first, *others = found.collectives
    slow = dataclasses.replace(first, measured=1.0, estimated=1e-3)
    changed = dataclasses.replace(
        found, collectives=(slow, *(dataclasses.replace(row, measured=1.0, estimated=1.0) for row in others))
    )
    (warning,) = changed.warnings
    assert warning.startswith(first.name) and "1,000 times what the cost model says" in warning


def test_loops_count_each_trip_and_donated_arguments_live_on():
    def loop(state, w):
        def body(c, _):
            return jnp.tanh(c @ w @ w.T), None

        return jax.lax.scan(body, state, None, length=3)[0]

    step = sdy.partition(
        loop, mesh=LINE, in_shardings=(P(), P(None, "x")), out_shardings=P(), donate_argnums=0, layouts="local"
    )
    state = jax.device_put(X, jax.sharding.NamedSharding(LINE, P()))
    found = step.plan(state, W).analyze(state, W)
    assert max(row.planned for row in found.collectives) == 3
    assert all(row.measured for row in found.collectives)
    assert not state.is_deleted()
    assert found.memory.results == 0  # they lie in the donated argument


def test_keyword_and_static_arguments():
    step = sdy.partition(lambda x, *, w, n: layer(x, w) * n, mesh=PLANE, static_argnames="n")
    found = step.plan(X, w=W, n=2).analyze(X, w=W, n=2)
    np.testing.assert_allclose(step(X, w=W, n=2), 2 * layer(X, W), rtol=1e-5)
    assert found.collectives == ()


def test_other_arguments_than_the_plans():
    step = sdy.partition(layer, mesh=PLANE, in_shardings=SPECS)
    own = step.plan(X, W)
    with pytest.raises(SdyError, match=r"`x` is f32\[128@x,32@y\] here and f32\[64@x,32@y\] in the plan"):
        own.analyze(jnp.ones((128, 32)), W)


def test_the_function_is_gone():
    plan = sdy.partition(layer, mesh=PLANE, in_shardings=SPECS).plan(X, W)
    gc.collect()
    with pytest.raises(SdyError, match="the function of layer is gone"):
        plan.analyze(X, W)


def test_a_profiler_that_runs_already(tmp_path):
    step = sdy.partition(layer, mesh=PLANE, in_shardings=SPECS)
    with jax.profiler.trace(tmp_path), pytest.raises(SdyError, match="profiler cannot be started"):
        step.plan(X, W).analyze(X, W)


def test_a_plan_without_devices():
    mesh = jax.sharding.AbstractMesh((8,), ("x",))
    step = sdy.partition(layer, mesh=mesh, in_shardings=P("x"))
    with pytest.raises(SdyError, match="devices"):
        step.plan(X, W).analyze(X, W)


def test_instructions_by_the_scopes_of_the_model():
    text = "\n".join(
        f'  %{name} = (f32[8]{{0:T(8)}}, f32[]) {kind}(%p), metadata={{op_name="jit(f)/{scope}" stack_frame_id=3}}'
        for name, kind, scope in (
            ("a", "fusion", "jvp(layer_0)/mlp/mul;jvp(layer_1)/mul"),
            ("b", "while", "jvp(layer_0)/while"),
            ("c", "all-reduce", "transpose(jvp(layer_0))/bucket_0_sdy.all_reduce[x] a.py:1/psum"),
            ("d", "all-reduce", "layer_1/(sdy.all_reduce[x] a.py:1/psum:sdy.all_reduce[x] a.py:2/psum)"),
            ("e", "add", "add"),
        )
    )
    assert list(instructions(text)) == [
        ("a", "layer_0/mlp", False, False),
        ("c", "layer_0", True, True),
        ("d", "layer_1", False, True),
        ("e", "", False, False),
    ]


def test_instructions_are_found_by_scopes():
    text = "\n".join(
        (
            "HloModule jit_f, is_scheduled=true",
            '  %psum.1 = f32[] all-reduce(%p), metadata={op_name="jit(f)/shard_map/sdy.all_reduce[x] a.py:1/psum"}',
            '  %copy.1 = f32[] copy(%p), metadata={op_name="jit(f)/shard_map/sdy.all_reduce[x] a.py:1/psum"}',
            '  %psum.2 = f32[] all-reduce(%p), metadata={op_name="jit(f)/shard_map/other/psum"}',
        )
    )
    assert module_name(text) == "jit_f"
    plan = sdy.partition(layer, mesh=LINE, in_shardings=(P(None, "x"), P("x"))).plan(X, W)
    record = next(record for record in plan.collectives if record.kind == "all_reduce")
    (scope,) = scopes([record], text.replace("a.py:1", record.source.rpartition("/")[2]))
    assert scope.instructions == ("psum.1",)
