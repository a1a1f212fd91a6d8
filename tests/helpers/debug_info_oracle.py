"""The explanation attributes of modules after passes, as text; jaxlib's in a child process, because it may crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jax.extend.mlir import ir
from sharding_dump import parse, run_oracle

NAMES = (
    "sdy.propagation_edges",
    "sdy.sharding_origins",
    "sdy.sharding_origin_name",
    "sdy.block_arg_propagation_edges",
    "sdy.result_propagation_edges",
    "sdy.block_arg_sharding_origins",
    "sdy.result_sharding_origins",
)


def dump(module: ir.Module) -> str:
    """One line per op in pre-order, then per argument and result of a function, with their explanation attributes."""
    return "\n".join(_lines(module.operation))


def _lines(op: ir.Operation) -> Iterator[str]:
    yield f"{op.name} {_found(op.attributes)}"
    if op.name == "func.func":
        for name in ("arg_attrs", "res_attrs"):
            for i, entry in enumerate(op.attributes.get(name, ())):
                yield f"  {name} {i} {_found(ir.DictAttr(entry))}"
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _lines(inner.operation)


def _found(attributes: ir.DictAttr) -> dict[str, str]:
    return {name: str(attributes[name]) for name in NAMES if name in attributes}


def oracle_dumps(cases: Sequence[tuple[str, str]]) -> list[str | None]:
    """What `dump` says of each (text, passes) after jaxlib's passes; None where they fail or crash."""
    answers: list[str | None] = []
    here = str(Path(__file__).parent)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": here}
    while len(answers) < len(cases):
        rest = "\n".join(map(json.dumps, cases[len(answers) :]))
        command = [sys.executable, "-c", "import debug_info_oracle; debug_info_oracle.serve()"]
        done = subprocess.run(command, input=rest, capture_output=True, text=True, timeout=300, env=environment)
        lines = done.stdout.splitlines()
        assert lines or done.returncode < 0, done.stderr
        answers += map(json.loads, lines)
        if done.returncode < 0:
            answers.append(None)
    return answers


def serve() -> None:
    """Answers cases from standard input, one line each."""
    for line in sys.stdin:
        text, passes = json.loads(line)
        try:
            module = parse(text)
            run_oracle(module, passes)
            answer = dump(module)
        except ir.MLIRError:
            answer = None
        print(json.dumps(answer), flush=True)
