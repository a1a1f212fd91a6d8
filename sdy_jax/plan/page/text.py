"""Text of pages: aligned columns, sections of as many lines as fit, and colours or HTML where a reader has these."""

from __future__ import annotations

import html
import re
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

# Rows of text in aligned columns.


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows as lines, indented by two; the columns with numbers in `right` are flush right, empty columns left out.

    A row of one cell is a line of text.


    >>> aligned([("a", "", "10 B"), ("bcd", "", "9 B")], right={2})
    ['  a    10 B', '  bcd   9 B']
    """
    widths = [max(map(len, column)) for column in zip(*(row for row in rows if len(row) > 1), strict=True)]
    kept = [number for number, width in enumerate(widths) if width]

    def line(row: Sequence[str]) -> str:
        if len(row) == 1:
            return row[0]
        return "  ".join(row[n].rjust(widths[n]) if n in right else row[n].ljust(widths[n]) for n in kept)

    return [f"  {line(row)}".rstrip() for row in rows]


_LEAST, _SMALL = 0.0005, 0.0995
"""Given: less would be 0.0%, and more has two digits without a decimal."""


def share_text(part: float) -> str:
    """A share, with a decimal where it is small, as the page writes it.

    >>> share_text(0.314), share_text(0.0917), share_text(0.0001)
    ('31%', '9.2%', '<0.1%')
    """
    if 0 < part < _LEAST:
        return "<0.1%"
    return f"{part:.{1 if part < _SMALL else 0}%}"


_NARROW = 16
"""Columns of a cell that keep it readable. Chosen: a kind of collective, or the end of a path."""


def shortened(text: str, width: int) -> str:
    """A text of so many columns at most, which loses its middle: of a path the tree and the leaf stay.

    >>> shortened("state['params']['layers'][0]['mlp']['kernel']", 24)
    "state['param…]['kernel']"
    """
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def terminal_width() -> int:
    """The columns of the terminal that standard output is; 0 where it is none, and lines may be as long as they are."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def within(rows: Sequence[Sequence[str]], width: int, right: Collection[int] = ()) -> list[tuple[str, ...]]:
    """Rows of which `aligned` makes lines of so many columns, if that is possible: the widest columns, but those of
    numbers, are shortened first."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    free = [number for number in range(len(widths)) if number not in right]
    while 2 * len([each for each in widths if each]) + sum(widths) > width:
        widest = max(free, key=lambda number: widths[number], default=None)
        if widest is None or widths[widest] <= _NARROW:
            break
        widths[widest] -= 1
    return [tuple(shortened(cell, most) for cell, most in zip(row, widths, strict=True)) for row in rows]


# Sections of a page, and how many lines of each there are where not all fit.


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        title: its first line.
        rows: the others in columns, most important first where some may be left out.
        right: the columns that are flush right.
        weight: its share of a page on which not all lines fit, beside the other sections'.
        rest: says of so many last rows what they are; those that are left out.
    """

    title: str
    rows: Sequence[Sequence[str]] = ()
    right: Collection[int] = ()
    weight: float = 1.0
    rest: Callable[[int], str] = lambda hidden: f"and {hidden} more"

    def shown(self, count: int) -> str:
        """The section in so many lines below its title."""
        kept = len(self.rows) if count >= len(self.rows) else max(0, count - 1)
        hidden = len(self.rows) - kept
        more = [f"  {self.rest(hidden)}"] if hidden else []
        return "\n".join([self.title, *aligned(self.rows[:kept], self.right), *more])


def fit_in_lines(sections: Sequence[Section], lines: int) -> str:
    """The sections, an empty line between any two, in so many lines at most: each has its share as far as it needs it.

    A section shows one line below its title at least, if it has any.
    """
    sections = [section for section in sections if section.title]
    counts = [min(1, len(section.rows)) for section in sections]
    left = lines - sum(counts) - 2 * len(sections) + 1
    while left > 0:
        wanting = [n for n, section in enumerate(sections) if counts[n] < len(section.rows)]
        if not wanting:
            break
        counts[min(wanting, key=lambda n: counts[n] / sections[n].weight)] += 1
        left -= 1
    return "\n\n".join(section.shown(count) for section, count in zip(sections, counts, strict=True))


# Pages and tables where there is more than plain text: colours on terminals, HTML in notebooks.

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
