"""The scripts that look at a machine, or at meshes larger than any: on virtual CPU devices they run and print rows."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from benchmarks import SCRIPTS  # makes the scripts importable
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

# isort: split
import accelerator_cases
from accelerator_cases import Case

import sdy_jax as sdy


def output_of(script: str, *options: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, str(SCRIPTS / script), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.more("the script as a whole")
def test_accelerators_are_checked_and_virtual_devices_said_to_be_none() -> None:
    first, _, head, rule, *rows, _, last = output_of("check_accelerator", "--quick", "--only", "numbers").splitlines()
    assert "8 x cpu (cpu, virtual: no accelerator is at hand)" in first and "mesh data=2,model=4" in first
    assert head == "| what | measured | found |" and rule == "|---|---|---|" and last == "all right"
    assert [row.split(" | ")[0] for row in rows] == ["| training step", "| maxima with NaNs, float32"]


@pytest.mark.slow
def test_the_whole_check_of_accelerators() -> None:
    rows = output_of("check_accelerator").splitlines()
    assert rows[-1] == "all right" and len(rows) > len(accelerator_cases.CASES) + 5


def test_what_is_wrong_is_said_in_its_row(monkeypatch: pytest.MonkeyPatch, mesh: Mesh) -> None:
    def wrong(x: jax.Array) -> jax.Array:
        noise = np.random.default_rng().standard_normal()  # another number each time it is traced
        return x + noise

    def broken(x: jax.Array) -> jax.Array:
        raise KeyError("w1")

    cases = {
        name: lambda fun=fun: Case(fun, (np.ones(8, np.float32),), P("data"))
        for name, fun in (("a", wrong), ("b", broken))
    }
    monkeypatch.setattr(accelerator_cases, "CASES", cases)
    first, second = accelerator_cases.run(mesh, ["a", "b"])
    assert "AssertionError: result differs by" in first["problem"] and "KeyError" in second["problem"]


@dataclass(frozen=True)
class Kind:
    """What an abstract mesh says of its devices."""

    device_kind: str
    num_cores: int | None = None
    platform: str | None = None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "AMD Instinct MI300X", "TPU v5 lite"])
@pytest.mark.parametrize("name", accelerator_cases.CASES)
def test_every_case_is_lowered_for_accelerators_that_are_not_there(kind: str, name: str) -> None:
    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2, abstract_device=Kind(kind))
    case = accelerator_cases.CASES[name]()
    options = {"in_shardings": case.in_shardings, "out_shardings": case.out_shardings, "on_unknown": "ignore"}
    text = sdy.partition(case.fun, mesh=mesh, **options).lower(*case.arguments).as_text()
    assert "mhlo.num_partitions = 8" in text


@pytest.mark.slow
def test_planning_time_by_devices() -> None:
    head, *rows, growth = output_of(
        "bench_scale", "--meshes", "2x4,64x64", "--layers", "1", "--repeats", "1"
    ).splitlines()
    assert head.split()[:2] == ["mesh", "devices"] and growth.startswith("the last takes ")
    assert [row.split()[1] for row in rows] == ["8", "4,096"]
    assert all(len(row.split()[-1]) == 32 for row in rows)
