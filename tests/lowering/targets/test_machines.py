"""Cost models of machines: from the devices of a mesh, with slow axes where these are over a network."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.calls.options import Options
from sdy_jax.lowering.planner.setting import limit
from sdy_jax.lowering.targets.target import device_memory, machine_name, machines, memory_of


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
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA L40S", "l40s"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GB300", None),
        ("NVIDIA L40", None),
        ("TPU v4 lite", None),
        ("cpu", None),
    ],
)
def test_kinds_of_devices_are_known_by_the_names_that_jax_reports(kind, name):
    assert machine_name(kind) == name


GIB = 2**30


@pytest.mark.parametrize(
    ("kind", "gib"),
    [
        ("TPU v5 lite", 15.75),
        ("TPU7x", 94.74),
        ("Tesla V100-SXM2-16GB", 0.75 * 16),
        ("Tesla V100-SXM2-32GB", 0.75 * 32),
        ("NVIDIA A100-SXM4-80GB", 0.75 * 80),
        ("NVIDIA A100 80GB PCIe", 0.75 * 80),
        ("NVIDIA A100", 0.75 * 40),  # may be one of 80
        ("NVIDIA H100 PCIe", 0.75 * 80),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 0.75 * 10),
        ("NVIDIA GB200", 0.75 * 186),
        ("AMD Instinct MI300X", 0.75 * 192),
        ("NVIDIA GB300", 0),
        ("cpu", 0),
    ],
)
def test_the_memory_of_devices_is_known_by_their_kind(kind, gib):
    assert device_memory(kind) == gib * GIB


def test_described_devices_have_the_memory_of_those_at_hand():
    """What the allocator of these has by chance does not count."""
    at_hand = mesh_of("TPU v5 lite", "tpu", np.zeros((8,), int), ("data",))
    for device in at_hand.devices:
        device.memory_stats = lambda: {"bytes_limit": 15 * GIB}
    described = AbstractMesh((8,), ("data",), abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu"))
    assert Options().policy(at_hand) == Options().policy(described)
    assert Options().target(at_hand) == Options().target(described)
    assert Options().target(described).memory == 15.75 * GIB
    assert limit(Options().policy(described), Options().target(described)) == 0.9 * 15.75 * GIB


def test_of_unknown_devices_the_allocator_says_the_memory():
    mesh = mesh_of("Abacus 3", "abacus", np.zeros((8,), int), ("x",))
    for device in mesh.devices:
        device.memory_stats = lambda: {"bytes_limit": GIB}
    assert Options().target(mesh).memory == GIB


def test_several_processes_do_not_ask_their_own_allocators(monkeypatch):
    mesh = mesh_of("Abacus 3", "abacus", np.zeros((8,), int), ("x",))
    for device in mesh.devices:
        device.memory_stats = lambda: {"bytes_limit": GIB}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert memory_of(mesh) == 0
    assert memory_of(mesh_of("NVIDIA H200", "gpu", np.zeros((8,), int), ("x",))) == 0.75 * 141 * GIB


def test_all_machines_have_the_same_order_of_rates():
    for name, machine in machines().items():
        links, chip = machine.links, machine.chip
        assert links.network.bandwidth < links.bandwidth < chip.memory < chip.flops, name
        assert links.start > 0 and links.latency > 0, name


def test_a_mesh_of_one_server_has_its_machines_rates():
    mesh = mesh_of("NVIDIA H100 80GB HBM3", "gpu", np.zeros((2, 4), int), ("data", "model"))
    costs = sdy.CostModel.of_mesh(mesh)
    assert costs == sdy.CostModel.of_machine("h100", ("data", "model"))
    assert costs.unit == "seconds" and costs.origin == "h100, by its published rates"


def test_an_axis_over_processes_of_gpus_is_slow():
    mesh = mesh_of("NVIDIA H100 80GB HBM3", "gpu", np.repeat([0, 1], 4).reshape(2, 4), ("data", "model"))
    costs = sdy.CostModel.of_mesh(mesh)
    assert [costs.bandwidth_of(axis) for axis in mesh.axis_names] == [50e9, 450e9]


def test_an_axis_over_processes_of_one_host_is_not():
    """A process for each GPU: jax says by `slice_index` which of them are on a host."""
    kind, names = "NVIDIA H100 80GB HBM3", ("data", "model")
    mesh = mesh_of(kind, "gpu", np.repeat([0, 1], 4).reshape(2, 4), names, of="slice_index")
    for number, device in enumerate(mesh.devices.flat):
        device.process_index = number
    assert [sdy.CostModel.of_mesh(mesh).bandwidth_of(axis) for axis in names] == [50e9, 450e9]


def test_an_axis_over_slices_of_tpus_is_slow_and_one_over_hosts_of_a_slice_is_not():
    hosts = mesh_of("TPU v5 lite", "tpu", np.repeat([0, 1], 4).reshape(4, 2), ("data", "model"))
    slices = mesh_of("TPU v5 lite", "tpu", np.tile([0, 1], 4).reshape(4, 2), ("data", "model"), of="slice_index")
    assert sdy.CostModel.of_mesh(hosts).torus == ("data", "model")
    costs = sdy.CostModel.of_mesh(slices)
    assert [costs.bandwidth_of(axis) for axis in ("data", "model")] == [90e9, 3.125e9]
    assert costs.torus == ("data",)


def test_tpus_of_unknown_rates_round_what_products_read():
    costs = sdy.CostModel.of_mesh(mesh_of("TPU v99", "tpu", np.zeros((8,), int), ("x",)))
    assert costs == sdy.CostModel.of_platform("tpu") and costs.unit == "bytes" and "'TPU v99'" in costs.origin


def test_of_unknown_devices_bytes_count_and_the_model_says_so():
    costs = sdy.CostModel.of_mesh(mesh_of("Abacus 3", "abacus", np.zeros((8,), int), ("x",)))
    assert costs == sdy.CostModel() and costs.unit == "bytes"
    assert costs.origin == "the rates of 'Abacus 3' devices are not known"


def loss(x, w):
    return jnp.sum(jnp.tanh(x @ w))


def step(x, w):
    return w - jax.grad(loss, argnums=1)(x, w)


@pytest.mark.parametrize("parts", [True, False])
def test_a_gradient_is_reduced_over_the_slow_axis_on_shards(parts):
    """By the library, or in three steps where it sends all bytes at the rate of the slow axis."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("slow", "fast"))
    costs = sdy.CostModel.of_machine("h100", ("slow", "fast"), bandwidth={"slow": 1e9})
    costs = costs if parts else dataclasses.replace(costs, network=())
    partitioned = sdy.partition(
        step, mesh=mesh, in_shardings=(P(("slow", "fast")), P()), out_shardings=P(), costs=costs, layouts="local"
    )
    x, w = np.random.default_rng(0).standard_normal((2, 64, 64)).astype(np.float32)
    plan = partitioned.plan(x, w)
    steps = [("reduce_scatter", '"fast"'), ("all_reduce", '"slow"'), ("all_gather", '"fast"')]
    at_once = [("all_reduce", '"slow"', '"fast"')]
    assert [(c.kind, *map(str, c.axes)) for c in plan.collectives] == (at_once if parts else steps)
    np.testing.assert_allclose(partitioned(x, w), jax.jit(step)(x, w), rtol=1e-5, atol=1e-5)


MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
SLOW_MEMORY = sdy.CostModel(
    bandwidth={"data": 1e9, "model": 1e9}, flop=1e-15, memory=1e-9, launch=1e-3, product_launch=2e-3
)


def time_of(fun, *args, specs, costs=SLOW_MEMORY, **options):
    return sdy.partition(fun, mesh=MESH, in_shardings=specs, costs=costs, **options).plan(*args).time


def messages(nodes, senders, receivers, weights):
    return jax.ops.segment_sum(jnp.tanh(nodes[senders] @ weights), receivers, nodes.shape[0])


def test_narrow_columns_are_not_exchanged_where_arrays_lie_in_tiles():
    """Rows that are looked up by columns travel four times, but as eighths: less is sent than by a gather."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = P(("x", "y"))
    published = sdy.CostModel.of_machine("tpu v5e", ["x", "y"])
    tiles = dataclasses.replace(published, machine="", torus=())  # it fuses as CPUs do
    shapes = (2048, 512), (8192,), (8192,), (512, 512)
    given = [jax.ShapeDtypeStruct(shape, np.float32 if len(shape) == 2 else np.int32) for shape in shapes]

    def kinds(costs):
        ours = sdy.partition(messages, mesh=mesh, in_shardings=(rows, rows, rows, P()), out_shardings=rows, costs=costs)
        return {found.kind for found in ours.plan(*given).collectives if found.wire_bytes}

    assert "all_to_all" in kinds(dataclasses.replace(tiles, copies=tiles.copies.exchanged))
    assert kinds(tiles) == {"all_gather", "reduce_scatter"}


def test_small_narrow_blocks_take_longer_than_several_ops_where_arrays_lie_in_tiles():
    """The compiler for v5e states 7 to 10 microseconds for what rearranges 16 to 112 KiB of them."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    costs, x = sdy.CostModel.of_machine("tpu v5e", "x"), np.random.default_rng(0).normal(size=(4, 4, 1024))

    def sent(width):
        ours = sdy.partition(
            jnp.tanh, mesh=mesh, in_shardings=P(None, None, "x"), out_shardings=P(), costs=costs, layouts="propagated"
        )
        given = x[..., :width].astype(np.float32)
        np.testing.assert_allclose(ours(given), np.tanh(given), rtol=1e-5, atol=1e-6)
        assert [found.kind for found in ours.plan(given).collectives] == ["all_gather"]
        return ours.plan(given).time.communication

    assert sent(512) > sent(1024) + 3 * machines()["tpu v5e"].chip.launch


def test_ops_that_fuse_read_and_write_memory_once():
    x = np.zeros((64, 64), np.float32)
    time = time_of(lambda x: jnp.tanh(x * 2) + 1, x, specs=(P("data"),), layouts="local")
    assert time.unit == "seconds" and time.communication == 0
    assert time.compute == pytest.approx(1e-9 * 2 * 4 * 64 * 64 / 2 + 1e-3)


def test_a_product_takes_as_long_as_its_operations_or_its_bytes():
    x, w = np.zeros((64, 32), np.float32), np.zeros((32, 16), np.float32)
    specs = (P("data"), P(None, "model"))
    blocks = 4 * (32 * 32 + 32 * 4 + 32 * 4)
    assert time_of(jnp.matmul, x, w, specs=specs).compute == pytest.approx(1e-9 * blocks + 2e-3)
    quick = dataclasses.replace(SLOW_MEMORY, flop=1e-6)
    assert time_of(jnp.matmul, x, w, specs=specs, costs=quick).compute == pytest.approx(1e-6 * 32 * 32 * 4 + 2e-3)


PACES = [
    ("h100", "bf16", "DEFAULT", 989e12),
    ("h100", "f32", "DEFAULT", 494e12),
    ("h100", "f32", "HIGHEST", 67e12),
    ("h100", "f8E4M3FN", "DEFAULT", 1979e12),
    ("h100", "i8", "DEFAULT", 1979e12),
    ("v100", "f32", "DEFAULT", 15.7e12),
    ("mi300x", "f8E5M2", "DEFAULT", 2614.9e12),
    ("tpu v5e", "f32", "DEFAULT", 197e12),
    ("tpu v5e", "f32", "HIGH", 197e12 / 3),
    ("tpu v5e", "f32", "HIGHEST", 197e12 / 6),
    ("tpu v5e", "i8", "DEFAULT", 393e12),
    ("tpu v5e", "f8E4M3FN", "DEFAULT", 197e12),
    ("tpu7x", "f8E4M3FN", "DEFAULT", 2307e12),
]


@pytest.mark.parametrize("machine, dtype, precision, peak", PACES)
def test_products_take_the_peak_of_their_type(machine, dtype, precision, peak):
    costs = sdy.CostModel.of_machine(machine, ["x"])
    assert 2 / (costs.flop * costs.pace(dtype, precision)) == pytest.approx(peak)


def test_rates_that_nobody_published_are_of_all_types():
    assert sdy.CostModel().pace("f32") == 1
    assert dataclasses.replace(sdy.CostModel.of_machine("h100", ["x"]), flop=1e-14).pace("f8E4M3FN") == 1


TYPES = [
    (jnp.bfloat16, None, 1),
    (jnp.float32, None, 989 / 494),
    (jnp.float32, "highest", 989 / 67),
    (jnp.int8, None, 0.5),
]


@pytest.mark.parametrize("dtype, precision, pace", TYPES)
def test_a_plan_takes_as_long_as_its_type_asks_and_uses_the_peak_of_that(dtype, precision, pace):
    mesh = jax.sharding.AbstractMesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    wide = jnp.int32 if dtype is jnp.int8 else jnp.float32
    dot = lambda x, w: jax.lax.dot(x, w, precision=precision, preferred_element_type=wide)  # noqa: E731
    costs = sdy.CostModel.of_machine("h100", mesh)
    x, w = (jax.ShapeDtypeStruct((rows, 8192), dtype) for rows in (65536, 8192))
    record = sdy.partition(dot, mesh=mesh, in_shardings=(P("x"), P()), costs=costs).plan(x, w).record()
    work = record.flops * costs.flop / 2 * pace
    assert record.time.total == pytest.approx(work, rel=0.01)
    compute = record.roofline.resources[0]
    assert compute.peak == pytest.approx(989e12 / pace, rel=0.01) and record.roofline.share(compute) > 0.98


def test_what_is_returned_is_made_in_one_loop_with_what_follows():
    """A moment and the weight that it changes."""
    m, g, w = (np.zeros((64, 64), np.float32) for _ in range(3))

    def update(m, g, w):
        m = 0.9 * m + g
        return m, w - m

    time = time_of(update, m, g, w, specs=(P("data"),) * 3, layouts="local")
    assert time.compute == pytest.approx(1e-9 * 5 * 4 * 64 * 64 / 2 + 2e-3)


def test_slices_read_what_they_take_and_loops_count_trips():
    stack, x = np.zeros((8, 16, 16), np.float32), np.zeros((32, 16), np.float32)

    def layers(stack, x):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, stack)[0]

    per_trip = 4 * (16 * 16 + 16 * 16) + 4 * (16 * 16 + 16 * 16 + 16 * 16)  # the slice, then the product
    found = time_of(layers, stack, x, specs=(P(), P("data")))
    assert found.compute == pytest.approx(8 * (1e-9 * per_trip + 3e-3), rel=1e-2)


def test_the_time_of_a_plan_is_that_of_its_collectives_one_by_one():
    x, w = np.zeros((64, 32), np.float32), np.zeros((32, 16), np.float32)
    costs = sdy.CostModel.of_machine("h100", MESH.axis_names)
    specs = (P(None, "model"), P("model"))
    options = {"in_shardings": specs, "out_shardings": P(), "costs": costs, "layouts": "local"}
    plan = sdy.partition(jnp.matmul, mesh=MESH, **options).plan(x, w)
    (record,) = plan.collectives
    assert record.kind == "all_reduce"
    whole = 4 * 64 * 16
    assert plan.time.communication == pytest.approx(
        2 * 3 / 4 * whole * (1 / 450e9 + 2 / 3.35e12) + 7e-6 + 2 * 3 * 0.6e-6
    )
    assert plan.headline.endswith(f"on the wire per device, estimated {plan.time}")
    assert "costs in seconds: h100, by its published rates" in str(plan)


def test_a_plan_in_bytes_says_no_time():
    plan = sdy.partition(jnp.tanh, mesh=MESH, in_shardings=P("data")).plan(np.zeros((64, 32), np.float32))
    assert plan.time.unit == "bytes" and plan.headline.endswith("per device")
    assert "costs in" not in str(plan)


def test_plans_for_unknown_devices_say_that_bytes_count():
    costs = sdy.CostModel.of_mesh(mesh_of("Abacus 3", "abacus", np.zeros((8,), int), ("x",)))
    plan = sdy.partition(jnp.tanh, mesh=MESH, in_shardings=P("data"), costs=costs).plan(np.zeros((64,), np.float32))
    assert "costs in bytes: the rates of 'Abacus 3' devices are not known" in str(plan)
