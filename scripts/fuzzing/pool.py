"""Processes that run seeds side by side, and what is known of a long run, in a file."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sdy_jax.base.files import write_whole

# Processes that run seeds side by side. One that dies or takes too long is a finding, and another takes its place.

_WORKER = Path(__file__).with_name("worker.py")

_SEEDS_OF_A_PROCESS = 400
"""After so many a process is followed by a new one: what jaxlib never gives back stays small."""


class Task(NamedTuple):
    suite: str
    seed: int


class Answer(NamedTuple):
    """What a worker said of a task: cases by kind, what went wrong, what was reached for the first time."""

    cases: dict[str, int]
    problem: str | None
    reached: dict[str, list[str]]


class _Worker:
    """One process, begun when it is needed."""

    def __init__(self, suites: Sequence[str], patience: float):
        self._suites, self._patience = suites, patience
        self._process: subprocess.Popen[str] | None = None
        self._left = 0

    def answer(self, task: Task) -> Answer:
        process = self._running()
        stopped = threading.Event()
        timer = threading.Timer(self._patience, lambda: (stopped.set(), process.kill()))
        timer.start()
        try:
            line = _asked(process, task)
        finally:
            timer.cancel()
        if line:
            self._left -= 1
            return Answer(**json.loads(line))
        self._process, status = None, process.wait()
        how = f"took longer than {self._patience:.0f} s" if stopped.is_set() else f"ended with status {status}"
        return Answer({}, f"{task.suite}: the process of seed {task.seed} {how}", {})

    def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()
        self._process = None

    def _running(self) -> subprocess.Popen[str]:
        if self._left <= 0:
            self.close()
        if self._process is None:
            command = [sys.executable, "-W", "ignore", str(_WORKER), *self._suites]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._left = _SEEDS_OF_A_PROCESS
        return self._process


def _asked(process: subprocess.Popen[str], task: Task) -> str:
    """The answer's line; empty where the process is gone."""
    assert process.stdin is not None and process.stdout is not None
    try:
        print(*task, file=process.stdin, flush=True)
    except BrokenPipeError:
        return ""
    return process.stdout.readline()


def run(
    tasks: Iterator[Task],
    suites: Sequence[str],
    processes: int,
    patience: float,
    begun: Callable[[Task], Any],
    done: Callable[[Task, Answer], Any],
) -> None:
    """Runs tasks until there are none; `begun` and `done` are called one at a time."""
    lock = threading.Lock()

    def work() -> None:
        worker = _Worker(suites, patience)
        while True:
            with lock:
                task = next(tasks, None)
                if task is not None:
                    begun(task)
            if task is None:
                return worker.close()
            answer = worker.answer(task)
            with lock:
                done(task, answer)

    threads = [threading.Thread(target=work) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# What is known of a long run, in a file: where each suite stands, cases, failures, what was reached.

_SAVED_EVERY = 20.0
"""Seconds."""


class Journal:
    """Kept in a file beside the programs of failures; one that is there is gone on with.

    Args:
        path: the file, in a folder that may not be there yet.
        suites: those of this run.
        seed: the first one of suites that the journal does not know.
    """

    def __init__(self, path: Path, suites: Sequence[str], seed: int):
        self._folder, self._path, self._saved = path.parent, path, time.monotonic()
        held: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}
        self.first: dict[str, int] = dict.fromkeys(suites, seed) | held.get("first", {})
        self._next: dict[str, int] = {name: self.first[name] for name in suites} | held.get("next", {})
        self._running: set[Task] = set()
        self.cases = {name: Counter(found) for name, found in held.get("cases", {}).items()}
        self.failures: list[str] = held.get("failures", [])
        self.reached = {kind: set(found) for kind, found in held.get("reached", {}).items()}

    def next_task(self, suite: str) -> Task:
        return Task(suite, self._next[suite])

    def begun(self, task: Task) -> None:
        self._running.add(task)
        self._next[task.suite] = task.seed + 1

    def done(self, task: Task, answer: Answer) -> None:
        self._running.discard(task)
        self.cases.setdefault(task.suite, Counter()).update(answer.cases)
        for kind, found in answer.reached.items():
            self.reached.setdefault(kind, set()).update(found)
        if answer.problem is not None:
            self._fail(task, answer.problem)
        if time.monotonic() - self._saved > _SAVED_EVERY:
            self.save()

    def _fail(self, task: Task, problem: str) -> None:
        name = f"{task.suite}-{task.seed}.txt"
        self._folder.mkdir(exist_ok=True)
        (self._folder / name).write_text(problem)
        if name not in self.failures:
            self.failures.append(name)
        print(f"{problem}\nkept as {self._folder.name}/{name}", flush=True)

    def save(self) -> None:
        """Replaces the file; seeds that were running count as not begun."""
        self._saved, begin = time.monotonic(), dict(self._next)
        for task in self._running:
            begin[task.suite] = min(begin[task.suite], task.seed)
        held = {
            "first": self.first,
            "next": begin,
            "cases": self.cases,
            "failures": self.failures,
            "reached": {kind: sorted(found) for kind, found in self.reached.items()},
        }
        self._folder.mkdir(exist_ok=True)
        write_whole(self._path, json.dumps(held, indent=1))

    def summary(self) -> str:
        """Cases by kind and suite, and how much was reached."""
        total = sum(self.cases.values(), Counter[str]())
        lines = [f"{len(self.failures)} failed; " + ", ".join(f"{n:,} {kind}" for kind, n in sorted(total.items()))]
        lines += [
            f"  {name}, seeds {self.first[name]} to {self._next[name] - 1}: "
            + ", ".join(f"{n:,} {kind}" for kind, n in sorted(found.items()))
            for name, found in sorted(self.cases.items())
        ]
        lines += [f"reached {kind}: {len(found)}" for kind, found in self.reached.items()]
        return "\n".join(lines)
