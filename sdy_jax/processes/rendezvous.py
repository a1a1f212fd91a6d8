"""Whether all processes of a group are at the same program, found out through jax's coordination service.

A group agrees in rounds. In round 3, about to run a program of digest `d`, process 1 sets its key `at/1` to `3 d`. The
first process of the group reads all of these. Once all are at round 3 it sets `verdict/3`: to nothing where the digests
are equal, else to those that it has found. All others wait for that key. So a process sends two small messages per
program, whatever the size of the group, and none for a digest on which the group has agreed before.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Protocol

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


class Group:
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
