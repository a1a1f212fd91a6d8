"""`sdy-jax plan --topology`: meshes of described chips, what a compiler says, and, with libtpu, programs for pods."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from places import HELPERS, ROOT

import sdy_jax as sdy
from sdy_jax.cli.devices import Topology, compiled_report, gpu_kinds
from sdy_jax.cli.main import main
from sdy_jax.errors import SdyError
from sdy_jax.lowering.targets.target import device_memory
from sdy_jax.plan.profile import overlapped
from sdy_jax.runtime.devices import network_axes

TARGETS = ROOT / "sdy_jax" / "cli" / "targets"

needs_libtpu = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (pip install libtpu)"),
]


def of_cpus(slices: int = 1) -> Topology:
    """The eight virtual devices as slices."""
    return Topology("cpu:2x4", slices, tuple(jax.devices()[:8]))


def test_a_mesh_has_all_chips_and_its_first_axis_runs_over_slices() -> None:
    mesh = of_cpus(2).mesh(sdy.Mesh.of(slice=2, data=2, model=2))
    assert mesh.axis_names == ("slice", "data", "model") and mesh.devices.shape == (2, 2, 2)
    assert {d.id for d in mesh.devices[0].flat} == {0, 1, 2, 3}
    assert {d.id for d in of_cpus(2).mesh(sdy.Mesh.of(data=4, model=2)).devices[:2].flat} == {0, 1, 2, 3}


def test_meshes_that_do_not_fit_are_errors() -> None:
    with pytest.raises(SdyError, match=r"has 4 devices; expected all of cpu:2x4, 8 cpu devices"):
        of_cpus().mesh(sdy.Mesh.of(data=4))
    with pytest.raises(SdyError, match=r'runs over slices; got "data"=1 for 2 x cpu:2x4'):
        of_cpus(2).mesh(sdy.Mesh.of(data=1, model=8))


def test_what_the_compiler_says() -> None:
    mesh = of_cpus().mesh(sdy.Mesh.of(data=2, model=4))
    step = sdy.partition(
        lambda x, w: x @ w, mesh=mesh, in_shardings=(P(None, "model"), P("model")), out_shardings=P(), donate_argnums=0
    )
    matrix = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    report = compiled_report(step.lower(matrix, matrix), of_cpus())
    first, *rows = report.splitlines()
    assert first == "compiled for cpu:2x4, 8 cpu devices: per device"
    found = {row[:18].strip(): row[18:].strip() for row in rows}
    assert found["arguments"] == "128.0 KiB" and found["results"].startswith("256.0 KiB")
    assert found["collectives"].endswith("KiB on the wire") and found["all-reduce"].startswith("1 x, ")
    assert found["operations"].endswith("flop")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--topology", "v5e"), "expected a platform and a slice of it, as in tpu:v5e:16x16"),
        (("--topology", "tpu:v5e:4x4"), "needs libtpu|libtpu, which is not installed; to fix: pip install libtpu"),
        (("--slices", "2"), "name one of them by --topology"),
        (("--topology", "gpu:h100"), "gpu:h100; expected a kind and slices x hosts x GPUs, as in gpu:h100:8x1x8"),
        (("--topology", "gpu:h100:2x2x2x2"), "expected a kind and slices x hosts x GPUs"),
        (("--topology", "gpu:h900:8"), "gpu:h900; expected a100, a100-40gb, b200, h100, h200, or a file with the text"),
        (("--topology", "gpu:h100:8"), "for CUDA|for CUDA, which is not installed; .* pip install 'sdy_jax.gpu-topol"),
        (("--topology", "gpu:h100:8", "--slices", "2"), "--slices 2; GPUs have their slices in their name"),
    ],
)
def test_bad_options(
    options: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.mlir").write_text(
        "func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> { return %x : tensor<8xf32> }"
    )
    assert main(["plan", "m.mlir", *options]) > 0
    error = capsys.readouterr().err
    assert any(part in error for part in message.split("|")) and "Traceback" not in error


@pytest.mark.parametrize(
    ("sizes", "batch", "slow"),
    [
        ({"slice": 2, "data": 4, "model": 4}, ("slice", "data"), "slice"),
        ({"data": 8, "model": 4}, "data", "data:(1)2"),
    ],
)
def test_a_slow_axis_or_part_of_one_is_used_least(sizes: dict[str, int], batch: Any, slow: str) -> None:
    """Gradients are summed within slices, and a device's part of the sum between them."""
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    costs = sdy.CostModel.of_machine("tpu v5e", sizes, {slow: 3.125e9})

    def step(weights: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        slopes = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2))(weights)
        return jax.tree.map(lambda p, g: p - g, weights, slopes)

    within = P("data", "model") if "slice" in sizes else '[{"data":(2)4}, {"model"}]'
    back = P("model", "data") if "slice" in sizes else '[{"model"}, {"data":(2)4}]'
    specs = {"up": within, "down": back}
    shapes = {"up": (2048, 8192), "down": (8192, 2048)}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((8192, 2048), jnp.float32)
    step_on_slices = sdy.partition(step, mesh=mesh, in_shardings=(specs, P(batch)), out_shardings=specs, costs=costs)
    plan = step_on_slices.plan(weights, x)
    crossing = [r for r in plan.collectives if any((a.name, a.pre_size) == (slow.split(":")[0], 1) for a in r.axes)]
    shards = sum(4 * int(np.prod(shape)) / 16 for shape in shapes.values())
    assert (
        sum(record.total_wire_bytes for record in crossing) <= shards
    )  # an all-reduce of one on two slices sends it once


def test_a_slow_part_of_an_axis_is_reduced_over_last() -> None:
    """On eight devices in two slices: within them first, then what is left between them, if no library does so."""
    mesh = of_cpus(2).mesh(sdy.Mesh.of(data=8))
    costs = sdy.CostModel.of_machine("tpu v5e", ["data"], {"data:(1)2": 1e6})
    costs = replace(costs, rounds=1.0, network=())
    rng = np.random.default_rng(0)
    x, w = (rng.normal(0, 0.1, shape).astype(np.float32) for shape in ((1024, 64), (64, 64)))  # x is not worth sending
    step = sdy.partition(lambda x, w: (x.T @ x) @ w, mesh=mesh, in_shardings=(P("data"), P()), costs=costs)
    sums = [r for r in step.plan(x, w).collectives if r.kind in ("reduce_scatter", "all_reduce")]
    assert [(r.kind, *map(str, r.axes)) for r in sums][:2] == [
        ("reduce_scatter", '"data":(2)4'),
        ("all_reduce", '"data":(1)2'),
    ]
    np.testing.assert_allclose(step(x, w), (x.T @ x) @ w, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("said", ["state", "0"])
def test_the_command_line_donates(said: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "model.py").write_text("def step(state, x):\n    return state + x.sum()\n")
    options = ["--mesh", "data=8", "--args", "f32[1024,1024], f32[8]", "--donate", said]
    assert main(["plan", f"{tmp_path / 'model.py'}:step", *options]) == 0
    assert "4.0 MiB of results (4.0 MiB of them in donated arguments)" in capsys.readouterr().out


@dataclass(frozen=True)
class Chip:
    slice_index: int
    platform: str = "tpu"


@pytest.mark.parametrize(
    ("slices", "expected"),
    [([0] * 8, {}), ([0] * 4 + [1] * 4, {"x": 2}), ([*range(8)], {"x": 0}), ([0, 0, 0, 1, 1, 1, 2, 2], {"x": 0})],
)
def test_which_part_of_an_axis_runs_over_slices(slices: list[int], expected: dict[str, int]) -> None:
    chips = np.array([Chip(index) for index in slices])
    mesh = SimpleNamespace(devices=chips.reshape(8, 1), axis_names=("x", "y"))
    assert network_axes(mesh) == expected  # type: ignore[arg-type]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment.pop("XLA_FLAGS", None)  # libtpu ends the process at flags that it does not know
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=600)


class TestOnTpus:
    pytestmark = needs_libtpu

    @pytest.mark.parametrize(
        ("slice_", "slices", "mesh", "devices"),
        [
            ("v5e:4x4", 1, "data=4,model=4", 16),
            ("v5e:4x4", 2, "slice=2,data=4,model=4", 32),
            ("v5e:16x16", 1, "data=16,model=16", 256),
            ("v5p:8x8x16", 1, "data=64,model=16", 1024),
            ("v5e:16x16", 4, "slice=4,data=16,model=16", 1024),
        ],
    )
    def test_a_training_step_is_compiled_for_a_pod(self, slice_: str, slices: int, mesh: str, devices: int) -> None:
        done = run(str(HELPERS / "pod_programs.py"), slice_, str(slices), mesh)
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["devices"] == devices and found["unit"] == "seconds"
        assert 0.7 < found["sent"] / found["planned"] < 1.3
        assert found["memory"] < 16 * 2**30 and "memory" in found["report"] and "collectives" in found["report"]
        if "slice" in mesh:
            sent_once = 2 * (slices - 1) / slices * found["weights"] / (devices / slices)
            assert 0 < found["over slices"] <= 1.1 * sent_once  # the norms' weights are not split

    def test_the_command_prints_plan_and_compiler(self, tmp_path: Path) -> None:
        (tmp_path / "model.py").write_text("def step(x, w):\n    return x @ w\n")
        options = ["--topology", "tpu:v5e:4x4", "--mesh", "data=4,model=4", "--args", "bf16[512,1024], bf16[1024,512]"]
        sharded = ["--in-shardings", "P('data', 'model'), P('model')", "--out-shardings", "P('data')"]
        done = run("-m", "sdy_jax", "plan", f"{tmp_path / 'model.py'}:step", *options, *sharded)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.startswith("plan of step on mesh data=4, model=4 (16 devices): 1 collective")
        assert "compiled for tpu:v5e:4x4, 16 TPU v5 lite devices: per device" in done.stdout

    def test_unknown_slices_are_errors(self, tmp_path: Path) -> None:
        (tmp_path / "model.py").write_text("def step(x):\n    return x\n")
        done = run(
            "-m", "sdy_jax", "plan", f"{tmp_path / 'model.py'}:step", "--topology", "tpu:v5e:3x3", "--args", "f32[8]"
        )
        assert done.returncode == 1 and "error: --topology tpu:v5e:3x3: INVALID_ARGUMENT" in done.stderr
        assert "Traceback" not in done.stderr


needs_cuda_plugin = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs jax's plugin for CUDA (gpu-topologies)"
    ),
]


class TestOnGpus:
    pytestmark = needs_cuda_plugin

    @pytest.mark.parametrize("kind", gpu_kinds())
    def test_the_command_prints_plan_and_compiler(self, kind: str, tmp_path: Path) -> None:
        """On an H100 a gather runs beside the product of the layer before."""
        (tmp_path / "model.py").write_text(LAYERS)
        options = ["--topology", f"gpu:{kind}:2x8", "--mesh", "data=16", "--args", "bf16[8192,2048], bf16[4,2048,2048]"]
        sharded = ["--in-shardings", "P('data'), P(None, 'data')", "--out-shardings", "P('data')"]
        done = run("-m", "sdy_jax", "plan", f"{tmp_path / 'model.py'}:step", *options, *sharded)
        assert done.returncode == 0, done.stderr[-3000:]
        report = done.stdout[done.stdout.index("compiled for") :]
        assert f"compiled for gpu:{kind}:2x8, 16 NVIDIA {kind[:4].upper()}" in report
        assert re.search(r"memory +[\d.]+ MiB of [\d.]+ GiB", report)
        assert re.search(r"all-gather +4 x, 30.0 MiB", report)
        assert "beside other work" in report or kind != "h100"

    @pytest.mark.parametrize(("shape", "axes"), [("1x8x8", {}), ("8x1x8", {"a": 0}), ("2x4x8", {"a": 2})])
    def test_slices_are_reached_over_the_network(self, shape: str, axes: dict[str, int]) -> None:
        code = f"""
import sdy_jax as sdy
from sdy_jax.cli.devices import Topology, prepare
from sdy_jax.runtime.devices import network_axes
prepare()
topology = Topology.of("gpu:h100:{shape}")
print(topology.slices, network_axes(topology.mesh(sdy.Mesh.of(a=8, b=8))))
"""
        done = run("-c", code)
        assert done.stdout.splitlines()[-1:] == [f"{shape[0]} {axes}"], done.stderr[-3000:]

    def test_a_file_describes_a_gpu(self, tmp_path: Path) -> None:
        (target,) = (file for file in TARGETS.iterdir() if file.name == "h100.textproto")
        (tmp_path / "mine.textproto").write_text(target.read_text())
        (tmp_path / "model.py").write_text(LAYERS)
        found = ["--topology", f"gpu:{tmp_path / 'mine.textproto'}:8", "--mesh", "data=8"]
        done = run("-m", "sdy_jax", "plan", f"{tmp_path / 'model.py'}:step", *found, "--args", "f32[8,8], f32[2,8,8]")
        assert done.returncode == 0, done.stderr[-3000:]
        assert "8 NVIDIA H100 80GB HBM3 devices: per device" in done.stdout


LAYERS = """\
import jax
import jax.numpy as jnp


def step(x, weights):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0]
"""


@pytest.mark.parametrize("kind", gpu_kinds())
def test_described_gpus_are_machines_of_known_rates(kind: str) -> None:
    text = TARGETS.joinpath(f"{kind}.textproto").read_text()
    described = re.search(r'device_description_str: "(.*)"', text)
    memory = re.search(r"device_memory_size: (\d+)", text)
    assert described and memory and 0 < device_memory(described[1]) < int(memory[1])


def test_what_runs_beside_other_work_in_a_scheduled_module() -> None:
    """The first gather has a product between start and done, the second has none."""
    found = overlapped(SCHEDULED)
    assert found.by_kind == {"all-gather": (1, 3 * 64.0)}


SCHEDULED = """\
HloModule m, is_scheduled=true, num_partitions=4

ENTRY %main (p: f32[4,4], q: f32[16,16]) -> f32[16,4] {
  %p = f32[4,4]{1,0} parameter(0)
  %q = f32[16,16]{1,0} parameter(1)
  %s = (f32[4,4], f32[16,4]) all-gather-start(%p), replica_groups=[1,4]<=[4], dimensions={0}
  %d = f32[16,16]{1,0} dot(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %g = f32[16,4]{1,0} all-gather-done(%s)
  %t = (f32[4,4], f32[16,4]) all-gather-start(%p), replica_groups=[1,4]<=[4], dimensions={0}
  %h = f32[16,4]{1,0} all-gather-done(%t)
  ROOT %r = f32[16,4]{1,0} dot(%d, %g), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
