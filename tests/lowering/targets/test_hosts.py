"""Machines by name: their figures beside those worked out by hand from data sheets, hosts of them, their networks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE

import sdy_jax as sdy
from sdy_jax.calls.options import Options
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.reshard.route_prices import RoutePrices
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.target import Hosts, machines

GIB = 2**30
EIGHT = Mesh.of(x=8)

FIGURES = [
    # Name, milliseconds of an all_reduce of 1 GiB on eight devices and of a product of 8192 x 8192 matrices, GiB.
    # With B bytes on the wire, 2 * 7/8 GiB: B / link + 2 * B / HBM + 7 us + 14 hops on GPUs, B / links + 5 us + 2 times
    # the hops on TPUs: a ring through 8 chips of v5e, three lines of 2 x 2 x 2 others with half of a ring's rate.
    ("v100", 16.72, 8.796, 12.0),
    ("a100", 8.158, 3.524, 30.0),
    ("a100-40gb", 8.696, 3.524, 30.0),
    ("a100-80gb", 8.122, 3.524, 60.0),
    ("h100-sxm", 5.313, 1.112, 60.0),
    ("h100-pcie", 31.26, 1.454, 60.0),
    ("h200", 4.974, 1.112, 105.75),
    ("h20", 5.131, 7.429, 72.0),
    ("l40s", 63.09, 3.037, 36.0),
    ("b200", 2.573, 0.4887, 135.0),
    ("gb200", 2.573, 0.4398, 139.5),
    ("b300", 2.573, 0.4887, 202.5),
    ("mi300x", 4.919, 0.8412, 144.0),
    ("tpu v4", 13.93, 3.998, 30.5),
    ("tpu v5e", 20.89, 5.581, 15.75),
    ("tpu v5p", 6.970, 2.395, 95.73),
    ("tpu v6e", 10.45, 1.198, 31.24),
    ("tpu v7x", 12.54, 0.9536, 94.74),
]


@pytest.mark.parametrize(("name", "reduced", "multiplied", "gib"), FIGURES, ids=[row[0] for row in FIGURES])
def test_figures_are_those_that_data_sheets_give_by_hand(name, reduced, multiplied, gib):
    costs = CostModel.of_machine(name, EIGHT)
    assert 1e3 * costs.time("all_reduce", [AxisRef("x")], EIGHT, GIB, GIB) == pytest.approx(reduced, rel=1e-3)
    assert 1e3 * costs.work_time(8192**3, 3 * 2 * 8192**2) == pytest.approx(multiplied, rel=1e-3)
    assert Options(costs=costs).target(LINE).memory == gib * GIB


def test_every_machine_has_figures_here():
    assert {Hosts.of(name).machine for name, *_ in FIGURES} == {*machines()}


def step(weights, x):
    def loss(weights):
        return jnp.mean(jnp.tanh(x @ weights) ** 2)

    return weights - 0.1 * jax.grad(loss)(weights)


@pytest.mark.parametrize("name", [row[0] for row in FIGURES])
def test_each_machine_plans_a_step(name):
    costs = sdy.CostModel.of_machine(f"{name} x8", LINE)
    w, x = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((64, 32), (128, 64)))
    f = sdy.partition(step, mesh=LINE, in_shardings=(P(), P("x")), out_shardings=P(), costs=costs)
    plan = f.plan(w, x)
    assert plan.time.unit == "seconds" and plan.time.compute > 0
    assert {sent.kind for sent in plan.collectives} <= {"all_reduce", "reduce_scatter", "all_gather"}
    assert plan.collectives and plan.memory.available == machines()[Hosts.of(name).machine].memory_of()


def test_rates_of_other_types_are_no_less_than_the_types_are_narrow():
    for name, machine in machines().items():
        chip, peaks = machine.chip, machine.chip.peaks
        assert peaks, name
        assert all(peaks.get(narrow, chip.flops) >= chip.flops for narrow in ("float8", "int8", "float4")), name
        assert all(peaks[wide] < 0.51 * chip.flops for wide in ("tf32", "float32") if wide in peaks), name


# Hosts, and networks of them.


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("h100-sxm", "h100"),
        ("H100 x8", "h100 x8"),
        ("h100x8", "h100 x8"),
        ("4 x h100-sxm x8", "4 x h100 x8"),
        ("4x mi300x x8", "4 x mi300x x8"),
        ("mi300x", "mi300x"),
        ("2 x gb200 x72", "2 x gb200 x72"),
        ("v7x", "tpu7x"),
        ("2 x TPU v7x x64", "2 x tpu7x x64"),
        ("1 x l40s x4", "l40s x4"),
    ],
)
def test_hosts_are_called_by_how_many_and_of_what(text, canonical):
    assert str(Hosts.of(text)) == canonical
    assert Hosts.of(canonical) == Hosts.of(text)


@pytest.mark.parametrize(
    ("text", "mesh", "message"),
    [
        ("h9000 x8", EIGHT, "no machine is called 'h9000'; did you mean"),
        ("", EIGHT, "no machine is called ''; known are tpu v4,"),
        ("h100 x16", EIGHT, "NVLink 4 joins 8 h100 devices, not 16; as in '2 x h100 x8'"),
        ("4 x h100", EIGHT, "'4 x h100' does not say how many devices each host has; to fix: as in '4 x h100 x8'"),
        ("4 x h100 x8", EIGHT, "'4 x h100 x8' are 32 devices, and the mesh x=8 has 8"),
        ("h100 x4", EIGHT, "'h100 x4' are 4 devices, and the mesh x=8 has 8"),
        ("2 x h100 x4", "x", "which axes run over the hosts of '2 x h100 x4' is for the mesh to say"),
    ],
)
def test_what_cannot_be_is_an_error(text, mesh, message):
    with pytest.raises(sdy.SdyError) as error:
        CostModel.of_machine(text, mesh)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "mesh", "bandwidth"),
    [
        ("4 x h100 x8", Mesh.of(data=4, model=8), {"data": 50e9, "model": 450e9}),
        ("2 x h100 x8", Mesh.of(data=16), {"data": 450e9, "data:(1)2": 50e9}),
        ("2 x h100 x8", Mesh.of(data=8, model=2), {"data": 450e9, "data:(1)2": 50e9, "model": 450e9}),
        ("2 x h100 x2", Mesh.of(model=2, data=2), {"data": 450e9, "model": 50e9}),
        ("h100 x8", Mesh.of(data=2, model=4), {"data": 450e9, "model": 450e9}),
        ("2 x v5e x256", Mesh.of(data=32, model=16), {"data": 90e9, "data:(1)2": 3.125e9, "model": 90e9}),
        ("2 x gb200 x72", Mesh.of(data=2, model=72), {"data": 50e9, "model": 900e9}),
    ],
)
def test_a_mesh_fills_host_after_host(text, mesh, bandwidth):
    costs = CostModel.of_machine(text, mesh)
    assert dict(costs.bandwidth) == bandwidth and costs.origin == f"{Hosts.of(text)}, by its published rates"


def test_devices_in_another_order_are_of_the_hosts_where_they_lie():
    swapped = dataclasses.replace(Mesh.of(x=2, y=2), device_ids=(0, 2, 1, 3))
    assert dict(CostModel.of_machine("2 x h100 x2", swapped).bandwidth) == {"x": 450e9, "y": 50e9}


def test_a_host_by_name_is_a_mesh_with_the_networks_rate_stated():
    mesh = Mesh.of(servers=4, gpus=8)
    assert CostModel.of_machine("4 x h100 x8", mesh) == CostModel.of_machine("h100", mesh, {"servers": 50e9})
    slower = CostModel.of_machine("4 x h100 x8", mesh, {"servers": 25e9})
    assert slower.bandwidth_of("servers") == 25e9 and slower.bandwidth_of("gpus") == 450e9


def test_usual_hosts_hold_what_links_join():
    assert str(Hosts.of("h100").usual(8)) == "h100" and str(Hosts.of("h100").usual(16)) == "2 x h100 x8"
    assert str(Hosts.of("gb200").usual(72)) == "gb200" and str(Hosts.of("h100 x4").usual(64)) == "h100 x4"
    with pytest.raises(sdy.SdyError, match=r"12 do not fill such hosts; .* as in '2 x h100 x6'"):
        Hosts.of("h100").usual(12)


# A network and the links of hosts at once: only what has to goes over the network.


@pytest.mark.parametrize(
    ("kind", "across"),
    [
        ("all_gather", 7),  # of 63 blocks, one from each other server
        ("reduce_scatter", 7),
        ("all_reduce", 7),
        ("all_to_all", 56),  # to all devices of other servers
        ("collective_permute", 63),
    ],
)
def test_over_hosts_each_device_sends_its_part_of_what_leaves_them(kind, across):
    mesh = Mesh.of(data=64)
    costs = CostModel.of_machine("8 x h100 x8", mesh)
    assert costs.network == ("data:(1)8",)
    wanted = across / 63 / 50e9 + (63 - across) / 63 / 450e9
    assert 1 / costs.speed(kind, [AxisRef("data")], mesh) == pytest.approx(wanted)
    inside, outside = (AxisRef.sub("data", *part) for part in ((8, 8), (1, 8)))
    assert costs.speed(kind, [inside], mesh) == 450e9 and costs.speed(kind, [outside], mesh) == 50e9
    two = Mesh.of(servers=8, gpus=8)
    costs = CostModel.of_machine("8 x h100 x8", two)
    assert 1 / costs.speed(kind, [AxisRef("servers"), AxisRef("gpus")], two) == pytest.approx(wanted)
    slowest = dataclasses.replace(costs, network=())
    assert slowest.speed(kind, [AxisRef("servers"), AxisRef("gpus")], two) == 50e9


# Links of each pair: a device sends to n others over n of its links.


@pytest.mark.parametrize(("size", "links"), [(2, 1), (4, 3), (8, 7)])
def test_between_few_devices_only_the_links_between_them_send(size, links):
    mesh = Mesh.of(x=size)
    costs = CostModel.of_machine("mi300x x8", mesh)
    found = costs.rate("all_gather", (AxisRef("x"),), mesh).per_byte
    assert found == pytest.approx(1 / (links * 64e9) + 2 / 5.3e12)
    assert costs.rate("collective_permute", (AxisRef("x"),), mesh).per_byte == pytest.approx(1 / 64e9 + 2 / 5.3e12)


def test_along_two_axes_at_once_all_links_send():
    mesh = Mesh.of(x=2, y=4)
    costs = CostModel.of_machine("mi300x", mesh)
    both = costs.rate("all_gather", (AxisRef("x"), AxisRef("y")), mesh).per_byte
    assert both == pytest.approx(1 / 448e9 + 2 / 5.3e12)
    part = costs.rate("all_gather", (AxisRef.sub("y", 1, 2),), mesh).per_byte
    assert part == pytest.approx(1 / 64e9 + 2 / 5.3e12)


def test_a_network_has_no_links_of_pairs():
    mesh = Mesh.of(x=16)
    costs = CostModel.of_machine("2 x mi300x x8", mesh)
    assert costs.rate("all_gather", (AxisRef.sub("x", 1, 2),), mesh).per_byte == pytest.approx(1 / 50e9 + 2 / 5.3e12)


def test_prices_of_layouts_know_that_all_links_at_once_are_faster():
    """2 x 2 devices, three links of a byte per second each: gathered at once a device sends three blocks over three."""
    mesh = Mesh.of(x=2, y=2)
    costs = CostModel(bandwidth={"x": 3.0, "y": 3.0}, peers=3)
    split, whole = (TensorSharding.closed("m", [axes]) for axes in ([AxisRef("x"), AxisRef("y")], []))
    ((found,),) = RoutePrices("m", mesh, costs).matrix((64,), 1.0, [split], [whole])
    assert found == pytest.approx(3 * 16 / 3)
