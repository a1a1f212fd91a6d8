"""Pages and tables where there is more than plain text: colours on terminals, HTML in notebooks."""

from __future__ import annotations

import html
import re
import sys
from importlib.util import find_spec
from typing import Any

_STYLES = (
    (r"(?m)^\S.*$", "bold"),
    (r"[\w./-]+\.(?:py|mlir):\d+", "cyan"),
    (r"\b(?:all_gather|all_reduce|reduce_scatter|all_to_all|collective_permute)\b", "magenta"),
    (r"\b\d[\d.]* (?:B|[KMGT]iB)\b", "green"),
    (r"\b(?:[1-9]\d|100)%", "bold yellow"),
    (r"(?<=@)(?:\([\w:,()]+\)|[\w]+(?::\(\d+\)\d+)?)", "blue"),
)
"""What is coloured, by rich's names of styles."""


def coloured(text: str) -> Any:
    """A page or table as a text of rich, which must be installed."""
    from rich.text import Text

    found = Text(text)
    for pattern, style in _STYLES:
        found.highlight_regex(pattern, style)
    return found


def show(text: str) -> None:
    """Prints a page or table, in colours where standard output is a terminal and rich is installed."""
    if sys.stdout.isatty() and find_spec("rich") is not None:
        from rich.console import Console

        Console(soft_wrap=True).print(coloured(text))
    else:
        print(text)


def as_html(text: str) -> str:
    """A page for notebooks: its lines as they are, titles bold."""
    lines = (html.escape(line) for line in text.split("\n"))
    marked = (f"<b>{line}</b>" if re.match(r"\S", line) else line for line in lines)
    return f'<pre style="line-height:1.35;overflow-x:auto">{chr(10).join(marked)}</pre>'
