"""The cost model: bytes on the wire and time per collective."""

import pytest

from sdy_jax.errors import InternalError, SdyError
from sdy_jax.lowering.reshard.cost import CostModel, same_cost
from sdy_jax.representation.mesh import AxisRef, Mesh

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
    assert model.time("all_reduce", [AxisRef("x"), AxisRef("y")], MESH, 64, 64) == 10 * 14 + 112 / 2
    assert model.time("all_to_all", [AxisRef.sub("y", 1, 2)], MESH, 64, 64) == 10 + 32 / 2


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
    assert fast == pytest.approx(7e6 / 450e9 + 7 * 3e-6)
    assert model.time("all_gather", [AxisRef("data")], mesh, 1e6, 2e6) == pytest.approx(1e6 / 25e9 + 3e-6)


def test_an_unknown_machine_is_refused_with_the_names():
    with pytest.raises(SdyError, match=r"no machine is called 'h9000'; known are tpu v4, .*b200"):
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
