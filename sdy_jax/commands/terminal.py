"""Colours where a person looks at the output: on a terminal, and not if NO_COLOR is set."""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

_CODES = {"bold": "1", "red": "1;31", "green": "32", "yellow": "33", "faint": "2"}
_ERROR = re.compile(r"(?m)^((?:[^\n]*?: )?)(error|note):")


def styled(text: str, style: str, stream: TextIO) -> str:
    """The text in a style ("bold", "red", "green", "yellow" or "faint"), if the stream shows styles."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if _shows_styles(stream) else text


def print_error(error: Exception) -> None:
    """Prints an error on standard error; one without a place of its own begins with `error: `."""
    text = str(error)
    if not _ERROR.match(text):
        text = f"error: {text}"
    if _shows_styles(sys.stderr):
        text = _ERROR.sub(_emphasized, text)
    print(text, file=sys.stderr)


def _emphasized(match: re.Match[str]) -> str:
    place, kind = match.groups()
    return styled(place, "bold", sys.stderr) + styled(f"{kind}:", "red" if kind == "error" else "bold", sys.stderr)


def _shows_styles(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
