"""Brackets in text, with strings passed over, and comments where the text has them."""

from __future__ import annotations

import re
from collections.abc import Iterator

STRING = r'"(?:[^"\\\n]|\\.)*"'
COMMENT = r"//[^\n]*"
STRING_OR_COMMENT = f"{STRING}|{COMMENT}"

NO_BRACKET = rf"{STRING_OR_COMMENT}|->|[<>]="
"""What is no bracket in MLIR text, where `<` and `>` are brackets too."""

_MARKS = r"(?P<mark>[()\[\]{},])"
_IN_TEXT = re.compile(rf"{STRING}|{_MARKS}")
_IN_CODE = re.compile(rf"{STRING_OR_COMMENT}|{_MARKS}")


def closing(text: str, start: int, comments: bool = False) -> int | None:
    """The index of the bracket that closes the one at `start`; None where none does.

    >>> closing('f(a, ")", [b])', 1)
    13
    """
    return next((index for index, _, depth in _marks(text, start, comments) if depth == 0), None)


def split_list(text: str) -> Iterator[str]:
    """What stands between the commas that are inside of no bracket.

    >>> list(split_list("f32[2,4] a, (b, c)"))
    ['f32[2,4] a', ' (b, c)']
    """
    start = 0
    for index, mark, depth in _marks(text, 0, False):
        if mark == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    yield text[start:]


def _marks(text: str, start: int, comments: bool) -> Iterator[tuple[int, str, int]]:
    """Each bracket and comma, with its index and how many brackets are open behind it."""
    depth = 0
    for found in (_IN_CODE if comments else _IN_TEXT).finditer(text, start):
        if mark := found["mark"]:
            depth += (mark in "([{") - (mark in ")]}")
            yield found.start(), mark, depth
