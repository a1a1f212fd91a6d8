"""Cost models of machines: from the devices of a mesh, with slow axes where these are over a network."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.lowering.reshard.machines import MACHINES, machine_name


def mesh_of(kind: str, platform: str, places: np.ndarray, names: tuple[str, ...], of: str = "process_index"):
    """What a cost model reads of a mesh, on devices of a kind in these slices or processes."""
    fields = {"device_kind": kind, "platform": platform, "process_index": 0}
    devices = np.array([SimpleNamespace(**fields | {of: place}) for place in places.flat])
    return SimpleNamespace(devices=devices.reshape(places.shape), axis_names=names)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "tpu v4"),
        ("TPU v5 lite", "tpu v5e"),
        ("TPU v5e", "tpu v5e"),
        ("TPU v5", "tpu v5p"),
        ("TPU v5p", "tpu v5p"),
        ("TPU v6 lite", "tpu v6e"),
        ("TPU7x", "tpu7x"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", None),
        ("TPU v4 lite", None),
        ("cpu", None),
    ],
)
def test_kinds_of_devices_are_known_by_the_names_that_jax_reports(kind, name):
    assert machine_name(kind) == name


def test_all_machines_have_the_same_order_of_rates():
    for name, machine in MACHINES.items():
        assert machine.network < machine.bandwidth < machine.memory < machine.flops, name
        assert machine.start > 0 and machine.latency > 0, name


def test_a_mesh_of_one_server_has_its_machines_rates():
    mesh = mesh_of("NVIDIA H100 80GB HBM3", "gpu", np.zeros((2, 4), int), ("data", "model"))
    costs = sdy.CostModel.of_mesh(mesh)
    assert costs == sdy.CostModel.of_machine("h100", ("data", "model"))
    assert costs.unit == "seconds" and costs.origin == "h100, by its published rates"


def test_an_axis_over_processes_of_gpus_is_slow():
    mesh = mesh_of("NVIDIA H100 80GB HBM3", "gpu", np.repeat([0, 1], 4).reshape(2, 4), ("data", "model"))
    costs = sdy.CostModel.of_mesh(mesh)
    assert [costs.bandwidth_of(axis) for axis in mesh.axis_names] == [50e9, 450e9]


def test_an_axis_over_slices_of_tpus_is_slow_and_one_over_hosts_of_a_slice_is_not():
    hosts = mesh_of("TPU v5 lite", "tpu", np.repeat([0, 1], 4).reshape(4, 2), ("data", "model"))
    slices = mesh_of("TPU v5 lite", "tpu", np.tile([0, 1], 4).reshape(4, 2), ("data", "model"), of="slice_index")
    assert sdy.CostModel.of_mesh(hosts).torus == ("data", "model")
    costs = sdy.CostModel.of_mesh(slices)
    assert [costs.bandwidth_of(axis) for axis in ("data", "model")] == [90e9, 3.125e9]
    assert costs.torus == ("data",)


def test_of_unknown_devices_bytes_count_and_the_model_says_so():
    costs = sdy.CostModel.of_mesh(mesh_of("Abacus 3", "abacus", np.zeros((8,), int), ("x",)))
    assert costs == sdy.CostModel() and costs.unit == "bytes"
    assert costs.origin == "nothing is known of 'Abacus 3' devices"


def loss(x, w):
    return jnp.sum(jnp.tanh(x @ w))


def step(x, w):
    return w - jax.grad(loss, argnums=1)(x, w)


def test_a_gradient_is_reduced_over_the_slow_axis_on_shards():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("slow", "fast"))
    costs = sdy.CostModel.of_machine("h100", ("slow", "fast"), bandwidth={"slow": 1e9})
    partitioned = sdy.partition(
        step, mesh=mesh, in_shardings=(P(("slow", "fast")), P()), out_shardings=P(), costs=costs, layouts="local"
    )
    x, w = np.random.default_rng(0).standard_normal((2, 64, 64)).astype(np.float32)
    plan = partitioned.plan(x, w)
    assert [(c.kind, *map(str, c.axes)) for c in plan.collectives] == [
        ("reduce_scatter", '"fast"'),
        ("all_reduce", '"slow"'),
        ("all_gather", '"fast"'),
    ]
    np.testing.assert_allclose(partitioned(x, w), jax.jit(step)(x, w), rtol=1e-5, atol=1e-5)
