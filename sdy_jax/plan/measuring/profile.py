"""Runs of a compiled program: how long they take, and how long each instruction of its HLO does, by jax's profiler."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax

from sdy_jax.errors import SdyError

_TIMED, _PROFILED = 5, 3
"""Runs that are timed without the profiler, and with it. Guessed: the median of five leaves out one interrupted run;
profiles are large."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What runs took, in seconds.

    Attributes:
        seconds: of a call, the median.
        instructions: what each instruction of the program takes per call, executions in loops together. A device that
            comes early waits inside of a collective, so that of each execution the device that takes least counts.
    """

    seconds: float
    instructions: dict[str, float]


def measured(call: Callable[[], Any], module: str) -> Measured:
    """Runs `call`, which is compiled and runs the HLO module of that name.

    Raises:
        SdyError: the profiler runs already.
    """
    times = [_seconds(call) for _ in range(_TIMED)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            trace = jax.profiler.trace(folder)
            trace.__enter__()
        except RuntimeError as error:
            raise SdyError(
                f"analyze: jax's profiler cannot be started: {error}; to fix: stop the one that runs"
            ) from None
        try:
            for _ in range(_PROFILED):
                jax.block_until_ready(call())
        finally:
            trace.__exit__(None, None, None)
        with warnings.catch_warnings():
            # Types of jax's reader warn when they are made, and where warnings are errors that aborts the process.
            warnings.simplefilter("ignore", DeprecationWarning)
            events = [*_events(Path(folder), module)]
    return Measured(median(times), _per_call(events))


def _seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begun


_Event = tuple[str, Any, float, float]
"""Instruction, device, start and duration in seconds."""


def _events(folder: Path, module: str) -> Iterator[_Event]:
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events:
                    stats = {key: value for key, value in event.stats if key is not None}
                    if str(stats.get("hlo_module", "")).partition("(")[0] == module and "hlo_op" in stats:
                        device = stats.get("device_ordinal", plane.name)
                        yield str(stats["hlo_op"]), device, event.start_ns / 1e9, event.duration_ns / 1e9


def _per_call(events: list[_Event]) -> dict[str, float]:
    """Seconds per call of each instruction: executions are told apart by their order on each device."""
    by_device: dict[str, dict[Any, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for name, device, start, seconds in events:
        by_device[name][device].append((start, seconds))
    found = {}
    for name, devices in by_device.items():
        executions = zip(*(sorted(each) for each in devices.values()), strict=False)
        found[name] = sum(min(seconds for _, seconds in each) for each in executions) / _PROFILED
    return found
