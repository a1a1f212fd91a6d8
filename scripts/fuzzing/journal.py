"""What is known of a long run, in a file: where each suite stands, cases, failures, what was reached."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fuzzing.pool import Answer, Task
from sdy_jax.base.files import write_whole

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
