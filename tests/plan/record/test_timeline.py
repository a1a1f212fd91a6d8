"""One step over time: lanes add up to what the plan says; what waits, what is hidden; phases; the roofline."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from timed_plans import (
    H100,
    LAYERS,
    MESH,
    NETWORK,
    ROWS,
    SPREAD,
    TIMED,
    V5E,
    WIDTH,
    in_branches,
    mesh_of,
    offloading,
    shape,
    step_in_a_loop,
    step_of_layers,
    with_rings,
)

import sdy_jax as sdy
from sdy_jax.ir.jax_shardings import bytes_text
from sdy_jax.lowering.targets.target import machines
from sdy_jax.plan.record.record import PlanRecord
from sdy_jax.plan.record.timeline import RecordedSlice


@cache
def plan_of(name: str) -> sdy.Plan:
    return TIMED[name]()


def record_of(name: str) -> PlanRecord:
    return plan_of(name).record()


def close(value: float) -> object:
    """Sums of the same times in another order."""
    return pytest.approx(value, rel=1e-9, abs=1e-18)


@pytest.mark.parametrize("name", TIMED)
def test_lanes_add_up_to_what_the_plan_says(name: str) -> None:
    plan, timeline = plan_of(name), record_of(name).timeline
    assert timeline.compute == close(plan.time.compute)
    assert timeline.communication == close(plan.time.communication)
    assert timeline.hidden == close(plan.time.hidden)
    assert timeline.total == close(plan.time.total)
    assert plan.time.compute > 0 and timeline.slices


@pytest.mark.parametrize("name", TIMED)
def test_the_critical_path_has_no_gaps_and_no_overlaps(name: str) -> None:
    record = record_of(name)
    at = 0.0
    for each in record.timeline.critical:
        assert each.start == close(at) and each.duration > 0
        at = each.end
    assert at == close(record.time.total)
    assert sum(record.timeline.phases().values()) == close(at)


@pytest.mark.parametrize("name", TIMED)
def test_what_is_hidden_is_sent_while_something_is_computed(name: str) -> None:
    timeline = record_of(name).timeline
    for each in timeline.slices:
        if each.hidden:
            beside = (work for work in timeline.critical if work.start <= each.start * (1 + 1e-9) + 1e-15)
            assert each.end <= timeline.total * (1 + 1e-9) and any(True for _ in beside)


@pytest.mark.parametrize("name", TIMED)
def test_slices_say_what_they_are_of(name: str) -> None:
    record = record_of(name)
    sent = dict[int, list[RecordedSlice]]()
    for each in record.timeline.slices:
        assert record.timeline.lanes[each.lane].axes if each.collective is not None else each.lane == 0
        if each.collective is None:
            assert each.op is not None and record.ops[each.op].times_known is (each.times == record.ops[each.op].times)
        else:
            sent.setdefault(each.collective, []).append(each)
    for number, slices in sent.items():
        one = record.collectives[number]
        assert sum(each.duration for each in slices) == close(slices[0].times * one.time)
        assert {axis.partition(":")[0] for axis in one.axes} <= set(record.timeline.lanes[slices[0].lane].axes)
    assert {number for number, one in enumerate(record.collectives) if one.time} == set(sent)


@pytest.mark.parametrize("name", TIMED)
def test_ops_are_those_that_compute_and_send(name: str) -> None:
    """A product takes as long as its operations at least, and what is sent is the op that sends it."""
    plan, record = plan_of(name), record_of(name)
    products = 0
    for each in record.timeline.slices:
        op = record.ops[each.op or 0]
        if each.collective is None:
            assert not op.kind.startswith("sdy.") or op.kind == "sdy.all_slice"
            if op.kind == "stablehlo.dot_general":
                products += 1
                assert each.duration / each.times >= plan.costs.flop * op.flops / 2 * (1 - 1e-9) > 0
        else:
            ops = {one.op for one in record.collectives[each.collective].single}
            assert each.op in ops or ops == {None}  # the user's own, in a manual computation
    assert products == sum(op.kind == "stablehlo.dot_general" for op in record.ops)


@pytest.mark.parametrize("name", TIMED)
def test_a_saved_plan_has_its_timeline(name: str, tmp_path) -> None:
    plan_of(name).save(tmp_path / "plan.json")
    read = sdy.load_plan(tmp_path / "plan.json")
    assert read.timeline == record_of(name).timeline and read.roofline == record_of(name).roofline


def test_what_is_in_a_loop_is_as_wide_as_all_of_its_trips() -> None:
    record = record_of("a loop over a network")
    forward, backward = record.timeline.loops
    assert forward.trips == backward.trips == LAYERS
    for loop in (forward, backward):
        inside = [each for each in record.timeline.critical if _is_in(record, each.op, loop.op)]
        assert sum(each.duration for each in inside) == close(loop.duration)
        assert {each.times for each in inside} <= {LAYERS, LAYERS + 1}
        assert min(each.start for each in inside) == close(loop.start)


def _is_in(record: PlanRecord, op: int | None, loop: int) -> bool:
    while op is not None and op != loop:
        op = record.ops[op].parent
    return op is not None


def test_layers_in_a_loop_take_as_long_as_one_by_one() -> None:
    """The same products, whoever writes them."""
    loop, layers = (
        {record.ops[each.op].place.primitive for each in record.timeline.slices if each.op is not None}
        for record in (record_of("a loop"), record_of("layers on TPUs"))
    )
    assert "dot_general" in loop & layers


def test_what_compilers_hide_begins_while_something_is_computed() -> None:
    timeline = record_of("layers, over a network").timeline
    hidden = [each for each in timeline.slices if each.hidden]
    assert hidden and {timeline.lanes[each.lane].name for each in hidden} <= {"data", "model"}
    work = [each for each in timeline.slices if each.collective is None]
    for each in hidden:
        assert any(a.start <= each.start + 1e-15 and each.start < a.end for a in work)


def test_rings_are_beside_their_products() -> None:
    record = record_of("rings")
    ringed = {number for number, one in enumerate(record.collectives) if one.hidden}
    pieces = [each for each in record.timeline.slices if each.hidden and each.collective in ringed]
    assert len(pieces) == len(ringed) == 2
    for piece in pieces:
        (beside,) = (
            each
            for each in record.timeline.slices
            if each.collective is None and each.op is not None and each.start == piece.start and each.duration > 1e-9
        )
        assert record.ops[beside.op].kind == "stablehlo.dot_general"


def test_a_gather_one_trip_ahead_is_hidden_in_each_trip() -> None:
    record = record_of("a trip ahead")
    ahead = {number for number, one in enumerate(record.collectives) if one.is_ahead}
    pieces = [each for each in record.timeline.slices if each.hidden and each.collective in ahead]
    assert ahead and {each.collective for each in pieces} == ahead
    loops = {loop.op: loop for loop in record.timeline.loops}
    for piece in pieces:
        assert piece.op is not None
        loop = loops[record.ops[piece.op].parent or 0]
        assert loop.start <= piece.start and piece.duration < loop.duration and piece.times == loop.trips


def test_what_runs_ahead_and_what_does_not_share_the_products_beside_them() -> None:
    """The links send one thing at a time: no product hides two."""
    record = record_of("a trip ahead of others")
    timeline, hides = record.timeline, 0
    for loop in timeline.loops:
        inside = [each for each in timeline.slices if loop.start <= each.start < loop.start + loop.duration]
        products = [
            each.duration
            for each in inside
            if each.collective is None and each.op is not None and record.ops[each.op].kind == "stablehlo.dot_general"
        ]
        sent = [each for each in inside if each.hidden and each.collective is not None]
        ahead = [record.collectives[each.collective or 0].is_ahead for each in sent]
        assert math.fsum(each.duration for each in sent) <= math.fsum(products) * (1 + 1e-9)
        hides += any(ahead) and not all(ahead)
    assert hides


def test_a_bucket_starts_when_all_of_it_is_there() -> None:
    """Members run as one, are sent once, and share its time."""
    record = record_of("layers, in buckets")
    buckets = [number for number, one in enumerate(record.collectives) if one.members]
    assert buckets
    for number in buckets:
        slices = [each for each in record.timeline.slices if each.collective == number]
        one = record.collectives[number]
        assert sum(each.duration for each in slices) == close(one.time)
        assert sum(each.time for each in one.members) == close(one.time)


def test_phases_follow_each_other() -> None:
    record = record_of("layers on TPUs")
    assert list(record.timeline.phases()) == ["forward", "backward", "update"]
    for each in record.timeline.slices:
        assert each.op is not None
        place = record.ops[each.op].place
        if each.collective is None:
            assert (each.phase == "backward") is place.backward
            assert (each.phase == "update") is (place.scope == "optimizer") or not place.scope


def test_rows_of_a_pipeline_are_of_the_pass_that_they_say() -> None:
    """1F1B: rows of both passes take turns, and nothing is updated."""
    record = record_of("a pipeline")
    phases = record.timeline.phases()
    assert phases["backward"] > phases["forward"] > 0 and phases.get("update", 0.0) < 0.2 * record.time.total
    for each in record.timeline.slices:
        scope = record.ops[each.op].place.scope.split("/") if each.op is not None else []
        if "forward" in scope or "backward" in scope:
            assert each.phase == ("backward" if "backward" in scope else "forward")


def test_a_program_without_a_backward_pass_has_no_phases() -> None:
    assert set(in_branches().record().timeline.phases()) == {""}


def test_a_loop_that_adds_up_gradients_has_both_passes_in_it() -> None:
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    def step(w, batches):
        def add(total, x):
            return total + jax.grad(loss)(w, x), None

        gradient, _ = jax.lax.scan(add, jnp.zeros_like(w), batches)
        with jax.named_scope("optimizer"):
            return w - 0.1 * gradient

    f = sdy.partition(step, mesh=MESH, in_shardings=(P(), P(None, "data")), out_shardings=P(), costs=V5E)
    timeline = f.plan(shape(256, 256), shape(4, 1024, 256)).record().timeline
    assert set(timeline.phases()) == {"forward", "backward", "update"}


def test_a_program_on_local_arrays_is_its_collectives() -> None:
    text = """
    mesh.mesh @m(shape = 2x4)
    func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {
      %0 = mesh.all_reduce %x on @m mesh_axes = [0, 1] : tensor<3xf32> -> tensor<3xf32>
      return %0 : tensor<3xf32>
    }"""
    plan = sdy.loads(text).run_local().plan(jnp.ones((8, 3)))
    timeline = plan.record().timeline
    assert timeline.total == close(plan.time.total) and timeline.total > 0
    assert [each.collective for each in timeline.slices] == [0]


# How much of what the machine can do is used.


def test_a_roofline_is_of_what_the_plan_counts() -> None:
    plan, roofline = plan_of("layers, over a network"), record_of("layers, over a network").roofline
    assert roofline is not None
    compute, memory, data = (roofline.of(name) for name in ("compute", "memory", "data"))
    assert compute is not None and memory is not None and data is not None
    assert compute.amount == plan.record().flops and compute.peak == pytest.approx(989e12)
    assert memory.peak == pytest.approx(3.35e12) and memory.amount > plan.memory.arguments
    assert data.peak == NETWORK
    links = [each for each in roofline.resources if each.name not in ("compute", "memory")]
    assert math.fsum(each.amount for each in links) == close(plan.wire_bytes)
    assert roofline.bound is data and roofline.seconds == plan.time.total
    assert roofline.mfu == close(plan.record().flops / compute.peak / plan.time.total)
    assert all(0 < roofline.share(each) <= 1 for each in roofline.resources)


def test_over_a_network_and_other_links_bytes_have_the_rate_of_both() -> None:
    """Of the seven blocks that a device receives, one comes over its own port of the network."""
    costs = replace(SPREAD, network=("data",))
    plan = step_of_layers(costs, 2 * ROWS)
    links = plan.record().roofline.of("data, model")
    assert links is not None and links.peak == close(7 / (1 / NETWORK + 6 / 450e9))
    assert links.amount == close(plan.wire_bytes)


def test_bytes_have_no_roofline() -> None:
    assert record_of("layers in bytes").roofline is None


def test_the_planner_and_the_timeline_hide_the_same() -> None:
    """There is one answer: what a plan says was hidden when it was made is what its timeline shows."""
    for plan in (step_of_layers(SPREAD), step_in_a_loop(SPREAD), with_rings()):
        own = sum(record.estimated_times * record.hidden for record in plan.collectives)
        assert plan.record().timeline.hidden == close(plan.hidden_by_work + own)


@pytest.mark.parametrize(
    "name", ["layers on TPUs", "a loop", "a pipeline", "a kernel", "rings", "a trip ahead", "branches", "unknown trips"]
)
def test_plans_are_compared_by_the_time_that_they_say(name: str) -> None:
    plan = plan_of(name)
    assert plan.layouts is not None and plan.time.total == close(plan.layouts.exposed)


@pytest.mark.parametrize("name", ["layers, over a network", "layers, in buckets", "a loop over a network"])
def test_buckets_that_could_be_filled_are_taken_for_those_that_are(name: str) -> None:
    plan = plan_of(name)
    assert plan.layouts is not None and plan.time.total == pytest.approx(plan.layouts.exposed, rel=0.1)


def test_links_between_hosts_are_at_the_rate_of_the_network() -> None:
    """An axis of which a major part runs over the network: what is sent along that part alone is at its rate."""
    mesh = mesh_of(data=4)
    costs = sdy.CostModel.of_machine("h100", mesh, {"data:(1)2": NETWORK})
    f = sdy.partition(lambda x: x * 2, mesh=mesh, in_shardings=P("data"), out_shardings=P(), costs=costs)
    plan = f.plan(shape(ROWS, WIDTH))
    (links,) = (each for each in plan.record().roofline.resources if each.name == "data")
    assert NETWORK <= links.peak <= costs.bandwidth_of("data") and links.amount == close(plan.wire_bytes)
    assert links.seconds <= plan.time.communication * (1 + 1e-9)


@pytest.mark.parametrize("name", [name for name in TIMED if "bytes" not in name])
def test_nothing_is_used_beyond_its_peak(name: str) -> None:
    roofline = record_of(name).roofline
    assert roofline is not None
    assert all(0 <= roofline.share(each) <= 1 + 1e-9 for each in roofline.resources)


def test_the_text_of_a_plan_says_what_it_uses_and_the_bound() -> None:
    record = record_of("layers, over a network")
    (line,) = (line for line in str(record).splitlines() if line.startswith("  uses"))
    said = "8.9% of peak compute (MFU), 19% of memory bandwidth, links 30% data, 10% model; bound by data"
    assert line == f"  uses      {said}"
    assert "  uses" not in str(record_of("layers in bytes"))


# What moves from and to the memory of the host.


def test_what_moves_from_and_to_the_host_is_a_lane_at_the_rate_of_its_link() -> None:
    plan = offloading(H100)
    record, rate = plan.record(), machines()["h100"].links.host
    timeline = record.timeline
    *_, lane = timeline.lanes
    assert (lane.name, lane.axes, rate) == ("host", (), 64e9)
    moving = [each for each in timeline.slices if each.lane == len(timeline.lanes) - 1]
    assert sorted(each.host for each in moving) == [n for n, one in enumerate(record.host) if one.times]
    weights, inputs = 2 * 2 * LAYERS * 4 * WIDTH * WIDTH / MESH.size, 2 * LAYERS * ROWS * WIDTH / MESH.size
    for leaves in (True, False):
        assert sum(one.total for one in record.host if one.leaves is leaves) == weights + inputs
    for each in moving:
        one = record.host[each.host or 0]
        assert each.duration == close(one.total / rate) and each.hidden and each.times == one.times
        for other in moving:  # one after the other in each direction
            alike = other is not each and record.host[other.host or 0].leaves is one.leaves
            assert not alike or other.start >= each.end * (1 - 1e-9) or other.end <= each.start * (1 + 1e-9)
    offloaded, needed = (each for each in moving if each.times == LAYERS)
    forward, backward = timeline.loops
    assert forward.start < offloaded.start <= forward.start + forward.duration <= backward.start <= needed.start
    assert timeline.total == close(plan.time.total) and timeline.communication == close(plan.time.communication)
    assert (
        f"  moves     {bytes_text(weights + inputs)} to the host, {bytes_text(weights + inputs)} from the host, "
        in str(plan)
    )


def test_without_a_rate_of_the_host_moves_take_no_time_that_is_known() -> None:
    plan = offloading(V5E)
    record = plan.record()
    moving = [each for each in record.timeline.slices if each.host is not None]
    assert moving and all(not each.duration for each in moving) and record.timeline.host == 0
    assert "in a time that is not known" in str(plan)


def test_arguments_and_results_on_the_host_that_nothing_moves_inside_move_around_the_step() -> None:
    there = NamedSharding(MESH, P("data"), memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=there)
    plan = sdy.partition(lambda x: jnp.tanh(x), mesh=MESH, in_shardings=there, out_shardings=there, costs=H100).plan(x)
    timeline, size = plan.record().timeline, 4 * ROWS * WIDTH / 2
    moving = [each for each in timeline.slices if each.host is not None]
    assert [each.start for each in moving] == [0.0, close(timeline.total)]
    assert timeline.host == close(2 * size / 64e9)


# What is held, by kind.


@pytest.mark.parametrize("name", TIMED)
def test_kinds_of_memory_add_up_to_what_is_held(name: str) -> None:
    memory = record_of(name).memory
    assert memory is not None
    kinds = memory.temporaries_by(lambda buffer: buffer.kind)
    border = sum(held.bytes for held in memory.border_by_kind)
    assert border == close(memory.arguments + memory.own_results)
    held = [border + sum(sizes[op] for sizes in kinds.values()) for op in range(len(memory.timeline))]
    assert held == pytest.approx([memory.held_at(op) for op in range(len(held))])
    assert max(held) == close(memory.peak)


def test_kinds_of_memory_are_what_people_call_them() -> None:
    """Layers whose weights are gathered, whose inputs wait on the host, and whose products run again."""
    record = offloading(H100).record()
    assert record.memory is not None
    always = {held.kind: held.bytes for held in record.memory.border_by_kind}
    matrices, rows = 2 * 2 * LAYERS * 4 * WIDTH * WIDTH / MESH.size, 2 * ROWS * WIDTH / 2
    sizes = {"weights": matrices, "optimizer state": matrices, "arguments": rows, "results": 2 * matrices}
    assert always == sizes
    made = dict[str, set[str]]()
    for buffer in record.memory.buffers:
        made.setdefault(buffer.kind, set()).add(record.ops[buffer.op or 0].place.primitive or buffer.value)
    assert set(made) == {"gathered", "recomputed", "activations", "gradients", "temporaries"}
    assert any("dot_general" in name for name in made["recomputed"])
    one_by_one = record_of("layers on TPUs")
    assert one_by_one.memory is not None
    kept = [each for each in one_by_one.memory.buffers if each.kind == "activations"]
    phases = [one_by_one.ops[op].place.backward for each in kept for op in (each.op or 0, each.last)]
    assert kept and not any(phases[::2]) and all(phases[1::2])


def test_what_the_planner_computes_again_is_of_the_backward_pass() -> None:
    free = step_of_layers(V5E)
    plan = step_of_layers(V5E, memory=int(0.62 * free.memory.peak))
    record = plan.record()
    assert plan.recomputed is not None and record.memory is not None
    assert {"recomputed"} <= {buffer.kind for buffer in record.memory.buffers}
    phases, before = record.timeline.phases(), free.record().timeline.phases()
    assert phases["update"] == pytest.approx(before["update"], rel=0.2) and phases["backward"] > before["backward"]
