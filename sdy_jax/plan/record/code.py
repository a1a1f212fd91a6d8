"""The lines of code that two plans do not share: which ops stand where, by the user's frames.

A line is known by its function, its text, and the how many-th line of that text it is in the function, so that lines
which only moved are the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from sdy_jax.plan.record.border import RecordedFrame
from sdy_jax.plan.record.matching import matched
from sdy_jax.plan.record.program import RecordedCode


@dataclass(frozen=True, slots=True)
class CodeChange:
    """Ops that only one of two plans has.

    Attributes:
        frame: the line of the user's code that is new, gone, or at which there are more or fewer ops.
        before: the line that it was, where the text changed.
        added, removed: what jax calls the ops.
        is_edit: no line of the other plan has this text at this place.
    """

    frame: RecordedFrame
    before: RecordedFrame | None
    added: tuple[str, ...]
    removed: tuple[str, ...]
    is_edit: bool


Line = tuple[str, str, int]
"""A line: its function, its text, and the how many-th of that text."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """An op: what jax calls it, and the frames around it with their lines, inner ones first."""

    name: str
    frames: tuple[RecordedFrame, ...]
    lines: tuple[Line, ...]

    @property
    def functions(self) -> Hashable:
        return self.name, tuple(frame.function for frame in self.frames)


class _Code:
    """The lines of a program and the ops on them."""

    def __init__(self, code: Sequence[RecordedCode]):
        numbers: dict[tuple[str, str], dict[int, None]] = {}
        for frame in (frame for each in code for frame in each.frames):
            numbers.setdefault((frame.function, frame.text), {})[_number(frame)] = None
        self._numbers = {text: sorted(found) for text, found in numbers.items()}
        self.entries = list(self._entries(code))

    def _entries(self, code: Sequence[RecordedCode]) -> Iterator[_Entry]:
        for each in code:
            lines = tuple(map(self._line, each.frames))
            for count in each.ops:
                yield from [_Entry(count.name, each.frames, lines)] * count.count

    def _line(self, frame: RecordedFrame) -> Line:
        key = frame.function, frame.text
        return *key, self._numbers[key].index(_number(frame))

    def has(self, line: Line) -> bool:
        """Whether the program has the line, or none can tell as it has no text."""
        return not line[1] or len(self._numbers.get(line[:2], ())) > line[2]


def _number(frame: RecordedFrame) -> int:
    number = frame.line.rpartition(":")[2]
    return int(number) if number.isdecimal() else 0


def code_changes(before: Sequence[RecordedCode], after: Sequence[RecordedCode]) -> list[CodeChange]:
    """The lines at which ops were added or removed, edited lines first, then those with most ops."""
    old, new = _Code(before), _Code(after)
    keys = [lambda e: (e.name, e.lines), lambda e: e.functions]
    _, gone, made = matched(old.entries, new.entries, keys)
    found = [*_grouped(made, old, True), *_grouped(gone, new, False)]
    return sorted(_paired(found), key=lambda c: (not c.is_edit, -len(c.added) - len(c.removed)))


def _grouped(entries: Iterable[_Entry], other: _Code, is_added: bool) -> Iterator[CodeChange]:
    """One change per line that the other program does not have, the outermost around an op; of ops for which there is
    none, one per line of the outermost function."""
    edited: dict[RecordedFrame, list[_Entry]] = {}
    around: dict[RecordedFrame, list[_Entry]] = {}
    for entry in entries:
        own = [f for f, line in zip(entry.frames, entry.lines, strict=True) if not other.has(line)]
        group = edited.setdefault(own[-1], []) if own else around.setdefault(entry.frames[-1], [])
        group.append(entry)
    for frame, group in edited.items():
        yield _change(frame, group, is_added, True)
    for group in around.values():
        yield _change(_common(group), group, is_added, False)


def _common(group: Sequence[_Entry]) -> RecordedFrame:
    """The innermost line through which all ops of a group are reached."""
    levels: Iterable[tuple[RecordedFrame, ...]] = zip(*(entry.frames[::-1] for entry in group), strict=False)
    return [level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)][-1]


def _change(frame: RecordedFrame, group: Sequence[_Entry], is_added: bool, is_edit: bool) -> CodeChange:
    names = tuple(entry.name for entry in group)
    return CodeChange(frame, None, names if is_added else (), () if is_added else names, is_edit)


def _paired(changes: Sequence[CodeChange]) -> Iterator[CodeChange]:
    """A line that is new beside one that is gone in the same function is a line that was changed."""
    added, removed = ([c for c in changes if bool(c.added) is is_added] for is_added in (True, False))
    (pairs,), gone, made = matched(removed, added, [lambda c: (c.frame.function, c.is_edit)])
    for old, new in pairs:
        before = old.frame if new.is_edit else None
        yield CodeChange(new.frame, before, new.added, old.removed, new.is_edit)
    yield from (*made, *gone)
