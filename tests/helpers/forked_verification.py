"""Processes that verify, forked from one that has imported what they need: starting one is most of a small case.

Each has an environment, flags of XLA and an end of its own, as one that is started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sdy_jax.equivalence import trial


class Forks:
    """A process that forks: it has imported, and has neither devices nor threads."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", "import forked_verification; forked_verification.serve()"]
        paths = os.pathsep.join(filter(None, sys.path))
        environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
        self._server = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, folder: Path, first: int, devices: int, timeout: float) -> str:
        """As `trial._run_process`, whose place it takes: what ended the process; empty if nothing did."""
        request = {"folder": str(folder), "first": first, "seconds": timeout, "env": trial._environment(devices)}
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        status = int(self._server.stdout.readline())
        return f"the process ended with status {status}" if status else ""

    def close(self) -> None:
        self._server.communicate()


@contextmanager
def verified_by_forks() -> Iterator[None]:
    """Meanwhile `verify` runs its cases in forks."""
    forks = Forks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "_run_process", forks.run)
        yield
    forks.close()


def serve() -> None:
    """Reads a request a line, and answers with the exit status of the process that did it."""
    import planted_faults  # noqa: F401  (imported once for all)

    for line in sys.stdin:
        child = os.fork()
        if not child:
            _verify(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _verify(request: dict[str, Any]) -> None:
    """What the fork does, which then ends."""
    status = 1
    try:
        signal.alarm(int(request["seconds"]))
        os.environ.clear()
        os.environ.update(request["env"])
        trial.main(Path(request["folder"]), request["first"])
        status = 0
    finally:
        os._exit(status)
