"""jaxlib's own parser, verifier and passes as an oracle, in a child process: they may die of what they reject."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sdy_jax.shardy.passes.registry import Pass

_ON_FUNCTIONS = {
    "sdy-constant-or-scalar-merger",
    "sdy-drop-sharding-rules",
    "sdy-insert-explicit-reshards",
    "sdy-sharding-constraint-to-reshard",
    "sdy-sink-data-flow-edges",
    "sdy-sink-func-data-flow-edges",
    "sdy-verify-unreduced-axes",
}


def oracle_text(step: Pass) -> str:
    """A pass as jaxlib takes it, which runs some on functions and not on modules."""
    return f"func.func({step})" if step.name in _ON_FUNCTIONS else str(step)


_CHILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
from jax.interpreters.mlir import make_ir_context
from sharding_dump import parse, plain_text, run_oracle

context = make_ir_context()

def after_each(module, steps):
    for step in steps:
        run_oracle(module, step, verify=False)
        yield plain_text(parse(str(module)))

for line in sys.stdin:
    text, passes = json.loads(line)
    try:
        module = parse(text, context)
        if passes is None:
            answer = [str(module), ""]
        elif isinstance(passes, list):
            answer = [list(after_each(module, passes)), ""]
        else:
            run_oracle(module, passes, verify=False)
            answer = [plain_text(module), ""]
    except Exception as error:
        answer = [None, str(error)]
    print(json.dumps(answer), flush=True)
"""


class Oracle:
    """A child process that answers one module at a time, and is replaced when it dies."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self.error = ""
        """Why the last module was rejected."""

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.communicate()

    def run(self, text: str, passes: str | None = None) -> str | None:
        """The module after the passes, None where jaxlib rejects it, or dies. `passes` None: just parsed."""
        return self.ask(text, passes)

    def ask(self, text: str, passes: object) -> Any:
        """The child's answer: for a list of passes, the module after each."""
        child = self._running()
        assert child.stdin is not None and child.stdout is not None
        print(json.dumps([text, passes]), file=child.stdin, flush=True)
        line = child.stdout.readline()
        if line:
            answer, self.error = json.loads(line)
            return answer
        assert child.wait() < 0, "the oracle did not start"
        self._child, self.error = None, f"died of signal {-child.returncode}"
        return None

    def _running(self) -> subprocess.Popen[str]:
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(Path(__file__).parent)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )
        return self._child


def parse_modules(texts: Iterable[str]) -> list[str | None]:
    """Each module as jaxlib prints it, or None where jaxlib rejects it or dies of it."""
    with Oracle() as oracle:
        return [oracle.run(text) for text in texts]


def run_each(cases: Iterable[tuple[str, Sequence[str]]]) -> list[list[str] | None]:
    """Each module after each step of a pipeline; None where jaxlib refuses it or dies at one of the steps."""
    with Oracle() as oracle:
        return [oracle.ask(text, list(steps)) for text, steps in cases]


def run_passes(cases: Iterable[tuple[str, str]]) -> list[str | None]:
    """Each module, given with a list of passes, as jaxlib prints it after them; None where jaxlib refuses or dies."""
    with Oracle() as oracle:
        return [oracle.run(text, passes or None) for text, passes in cases]
