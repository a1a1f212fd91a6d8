"""Plans stay as they are unless a commit changes them on purpose: quick ones of `scripts/plan_digests`."""

from __future__ import annotations

import json
import subprocess
import sys

import jax
import pytest
from benchmarks import SCRIPTS

STORED = json.loads((SCRIPTS / "plan_digests.json").read_text())

QUICK = (
    "mlp 2x4 cpu stated",
    "moe 2x2x2 cpu stated",
    "fsdp 2x2x2 cpu stated",
    "conv 2x4 cpu stated",
    "llama-8b-plain fsdp=64 h100:8x1x8 stated",
    "llama-8b fsdp=64 h100:8x1x8 free",
    "experts-128-small fsdp=8,expert=8 h100:8x1x8 stated",
    "decode-by-heads model=8 v5e:2x4 stated",
    "decode-by-batch data=2,model=4 h100:1x1x8 free",
    "bert-large fsdp=2,model=4 h100:1x1x8 free",
    "lstm fsdp=4,model=4 v5e:4x4 stated",
    "lstm fsdp=8 h100:1x1x8 free",
)
"""Those that take few seconds, of each kind of model, mesh and machine. Limits of memory, the free choice of layouts
and pods take longer, and are left to the script."""


@pytest.mark.more("plans of models at their real widths")
@pytest.mark.skipif(jax.__version__ != STORED["jax"], reason=f"plans are stored as jax {STORED['jax']} traces programs")
def test_plans_are_those_that_are_stored() -> None:
    assert not {*QUICK} - {*STORED["programs"]}
    command = [sys.executable, str(SCRIPTS / "plan_digests"), "--check", "--workers", "1", *QUICK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    update = "Where they are to change, `scripts/plan_digests --write`, which plans all, belongs to the same commit."
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{update}"
