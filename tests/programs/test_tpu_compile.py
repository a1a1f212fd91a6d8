"""What we emit compiles for slices of TPUs, by libtpu and without a TPU, in processes of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from places import TESTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (pip install libtpu)"),
]

FILES = [
    "tpu_programs",
    "test_strategies",
    "test_strategies_indexing",
    "test_reductions",
    "test_deferral",
    "test_rematerialize",
    "test_worked_examples",
]
"""The first is for TPUs alone; the others are tests on CPU devices, whose programs are compiled for TPUs instead."""


def environment() -> dict[str, str]:
    """No other process may have libtpu loaded unless it is allowed; the machine need not be one of Google's cloud."""
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    libtpu = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    return {**os.environ, **libtpu, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.mark.parametrize("file", FILES)
def test_programs_compile_for_tpus(file: str) -> None:
    (path,) = TESTS.rglob(f"{file}.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tpu_plugin", "-p", "no:cacheprovider", "-m", "not slow"]
    done = subprocess.run([*command, str(path)], env=environment(), cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
