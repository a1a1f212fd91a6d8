"""Runs of a compiled program: how long each instruction takes, by jax's profiler, and which collectives of the
plan and parts of the model the instructions are.
"""

from __future__ import annotations

import re
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax

from sdy_jax.errors import SdyError
from sdy_jax.ir.locations import scope_of
from sdy_jax.lowering.ops.emission.scopes import scope_name
from sdy_jax.lowering.planner.report import CollectiveRecord
from sdy_jax.plan.measuring.hlo_module import WIRE_BYTES

# Runs of a compiled program: how long they take, and how long each instruction of its HLO does, by jax's profiler.

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


# Which instructions of a compiled program are which collectives of its plan, and of which parts of the model: by the
# scopes that profilers show.

_MODULE = re.compile(r"HloModule ([^\s,]+)")
_COLLECTIVE = re.compile(
    rf"%?(?P<name>[\w.-]+) = .*? (?:{'|'.join(WIRE_BYTES)})(?:-start|-done)?\("
    r'.*metadata=\{[^}]*?op_name="(?P<scope>[^"]*)"'
)
_INSTRUCTION = re.compile(
    r'%?(?P<name>[\w.-]+) = .*? (?P<kind>[\w-]+)\(.*metadata=\{[^}]*?op_name="(?P<scope>(?:[^"\\]|\\.)*)"'
)
_AROUND = frozenset({"while", "conditional", "call"})
"""Instructions whose time is that of others."""
_SENT = re.compile(r"/\(?(?:bucket_\d+_)?\w+\.\w+\[[^\]/]*\] ")
"""What stands before the name of a collective: `/sdy.all_reduce[data] model.py:12`."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The collectives of a plan that profilers show under one name, and the instructions that they became."""

    name: str
    records: tuple[CollectiveRecord, ...]
    instructions: tuple[str, ...]

    @property
    def first(self) -> CollectiveRecord:
        """The collective that they are called after."""
        return _first(self.records[0])


def module_name(text: str) -> str:
    """The name of an HLO module, from its text."""
    found = _MODULE.match(text)
    return found[1] if found else ""


def scopes(records: Iterable[CollectiveRecord], text: str) -> list[Scope]:
    """The collectives of a plan by their scopes, in the order of the plan, with their instructions in the text of its
    optimised HLO."""
    planned: dict[str, list[CollectiveRecord]] = {}
    for record in records:
        planned.setdefault(_scope_of(record), []).append(record)
    found: dict[str, list[str]] = {}
    for match in filter(None, map(_COLLECTIVE.search, text.splitlines())):
        own = [part for part in _parts(match["scope"]) if part in planned]
        if own:
            found.setdefault(own[-1], []).append(match["name"])
    return [Scope(name, tuple(same), tuple(found.get(name, ()))) for name, same in planned.items()]


class Instruction(NamedTuple):
    """An instruction of a compiled program.

    Attributes:
        name: as profilers show it.
        scope: the name scopes of the op that it is of, without transformations; empty where there are none.
        is_backward: it is of a derivative's backward pass.
        is_sending: it is of a collective.
    """

    name: str
    scope: str
    is_backward: bool
    is_sending: bool


def instructions(text: str) -> Iterator[Instruction]:
    """The instructions in the text of an optimised HLO that say of which op they are, without loops and branches, of
    which those inside are listed."""
    for found in filter(None, map(_INSTRUCTION.search, text.splitlines())):
        if found["kind"] in _AROUND:
            continue
        name, *sent = _SENT.split(found["scope"], maxsplit=1)
        scope = scope_of(f"{name}/" if sent else name)
        yield Instruction(found["name"], scope, "transpose(" in name, bool(sent))


def _first(record: CollectiveRecord) -> CollectiveRecord:
    return record.members[0] if record.members else record


def _scope_of(record: CollectiveRecord) -> str:
    first = _first(record)
    return scope_name(f"sdy.{first.kind}", first.axes, first.source)


def _parts(scope: str) -> list[str]:
    """The scopes around an instruction, outermost first; buckets are called after their first member. Where XLA makes
    one of several its name is `around/(of one:of another)`."""
    return [re.sub(r"^\(?(bucket_\d+_)?", "", part) for part in re.split(r"/|:(?=\w+\.\w+\[)", scope)]
