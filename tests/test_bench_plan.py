"""The benchmark of planning runs and prints its table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "bench_plan"


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
