"""Devices that wait for a callback, on which nothing else can run until it returns: jit would wait forever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

Devices = frozenset[jax.Device]


class _Thread(threading.local):
    callback: tuple[str, Devices] | None = None
    """The callback that this thread runs, and the devices that wait for it."""


_thread = _Thread()


@contextmanager
def _waiting(title: str, devices: Devices) -> Iterator[None]:
    before, _thread.callback = _thread.callback, (title, devices)
    try:
        yield
    finally:
        _thread.callback = before


@dataclass(frozen=True)
class Waited:
    """The Python function of a callback for which devices wait; `title` is what users call the callback."""

    title: str
    devices: Devices
    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        with _waiting(self.title, self.devices):
            return self.function(*args)


def is_called_back() -> bool:
    """Whether this thread runs a callback of ours."""
    return _thread.callback is not None


def waits_forever(mesh: jax.sharding.Mesh) -> str | None:
    """Why a program on these devices would never end in this thread; None where it would.

    All virtual devices of a CPU share their threads.
    """
    if _thread.callback is None or mesh.size == 1:
        return None
    title, waiting = _thread.callback
    devices = frozenset(mesh.devices.flat)
    is_cpu = all(device.platform == "cpu" for device in devices | waiting)
    if len(waiting) == 1 or not (is_cpu or devices & waiting):
        return None
    return (
        f"is called inside a {title}, for which {len(waiting)} devices wait, so a program on {mesh.size} devices would "
        "not end; to fix: call it before or after, and pass values, or compute with numpy or on one device"
    )
