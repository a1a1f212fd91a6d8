"""jaxlib's own parser and verifier as an oracle, in a child process: it may abort on what it rejects."""

from __future__ import annotations

import json
import os
import subprocess
import sys

_CHILD = """
import json, sys
from jax.extend.mlir import ir
from jax.interpreters import mlir
context = mlir.make_ir_context()
for line in sys.stdin:
    try:
        answer = str(ir.Module.parse(json.loads(line), context))
    except Exception as error:
        answer = None
    print(json.dumps(answer), flush=True)
"""


def parse_modules(texts):
    """Each module as jaxlib prints it, or None where jaxlib rejects it or dies of it."""
    texts, answers = list(texts), []
    while len(answers) < len(texts):
        rest = "\n".join(map(json.dumps, texts[len(answers) :]))
        command = [sys.executable, "-c", _CHILD]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, input=rest, capture_output=True, text=True, timeout=120, env=environment)
        lines = done.stdout.splitlines()
        assert lines or done.returncode < 0, done.stderr
        answers.extend(map(json.loads, lines))
        if done.returncode < 0:
            answers.append(None)
    return answers
