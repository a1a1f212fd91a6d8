"""Processes that run seeds side by side. One that dies or takes too long is a finding, and another takes its place."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
