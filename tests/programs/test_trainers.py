"""Public trainers as they are, with one changed word: their own steps and sharding rules, beside jit.

They fight with one another's and with our requirements, so that they run in an interpreter of their own, which
`SDY_TRAINERS_PYTHON` names: one where `pip install --no-deps` has put the trainers, and jax 0.10 to 0.12 with what they
import (`public_code/trainers/README.md`). Each case runs twice in a process of its own, once as it stands, once with
`jax.jit` read as `sdy.partition` in the trainer's sources.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent / "public_code" / "trainers"
PYTHON = os.environ.get("SDY_TRAINERS_PYTHON", "")
CASES = {
    "maxtext": ("fsdp_tensor", "data_fsdp", "context", "experts", "mixtral", "pipeline"),
    "levanter": ("fsdp", "fsdp_tensor", "replicas"),
    "tunix": ("llama3", "qwen3"),
    "gemma": ("fsdp",),
}
pytestmark = [
    pytest.mark.public,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="SDY_TRAINERS_PYTHON names no Python that has the trainers"),
]


def report(trainer: str, case: str, how: str) -> dict[str, Any]:
    """What `measure.py` states of a case under `jit` or `partition`."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[3])}
    command = [PYTHON, str(HERE / "measure.py"), f"{trainer}_steps", case, how]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("trainer", "case"), [(trainer, case) for trainer in CASES for case in CASES[trainer]])
def test_trainers_steps_are_those_of_jit(trainer: str, case: str) -> None:
    if subprocess.run([PYTHON, "-c", f"import {trainer}"], capture_output=True).returncode:
        pytest.skip(f"{PYTHON} has no {trainer}")
    jits, ours = report(trainer, case, "jit"), report(trainer, case, "partition")
    print({name: (ours[name], jits[name]) for name in jits})
    np.testing.assert_allclose(ours["numbers"], jits["numbers"], rtol=2e-3)  # bfloat16 inside
    assert ours["wire_bytes"] <= jits["wire_bytes"]
    assert ours["programs"] == jits["programs"]
    assert ours["compiles"][1:] == jits["compiles"][1:]
