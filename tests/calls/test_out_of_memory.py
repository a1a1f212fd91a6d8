"""Where devices have too little memory, the error says what was planned to be held; its type stays jax's."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from places import ROOT

import sdy_jax as sdy
from sdy_jax.calls.argument_placement import Dispatch

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
WEIGHTS = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}
SPECS = {"up": P(None, "model"), "down": P("model")}


@pytest.fixture
def step() -> Any:
    @sdy.partition(mesh=MESH, in_shardings=(SPECS, P("data")), on_unknown="ignore")
    def step(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ weights["up"]) @ weights["down"]

    return step


class Failing:
    """A jitted function whose program fails when it is run."""

    def __init__(self, jitted: Any, message: str):
        self._jitted, self._message = jitted, message

    def _cache_miss(self, *args: Any, **kwargs: Any) -> Any:
        self._jitted.trace(*args, **kwargs)
        raise jax.errors.JaxRuntimeError(self._message)


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Any:
    real = Dispatch.__call__

    def with_message(message: str) -> None:
        monkeypatch.setattr(Dispatch, "__call__", lambda self, *call: Failing(real(self, *call), message))

    return with_message


def notes_of(error: BaseException) -> list[str]:
    """Ours, without jax's on its traceback."""
    return [note for note in getattr(error, "__notes__", ()) if note.startswith("sdy_jax")]


def test_a_call_says_what_its_plan_holds(step: Any, fail: Any) -> None:
    fail("RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes.")
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        step(WEIGHTS, jnp.ones((32, 64)))
    assert str(error.value) == "RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes."
    (note,) = notes_of(error.value)
    held = step.plan(WEIGHTS, jnp.ones((32, 64))).memory
    assert (held.arguments, held.results, held.temporaries) == (36864, 4096, 8192)
    assert "step, partitioned at" in note and "test_out_of_memory.py:" in note
    assert "hold 48.0 KiB on each device: arguments 36.0 KiB, results 4.0 KiB, temporaries 8.0 KiB." in note
    largest = note.partition("The largest values: ")[2].split("; ")
    assert largest[0] == "16.0 KiB of weights['down']: f32[256@model,64]"
    assert [text.split(" of ")[0] for text in largest[:5]] == ["16.0 KiB", "16.0 KiB", "4.0 KiB", "4.0 KiB", "4.0 KiB"]
    assert any("of f32[32@data,256@model] at " in text and ".py:" in text for text in largest)


def test_other_errors_are_as_they_are(step: Any, fail: Any) -> None:
    fail("INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        step(WEIGHTS, jnp.ones((32, 64)))
    assert not notes_of(error.value)


def test_the_function_of_a_derivative_is_named_once(step: Any, fail: Any) -> None:
    fail("RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes.")
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.grad(lambda weights: step(weights, jnp.ones((32, 64))).sum())(WEIGHTS)
    (note,) = notes_of(error.value)
    assert note.startswith("sdy_jax: step")


REALLY = """
import resource
import jax, jax.numpy as jnp, sdy_jax as sdy
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

@sdy.partition(mesh=mesh, in_shardings=P("x"), on_unknown="ignore")
def small(x):
    return x + 1

@sdy.partition(mesh=mesh, in_shardings=P("x"), on_unknown="ignore")
def step(x):
    return jnp.sin(x)[:, None] * jnp.ones((1, 1 << 16))

x = jax.device_put(jnp.ones(1 << 16), jax.NamedSharding(mesh, P("x")))
jax.block_until_ready(small(x))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
jax.block_until_ready(step(x))
"""


@pytest.mark.more("a process that ends")
@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process")
def test_an_error_that_ends_the_process_names_the_plans_that_hold_most() -> None:
    """On CPUs memory is taken while the program runs, so it is the wait that fails."""
    done = subprocess.run([sys.executable, "-c", REALLY], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    *_, error, first, second = done.stderr.strip().splitlines()
    assert "RESOURCE_EXHAUSTED: Out of memory" in error
    assert first.startswith("sdy_jax: step, partitioned at <string>:12, is planned to hold 2.0 GiB on each device")
    assert "2.0 GiB of result: f32[65536@x,65536]" in first
    assert second.startswith("sdy_jax: small, partitioned at ")
