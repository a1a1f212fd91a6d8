"""Rows of text in aligned columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence


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
