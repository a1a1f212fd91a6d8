"""A compiled program: the collectives in it and what runs beside them, and how long each instruction takes."""

from __future__ import annotations

import re
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax

from sdy_jax.base.errors import SdyError
from sdy_jax.ir.locations import scope_of
from sdy_jax.lowering.ops.re_emission import scope_name
from sdy_jax.lowering.planner.report import CollectiveRecord
from sdy_jax.plan.hlo_module import WIRE_BYTES, HloCollective, HloInstruction, HloModule, called_by, collective_of

# Runs of a compiled program: how long they take, and how long each instruction of its HLO does, by jax's profiler.

_TIMED, _PROFILED = 5, 3
"""Runs that are timed without the profiler, and with it. Guessed: the median of five leaves out one interrupted run;
profiles are large."""


class Execution(NamedTuple):
    """One execution of an instruction on a device: when it started, from the beginning of the call, and its seconds."""

    instruction: str
    start: float
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """What runs took, in seconds.

    Attributes:
        seconds: of a call, the median.
        instructions: what each instruction of the program takes per call, executions in loops together. A device that
            comes early waits inside of a collective, so that of each execution the device that takes least counts.
        last: the executions of the last call on one device, in the order in which they start.
    """

    seconds: float
    instructions: dict[str, float]
    last: tuple[Execution, ...] = ()


def measured(call: Callable[[], Any], module: str) -> MeasuredTimes:
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
    return MeasuredTimes(median(times), _per_call(events), tuple(_last_call(events)))


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


def _last_call(events: Sequence[_Event]) -> list[Execution]:
    """The executions of the last call on the first device: of each instruction the last of as many as a call has."""
    first = min((device for _, device, _, _ in events), key=str, default=None)
    of_name: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, device, start, seconds in events:
        if device == first:
            of_name[name].append((start, seconds))
    last = [(start, seconds, name) for name, each in of_name.items() for start, seconds in _of_last(each)]
    begun = min((start for start, *_ in last), default=0.0)
    return [Execution(name, start - begun, seconds) for start, seconds, name in sorted(last)]


def _of_last(executions: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return sorted(executions)[len(executions) - len(executions) // _PROFILED :]


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


# The collectives of a compiled program: what really went into the executable, ours or `jax.jit`'s.
#
# Reads the text of optimised HLO (`compiled.as_text()`). Everything follows from the operands of a collective, so
# that synchronous and asynchronous (`-start`) forms, tuples and combined collectives are one case. Ops in a while
# loop count once per trip where XLA says the number of trips or a counter runs from constant to constant, else once,
# and those of its condition once more; of a conditional the branch counts that sends most.
#
#     ENTRY %main (p: f32[4,8]) -> f32[4,8] {
#       %p = f32[4,8]{1,0} parameter(0)
#       ROOT %r = f32[4,8]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
#     }
#
# has one all-reduce in groups of 4 over 128 bytes: 2 * 3/4 * 128 = 192 bytes on the wire per device.


@dataclass(frozen=True, slots=True)
class HloTotals:
    """Executions and wire bytes per device of a program's collectives, in all and by kind (count, bytes)."""

    count: int
    wire_bytes: float
    by_kind: dict[str, tuple[int, float]]


def collectives_in_hlo(text: str) -> list[HloCollective]:
    """The collectives of an optimised HLO module, in the order of its text.

    Raises:
      ParseError: an instruction names an operand, or groups, that cannot be read.
    """
    module = HloModule.parse(text)
    executions = module.executions()
    return [
        collective_of(instruction, module, executions[name])
        for name, instructions in module.computations.items()
        for instruction in instructions
        if instruction.opcode in WIRE_BYTES
    ]


def totals(collectives: Iterable[HloCollective]) -> HloTotals:
    """Sums of executions and wire bytes."""
    by_kind: dict[str, tuple[int, float]] = {}
    for collective in collectives:
        if not collective.count:
            continue
        count, wire = by_kind.get(collective.kind, (0, 0.0))
        by_kind[collective.kind] = count + collective.count, wire + collective.total_wire_bytes
    return HloTotals(sum(c for c, _ in by_kind.values()), sum(w for _, w in by_kind.values()), by_kind)


def estimated_cycles(text: str) -> float:
    """The cycles that a TPU's compiler expects the instructions of an optimised HLO module to take, loops by trips.

    It says none for collectives and for kernels (`kernels_in_hlo`). What other compilers make has no such numbers, and
    takes 0.
    """
    module = HloModule.parse(text)
    executions = module.executions()
    return sum(
        executions[name] * instruction.cycles
        for name, instructions in module.computations.items()
        for instruction in instructions
    )


def kernels_in_hlo(text: str) -> list[tuple[HloInstruction, int]]:
    """The calls of kernels for TPUs in an optimised HLO module, and how often each runs."""
    module = HloModule.parse(text)
    executions = module.executions()
    return [
        (instruction, executions[name])
        for name, instructions in module.computations.items()
        for instruction in instructions
        if instruction.is_kernel
    ]


# What runs beside the collectives of a compiled program, as its compiler has scheduled it.
#
# A collective that has a start and a done runs beside what stands between them. On TPUs both are fusions,
# `async-collective-start.3` and `async-collective-done.3`, and the first calls the collective.

_WORK = frozenset(("convolution", "custom-call", "dot", "fusion", "reduce", "scatter", "sort", "while"))


def overlapped(text: str) -> HloTotals:
    """Of the collectives of a scheduled HLO module those that run beside other work: that have a fusion, a product or a
    loop between start and done."""
    module = HloModule.parse(text)
    executions = module.executions()
    return totals(
        collective_of(started, module, executions[name])
        for name, instructions in module.computations.items()
        for place, instruction in enumerate(instructions)
        if (started := module.started_by(instruction)) and _has_work(instruction, instructions[place + 1 :])
    )


def _has_work(start: HloInstruction, later: Iterable[HloInstruction]) -> bool:
    """Whether work lies between a start and its done."""
    for instruction in later:
        if instruction.ends(start):
            return False
        if instruction.opcode in _WORK:
            return True
    return False


@dataclass(frozen=True, slots=True)
class Waiting:
    """Seconds of a program on a device: of its work, its collectives, and those of these beside which nothing runs."""

    work: float
    sent: float
    exposed: float


def waiting(
    module: HloModule, seconds: Callable[[HloCollective], float], work: Callable[[HloInstruction], float]
) -> Waiting:
    """What a scheduled HLO module waits for its collectives, as it orders starts, work and dones.

    Those that run at once share the links: the first to start goes first, and one that has no start goes before them.

    Args:
        seconds: how long a collective takes.
        work: how long an instruction takes that is none, without those of the computations that it calls.
    """
    return _Schedule(module, seconds, work).waiting(module.executions())


class _Schedule:
    """The seconds of computations as they are scheduled: callees before those that call them."""

    def __init__(
        self,
        module: HloModule,
        seconds: Callable[[HloCollective], float],
        work: Callable[[HloInstruction], float],
    ):
        self._module, self._seconds, self._work = module, seconds, work
        self._took: dict[str, float] = {}

    def waiting(self, executions: Mapping[str, int]) -> Waiting:
        started = [i for body in self._module.computations.values() for i in body if self._module.started_by(i)]
        inside = {name for start in started if start.opcode not in WIRE_BYTES for name in called_by(start)}
        work = sent = exposed = 0.0
        for name, count in executions.items():
            if name not in inside:
                own = self._run(name)
                work, sent, exposed = work + count * own.work, sent + count * own.sent, exposed + count * own.exposed
        return Waiting(work, sent, exposed)

    def _run(self, name: str) -> Waiting:
        """Of a computation, without those that it calls."""
        work = sent = exposed = took = 0.0
        running: list[tuple[HloInstruction, float]] = []
        for instruction in self._module.computations[name]:
            if started := self._module.started_by(instruction):
                seconds = self._seconds(collective_of(started, self._module, 1))
                sent += seconds
                running.append((instruction, seconds))
            elif place := next((n + 1 for n, (start, _) in enumerate(running) if instruction.ends(start)), 0):
                exposed += sum(left for _, left in running[:place])
                running = running[place:]
            elif instruction.opcode in WIRE_BYTES:
                seconds = self._seconds(collective_of(instruction, self._module, 1))
                sent, exposed = sent + seconds, exposed + seconds
            else:
                own = self._work(instruction)
                seconds = own + self._called(instruction)
                work, took = work + own, took + seconds
                running = _after(running, seconds)
        self._took[name] = took + exposed
        return Waiting(work, sent, exposed)

    def _called(self, instruction: HloInstruction) -> float:
        """The seconds of the computations that it calls."""
        trips = self._module.trips(instruction) if instruction.opcode == "while" else 1
        return trips * sum(self._took.get(name, 0.0) for name in called_by(instruction))


def _after(running: Sequence[tuple[HloInstruction, float]], seconds: float) -> list[tuple[HloInstruction, float]]:
    """What is left of collectives that run, the first one first, after some time."""
    left = []
    for start, took in running:
        left.append((start, max(took - seconds, 0.0)))
        seconds = max(seconds - took, 0.0)
    return left
