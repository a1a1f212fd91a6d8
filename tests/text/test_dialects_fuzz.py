"""No module makes `sdy-jax opt` print a traceback, or die: what is wrong is said at its place."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from mutated_modules import MODULES
from places import HELPERS, ROOT

from sdy_jax.commands.optimize import optimize

_PROGRAM = HELPERS / "mutated_modules.py"


def run(first: int, count: int) -> None:
    done = subprocess.run(
        [sys.executable, str(_PROGRAM), str(first), str(count)],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(map(str, (HELPERS, ROOT)))},
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"seed {lines[-1] if lines else 'none'}: {done.stderr[-2000:]}"
    wrong = [line for line in lines if line.startswith("seed")]
    assert not wrong, wrong
    assert len(lines) == count


def fuzz(seed: int) -> dict[str, int]:
    run(500 * seed, 500)
    return {"text": 500}


def test_modules_with_mistakes_give_errors():
    run(0, 300)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 6000, 1000))
def test_thousands_of_modules_with_mistakes_give_errors(first):
    run(first, 1000)


@pytest.mark.parametrize("module", MODULES)
def test_without_mistakes_they_are_right(module):
    optimize(module, "", "m.mlir")
