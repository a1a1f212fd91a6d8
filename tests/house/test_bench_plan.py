"""The benchmark of planning runs and prints its table."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from benchmarks import SCRIPTS  # makes the scripts importable

# isort: split
import planning_time
from models import rows

SCRIPT = SCRIPTS / "bench_plan"


@pytest.mark.more("the benchmark as a whole")
def test_a_row_per_number_of_layers_with_every_stage() -> None:
    command = [sys.executable, str(SCRIPT), "--layers", "1", "--repeats", "1", "--d-model", "32", "--devices", ""]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    _, head, row, *growth = done.stdout.splitlines()
    for stage in ("trace", "import", "propagate", "export", "partition", "emit", "jaxlib pipeline"):
        assert stage in head
    numbers = [float(word) for word in row.split()]
    assert numbers[0] == 1 and len(numbers) == 13 and all(number > 0 for number in numbers)
    assert len(growth) == 2


@pytest.mark.more("the benchmark as a whole")
def test_planning_as_a_whole_beside_compilation() -> None:
    options = ["--layers", "1", "--repeats", "1", "--d-model", "32", "--devices", "", "--cpu", "--compiled", "8"]
    done = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *_, head, row = done.stdout.splitlines()
    assert head.split() == ["mesh", "layers", "planned", "compiled", "ratio"]
    mesh, layers, planned, compiled, ratio = row.split()
    assert (mesh, layers) == ("8", "1") and float(ratio) == pytest.approx(float(planned) / float(compiled), rel=0.1)


ROWS = {"8": [0.5, 2.0, 8.0, 32.0], "2x4": [1.0, 4.0, 16.0, 96.0], "2x2x2": [5.0, 20.0, 80.0, 320.0]}


def test_structures_that_take_too_long_to_plan() -> None:
    times = [(3.0, 1.5, 4), (5.0, 9.0, 4), (7.0, 2.1, 10), (8.0, math.inf, 10)]
    planned = [rows.Planned("a step", plan, jit, most) for plan, jit, most in times]
    assert [row.is_late for row in planned] == [False, True, True, False]


def test_goals_of_planning_time_that_are_missed() -> None:
    layers, compiled = [1, 4, 16, 64], [2.0, 8.0, 32.0, 90.0]
    planned = [
        planning_time.Row(mesh, *numbers)
        for mesh, times in ROWS.items()
        for numbers in zip(layers, times, compiled, strict=True)
    ]
    assert list(planning_time.missed(planned)) == [
        "2x4, 64 layers: 1.07 of XLA's time; at most 1",
        "2x4: a layer takes 1.67 times as long among many as among few; at most 1.5",
    ]
