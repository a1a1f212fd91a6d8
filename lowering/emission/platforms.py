"""The platform for which a program is emitted, where its devices are known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

_platform: ContextVar[str] = ContextVar("platform", default="")


@contextmanager
def running_on(device: jax.Device | None) -> Iterator[None]:
    """What is traced meanwhile runs on such devices, where these are known."""
    token = _platform.set("" if device is None else device.platform)
    try:
        yield
    finally:
        _platform.reset(token)


def are_cpus() -> bool:
    """Whether devices are known, and are CPUs."""
    return _platform.get() == "cpu"


def are_tpus() -> bool:
    """Whether devices are known, and are TPUs."""
    return _platform.get() == "tpu"
