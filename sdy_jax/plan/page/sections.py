"""Sections of a page, and how many lines of each there are where not all fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from sdy_jax.plan.page.columns import aligned


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


def fitted(sections: Sequence[Section], lines: int) -> str:
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
