"""The benchmark of bytes: its rows, their goals, and the arguments that it draws."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from benchmarks import loaded  # makes the scripts importable
from jax.sharding import PartitionSpec as P

# isort: split
from comparing import Cost, rank_correlation
from timing import Seconds, ServerSeconds, compiler_time, fullest_bucket, paired_ratio
from training import FAST, MODELS, ROWS, training_rows
from workloads import MESHES

import sdy_jax as sdy
from sdy_jax.lowering.targets.target import machines
from sdy_jax.plan.hlo_module import HloCollective
from sdy_jax.plan.profile import HloTotals, estimated_cycles

bench_bytes = loaded("bench_bytes")
LISTED = list(training_rows())
H100 = machines()["h100"].links


def side(wire=100.0, flops=100.0, memory=100):
    return Cost(HloTotals(1, wire, {}), flops, memory)


def row(layouts, apart=(), **ours):
    return bench_bytes.Row("a model", "8", layouts, [side(**ours), side()], [0.0, 0.0], list(apart))


@pytest.mark.parametrize(
    ("ours", "misses"),
    [
        ({}, []),
        ({"wire": 100.1}, ["bytes"]),
        ({"flops": 102.1}, ["flops"]),
        ({"memory": 111}, ["memory"]),
        ({"wire": 50.0, "flops": 102.0, "memory": 110}, []),
        ({"apart": (2e-4, 1e-6)}, ["numbers"]),
        ({"apart": (2e-4, 1e-4)}, []),
    ],
)
def test_rows_say_which_goals_they_miss(ours, misses):
    assert row("global", **ours).misses == misses
    assert str(row("global", **ours)).endswith(f"! {', '.join(misses)}" if misses else "0.00")


@pytest.mark.parametrize(
    ("times", "misses"),
    [
        ({"compile": 1.1, "step": 1.05}, []),
        ({"compile": 1.2, "step": 1.06}, ["compile", "step"]),
        ({"compiler's time": 1.03}, ["compiler's time"]),
    ],
)
def test_rows_say_which_times_are_too_long(times, misses):
    found = row("global")
    found.times = times
    assert found.misses == misses
    assert bench_bytes.summary("global", [found]).endswith(", ".join(f"{n} {t:.3f}" for n, t in times.items()))


@pytest.mark.parametrize(
    ("count", "fullest", "misses"), [(2, 1.0, []), (2, 1.1, ["collectives"]), (1, 1.1, []), (0, 0.0, [])]
)
def test_more_collectives_than_jits_are_each_below_the_size_of_a_bucket(count, fullest, misses):
    found = row("global")
    found.costs[0], found.fullest = Cost(HloTotals(count, 100.0, {}), 100.0, 100), fullest
    assert found.misses == misses


def test_the_largest_collective_is_measured_by_buckets():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    costs = sdy.CostModel(latency=1e-6, bandwidth={"x": 1e9})
    w = jax.ShapeDtypeStruct((64, 64), np.float32)
    plan = sdy.partition(lambda a, b: a @ b, mesh=mesh, in_shardings=(P(None, "x"), P("x")), costs=costs).plan(w, w)
    (sent,) = [record for record in plan.collectives if record.wire_bytes]
    bucket = costs.bucket_bytes(sent.kind, sent.axes, plan.program.mesh)
    assert fullest_bucket(plan) == sent.wire_bytes / bucket > 0


def test_the_compilers_time_is_its_cycles_and_its_collectives():
    text = """HloModule m, num_partitions=8
%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %f = f32[8]{0} fusion(%p), kind=kLoop, backend_config={"estimated_cycles":"3000"}
}
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}
%condition (p: f32[8]) -> pred[] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %c = pred[] constant(true)
}
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %w = f32[8]{0} while(%x), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %r = f32[8]{0} all-reduce(%w), replica_groups=[2,4]<=[8], to_apply=%add
}
"""
    assert estimated_cycles(text) == 15000
    found = compiler_time(text)
    assert found.work == pytest.approx(10e-6)
    assert found.sent == pytest.approx(1e-6 + 2 * 1.5e-6 + 2 * 3 / 4 * 32 / 90e9)
    assert found.total == found.work + found.sent


@pytest.mark.parametrize(
    ("group", "seconds"),
    [
        (range(256), 255 / 180e9 + 15e-6),  # both dimensions at once
        (range(0, 256, 16), 15 / 90e9 + 7.5e-6),
        (range(8), 7 / 45e9 + 7e-6),  # a part of a ring is a line
        ((0, 17, 35), 2 / 90e9 + 1e-6),  # no lines: taken for a ring
    ],
)
def test_collectives_of_compiled_programs_are_timed_by_the_places_of_chips(group, seconds):
    places = [(x, y, 0) for x in range(16) for y in range(16)]
    found = HloCollective("all-gather", len(group), 1, len(group) - 1.0, 1, tuple(group))
    assert Seconds(places)(found) == pytest.approx(1e-6 + seconds)


def test_what_slices_send_goes_over_the_network():
    found, network = HloCollective("slice-send", 2, 10**9, 1e9, 1), machines()["tpu v5e"].links.network
    assert Seconds([(0, 0, 0)])(found) == pytest.approx(1e9 / network.bandwidth + network.latency)


@pytest.mark.parametrize(
    ("group", "bytes_time", "hops"),
    [
        (range(8), 7 / 450e9, 7 * 6e-7),
        (range(0, 64, 8), 7 / 50e9, 7 * 5e-6),
        (range(64), 7 / 50e9 + 56 / 450e9, 7 * 5e-6 + 7 * 6e-7),
    ],
)
def test_collectives_of_compiled_programs_are_timed_by_the_servers_of_gpus(group, bytes_time, hops):
    found = HloCollective("all-gather", len(group), 1, len(group) - 1.0, 1, tuple(group))
    assert ServerSeconds(H100)(found) == pytest.approx(H100.start + hops + bytes_time)


@pytest.mark.parametrize(("pairs", "rate"), [(((0, 1), (1, 0)), 450e9), (((0, 1), (7, 8)), 50e9)])
def test_permutes_of_compiled_programs_are_as_fast_as_their_slowest_pair(pairs, rate):
    found = HloCollective("collective-permute", 2, 10**9, 1e9, 1, pairs=pairs)
    assert ServerSeconds(H100)(found) == pytest.approx(1e9 / rate, rel=0.01)


def test_rank_correlation_does_not_ask_how_far_apart_values_are():
    assert rank_correlation([(1, 10), (2, 1000), (3, 1001)]) == pytest.approx(1)
    assert rank_correlation([(1, 30), (2, 20), (3, 10)]) == pytest.approx(-1)


def test_steps_are_run_in_turns_and_feed_themselves():
    calls = []

    class Program:
        input_shardings = ((jax.devices()[0], jax.devices()[0]),)

        def __init__(self, name):
            self.name = name

        def __call__(self, state, batch):
            calls.append((self.name, float(state)))
            return state + batch, 0.0

    both = [Program("ours"), Program("jit")]
    assert paired_ratio(both, (np.float32(0), np.float32(1)), donates=True, pairs=2) > 0
    assert sorted(calls) == [(name, float(n)) for name in ("jit", "ours") for n in range(4)]
    assert [name for name, _ in calls[:4]] == ["jit", "ours", "ours", "jit"]


def test_what_is_planned_op_by_op_promises_bytes_only():
    assert row("local", wire=101.0, flops=200.0, memory=200).misses == ["bytes"]


def test_the_summary_counts_rows_that_miss_a_goal_and_takes_geometric_means():
    said = bench_bytes.summary("global", [row("global", wire=50.0), row("global", wire=200.0)])
    assert "2 rows, 1 miss a goal" in said and said.endswith("bytes 1.000, flops 1.000, memory 1.000")


def test_every_model_has_rows_with_names_of_their_own_on_meshes_of_their_layouts():
    names = [(workload.name, mesh) for workload, mesh in LISTED]
    assert len(set(names)) == len(names) >= 40 and set(names) >= FAST
    assert {make(1).name for make in MODELS} == set(ROWS)
    assert all(mesh in workload.layouts for workload, mesh in LISTED)


@pytest.mark.parametrize("number", range(len(LISTED)), ids=[f"{workload.name}, {mesh}" for workload, mesh in LISTED])
def test_the_optimizer_s_state_lies_as_its_parameters_and_all_divide(number):
    workload, name = LISTED[number]
    sizes, axes = MESHES[name]
    ins, _ = workload.shardings(name)
    adam = ins[0]["optimizer"][0]
    assert adam.mu == adam.nu == ins[0]["weights"] and adam.count == jax.sharding.PartitionSpec()
    mesh = jax.sharding.AbstractMesh(sizes, axes)
    for leaf, spec in zip(jax.tree.leaves(workload.arguments), jax.tree.leaves(ins), strict=True):
        jax.sharding.NamedSharding(mesh, spec).shard_shape(leaf.shape)


def test_drawn_second_moments_have_roots():
    state, *_ = bench_bytes.drawn(next(workload for workload, _ in LISTED if workload.name == "lstm/data"))
    adam = state["optimizer"][0]
    assert all(np.all(np.asarray(leaf) >= 0) for leaf in jax.tree.leaves(adam.nu))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(adam.mu))
