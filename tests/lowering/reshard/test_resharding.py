"""Reshard plans: they arrive (simulated on blocks), they cost what the table says, they respect the cap."""

import math
import random
from dataclasses import replace

import pytest
from reshard_cases import axes, mesh_of, random_sharding, sharding
from reshard_simulator import Simulator

from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.reshard import solution as resharding
from sdy_jax.lowering.reshard.bounds import least_time
from sdy_jax.lowering.reshard.planner import plan_reshard
from sdy_jax.lowering.targets.cost_model import CostModel

TABLE = [  # shape, mesh, source, target, bytes per device (f32)
    ("16x8", "x=2 y=2 z=2", "[{x},{}]", "[{},{}]", 256),
    ("16x8", "x=2 y=2 z=2", "[{},{}]", "[{x},{y}]", 0),
    ("16x8", "x=2 y=2 z=2", "[{x,y,z},{}]", "[{x},{}]", 192),
    ("16x8", "x=2 y=2 z=2", "[{x},{}]", "[{},{x}]", 128),
    ("16x8", "x=2 y=2 z=2", "[{x,y},{}]", "[{x},{y}]", 64),
    ("16x8", "x=2 y=2 z=2", "[{x,y},{}]", "[{y},{x}]", 160),
    ("16x8", "x=2 y=2 z=2", "[{x},{y}]", "[{y},{x}]", 128),
    ("16x8", "x=2 y=2 z=2", "[{x,y},{}]", "[{y,x},{}]", 128),
    ("16x8", "x=2 y=2 z=2", "[{x},{}]", "[{y},{}]", 256),
    ("16x8", "x=2 y=2 z=2", "[{x,y,z},{}]", "[{z},{}]", 256),
    ("16x8", "x=2 y=2 z=2", "[{y,x},{}]", "[{x},{}]", 256),
    ("16x16x16", "x=2 y=2 z=2", "[{x},{y},{}]", "[{},{x},{y}]", 4096),
    ("16x16x16", "x=2 y=2 z=2", "[{x,z},{},{y}]", "[{},{z,x},{}]", 4096),
    ("16x16x16x16", "x=2 y=2 z=2", "[{x},{y},{},{}]", "[{},{},{x},{y}]", 49152),
    ("16x16", "x=2 y=2 z=2", "[{x,y},{z}]", "[{z},{}]", 512),
    ("16x16", "x=2 y=4", "[{y},{}]", "[{y:(1)2},{y:(2)2}]", 128),
    ("16x16", "x=2 y=4", "[{y:(2)2},{}]", "[{y},{}]", 256),
    ("16x16", "x=2 y=4", "[{x},{y}]", "[{y},{x}]", 192),
    ("16x16", "x=2 y=4", "[{y},{}]", "[{x},{}]", 512),
    ("16x16", "x=2 y=4", "[{x},{}]", "[{y},{}]", 256),
    ("16x16", "x=4 y=2", "[{x},{}]", "[{y},{x}]", 176),
    ("16x32x16", "x=2 y=4", "[{y},{x},{}]", "[{},{y,x},{}]", 5632),
    ("16x16", "x=2 y=4", "[{y:(1)2,x},{}]", "[{x,y},{}]", 128),
    ("16x16", "x=2 y=4", "[{y:(1)2},{}]", "[{},{y:(2)2}]", 256),
    ("24x48", "x=2 y=3", "[{x},{}]", "[{y},{}]", 1536),
    ("24x48", "x=2 y=3", "[{},{y}]", "[{y},{x}]", 1024),
    ("48x48x48", "x=2 y=3", "[{y},{},{x}]", "[{x},{},{}]", 233472),
    ("12", "x=2 y=3", "[{x}]", "[{y}]", 16),
    ("16x16", "x=4 y=4", "[{x},{y}]", "[{y},{x}]", 64),
    ("32x32", "x=4 y=4", "[{x,y},{}]", "[{y:(2)2},{x:(1)2}]", 1136),
    ("16", "x=4", "[{x:(1)2}]", "[{x:(2)2}]", 32),
    ("64", "x=8", "[{x:(2)2}]", "[{x:(1)2}]", 128),
    ("16x16", "x=2 y=4", "[{},{}] U={y}", "[{},{}]", 1536),
    ("16x16", "x=2 y=4", "[{},{}] U={y}", "[{y},{}]", 768),
    ("16x16", "x=2 y=4", "[{},{}] U={x,y}", "[{x},{}]", 1280),
    ("16x16", "x=2 y=4", "[{x},{}] U={y}", "[{x,y},{}]", 384),
    ("16x16", "x=2 y=4", "[{},{}] U={x}", "[{y},{}]", 256),
    ("16x16", "x=2 y=4", "[{y},{}] U={x}", "[{},{}]", 1024),
    ("16x16", "x=2 y=4", "[{x},{}] U={y}", "[{y},{}]", 640),
    ("16x16", "x=2 y=4", "[{y},{}]", "[{},{}] U={x,y}", 0),
    ("16x16x16", "x=4 y=2", "[{y},{},{x}]", "[{},{x,y},{}]", 2560),
]


@pytest.mark.parametrize(("shape", "mesh", "source", "target", "wire"), TABLE)
def test_table_of_worked_examples(shape, mesh, source, target, wire):
    shape, mesh = tuple(map(int, shape.split("x"))), mesh_of(mesh)
    source, target = sharding(source), sharding(target)
    plan = plan_reshard(shape, 4, source, target, mesh)
    assert plan.wire_bytes <= wire
    assert plan.cost == plan.wire_bytes == sum(step.wire_bytes for step in plan.steps)
    assert plan.steps[-1].result == target
    if math.prod(shape) <= 4096:
        Simulator(shape, source, mesh).run(plan).assert_is(target)


@pytest.mark.parametrize("unreduced", [(0, 0), (0.4, 0), (0, 0.4), (0.3, 0.3)])
@pytest.mark.parametrize("mesh", ["x=2 y=2 z=2", "x=4 y=2", "x=2 y=4", "x=2 y=3", "x=4 y=4", "x=2 y=2 z=2 w=2"])
def test_random_reshards_arrive_within_the_memory_cap(mesh, unreduced):
    rng, mesh = random.Random(f"{mesh}{unreduced}"), mesh_of(mesh)
    for _ in range(12):
        rank = rng.choice([1, 2, 2, 3])
        shape = (48 if 3 in mesh.sizes.values() else 16,) * min(rank, 2) + (12,) * (rank - 2)
        source, target = (random_sharding(mesh, rank, rng, chance) for chance in unreduced)
        if any(n % g for s in (source, target) for n, g in zip(shape, s.shard_counts(mesh), strict=True)):
            continue
        plan = plan_reshard(shape, 4, source, target, mesh)
        Simulator(shape, source, mesh).run(plan).assert_is(target)
        sizes = [math.prod(s.local_shape(shape, mesh)) for s in (source, target)]
        assert all(math.prod(step.result.local_shape(shape, mesh)) <= max(sizes) for step in plan.steps)


def test_dimensions_too_small_for_the_cap_still_arrive():
    shape, mesh = (4, 6), mesh_of("x=4 y=6")
    source, target = sharding("[{x},{y}]"), sharding("[{},{x:(2)2}]")
    Simulator(shape, source, mesh).run(plan_reshard(shape, 4, source, target, mesh)).assert_is(target)


def test_equal_shardings_need_nothing():
    source = TensorSharding("m", sharding("[{x},{}]").dimensions, replicated_axes=axes("y"))
    assert plan_reshard((8, 8), 4, source, sharding("[{x},{}]"), Mesh.of(x=2, y=2)).steps == ()


def test_a_second_call_is_answered_from_memory():
    args = ((8, 8), 4, sharding("[{x},{}]"), sharding("[{},{x}]"), Mesh.of(x=2, y=2))
    assert plan_reshard(*args) is plan_reshard(*args)


def test_names_of_axes_do_not_matter():
    one = plan_reshard((8, 8), 4, sharding("[{x,y},{}]"), sharding("[{y},{x}]"), Mesh.of(x=2, y=2))
    two = plan_reshard((8, 8), 4, sharding("[{b,a},{}]"), sharding("[{a},{b}]"), Mesh.of(a=2, b=2))
    assert [str(s) for s in two.steps] == [str(s).replace("x", "b").replace("y", "a") for s in one.steps]


def test_steps_print_as_the_dialect_prints_them():
    mesh = mesh_of("x=2 y=4")
    plan = plan_reshard((16, 16), 4, sharding("[{},{}] U={x,y}"), sharding("[{x},{}]"), mesh)
    assert [(s.kind, str(s)) for s in plan.steps] == [("reduce_scatter", '[{"x"}, {}]'), ("all_reduce", '{"y"}')]
    plan = plan_reshard((16, 16), 4, sharding("[{y},{}]"), sharding("[{y:(1)2},{y:(2)2}]"), mesh)
    assert [str(s) for s in plan.steps] == ['[{"y":(2)2}: 0->1]']


def test_a_reduction_keeps_its_kind():
    source = TensorSharding.closed("m", [(), ()], axes("x"), "max")
    (step,) = plan_reshard((8, 8), 4, source, sharding("[{},{}]"), Mesh.of(x=2)).steps
    assert (step.kind, step.reduction, step.result) == ("all_reduce", "max", sharding("[{},{}]"))
    (step,) = plan_reshard((8, 8), 4, sharding("[{},{}]"), source, Mesh.of(x=2)).steps
    assert (step.kind, step.reduction, step.result) == ("replicated_to_unreduced", "max", source)


def test_another_reduction_of_the_same_axes_comes_after_the_first():
    source = TensorSharding.closed("m", [(), ()], axes("x"), "max")
    plan = plan_reshard((8, 8), 4, source, replace(source, reduction="sum"), Mesh.of(x=2))
    assert [(s.kind, s.reduction) for s in plan.steps] == [("all_reduce", "max"), ("replicated_to_unreduced", "sum")]
    assert plan.cost == plan.wire_bytes == 256


@pytest.mark.parametrize("name", ["x=8", "x=2 y=4", "x=2 y=2 z=2", "x=2 y=3"])
def test_dimensions_that_do_not_divide_arrive_in_padded_blocks(name):
    rng, mesh, moved = random.Random(7), mesh_of(name), 0
    for _ in range(60):
        shape = tuple(rng.choice([1, 3, 5, 7, 9, 12, 16, 20]) for _ in range(rng.choice([1, 2, 2, 3])))
        source, target = (random_sharding(mesh, len(shape), rng, chance) for chance in (0.2, 0.0))
        plan = plan_reshard(shape, 4, source, target, mesh)
        Simulator(shape, source, mesh).run(plan).assert_is(target)
        moved += bool(plan.steps)
    assert moved >= 40


@pytest.mark.parametrize(
    "shape, source, target, kinds, wire",
    [
        ((65,), "[{x,y}]", "[{}]", "all_gather", 7 * 9 * 4),
        ((65,), "[{}]", "[{x,y}]", "all_slice", 0),
        (
            (5, 6),
            "[{x,y},{}]",
            "[{x},{}]",
            "all_to_all reshard all_gather",
            84,
        ),
        ((8, 7), "[{x,y},{}]", "[{},{x,y}]", "all_to_all", 7 * 4),
        ((7, 8), "[{x,y},{}]", "[{},{x,y}]", "all_to_all", 7 * 4),
        ((7, 5), "[{x,y},{}]", "[{y,x},{}]", "collective_permute", 5 * 4),
    ],
)
def test_bytes_with_padding(shape, source, target, kinds, wire):
    plan = plan_reshard(shape, 4, sharding(source), sharding(target), mesh_of("x=2 y=4"))
    assert " ".join(step.kind for step in plan.steps) == kinds
    assert plan.wire_bytes == wire


def test_latency_and_bandwidth_are_part_of_the_cost():
    costs = CostModel(latency=100, bandwidth={"x": 2})
    plan = plan_reshard((16, 8), 4, sharding("[{x},{}]"), sharding("[{},{}]"), Mesh.of(x=2), costs)
    assert (plan.wire_bytes, plan.cost) == (256, 100 + 128)


MODELS = [
    CostModel(),
    CostModel(latency=7.0),
    CostModel(bandwidth={"x": 0.25, "z": 3.0}),
    CostModel(bandwidth={"x": 0.02}),
    CostModel(bandwidth={"z": 0.02}),
]


@pytest.mark.dear
@pytest.mark.parametrize("costs", MODELS, ids=["bytes", "latency", "bandwidth", "slow x", "slow z"])
def test_no_plan_costs_less_than_the_bound(costs):
    rng, mesh, met = random.Random(3), mesh_of("x=2 y=4 z=3"), 0
    for _ in range(100):
        shape = (24, 48, 24)[: rng.choice([1, 2, 3])]
        source, target = (random_sharding(mesh, len(shape), rng, chance) for chance in (0.2, 0.05))
        least = least_time(shape, 4, source, target, mesh, costs)
        cost = plan_reshard(shape, 4, source, target, mesh, costs).cost
        assert least <= cost * (1 + 1e-9), f"{source} to {target}"
        met += 0 < cost == pytest.approx(least)
    assert met or costs != CostModel(), "a bound that is never met tells nothing"


BOUNDS = [  # source, target, least bytes per device (f32[16,8], x=2 y=4)
    ("[{x},{}]", "[{},{}]", 256),
    ("[{},{}]", "[{x},{y}]", 0),
    ("[{x},{}]", "[{y},{}]", 128),
    ("[{y:(1)2},{}]", "[{y},{}]", 0),
    ("[{},{}] U={y}", "[{y},{}]", 384),
    ("[{},{}] U={y}", "[{},{}]", 768),
    ("[{y},{}]", "[{},{}] U={y}", 0),
]


@pytest.mark.parametrize(("source", "target", "least"), BOUNDS)
def test_table_of_bounds(source, target, least):
    assert least_time((16, 8), 4, sharding(source), sharding(target), mesh_of("x=2 y=4"), CostModel()) == least


SLOW_BOUNDS = [  # source, target, least time (f32[16,8], x=2 y=4, x a tenth as fast as y)
    ("[{x},{}]", "[{},{}]", 256 * 10),
    ("[{x},{y}]", "[{y},{}]", 64 * 10 + 64),  # half of what comes is from the other side of x at least
    ("[{x},{y}]", "[{y,x},{}]", 32 * 10 + 32),
    ("[{x},{y}]", "[{x,y},{}]", 48),
    ("[{},{y}] U={x}", "[{y},{}]", 64 * 10 + 64),
    ("[{},{y}] U={x}", "[{y},{}] U={x}", 0),
]


@pytest.mark.parametrize(("source", "target", "least"), SLOW_BOUNDS)
def test_what_has_to_go_along_a_slow_axis_counts_at_its_rate(source, target, least):
    costs, mesh, ends = CostModel(bandwidth={"x": 0.1}), mesh_of("x=2 y=4"), (sharding(source), sharding(target))
    assert least_time((16, 8), 4, *ends, mesh, costs) == pytest.approx(least)
    assert least <= plan_reshard((16, 8), 4, *ends, mesh, costs).cost * (1 + 1e-9)


@pytest.mark.parametrize("source", ["[{},{y,z:(1)2},{},{}] U={x}", "[{y,z:(1)2},{},{},{}] U={x}"])
def test_little_goes_along_a_slow_axis_however_many_states_fast_ones_have(source):
    mesh, costs = mesh_of("x=2 y=16 z=16"), CostModel(bandwidth={"x": 0.03})
    ends = sharding(source), sharding("[{},{},{y,z:(1)2},{z:(2)8}]")
    plan = plan_reshard((512, 4096, 32, 128), 2, *ends, mesh, costs)
    assert [step.kind for step in plan.steps] == ["all_slice", "reduce_scatter", "all_to_all", "all_gather"]


MANY = [
    ("[{x},{}]", "[{},{x}]"),
    ("[{x},{y}]", "[{y},{x}]"),
    ("[{x,y},{}]", "[{y},{x}]"),
    ("[{},{y}] U={x}", "[{y},{}]"),
]


@pytest.mark.parametrize(("source", "target"), MANY)
def test_a_large_mesh_is_planned_like_a_small_one(source, target):
    ends = sharding(source), sharding(target)
    few = plan_reshard((4, 4), 4, *ends, mesh_of("x=2 y=2"))
    many = plan_reshard((1 << 16, 1 << 16), 4, *ends, mesh_of("x=256 y=256"))
    assert [(s.kind, str(s)) for s in many.steps] == [(s.kind, str(s)) for s in few.steps]


SEARCHED = [  # shape, mesh, source, target, parts of all axes in the searches
    ("256x256", "x=16 y=16", "[{x,y},{}]", "[{y},{x}]", 2),
    ("256x128", "x=256 y=256", "[{},{x:(1)128}] U={y}", "[{x},{}]", 5),
]


@pytest.mark.parametrize(("shape", "mesh", "source", "target", "most"), SEARCHED)
def test_searches_are_made_of_few_parts(shape, mesh, source, target, most, monkeypatch):
    parts, search = [], resharding.search
    monkeypatch.setattr(resharding, "search", lambda p, known: parts.append(len(p.sizes)) or search(p, known))
    shape, mesh, target = tuple(map(int, shape.split("x"))), mesh_of(mesh), sharding(target)
    resharding.solved.cache_clear()
    plan = plan_reshard(shape, 2, sharding(source), target, mesh)
    assert plan.steps[-1].result == target
    assert parts and max(parts) <= most
