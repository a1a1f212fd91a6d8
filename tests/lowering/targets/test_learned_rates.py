"""Cost models that learn from a step: `CostModel.calibrate(mesh, from_plan=...)`."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import PLANE

import sdy_jax as sdy
from sdy_jax.errors import SdyError
from sdy_jax.ir.meshes import Mesh
from sdy_jax.lowering.targets.axis_rates import learned_fields
from sdy_jax.lowering.targets.measurements import MeasuredSends, StepProfile

MESH = Mesh.of(data=2, model=4)
H100 = sdy.CostModel.of_machine("h100", MESH.axis_names, {"data": 25e9})
KIND = jax.devices()[0].device_kind


def sends(model, kind, axes, wire, slower, times=3):
    """Collectives that took so many times as long as by a model."""
    refs = [sdy.AxisRef(axis) for axis in axes]
    seconds = times * slower * model.sending_time(kind, refs, MESH, wire)
    return MeasuredSends(kind, tuple(map(str, refs)), times, times * wire, seconds)


def profile_of(*found, work=0.0, estimated=0.0, flop=H100.flop, memory=H100.memory):
    return StepProfile("H100", dict(MESH.sizes), found, work, estimated, flop, memory, "step.json")


def learned(model, *found, **work):
    return dataclasses.replace(model, **learned_fields(model, profile_of(*found, **work), MESH, "H100"))


def time_of(model, kind, axis, wire=1e6):
    return model.sending_time(kind, [sdy.AxisRef(axis)], MESH, wire)


def test_an_axis_is_as_much_slower_as_its_collectives_were():
    """But for what devices rearrange, which is the memory's."""
    model = learned(
        H100, sends(H100, "all_gather", ["model"], 1e6, 1.5), sends(H100, "all_reduce", ["model"], 1e4, 1.5)
    )
    for kind in ("all_gather", "reduce_scatter", "collective_permute"):
        assert time_of(model, kind, "model") == pytest.approx(1.5 * time_of(H100, kind, "model"), rel=0.05)
        assert time_of(model, kind, "data") == time_of(H100, kind, "data")
    assert (model.flop, model.memory) == (H100.flop, H100.memory)
    assert model.origin == "learned from step.json: collectives along model take 1.5 times as long"


def test_collectives_along_several_axes_are_of_the_slowest():
    model = learned(H100, sends(H100, "all_reduce", ["data", "model"], 1e8, 3.0))
    assert time_of(model, "all_gather", "data", 1e8) == pytest.approx(
        3 * time_of(H100, "all_gather", "data", 1e8), rel=0.05
    )
    assert time_of(model, "all_gather", "model") == time_of(H100, "all_gather", "model")


def test_those_along_equally_fast_axes_count_where_no_other_shows_one():
    even = sdy.CostModel.of_machine("h100", MESH.axis_names)
    both, one = sends(even, "all_reduce", ["data", "model"], 1e8, 3.0), sends(even, "all_gather", ["model"], 1e6, 1.5)
    model = learned(even, both, one)
    assert time_of(model, "all_gather", "model") == pytest.approx(1.5 * time_of(even, "all_gather", "model"), rel=0.05)
    assert time_of(model, "all_gather", "data") == pytest.approx(3 * time_of(even, "all_gather", "data"), rel=0.05)


def test_parts_of_an_axis_change_with_it():
    slices = sdy.CostModel.of_machine("tpu v5e", MESH.axis_names, {"model:(1)2": 3e9})
    model = learned(slices, sends(slices, "all_gather", ["model"], 1e8, 2.0))
    assert dict(model.bandwidth)["model:(1)2"] == pytest.approx(1.5e9)
    assert model.torus == slices.torus


def test_work_is_as_much_slower_as_it_was():
    model = learned(H100, work=3.0, estimated=2.0)
    assert (model.flop, model.memory) == pytest.approx((1.5 * H100.flop, 1.5 * H100.memory))
    assert model.origin.endswith("work 1.5 times")


def test_bytes_become_seconds():
    bytes_ = sdy.CostModel.of_platform("cpu")
    found = MeasuredSends("all_gather", ('"model"',), 2, 2e6, 1e-3)
    model = learned(bytes_, found, work=0.5, estimated=1e9, flop=bytes_.flop, memory=0.0)
    assert model.unit == "seconds"
    assert model.bandwidth_of("model") == model.bandwidth_of("data") == pytest.approx(2e9)
    assert model.flop == pytest.approx(bytes_.flop * 0.5e-9)
    assert "1.9 GiB/s along model" in model.origin
    assert learned(bytes_, found).flop == pytest.approx(bytes_.flop / 2e9)


def test_what_shows_nothing_is_refused():
    with pytest.raises(SdyError, match=r"step\.json shows nothing"):
        learned(H100, work=1e-3, estimated=0.0)
    elsewhere = dataclasses.replace(profile_of(), axes={"data": 8})
    with pytest.raises(SdyError, match=r"of 'H100' devices with axes {'data': 8}, the mesh has 'H100'"):
        learned_fields(H100, elsewhere, MESH, "H100")


def layer(x, w):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def test_a_plan_is_made_by_what_a_step_took_and_says_so(tmp_path):
    path, given = tmp_path / "step.profile.json", (jnp.ones((64, 256)), jnp.ones((256, 64)))
    options = {"mesh": PLANE, "in_shardings": (P("x", "y"), P("y"))}
    step = sdy.partition(layer, **options)
    found = step.plan(*given).analyze(*given)
    found.save(path)
    for from_plan in (found, path, str(path)):
        costs = sdy.CostModel.calibrate(PLANE, from_plan=from_plan)
        assert costs.unit == "seconds"
        assert costs.bandwidth == sdy.CostModel.calibrate(PLANE, from_plan=path).bandwidth
    again = sdy.partition(layer, **options, costs=costs)
    plan = again.plan(*given)
    assert "learned from step.profile.json: " in str(plan)
    estimated, seen = plan.time.communication, sum(row.measured for row in found.collectives)
    assert estimated == pytest.approx(seen, rel=0.5)
    np.testing.assert_allclose(again(*given), layer(*given), rtol=1e-5)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "is no profile"),
        ('{"version": 0}', "version 0, not 1"),
        ('{"version": 1}', "no 'axes'"),
        ("[]", "no profile"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, text, what):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SdyError, match=what):
        sdy.CostModel.calibrate(PLANE, from_plan=path)
    path.unlink()
    with pytest.raises(SdyError, match="cannot be read"):
        sdy.CostModel.calibrate(PLANE, from_plan=path)


def test_numbers_that_are_none_are_refused(tmp_path):
    path = tmp_path / "step.json"
    profile_of(sends(H100, "all_gather", ["model"], 1e6, 1.5)).save(path)
    held = json.loads(path.read_text())
    for value in (-1.0, "1", True, None):
        path.write_text(json.dumps(held | {"work": value}))
        with pytest.raises(SdyError, match="is no measurement"):
            sdy.CostModel.calibrate(PLANE, from_plan=path)
