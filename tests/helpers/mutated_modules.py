"""Runs `sdy-jax opt` with random passes on modules with random mistakes: in a process, as jaxlib could die of one.

    python mutated_modules.py FIRST COUNT

Prints each seed before its run, and after it what is wrong with what `opt` did.
"""

from __future__ import annotations

import io
import random
import re
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from dialect_texts import LOCAL, MIXED, REFERENCE, in_shard
from random_programs import RandomProgram

_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|[%@#!^]?[\w$.]+|->|\s+|.', re.DOTALL)
_NUMBERS = ("0", "1", "7", "-1", "?", "", "99999999999999999999", "-9223372036854775808")
_STRAY = (
    *'()[]{}<>,:=%@#!"/\\-?é\x01\n',
    "loc(",
    "//",
    "mesh.",
    "shard.all_gather",
    "@m",
    "%0",
    "<{",
    "}>",
    "sdy.mesh",
)
_ERROR = re.compile(r"[^\n:]+(:\d+:\d+)?: error: \S")
"""What is said of a module as a whole has no line."""

_UNREADABLE = re.compile(r"stablehlo\.dynamic_slice %[\w#]+, , sizes = \[\]")
"""What jaxlib prints and does not read: slices of scalars, with a comma too many."""

MODULES = (MIXED, LOCAL, in_shard(MIXED), in_shard(LOCAL), *REFERENCE.values())


_PIPELINES = (
    "",
    "",
    "propagation-pipeline",
    "propagation-pipeline,export-pipeline",
    "import-pipeline,aggressive-propagate,export-pipeline",
    "basic-propagate{keep-sharding-rules=true},close-shardings",
    "apply-sharding-constraints,user-priority-propagate",
    "add-data-flow-edges,op-priority-propagate,sink-data-flow-edges",
    "insert-explicit-reshards",
    "reshard-to-collectives",
)


def mutated(seed: int) -> tuple[str, str]:
    """A module with one to three random changes of its tokens or of its ops, and the passes for it."""
    rng = random.Random(seed)
    text = rng.choice(MODULES) if rng.random() < 0.6 else RandomProgram(seed, ops=8).text
    if rng.random() < 0.3:
        return _with_other_ops(rng, text), rng.choice(_PIPELINES)
    tokens = _TOKEN.findall(text)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        rng.choice(_CHANGES)(rng, tokens)
    return "".join(tokens), rng.choice(_PIPELINES)


def _with_other_ops(rng: random.Random, text: str) -> str:
    """The text with a line less, a line twice, lines in another order, or another value in a line."""
    lines = text.splitlines()
    values = re.findall(r"%\w+", text) or ["%0"]
    for _ in range(rng.choice([1, 1, 2])):
        at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        change = rng.randrange(4)
        if change == 0:
            del lines[at]
        elif change == 1:
            lines.insert(other, lines[at])
        elif change == 2:
            lines[at], lines[other] = lines[other], lines[at]
        else:
            lines[at] = re.sub(r"%\w+", rng.choice(values), lines[at], count=1)
    return "\n".join(lines)


def _place(rng: random.Random, tokens: list[str]) -> int:
    return rng.randrange(len(tokens)) if tokens else 0


def _drop(rng: random.Random, tokens: list[str]) -> None:
    start = _place(rng, tokens)
    del tokens[start : start + rng.choice([1, 1, 2, 10])]


def _copy(rng: random.Random, tokens: list[str]) -> None:
    if tokens:
        tokens.insert(_place(rng, tokens), rng.choice(tokens))


def _replace(rng: random.Random, tokens: list[str]) -> None:
    if tokens:
        tokens[_place(rng, tokens)] = rng.choice(tokens)


def _stray(rng: random.Random, tokens: list[str]) -> None:
    tokens.insert(_place(rng, tokens), rng.choice(_STRAY))


def _number(rng: random.Random, tokens: list[str]) -> None:
    places = [place for place, token in enumerate(tokens) if re.search(r"\d", token)]
    if places:
        place = rng.choice(places)
        tokens[place] = re.sub(r"\d+", rng.choice(_NUMBERS), tokens[place], count=1)


def _cut(rng: random.Random, tokens: list[str]) -> None:
    if rng.random() < 0.2:
        del tokens[_place(rng, tokens) :]


_CHANGES = (_drop, _copy, _replace, _replace, _stray, _number, _number, _cut)


def _opt(path: Path, text: str, passes: str = "") -> tuple[int, str, str]:
    from sdy_jax.cli.main import main

    path.write_text(text, encoding="utf-8", newline="")
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(["opt", str(path), "--pipeline", passes])
    return status, out.getvalue(), err.getvalue()


def _complaint(path: Path, text: str, passes: str) -> str | None:
    """What is wrong with what `opt` does with a text."""
    status, out, err = _opt(path, text, passes)
    if status == 0:
        if _UNREADABLE.search(out):
            return None
        is_quiet = all(line.startswith("warning: ") for line in err.splitlines())
        return None if _opt(path, out) == (0, out, "") and is_quiet else "what is printed does not print again"
    if status != 1 or out or not _ERROR.match(err) or "bug in sdy_jax" in err:
        return f"status {status}: {out[:100]}{err[:300]}"
    return None


def _run(first: int, count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + count):
            print(seed, flush=True)
            if complaint := _complaint(Path(folder, "m.mlir"), *mutated(seed)):
                print(f"seed {seed}: {complaint}", flush=True)


if __name__ == "__main__":
    _run(int(sys.argv[1]), int(sys.argv[2]))
