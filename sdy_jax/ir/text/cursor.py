"""Reading text from left to right: tokens, matching brackets, and places as offsets, lines and columns."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NoReturn

from sdy_jax.base.errors import ParseError

# Brackets in text, with strings passed over, and comments where the text has them.

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


# Places in a text: as offsets, and as lines and columns, which editors and MLIR count.


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a file; lines and columns count from 1, columns in bytes."""

    line: int
    column: int


class Lines:
    """The lines of a text.

    >>> lines = Lines("é = 1\\nb")
    >>> lines.position(2), lines.offset(Position(2, 1))
    (Position(line=1, column=4), 6)
    """

    def __init__(self, text: str):
        self._lines = text.split("\n")
        self._starts = [0, *accumulate(len(line) + 1 for line in self._lines)]

    def line(self, position: Position) -> str:
        """The line of a position, without its end; empty where the text has none."""
        return self._lines[position.line - 1] if position.line <= len(self._lines) else ""

    def index(self, position: Position) -> int:
        """How many characters of its line are before a position."""
        return len(self.line(position).encode()[: position.column - 1].decode(errors="replace"))

    def offset(self, position: Position) -> int:
        return self._starts[min(position.line, len(self._lines)) - 1] + self.index(position)

    def position(self, offset: int) -> Position:
        number = min(bisect_right(self._starts, offset), len(self._lines)) - 1
        before = self._lines[number][: offset - self._starts[number]]
        return Position(number + 1, len(before.encode()) + 1)


# Reading MLIR text from left to right: tokens, and what is between matching brackets.

WORD = re.compile(r"[A-Za-z_][\w$.]*")
VALUE = re.compile(r"%(?:\d+|[A-Za-z$._-][\w$.-]*)(?:#\d+)?")
SYMBOL = re.compile(rf"@(?:{STRING}|[A-Za-z_][\w$.]*)")
INTEGER = re.compile(r"-?\d{1,20}(?![\w.])")

_SPACE = re.compile(rf"(?:\s+|{COMMENT})*")
_TYPE = re.compile(
    r"[us]?i\d+\b|index\b|none\b|tf32\b|bf16\b|f\d+\w*|(?:tensor|memref|vector|tuple|complex)\b|![A-Za-z_][\w$.]*"
)
_IN_BRACKETS = re.compile(rf"{NO_BRACKET}|[()\[\]{{}}<>]")
_PARTNER = {"(": ")", "[": "]", "{": "}", "<": ">"}


class AssemblyError(ParseError):
    """Text that does not fit the op's form; `offset` is where."""

    def __init__(self, message: str, offset: int):
        self.message, self.offset = message, offset
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A piece of text, and where in the source it stands (or what it was made from stands)."""

    text: str
    at: int


class Cursor:
    """A place in a text that moves to the right, past what is taken. Spaces and comments do not count."""

    def __init__(self, text: str, at: int):
        self.text, self.at = text, at

    @property
    def next(self) -> int:
        """Where the next token begins."""
        space = _SPACE.match(self.text, self.at)
        return space.end() if space else self.at

    def peek(self, token: str) -> bool:
        """Whether the next token is a word or sign."""
        start = self.next
        if not self.text.startswith(token, start):
            return False
        word = WORD.match(self.text, start)
        return word is None or word[0] == token

    def take(self, token: str) -> bool:
        """Goes past a word or sign if it is next."""
        if not self.peek(token):
            return False
        self.at = self.next + len(token)
        return True

    def expect(self, token: str) -> None:
        if not self.take(token):
            self.fail(f"expected `{token}`")

    def match(self, pattern: re.Pattern[str]) -> TextSpan | None:
        """The next token, if it has a form."""
        start = self.next
        match = pattern.match(self.text, start)
        if match is None:
            return None
        self.at = match.end()
        return TextSpan(match[0], start)

    def need(self, pattern: re.Pattern[str], what: str) -> TextSpan:
        return self.match(pattern) or self.fail(f"expected {what}")

    def type(self) -> TextSpan | None:
        """A type, such as `tensor<4x?xf32>` or `!mesh.sharding`; None if none is next."""
        name = self.match(_TYPE)
        if name is None or not self.peek("<"):
            return name
        self.bracket()
        return TextSpan(self.text[name.at : self.at], name.at)

    def bracket(self) -> TextSpan:
        """What is between the next token, which is an opening bracket, and its partner, without the two."""
        start = self.next
        open_: list[str] = []
        for token in _IN_BRACKETS.finditer(self.text, start):
            if token[0] in _PARTNER:
                open_.append(_PARTNER[token[0]])
            elif open_ and token[0] == open_[-1]:
                open_.pop()
            elif token[0] in ")]}>":
                self.fail(f"`{token[0]}` without a partner", token.start())
            if not open_:
                self.at = token.end()
                return TextSpan(self.text[start + 1 : self.at - 1], start + 1)
        self.fail(f"`{self.text[start]}` without a partner", start)

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        """Says what is wrong with the next token, or the text at an offset."""
        start = self.next
        if at is None:
            line = self.text[start:].split("\n", 1)[0]
            found = re.match(rf"{STRING}|[%@#!^]?[\w$.-]+|.", line)
            message = f"{message}, got {f'`{found[0]}`' if found else 'the end of the text'}"
        raise AssemblyError(message, start if at is None else at)
