"""Values that are computed before what takes them in parts.

XLA for CPUs has no all_to_all of an array: it makes a slice for each device of the group, and fuses each with all the
element-wise ops before it. Every such fusion is compiled for itself. In a chain of all_to_alls among eight devices with
a multiplication between two of them, each took 165 ms of compilation, and 75 ms where the operand was computed apart,
by one fusion (2026-11, jaxlib 0.10.2). XLA drops `optimization_barrier` before it fuses, so a function that it may not
inline stands in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
from jax.experimental.xla_metadata import set_xla_metadata

_on_cpu: ContextVar[bool] = ContextVar("on_cpu", default=False)


@contextmanager
def running_on(device: jax.Device | None) -> Iterator[None]:
    """What is traced meanwhile runs on such devices, where these are known."""
    token = _on_cpu.set(device is not None and device.platform == "cpu")
    try:
        yield
    finally:
        _on_cpu.reset(token)


def computed_apart(x: jax.Array) -> jax.Array:
    """The array, on CPUs computed once for all its parts."""
    if not _on_cpu.get():
        return x
    with set_xla_metadata(inlineable="false"):
        return _as_it_is(x)


_as_it_is = jax.jit(jax.lax.optimization_barrier)
