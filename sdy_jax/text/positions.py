"""Places in a text: as offsets, and as lines and columns, which editors and MLIR count."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate


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
