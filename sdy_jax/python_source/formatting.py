"""Python text as ruff formats it, where ruff is installed."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

TEXT_LENGTH = 110
"""Columns of text that is indented below. Chosen: a line less two indentations."""

LINE_LENGTH = 120
"""Columns of a line of Python. Chosen: as of this library."""


def formatted(text: str) -> str:
    """The text in ruff's format, as it is where there is no ruff."""
    ruff = _ruff()
    if ruff is None:
        return text
    command = [ruff, "format", "--isolated", f"--line-length={LINE_LENGTH}", "--stdin-filename=program.py", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else text


def _ruff() -> str | None:
    """The binary beside the running Python, or that on the path."""
    beside = Path(sysconfig.get_path("scripts"), "ruff")
    return str(beside) if beside.exists() else shutil.which("ruff")
