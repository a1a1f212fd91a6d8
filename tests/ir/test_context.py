"""Modules are read on the caller's thread: in a process that was forked, too."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import os, signal
from sdy_jax.ir.text.modules import new_context
from sdy_jax.ir.text.modules import parse_module

text = "".join(f"func.func @f{i}(%0: tensor<8xf32>) -> tensor<8xf32> {{ return %0 : tensor<8xf32> }}" for i in range(8))
parse_module(text, new_context())
child = os.fork()
if not child:
    signal.alarm(60)
    print(str(parse_module(text, new_context())).count("func.func"), flush=True)
    os._exit(0)
raise SystemExit(os.waitpid(child, 0)[1])
"""


@pytest.mark.more("a forked process")
def test_a_forked_process_reads_modules_of_several_functions() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["8"]), done.stderr[-2000:]
