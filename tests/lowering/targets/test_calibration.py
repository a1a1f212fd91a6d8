"""Cost models that are measured: the fit, the file, and what is said of bad ones."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.ir.meshes import AxisRef
from sdy_jax.ir.meshes import Mesh as Axes
from sdy_jax.lowering.targets import measurements
from sdy_jax.lowering.targets.measurements import AxisRates, Calibration, Probes, calibrated, default_path, fitted
from sdy_jax.lowering.targets.rates import LastCut
from sdy_jax.lowering.targets.target import machines
from sdy_jax.runtime.devices import CollectiveTime

MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
SMALL = Probes(collectives=(64, 4096, 65536), product=16, memory=4096)
KNOWN = Calibration(
    MESH.devices.flat[0].device_kind,
    {"data": AxisRates(2, 1e9, 1e-6, 2e-6), "model": AxisRates(4, 2e9, 3e-6, 4e-6)},
    1e-10,
    2e-10,
    3e-6,
)


def test_the_fit_finds_the_rates_that_made_the_times():
    made = sdy.CostModel.of_mesh(MESH).with_rates(KNOWN, MESH, "")
    times = [
        CollectiveTime(kind, axis, size, made_time(made, kind, axis, size))
        for kind in ("all_gather", "all_reduce")
        for axis in ("data", "model")
        for size in (1 << 10, 1 << 16, 1 << 22)
    ]
    found = fitted({"data": 2, "one": 1, "model": 4}, times)
    for name, axis in KNOWN.axes.items():
        assert [found[name].bandwidth, found[name].latency, found[name].start] == pytest.approx(
            [axis.bandwidth, axis.latency, axis.start], rel=1e-6
        )
    assert found["one"] == AxisRates(1, found["model"].bandwidth, 0.0, 0.0)


def made_time(costs, kind, axis, size):
    mesh = Axes.of(data=2, model=4)
    rate = costs.rate(kind, (AxisRef(axis),), mesh)
    return rate.fixed + rate.per_byte * costs.wire_bytes(kind, mesh.sizes[axis], size, size)


def test_noise_makes_no_rate_negative():
    rng = np.random.default_rng(0)
    for _ in range(50):
        times = [
            CollectiveTime(kind, "x", size, float(rng.uniform(1e-6, 1e-4)))
            for kind in ("all_gather", "all_reduce")
            for size in (64, 4096, 65536)
        ]
        axis = fitted({"x": 8}, times)["x"]
        assert axis.bandwidth > 0 and axis.latency >= 0 and axis.start >= 0


def test_fast_devices_are_measured_with_more_than_what_any_op_takes(monkeypatch):
    """As a GPU on which a product of 1024 rows takes as long as an op of four bytes; clocks err by a microsecond."""
    flop, memory, launch, error = 2.5e-15, 2.5e-13, 1e-6, 1e-6
    asked = []

    def product_time(mesh, rows, dtype):
        asked.append(rows)
        return launch + flop * rows**3

    monkeypatch.setattr(measurements, "product_time", product_time)
    monkeypatch.setattr(measurements, "elementwise_time", lambda mesh, n: launch + 2 * memory * n + error * (n == 4))
    monkeypatch.setattr(measurements, "collective_times", lambda *_: [])
    found = Calibration.measured(MESH, Probes())
    assert found.flop == pytest.approx(flop, rel=0.05) and found.memory == pytest.approx(memory, rel=0.05)
    assert asked == [1024, 2048, 4096] and found.launch == pytest.approx(launch + error, rel=1e-3)


def test_what_is_measured_does_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(measurements, "product_time", lambda mesh, rows, dtype: 0.0)
    monkeypatch.setattr(measurements, "elementwise_time", lambda mesh, n: 1e-3 if n == 4 else 0.0)
    monkeypatch.setattr(measurements, "collective_times", lambda *_: [])
    found = Calibration.measured(MESH, Probes())
    assert found.flop == found.memory == measurements._LEAST


def costs_of(path):
    """As `CostModel.calibrate`, of small arrays."""
    found = calibrated(MESH, path, again=False, sizes=SMALL)
    return sdy.CostModel.of_mesh(MESH).with_rates(found, MESH, f"measured, {path}")


def test_a_machine_is_measured_once(tmp_path, monkeypatch):
    path = tmp_path / "below" / "mine.json"
    first = costs_of(path)
    assert first.unit == "seconds" and first.combines == ("all_reduce",) and first.origin == f"measured, {path}"
    assert all(first.bandwidth_of(axis) > 1 for axis in MESH.axis_names)
    monkeypatch.setattr(Calibration, "measured", lambda *_: pytest.fail("measured twice"))
    assert costs_of(path) == first
    assert sdy.CostModel.calibrate(MESH, path=path) == first
    assert [file.name for file in path.parent.iterdir()] == ["mine.json"]


@pytest.mark.more("measured costs, which choose as stated ones do")
def test_a_plan_by_measured_costs_has_the_numbers_of_the_function(tmp_path):
    costs = costs_of(tmp_path / "mine.json")
    x, w = np.random.default_rng(0).standard_normal((2, 64, 64)).astype(np.float32)
    matmul = sdy.partition(lambda x, w: x @ w, mesh=MESH, in_shardings=(P("data"), P("model")), costs=costs)
    assert "costs in seconds: measured" in str(matmul.plan(x, w))
    np.testing.assert_allclose(matmul(x, w), x @ w, rtol=1e-4, atol=1e-4)


def test_the_file_is_read_as_it_was_written():
    assert Calibration.of_text(KNOWN.text()) == KNOWN
    assert KNOWN.with_numbers(KNOWN.numbers()) == KNOWN


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no calibration of this version: Expecting value"),
        ("[]", "version None, not 1"),
        ('{"version": 0}', "version 0, not 1"),
        ('{"version": 1}', "no 'axes'"),
        (KNOWN.text().replace("1e-10", "-1"), "-1 is no rate"),
        (KNOWN.text().replace("1e-10", '"fast"'), "'fast' is no rate"),
        (KNOWN.text().replace('"model"', '"other"'), "the mesh has 'cpu' devices with axes {'data': 2, 'model': 4}"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(tmp_path, text, said):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(sdy.SdyError) as error:
        sdy.CostModel.calibrate(MESH, path=path)
    assert said in str(error.value) and str(path) in str(error.value) and "again=True" in str(error.value)


def test_a_path_that_cannot_be_is_refused(tmp_path):
    with pytest.raises(sdy.SdyError, match=r"cannot be read: .*give another path"):
        sdy.CostModel.calibrate(MESH, path=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(sdy.SdyError, match=r"cannot be (read|written): .*give another path"):
        calibrated(MESH, tmp_path / "file" / "mine.json", again=True, sizes=SMALL)


def test_measuring_again_replaces_the_file(tmp_path, monkeypatch):
    path = tmp_path / "mine.json"
    path.write_text("nonsense")
    monkeypatch.setattr(Calibration, "measured", lambda *_: KNOWN)
    calibrated(MESH, path, again=True, sizes=SMALL)
    assert json.loads(path.read_text())["version"] == measurements.VERSION


def test_the_file_lies_where_caches_do(tmp_path, monkeypatch):
    monkeypatch.setenv("SDY_JAX_CACHE", str(tmp_path))
    assert default_path(MESH) == tmp_path / "cpu_1p_data2_model4.json"
    monkeypatch.delenv("SDY_JAX_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_path(MESH).parent == tmp_path / "xdg" / "sdy_jax"
    monkeypatch.setattr("sys.platform", "darwin")
    assert default_path(MESH).parent.parts[-3:] == ("Library", "Caches", "sdy_jax")
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert default_path(MESH).parent == tmp_path / "local" / "sdy_jax"


def test_devices_that_are_only_described_cannot_be_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "devices", lambda *_: [])
    with pytest.raises(sdy.SdyError, match="'cpu' devices that are not there"):
        sdy.CostModel.calibrate(MESH, path=tmp_path / "mine.json")


TPUS = SimpleNamespace(
    devices=np.full((2, 4), SimpleNamespace(device_kind="TPU v5 lite", platform="tpu", process_index=0)),
    axis_names=("data", "model"),
    shape={"data": 2, "model": 4},
)
PUBLISHED = sdy.CostModel.of_machine("tpu v5e", TPUS.axis_names)


def measured(latency=0.5e-6, bandwidth=90e9, **others):
    """Rates of TPUs, those that are published if nothing is said; half a hop for each of the devices of a ring."""
    axes = {name: AxisRates(size, bandwidth, latency, 5e-6) for name, size in TPUS.shape.items()}
    known = {"flop": PUBLISHED.flop, "memory": PUBLISHED.memory, "launch": PUBLISHED.launch}
    return Calibration("TPU v5 lite", axes, **known | others)


def test_rates_that_are_measured_as_published_give_the_published_model(tmp_path):
    """Of a torus, in tiles, with float32 rounded before it is moved, and products that take longer to start."""
    file = tmp_path / "mine.json"
    file.write_text(measured().text())
    costs = sdy.CostModel.calibrate(TPUS, path=file)
    assert costs.torus == ("data", "model") and costs.lanes == 128 and costs.rounds == 0.5
    assert costs.product_launch == PUBLISHED.product_launch and costs.machine == "tpu v5e"
    mesh, narrow = Axes.of(data=2, model=4), LastCut(64, 3)
    for kind in ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "collective_permute"):
        for axes in ((AxisRef("data"),), (AxisRef("model"),), (AxisRef("data"), AxisRef("model"))):
            for cut in (None, narrow):
                found, wanted = (each.rate(kind, axes, mesh, cut) for each in (costs, PUBLISHED))
                assert found == pytest.approx(wanted), (kind, axes, cut)


def test_only_rates_are_replaced():
    costs = PUBLISHED.with_rates(measured(1e-6, 45e9, flop=1e-13, memory=1e-12, launch=1e-6), TPUS, "measured")
    changed = {"latency", "flop", "bandwidth", "start", "memory", "launch", "copies", "origin"}
    for field in dataclasses.fields(costs):
        if field.name not in changed:
            assert getattr(costs, field.name) == getattr(PUBLISHED, field.name), field.name
    assert costs.bandwidth_of("data") == 45e9 and costs.memory == 1e-12 and costs.copies.rows == 6e-12


def test_an_axis_over_the_network_is_no_torus():
    slices = np.array([[SimpleNamespace(**vars(TPUS.devices[0, 0]), slice_index=n)] * 4 for n in (0, 1)])
    mesh = SimpleNamespace(devices=slices, axis_names=TPUS.axis_names, shape=TPUS.shape)
    costs = sdy.CostModel.of_mesh(mesh).with_rates(measured(), mesh, "measured")
    assert costs.torus == ("model",) and costs.network == ("data",)


def test_an_axis_that_is_measured_whole_has_no_part_over_the_network():
    """As fast as its collectives were, which went over both."""
    published = sdy.CostModel.of_machine("tpu v5e", TPUS.axis_names, {"model:(1)2": 3e9})
    costs = published.with_rates(measured(), TPUS, "measured")
    assert published.network == ("model:(1)2",) and costs.network == () and not costs.major_parts


def test_what_all_collectives_rearrange_is_a_part_of_measured_times():
    """On GPUs, through the buffers of NCCL."""
    gpus = SimpleNamespace(device_kind="NVIDIA H100", platform="gpu", process_index=0)
    mesh = SimpleNamespace(devices=np.full((2, 4), gpus), axis_names=TPUS.axis_names)
    published = sdy.CostModel.of_mesh(mesh)
    costs = published.with_rates(dataclasses.replace(measured(), device_kind="NVIDIA H100"), mesh, "measured")
    assert published.copies.sent > 0 and not any(costs.copies) and costs.combines == published.combines


def test_no_published_rate_is_below_the_least_that_is_believed() -> None:
    chips = [machine.chip for machine in machines().values()]
    assert chips and min([2 / chip.flops for chip in chips] + [1 / chip.memory for chip in chips]) > measurements._LEAST
