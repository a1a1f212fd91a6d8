"""The programs of pages of documentation, and what is shown as their output."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Program(NamedTuple):
    """A block of Python, the line at which it begins in `model.py`, and what is shown as its output."""

    text: str
    line: int
    shown: str | None


def programs(page: Path) -> list[Program]:
    """The programs of a page; `model.py` is all of them, with a line in between."""
    found, blocks, line = list[Program](), BLOCK.findall(page.read_text()), 1
    for (language, text), (following, shown) in zip(blocks, [*blocks, ("python", "")][1:], strict=True):
        if language == "python":
            found.append(Program(text, line, shown if not following else None))
            line += text.count("\n") + 1
    return found


def printed(program: Program, names: dict[str, Any]) -> str:
    out = io.StringIO()
    code = compile("\n" * (program.line - 1) + program.text, "model.py", "exec", dont_inherit=True)
    with contextlib.redirect_stdout(out):
        exec(code, names)
    return out.getvalue()


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    found = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert len(set(found)) == len(found), f"{page.name} has a heading twice"
    return set(found)
