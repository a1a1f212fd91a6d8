"""The cost model: bytes on the wire and time per collective."""

import dataclasses

import pytest

from sdy_jax.errors import InternalError, SdyError
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.lowering.reshard.problem import same_cost
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.rates import LastCut, last_cut
from sdy_jax.lowering.targets.tpu import TPU

MESH = Mesh.of(x=2, y=4)


@pytest.mark.parametrize(
    ("kind", "bytes_in", "bytes_out", "wire"),
    [
        ("all_gather", 256, 1024, 768),
        ("reduce_scatter", 1024, 256, 768),
        ("all_reduce", 1024, 1024, 1536),
        ("all_to_all", 1024, 1024, 768),
        ("collective_permute", 1024, 1024, 1024),
        ("gather_and_reduce", 1024, 1024, 3072),
        ("all_slice", 1024, 256, 0),
        ("replicated_to_unreduced", 1024, 1024, 0),
        ("sharded_to_unreduced", 256, 1024, 0),
    ],
)
def test_wire_bytes_of_a_group_of_four(kind, bytes_in, bytes_out, wire):
    assert CostModel().wire_bytes(kind, 4, bytes_in, bytes_out) == wire
    assert CostModel().time(kind, [AxisRef("y")], MESH, bytes_in, bytes_out) == wire


def test_a_group_of_one_costs_nothing():
    assert CostModel(latency=5).time("all_reduce", [], MESH, 64, 64) == 0


def test_a_permute_of_devices_goes_over_any_axis():
    model = CostModel(latency=10, bandwidth={"x": 8, "y": 2})
    assert model.sending_time("collective_permute", [], MESH, 64) == 10 + 64 / 2
    assert model.sending_time("all_gather", [AxisRef("x")], MESH, 64) == 10 + 64 / 8
    assert model.sending_time("all_slice", [AxisRef("x")], MESH, 0) == 0


def test_time_is_hops_and_bytes_over_the_slowest_axis():
    model = CostModel(latency=10, bandwidth={"x": 8, "y": 2})
    assert model.time("all_gather", [AxisRef("x")], MESH, 64, 128) == 10 + 64 / 8
    assert model.time("all_reduce", [AxisRef("x"), AxisRef("y")], MESH, 64, 64) == 2 * 10 * (1 + 3) + 112 / 2
    assert model.time("all_to_all", [AxisRef.sub("y", 2, 2)], MESH, 64, 64) == 10 + 32 / 2


def test_neighbours_along_a_part_of_an_axis_are_as_far_apart_as_they_are():
    model, mesh = CostModel(latency=1, bandwidth={"x": 1e9}), Mesh.of(x=8)
    hops = [model.rate("all_gather", (AxisRef.sub("x", *part),), mesh).fixed for part in ((1, 2), (2, 2), (4, 2))]
    assert hops == [4, 2, 1]
    assert model.rate("all_gather", (AxisRef("x"),), mesh).fixed == sum(hops)
    assert model.link(AxisRef("x"), mesh).cut([2, 4]) == (
        model.link(AxisRef.sub("x", 1, 2), mesh),
        model.link(AxisRef.sub("x", 2, 4), mesh),
    )


def test_among_many_devices_hops_are_those_of_a_tree():
    model = CostModel(latency=1, bandwidth={"x": 1e9})
    hops = {n: model.rate("all_gather", (AxisRef("x"),), Mesh.of(x=n)).fixed for n in (2, 8, 16, 256, 4096)}
    assert hops == {2: 1, 8: 7, 16: 9, 256: 17, 4096: 25}
    torus = CostModel(latency=1, bandwidth={"x": 1e9}, torus=("x",))
    assert torus.rate("all_gather", (AxisRef("x"),), Mesh.of(x=256)).fixed == 255 / 2


def test_a_collective_starts_once():
    model = CostModel(latency={"x": 1}, start={"x": 100, "y": 1000})
    assert model.time("all_reduce", [AxisRef("x")], MESH, 64, 64) == 64 + 100 + 2
    assert model.time("all_reduce", [AxisRef("x"), AxisRef("y")], MESH, 64, 64) == 112 + 1000 + 2
    assert model.time("collective_permute", [AxisRef("x")], MESH, 64, 64) == 64 + 100 + 1
    assert model.time("all_gather", [AxisRef("x")], MESH, 0, 0) == 0
    assert model.time("all_slice", [AxisRef("x")], MESH, 64, 32) == 0


def test_combined_collectives_share_the_latency_of_a_bucket():
    alone = CostModel(latency=9, bandwidth={"x": 2, "y": 2})
    shared = dataclasses.replace(alone, combines=("all_gather",))
    full = shared.bucket_bytes("all_gather", [AxisRef("x")], MESH)
    assert full == 9 * 9 * 2
    small, large = (shared.rate("all_gather", (AxisRef("x"),), MESH).time(part * full) for part in (1 / 3, 3))
    assert small == pytest.approx(full / 3 / 2 * 10 / 9)
    assert large == alone.sending_time("all_gather", [AxisRef("x")], MESH, 3 * full)


def test_collectives_that_run_together_wait_once_for_each_bucket_that_they_fill():
    costs = CostModel(latency=9, bandwidth={"x": 2, "y": 2}, combines=("all_gather",))
    sent, full = [AxisRef("x")], costs.bucket_bytes("all_gather", [AxisRef("x")], MESH)

    def latency(kind, wires):
        return costs.sending_times(kind, sent, MESH, wires) - sum(wires) / 2

    assert latency("all_gather", [full / 4] * 3) == pytest.approx(9)
    assert latency("all_gather", [full / 4] * 12) == pytest.approx(3 * 9)
    assert latency("all_gather", [full] * 3) == latency("reduce_scatter", [full / 4] * 3) == pytest.approx(3 * 9)
    assert costs.sending_time("all_gather", sent, MESH, full / 4) - full / 8 == pytest.approx(9)


def test_a_ring_is_gone_round_in_both_directions():
    ring, line = (CostModel(latency=1, bandwidth={"x": 10.0}, torus=torus) for torus in (("x",), ()))
    mesh, x = Mesh.of(x=5), (AxisRef("x"),)
    assert ring.rate("all_gather", x, mesh).fixed == line.rate("all_gather", x, mesh).fixed / 2 == 2


def test_what_is_sent_is_copied():
    model = CostModel(bandwidth={"x": 10.0}, copies=0.4)
    assert model.time("all_gather", [AxisRef("x")], Mesh.of(x=2), 100, 200) == pytest.approx(100 / 10 + 0.4 * 100)
    assert not CostModel(copies=0.4).is_default


@pytest.mark.parametrize(
    ("kind", "cut", "copied"),
    [
        ("all_gather", None, 0),
        ("all_gather", LastCut(128, 3), 0),
        ("reduce_scatter", LastCut(64, 2), 6),
        ("all_gather", LastCut(64, 2, joins=True), 6),
        ("reduce_scatter", LastCut(64, 3), 6),
        ("all_gather", LastCut(64, 3, joins=True), 10),
        ("all_gather", LastCut(128, 2, joins=True), 0),
        ("all_to_all", None, 2),
        ("all_to_all", LastCut(256, 2), 2),
        ("all_to_all", LastCut(256, 2, joins=True), 8),
        ("all_to_all", LastCut(256, 3, joins=True), 2),
        ("all_to_all", LastCut(64, 2), 8),
        ("all_to_all", LastCut(192, 2), 8),
        ("all_to_all", LastCut(64, 3), 12),
        ("all_to_all", LastCut(64, 4), 42),
        ("all_gather", LastCut(64, 4, joins=True), 10),
    ],
)
def test_blocks_that_are_no_whole_tiles_are_rearranged(kind, cut, copied):
    model = CostModel(bandwidth={"x": 10.0}, copies=TPU.arrays.copies(0.1, 0.0))
    assert model.sending_time(kind, [AxisRef("x")], Mesh.of(x=2), 100, cut) == pytest.approx(
        100 / 10 + copied * 0.1 * 100
    )


@pytest.mark.parametrize(
    ("kind", "cut", "ops"),
    [
        ("all_gather", None, 0),
        ("all_gather", LastCut(128, 3, joins=True), 0),
        ("all_to_all", LastCut(256, 2, joins=True), 0),
        ("reduce_scatter", LastCut(64, 3), 1),
        ("all_gather", LastCut(64, 2, joins=True), 1),
        ("all_gather", LastCut(192, 3, joins=True), 4),
        ("all_to_all", LastCut(64, 2), 1),
        ("all_to_all", LastCut(64, 3), 4),
    ],
)
def test_small_blocks_that_are_no_whole_tiles_are_rearranged_by_ops_of_their_own(kind, cut, ops):
    model = CostModel(bandwidth={"x": 10.0}, copies=TPU.arrays.copies(0.0, 1000.0))
    assert model.sending_time(kind, [AxisRef("x")], Mesh.of(x=2), 100, cut) == pytest.approx(100 / 10 + 1000 * ops)


@pytest.mark.parametrize(
    ("shape", "before", "after", "cut"),
    [
        ((16, 512), (8, 1), (1, 8), LastCut(64, 2)),
        ((16, 512), (1, 8), (8, 1), LastCut(64, 2, joins=True)),
        ((16, 8, 512), (1, 1, 2), (1, 1, 4), LastCut(128, 3)),
        ((16, 8, 512), (8, 1, 2), (1, 8, 2), None),
        ((10,), (1,), (4,), LastCut(3, 1)),
        ((), (), (), None),
    ],
)
def test_what_is_cut_of_the_last_dimension(shape, before, after, cut):
    assert last_cut(shape, before, after) == cut


def test_only_tpus_have_tiles():
    assert {name: CostModel.of_machine(name, ["x"]).lanes for name in ("tpu v5e", "h100")} == {
        "tpu v5e": 128,
        "h100": 0,
    }


@pytest.mark.parametrize(("size", "slower"), [(2, 1), (4, 4 / 3), (8, 16 / 7), (16, 64 / 15)])
def test_through_a_ring_an_exchange_passes_devices_in_between(size, slower):
    """A quarter of what a gather of as much takes."""
    mesh, x = Mesh.of(x=size), [AxisRef("x")]
    ring, switch = (CostModel(bandwidth={"x": 10.0}, torus=torus) for torus in (("x",), ()))
    assert ring.time("all_to_all", x, mesh, 64, 64) == pytest.approx(
        slower * switch.time("all_to_all", x, mesh, 64, 64)
    )
    gathered = ring.time("all_gather", x, mesh, 64 / size, 64)
    whole = 64 * size / (size - 1)
    assert ring.time("all_to_all", x, mesh, whole, whole) >= gathered / 4
    assert ring.time("all_gather", x, mesh, 64, 64) == switch.time("all_gather", x, mesh, 64, 64)


def test_work_takes_as_long_as_its_operations_or_its_bytes():
    model = CostModel(flop=2.0, memory=0.5)
    assert model.work_time(10, 4) == 20
    assert model.work_time(10, 400) == 200
    assert CostModel(flop=2.0).work_time(10, 400) == 20


def test_the_unit_is_seconds_where_bandwidths_are_given():
    assert CostModel(latency=5).unit == "bytes"
    assert CostModel(bandwidth={"x": 1e9}).unit == "seconds"


def test_a_model_is_hashable_and_orders_its_axes():
    assert hash(CostModel(bandwidth={"x": 1, "y": 2})) == hash(CostModel(bandwidth={"y": 2, "x": 1}))
    assert CostModel().is_default
    assert not CostModel(bandwidth={"x": 2}).is_default
    assert CostModel(bandwidth={"x": 2}).bandwidth_of("y") == 1


def test_an_unknown_collective_is_our_mistake():
    with pytest.raises(InternalError, match="all_together"):
        CostModel().wire_bytes("all_together", 2, 1, 1)


def test_costs_compare_up_to_rounding():
    assert same_cost(0.1 + 0.2, 0.3)
    assert not same_cost(1.0, 1.001)


def test_a_machine_gives_seconds():
    model = CostModel.of_machine("h100", ["data", "model"], {"data": 25e9})
    mesh = Mesh.of(data=2, model=8)
    fast = model.time("all_gather", [AxisRef("model")], mesh, 1e6, 8e6)
    assert fast == pytest.approx(7e6 * (1 / 450e9 + 2 / 3.35e12) * 10 / 9)
    assert model.time("all_gather", [AxisRef("data")], mesh, 1e7, 2e7) == pytest.approx(
        1e7 * (1 / 25e9 + 2 / 3.35e12) + 7e-6 + 5e-6
    )
    assert model.work_time(1e12, 0) == pytest.approx(2e12 / 989e12)
    assert model.work_time(1, 3.35e9) == pytest.approx(1e-3)


def test_an_unknown_machine_is_refused_with_the_names():
    with pytest.raises(SdyError, match=r"no machine is called 'h9000'; did you mean 'h.00'\? Known are tpu v4, .*b200"):
        CostModel.of_machine("h9000", [])


def test_in_a_full_bucket_latency_is_a_tenth_of_the_time():
    model = CostModel(latency=3e-6, bandwidth={"x": 50e9, "y": 2e9})
    for kind in ("all_gather", "all_reduce", "collective_permute"):
        full = model.bucket_bytes(kind, [AxisRef("x"), AxisRef("y")], MESH)
        time = model.sending_time(kind, [AxisRef("x"), AxisRef("y")], MESH, full)
        assert full > 0
        assert full / 2e9 == pytest.approx(0.9 * time)


def test_without_latency_nothing_is_gained_by_combining():
    assert CostModel().bucket_bytes("all_gather", [AxisRef("x")], MESH) == 0
