"""Interrupts, forks and ends of the process: what is left works, and nothing waits forever."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from places import ROOT

import sdy_jax as sdy
from sdy_jax.calls.traced_function import traced_on
from sdy_jax.ir.operations import pre_order
from sdy_jax.plan.build import collection_paused

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
X, W = jnp.ones((8, 16)), jnp.linspace(0, 1, 256).reshape(16, 16)


def fun(x: jax.Array, w: jax.Array) -> jax.Array:
    x = jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x)
    return jax.nn.softmax(x @ w.T, axis=-1)


def partitioned() -> Any:
    return sdy.partition(fun, mesh=MESH, in_shardings=(P("data"), P(None, "model")), on_unknown="ignore")


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Ctrl-C after some time, as Python's handler makes of it."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def seconds_to_plan() -> float:
    begun = time.monotonic()
    partitioned().plan(X, W)
    return time.monotonic() - begun


@pytest.mark.more("a plan per place")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it came in a callback of jaxlib's
def test_planning_can_be_interrupted_anywhere_and_begun_again() -> None:
    partitioned().plan(X, W)
    whole, ours, number = seconds_to_plan(), partitioned(), 0
    for part in np.linspace(0.02, 0.98, 40):
        try:
            with interrupted_after(whole * part):
                ours(X, W)
        except KeyboardInterrupt:
            number += 1
        assert gc.isenabled() and traced_on() is None
        ours = ours if not ours.plans else partitioned()
    assert number > 10
    np.testing.assert_allclose(ours(X, W), fun(X, W), rtol=1e-5)
    assert str(ours.plan(X, W)) == str(partitioned().plan(X, W))


@pytest.mark.more("a plan that is interrupted")
def test_an_interrupt_in_a_walk_of_mlir_is_one() -> None:
    """The bindings would raise a RuntimeError, which nobody who waits for Ctrl-C would notice."""
    module = partitioned().plan(X, W).stages["partitioned"]
    for _ in range(20):
        with pytest.raises(KeyboardInterrupt), collection_paused(), interrupted_after(0.003):
            while True:  # callbacks of the collector would swallow it
                pre_order(module)


PROGRAM = """
import os, sys
import jax, jax.numpy as jnp, sdy_jax as sdy
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

@sdy.partition(mesh=mesh, in_shardings=(P("data"), P(None, "model")), on_unknown="ignore")
def step(x, w):
    return jax.lax.fori_loop(0, times, lambda _, x: jnp.tanh(x @ w) @ w.T, x)

times, x, w = 3, jnp.ones((64, 64)), jnp.ones((64, 64))
"""
WHILE_IT_RUNS = """
times = 3000
step(x, w)
"""
FORKED = """
before, plan = step(x, w).block_until_ready(), step.plan(x, w)
if not (child := os.fork()):
    step.plan(x, w).save(sys.argv[1])
    plan.to_html(sys.argv[1] + ".html")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert sdy.load_plan(sys.argv[1]) == plan.record()
assert (step(x, w) == before).all()
"""


def ended(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM + script, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.more("a process of its own")
def test_the_interpreter_may_end_while_a_step_runs() -> None:
    """In the main thread: where a daemon thread is in jaxlib then, that aborts, under jit as well."""
    done = ended(WHILE_IT_RUNS)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.more("a forked process")
def test_a_forked_process_has_the_plans_of_its_parent(tmp_path: Path) -> None:
    """New ones it cannot make: in a child jax waits forever for MLIR's threads, when it lowers as well."""
    done = ended(FORKED, str(tmp_path / "step.json"))
    assert (done.returncode, done.stderr) == (0, "")
