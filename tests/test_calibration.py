"""Cost models that are measured: the fit, the file, and what is said of bad ones."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.lowering.targets import calibration
from sdy_jax.lowering.targets.calibration import AxisRates, Calibration, Sizes, calibrated, default_path, fitted
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.mesh import Mesh as Axes
from sdy_jax.runtime.measuring import CollectiveTime

MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
SMALL = Sizes(collectives=(64, 4096, 65536), product=16, memory=4096)
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
    assert json.loads(path.read_text())["version"] == calibration.VERSION


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
