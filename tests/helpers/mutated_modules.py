"""Runs `sdy-jax opt` on modules with random mistakes: a program of its own, as jaxlib could die of one.

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
_ERROR = re.compile(r"[^\n:]+:\d+:\d+: error: \S")

MODULES = (MIXED, LOCAL, in_shard(MIXED), in_shard(LOCAL), *REFERENCE.values())


def mutated(seed: int) -> str:
    """A module with one to three random changes."""
    rng = random.Random(seed)
    tokens = _TOKEN.findall(rng.choice(MODULES))
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        rng.choice(_CHANGES)(rng, tokens)
    return "".join(tokens)


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


def _opt(path: Path, text: str) -> tuple[int, str, str]:
    from sdy_jax.commands.cli import main

    path.write_text(text, encoding="utf-8", newline="")
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(["opt", str(path)])
    return status, out.getvalue(), err.getvalue()


def _complaint(path: Path, text: str) -> str | None:
    """What is wrong with what `opt` does with a text."""
    status, out, err = _opt(path, text)
    if status == 0:
        return None if _opt(path, out) == (0, out, "") and not err else "what is printed does not print again"
    if status != 1 or out or not _ERROR.match(err) or "bug in sdy_jax" in err:
        return f"status {status}: {out[:100]}{err[:300]}"
    return None


def _run(first: int, count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + count):
            print(seed, flush=True)
            if complaint := _complaint(Path(folder, "m.mlir"), mutated(seed)):
                print(f"seed {seed}: {complaint}", flush=True)


if __name__ == "__main__":
    _run(int(sys.argv[1]), int(sys.argv[2]))
