"""Several processes: they agree that all of them run the same program before it runs, and hear of one that failed."""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import cache, lru_cache
from itertools import zip_longest
from types import TracebackType
from typing import Any, Protocol

import jax
from jax.interpreters import mlir

from sdy_jax.base.errors import ProcessError, SdyError
from sdy_jax.base.jax_calls import distributed_client
from sdy_jax.ir.jax_shardings import AnyMesh
from sdy_jax.ir.locations import short_source
from sdy_jax.plan.digests import collective_lines, digest
from sdy_jax.plan.plan import Plan
from sdy_jax.runtime.evaluation import identity_op

# Programs of two processes side by side: the first collective, or else the first op, that differs.

_LONGEST_PROGRAM = 2**20
"""The most characters that are sent of a program. Given by jax's service, which takes messages of 4 MiB."""

_WIDTH = 160
"""Characters of an op in a message. Chosen: for a reader."""

CALLBACK = "callback"
"""Part of the names of custom calls whose other attributes may be addresses in one process."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a process is about to run: the function's name; per collective what it is and its source line; the devices
    of the mesh in order; the program's text, a line per op."""

    name: str
    collectives: tuple[tuple[str, str], ...]
    devices: tuple[int, ...]
    program: tuple[str, ...]

    @classmethod
    def of(cls, plan: Plan, devices: Sequence[int]) -> Description:
        collectives = [
            (line, short_source(record.source)) for record in plan.collectives for line in collective_lines([record])
        ]
        text = plan.program.module.get_asm(enable_debug_info=False, large_elements_limit=None)
        lines = (_without_addresses(line) for line in text.splitlines())
        return cls(plan.name, tuple(collectives), tuple(devices), tuple(lines))

    @property
    def digest(self) -> str:
        """Equal for programs that may run together."""
        return digest([*(line for line, _ in self.collectives), str(self.devices), *self.program])

    def packed(self) -> str:
        """As a short text."""
        text = _packed(self)
        return (
            text
            if len(text) <= _LONGEST_PROGRAM
            else _packed(Description(self.name, self.collectives, self.devices, ()))
        )

    @classmethod
    def unpacked(cls, text: str) -> Description:
        name, collectives, devices, program = json.loads(zlib.decompress(base64.b64decode(text)))
        return cls(name, tuple((line, source) for line, source in collectives), tuple(devices), tuple(program))


def difference(a: int, first: Description, b: int, second: Description) -> str:
    """Where the programs of the processes `a` and `b` part."""
    for number, (one, other) in enumerate(zip_longest(first.collectives, second.collectives), 1):
        if (one and one[0]) != (other and other[0]):
            return f"collective {number} differs: {_sends(a, one)}; {_sends(b, other)}"
    if first.devices != second.devices:
        return f"the meshes have their devices in different orders: {_order(a, first)}; {_order(b, second)}"
    for mine, yours in zip_longest(first.program, second.program, fillvalue=""):
        if mine != yours:
            return f"the collectives are equal, the op differs: process {a} has {_op(mine)}; process {b} {_op(yours)}"
    return "what they compute differs"


def _packed(description: Description) -> str:
    return base64.b64encode(zlib.compress(json.dumps(astuple(description)).encode())).decode()


def _without_addresses(line: str) -> str:
    return "".join(c for c in line if not c.isdigit()) if CALLBACK in line else line


def _sends(process: int, collective: tuple[str, str] | None) -> str:
    if collective is None:
        return f"process {process} has none any more"
    line, source = collective
    return f"process {process} has {line}{f', of {source}' if source else ''}"


def _order(process: int, description: Description) -> str:
    some = description.devices[:8]
    return f"process {process} has {', '.join(map(str, some))}{', ...' if len(description.devices) > len(some) else ''}"


def _op(line: str) -> str:
    line = line.strip()
    return f"`{line[:_WIDTH]}{'...' if len(line) > _WIDTH else ''}`" if line else "none"


# A primitive that returns its operands, and has all processes compare a plan where the program around it is lowered.
#
# So a jitted function that calls a partitioned one compares too, and tracing alone (`jax.eval_shape`) waits for
# nobody.

Check = Callable[[], None]
"""Raises where the processes do not agree. It may be called any number of times."""


def compared(values: Sequence[Any], check: Check) -> list[Any]:
    """The values, of a program that does not run unless `check` lets it."""
    return list(compared_p.bind(*values, check=check)) if values else []


def _lower(ctx: mlir.LoweringRuleContext, *values: Any, check: Check) -> Sequence[Any]:
    if not ctx.module_context.lowering_parameters.for_export:  # an exported program runs elsewhere
        check()
    return values


compared_p = identity_op("sdy_compared", evaluated=lambda check: check(), lowered=_lower)


# A lowered program that all processes compare when it is compiled, so that one may look at its text alone.


class ComparedLowered(jax.stages.Lowered):
    """`jax.stages.Lowered`, whose `compile` first runs a check."""

    __slots__ = ("_check",)

    _check: Check

    @classmethod
    def of(cls, lowered: jax.stages.Lowered, check: Check) -> ComparedLowered:
        new = cls.__new__(cls)
        for name in jax.stages.Lowered.__slots__:
            setattr(new, name, getattr(lowered, name))
        new._check = check
        return new

    def compile(self, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
        """As jax's, for all processes at once."""
        self._check()
        return super().compile(*args, **kwargs)


# Whether all processes of a group are at the same program, found out through jax's coordination service.
#
# A group agrees in rounds. In round 3, about to run a program of digest `d`, process 1 sets its key `at/1` to `3 d`.
# The first process of the group reads all of these. Once all are at round 3 it sets `verdict/3`: to nothing where the
# digests are equal, else to those that it has found. All others wait for that key. So a process sends two small
# messages per program, whatever the size of the group, and none for a digest on which the group has agreed before.

_PAUSE, _LONGEST, _LONGER = 0.002, 0.1, 1.5
"""Seconds between two looks at who is there, at first and in the end, and by how much they grow. Guessed: programs are
compared once each, so a tenth of a second is little, and shorter pauses ask jax's service more often."""

_GRACE = 1.0
"""Seconds in which others may still arrive after two different digests were seen, so that the error can name all.
Guessed: with less, late ones are missing in it; with more, it comes later."""

_SLICE = 1.0
"""Seconds for which a process waits without looking for interrupts, and for processes that failed. Chosen: as long as a
user waits after Ctrl-C."""


_LEFT = "left"
"""In the place of its round, what a process says that waits no longer; the round comes after it."""


class Service(Protocol):
    """The part of jax's distributed client that is used."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...


class Missing(Exception):
    """Some processes have not come in time."""

    def __init__(self, processes: Sequence[int]):
        super().__init__(processes)
        self.processes = tuple(processes)


class Failed(Exception):
    """An error has ended a process."""

    def __init__(self, process: int, error: str):
        super().__init__(process, error)
        self.process, self.error = process, error


_FAILED = "sdy_jax/failed/"


def tell_failure(service: Service, me: int, error: str) -> None:
    """Says to all processes that an error ends this one."""
    service.key_value_set(f"{_FAILED}{me}", error, allow_overwrite=True)


class ProcessGroup:
    """The processes `members`, one of which is `me`, and what they have agreed on so far."""

    def __init__(self, service: Service, me: int, members: Sequence[int]):
        self._service, self._me, self._members = service, me, sorted(members)
        self._prefix = f"sdy_jax/{'-'.join(map(str, _ranges(self._members)))}"
        self._round = 0
        self._agreed: set[str] = set()
        self._lock = threading.Lock()

    def agree(self, digest: str, timeout: float) -> dict[int, str]:
        """Waits until all members are here, `timeout` seconds at most.

        Returns:
            Nothing where all have this digest; else the digests by process, of those that have come.

        Raises:
            Missing: after the timeout.
            Failed: an error has ended one of those that are not here.
        """
        with self._lock:
            if digest in self._agreed:
                return {}
            self._announce(f"{self._round} {digest}")
            try:
                verdict = (self._decided if self._me == self._members[0] else self._awaited)(timeout)
            except Missing:
                self._announce(f"{_LEFT} {self._round}")
                raise
            self._round += 1
            if not verdict:
                self._agreed.add(digest)
            return {int(process): found for process, found in json.loads(verdict or "{}").items()}

    def tell(self, key: str, value: str) -> None:
        """Publishes a text for the other members."""
        self._service.key_value_set(f"{self._prefix}/{self._round}/{key}", value, allow_overwrite=True)

    def told(self, key: str, timeout: float) -> str:
        """A text that another member publishes in this round; empty where it does not come."""
        try:
            return self._wait_for(f"{self._prefix}/{self._round}/{key}", timeout)
        except Missing:
            return ""

    def _announce(self, state: str) -> None:
        self._service.key_value_set(f"{self._prefix}/at/{self._me}", state, allow_overwrite=True)

    def _states(self) -> dict[int, list[str]]:
        found = self._service.key_value_dir_get(f"{self._prefix}/at/")
        return {int(key.rpartition("/")[2]): state.split() for key, state in found}

    def _here(self) -> dict[int, str]:
        """The digests of the processes that wait in this round."""
        return {process: what for process, (where, what) in self._states().items() if where == str(self._round)}

    def _missing(self) -> Missing:
        """Those that have not come to this round, not even to leave it again."""
        came = {process for process, state in self._states().items() if str(self._round) in (state[0], state[-1])}
        return Missing([process for process in self._members if process not in came])

    def _check_failures(self) -> None:
        for key, error in self._service.key_value_dir_get(_FAILED):
            process = int(key.rpartition("/")[2])
            if process in self._members:
                raise Failed(process, error)

    def _decided(self, timeout: float) -> str:
        """The verdict, by the member that gives it."""
        end, pause = time.monotonic() + timeout, _PAUSE
        look = time.monotonic() + _SLICE / 2
        while True:
            if time.monotonic() > look:
                self._check_failures()
                look = time.monotonic() + _SLICE
            here = self._here()
            differ = len({*here.values()}) > 1
            end = min(end, time.monotonic() + _GRACE) if differ else end
            is_over = time.monotonic() >= end
            if len(here) == len(self._members) or (differ and is_over):
                break
            if is_over:
                raise self._missing()
            time.sleep(pause)
            pause = min(_LONGER * pause, _LONGEST)
        verdict = json.dumps(here) if differ else ""
        self._service.key_value_set(f"{self._prefix}/verdict/{self._round}", verdict)
        return verdict

    def _awaited(self, timeout: float) -> str:
        return self._wait_for(f"{self._prefix}/verdict/{self._round}", timeout)

    def _wait_for(self, key: str, timeout: float) -> str:
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            try:
                return self._service.blocking_key_value_get(key, max(1, round(1000 * min(left, _SLICE))))
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                self._check_failures()
        raise self._missing()


def _ranges(numbers: Sequence[int]) -> list[str]:
    """`0:3`, `5:6` for 0, 1, 2, 5."""
    known = {*numbers}
    starts = [n for n in numbers if n - 1 not in known]
    ends = [n + 1 for n in numbers if n + 1 not in known]
    return [f"{start}:{end}" for start, end in zip(starts, ends, strict=True)]


# All processes of a mesh compare a program before it runs, and each of them raises where it is not the same in all.
#
# jax compares nothing: processes that run different programs exchange what these happen to send, and end with wrong
# numbers, or wait forever.

VARIABLE = "SDY_JAX_PROCESS_TIMEOUT"

_DEFAULT = 300.0
"""Seconds to wait for a process, which may be reading a checkpoint. Published (`jax.distributed.initialize`, whose
default it is): with less, slow hosts are taken for missing ones."""

_DETAILS = 30.0
"""Seconds to wait for what another process says of its program. Guessed: it has that at hand, unless it has died, and
then the error comes that much later."""


def are_several() -> bool:
    """Whether there are other processes that could run something else."""
    return jax.process_count() > 1 and distributed_client() is not None


def compare(plan: Plan, mesh: AnyMesh) -> None:
    """Waits until all processes of the mesh are about to run this program. Returns at once where that was found out
    before, in a single process, and in one that has no devices of the mesh.

    Raises:
        ProcessError: it is not the same in all of them, or some do not come.
    """
    timeout = _timeout()
    if not timeout or not are_several() or not isinstance(mesh, jax.sharding.Mesh):
        return
    members, me = sorted({device.process_index for device in mesh.devices.flat}), jax.process_index()
    if me not in members or len(members) == 1:
        return
    group = _group(distributed_client(), me, tuple(members))
    description = Description.of(plan, [device.id for device in mesh.devices.flat])
    try:
        digests = group.agree(description.digest, timeout)
    except Missing as missing:
        raise ProcessError(_missing_message(plan.name, missing.processes, timeout)) from None
    except Failed as failed:
        raise ProcessError(
            f"process {failed.process} ended before it came to `{plan.name}`, by {failed.error}. To fix: see its output"
        ) from None
    if digests:
        raise ProcessError(_message(group, me, description, digests))


@lru_cache(maxsize=64)
def _group(service: Service, me: int, members: tuple[int, ...]) -> ProcessGroup:
    return ProcessGroup(service, me, members)


def _timeout() -> float:
    text = os.environ.get(VARIABLE, "")
    try:
        found = float(text) if text else _DEFAULT
    except ValueError:
        found = -1.0
    if found < 0:
        raise SdyError(f"{VARIABLE}={text}; expected seconds, or 0 for processes that are not to be compared")
    return found


def _message(group: ProcessGroup, me: int, own: Description, digests: Mapping[int, str]) -> str:
    """Which process differs from most, and where. The first process with each program says what that is."""
    firsts = {digest: process for process, digest in sorted(digests.items(), reverse=True)}
    if firsts.get(own.digest) == me:
        group.tell(own.digest, own.packed())
    counts = Counter(digests.values())
    usual = max(counts, key=lambda digest: (counts[digest], -firsts[digest]))
    odd = min((digest for digest in counts if digest != usual), key=firsts.__getitem__)
    alike, others = ([p for p, d in sorted(digests.items()) if d == digest] for digest in (usual, odd))
    told = [group.told(digest, _DETAILS) for digest in (usual, odd)]
    return _difference_message(alike, others, [Description.unpacked(text) if text else None for text in told])


def _difference_message(alike: Sequence[int], others: Sequence[int], told: Sequence[Description | None]) -> str:
    first, second = told
    if first is None or second is None:
        names, where = "programs", "what they say of theirs does not come"
    else:
        names = f"`{first.name}`" if first.name == second.name else f"`{second.name}` and `{first.name}`"
        where = difference(alike[0], first, others[0], second)
    return (
        f"{_processes(others)} {'is' if len(others) == 1 else 'are'} about to run another program than "
        f"{_processes(alike)}, {names}: {where}. To fix: call the same functions, with the same options and types, in "
        "the same order in all processes"
    )


def _missing_message(name: str, missing: Sequence[int], timeout: float) -> str:
    theirs = "that process" if len(missing) == 1 else "those processes"
    return (
        f"{_processes(missing)} did not come to `{name}` within {timeout:g} s, whose mesh has devices of {theirs}. To "
        f"fix: call it in all processes of its mesh, or wait longer by {VARIABLE}=SECONDS in the environment; with 0, "
        "programs are not compared"
    )


def _processes(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    if not others:
        return f"process {last}"
    some = others if len(others) < 8 else [*others[:7], "..."]
    return f"processes {', '.join(some)} and {last}"


# A process that an error ends says so to the others, which would else wait for it until their timeout.

_LONGEST_ERROR = 400
"""Characters of an error in a message. Chosen: for a reader."""


@cache
def tell_of_failures() -> None:
    """From now on this process tells the others of an error that ends it."""
    sys.excepthook = _telling(sys.excepthook)


def _telling(hook: Callable[..., Any]) -> Callable[..., Any]:
    def tell(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        client = distributed_client()
        if client is not None:
            with suppress(RuntimeError):  # where the service is gone, nobody waits
                tell_failure(client, jax.process_index(), _line(f"{kind.__name__}: {error}"))
        hook(kind, error, traceback)

    return tell


def _line(text: str) -> str:
    return text.partition("\n")[0][:_LONGEST_ERROR]
