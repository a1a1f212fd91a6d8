"""No command line and no file of a plan makes the commands print a traceback: what is wrong is said in one line."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from random_command_lines import CommandLines, ran

_EACH = 20


@cache
def _lines() -> tuple[CommandLines, tempfile.TemporaryDirectory[str]]:
    """Over a folder that lasts as long as the process."""
    folder = tempfile.TemporaryDirectory(prefix="command-lines-")
    return CommandLines(Path(folder.name)), folder


def fuzz(seed: int) -> dict[str, int]:
    for number in range(_EACH * seed, _EACH * (seed + 1)):
        words = _lines()[0].drawn(number)
        done = ran(words)
        assert not done.complaint, (
            f"{done.complaint}: {' '.join(map(repr, words))}\n{done.out[-500:]}{done.err[-3000:]}"
        )
    return {"text": _EACH}


def test_random_command_lines_are_answered() -> None:
    for seed in range(5):
        fuzz(seed)
