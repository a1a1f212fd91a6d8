"""Comparing two plans: what they have in common, what differs, and why: mesh, options, annotations, lines of code."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar

from sdy_jax.base.errors import SdyError, some_of, with_article
from sdy_jax.ir.jax_shardings import count_text
from sdy_jax.plan.record.differences import (
    Amount,
    BorderChange,
    Cause,
    CollectiveChange,
    PlanDiff,
    ValueChange,
    alike,
    folded,
)
from sdy_jax.plan.record.program import (
    RecordedAnnotation,
    RecordedBorder,
    RecordedCode,
    RecordedCollective,
    RecordedFrame,
    RecordedOp,
    RecordedValue,
)
from sdy_jax.plan.record.recorded_plan import RecordedPlan

# What two plans have in common: entries matched by keys, the most exact ones first.

T = TypeVar("T")


def matched(
    before: Iterable[T], after: Iterable[T], keys: Sequence[Callable[[T], Hashable]]
) -> tuple[list[list[tuple[T, T]]], list[T], list[T]]:
    """The pairs that each key makes of what those before it left over, in order; and what is left in the end.

    >>> matched(["a1", "b2"], ["a1", "b3", "c4"], [str, lambda text: text[0]])
    ([[('a1', 'a1')], [('b2', 'b3')]], [], ['c4'])
    """
    pairs, left, right = [], list(before), list(after)
    for key in keys:
        found, left, right = _by_key(left, right, key)
        pairs.append(found)
    return pairs, left, right


def _by_key(
    before: Sequence[T], after: Sequence[T], key: Callable[[T], Hashable]
) -> tuple[list[tuple[T, T]], list[T], list[T]]:
    waiting: dict[Hashable, deque[T]] = {}
    for each in before:
        waiting.setdefault(key(each), deque()).append(each)
    pairs, right = [], []
    for each in after:
        found = waiting.get(key(each))
        if found:
            pairs.append((found.popleft(), each))
        else:
            right.append(each)
    return pairs, [each for group in waiting.values() for each in group], right


# The lines of code that two plans do not share: which ops stand where, by the user's frames.
#
# A line is known by its function, its text, and the how many-th line of that text it is in the function, so that
# lines which only moved are the same.


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


# Why two plans differ: the mesh, options, annotations, lines of code, arguments.

_NAMED = 4
"""Ops and arguments that are named. Chosen: for a reader."""


def causes(old: RecordedPlan, new: RecordedPlan) -> Iterator[Cause]:
    """What the user changed: what was stated, then edited lines, then what follows from those; other costs and versions
    where nothing else differs."""
    code = [_code(change) for change in code_changes(old.code, new.code)]
    found = [*_mesh(old, new), *_options(old, new), *_annotations(old, new), *_stated(old, new), *code]
    found += _arguments(old, new)
    yield from dict.fromkeys(found or _surroundings(old, new))


def _mesh(old: RecordedPlan, new: RecordedPlan) -> Iterator[Cause]:
    if old.mesh.axes != new.mesh.axes:
        yield Cause("mesh", new.line.line, f"mesh {old.mesh} -> {new.mesh}", new.line.text)
    elif old.mesh != new.mesh:
        yield Cause("mesh", new.line.line, "the mesh has other devices, or has them in another order", new.line.text)


def _options(old: RecordedPlan, new: RecordedPlan) -> Iterator[Cause]:
    gone = [f"{option} removed" for option in old.options if option not in new.options]
    made = [f"{option} added" for option in new.options if option not in old.options]
    if gone or made:
        yield Cause("option", new.line.line, ", ".join([*gone, *made]), new.line.text)


# Annotations.


def _annotations(old: RecordedPlan, new: RecordedPlan) -> Iterator[Cause]:
    keys = (_said, lambda a: _said(a)[:4], lambda a: (a.kind, a.place.function, a.place.text, a.type), _moved)
    (_, _, changed, also), gone, made = matched(old.annotations, new.annotations, keys)
    for before, after in (*changed, *also):
        yield _annotation(after, f"{before.text} -> {after.text}")
    yield from (_annotation(each, f"{each.text} removed") for each in gone)
    yield from (_annotation(each, f"{each.text} added") for each in made)


def _said(annotation: RecordedAnnotation) -> tuple[Hashable, ...]:
    place = annotation.place
    return annotation.kind, annotation.text, annotation.type, place.function, place.text


def _moved(annotation: RecordedAnnotation) -> Hashable:
    return annotation.kind, annotation.place.function, annotation.type


def _annotation(annotation: RecordedAnnotation, what: str) -> Cause:
    return Cause("annotation", annotation.place.line, f"{annotation.kind} {what}", annotation.place.text)


def _stated(old: RecordedPlan, new: RecordedPlan) -> Iterator[Cause]:
    """What `in_shardings` and `out_shardings` say otherwise, once for all arguments that are alike."""
    for name, before, after in (
        ("in_shardings", old.arguments, new.arguments),
        ("out_shardings", old.results, new.results),
    ):
        (same,), _, _ = matched(before, after, [lambda border: border.path])
        groups: dict[tuple[str, str], list[str]] = {}
        for one, other in same:
            if _statement(one) != _statement(other):
                groups.setdefault((_statement(one), _statement(other)), []).append(other.path)
        for (was, is_now), paths in groups.items():
            what = f"{name} of {_listed(paths)}: {was} -> {is_now}"
            yield Cause("annotation", new.line.line, what, new.line.text)


def _statement(border: RecordedBorder) -> str:
    if border.origin == "passed":
        return f"{border.tensor.type} as passed"
    return border.stated or ("AUTO" if border.origin == "planner" else "nothing")


# Code and arguments.


def _code(change: CodeChange) -> Cause:
    if change.is_edit and change.before is not None:
        return Cause("code", change.frame.line, f"changed from `{change.before.text}`", change.frame.text)
    if change.is_edit:
        what = f"{'added' if change.added else 'removed'}, with {_ops(change.added or change.removed)}"
        return Cause("code", change.frame.line, what, change.frame.text)
    texts = [f"{_ops(ops)} {how}" for ops, how in ((change.added, "more"), (change.removed, "less")) if ops]
    return Cause("code", change.frame.line, ", ".join(texts), change.frame.text)


def _ops(names: Sequence[str]) -> str:
    """`2 dot_general, add and 3 others`."""
    counts = Counter(names).most_common()
    texts = [f"{count} {name}" if count > 1 else name for name, count in counts[:_NAMED]]
    others = sum(count for _, count in counts[_NAMED:])
    return ", ".join(texts) + (f" and {others} others" if others else "")


def _arguments(old: RecordedPlan, new: RecordedPlan) -> Iterator[Cause]:
    (same, _), gone, made = matched(old.arguments, new.arguments, [lambda b: b.path, _global])
    for paths, how in ((gone, "gone"), (made, "new")):
        if paths:
            listed = _listed([each.path for each in paths])
            yield Cause("argument", "", f"argument{'s' if len(paths) > 1 else ''} {listed}: {how}")
    for before, after in same:
        if _global(before) != _global(after):
            yield Cause("argument", "", f"argument {after.path}: {_type(before)} -> {_type(after)}")


def _global(border: RecordedBorder) -> Hashable:
    return border.tensor.dtype, border.tensor.shape


def _type(border: RecordedBorder) -> str:
    return f"{border.tensor.dtype}[{','.join(map(str, border.tensor.shape))}]"


def _listed(names: Sequence[str]) -> str:
    return some_of([name + count_text(count) for _, name, count in alike(names, lambda name: (name,))], _NAMED)


def _surroundings(old: RecordedPlan, new: RecordedPlan) -> Iterator[Cause]:
    if (old.time.unit, old.time.origin) != (new.time.unit, new.time.origin):
        costs = (record.time.origin or f"in {record.time.unit}" for record in (old, new))
        yield Cause("costs", new.line.line, f"costs {' -> '.join(costs)}", new.line.text)
    elif old.versions != new.versions:
        yield Cause("version", "", f"{', '.join(old.versions)} -> {', '.join(new.versions)}")


# Comparing two plans.
#
# Nothing is compared by line numbers or positions. Collectives and ops are matched by their name scopes, functions
# and kinds, in order; arguments by their paths, or by types in order where they were renamed.


def diff(before: Any, after: Any) -> PlanDiff:
    """What differs between two plans.

    Args:
        before, after: `Plan`s or `PlanRecord`s.

    Raises:
        SdyError: one of them is something else.
    """
    old, new = _record(before), _record(after)
    values = tuple(_values(old, new)) if old.values and new.values else ()
    border = (*_border("argument", old.arguments, new.arguments), *_border("result", old.results, new.results))
    collectives = tuple(_collectives(old, new))
    found = PlanDiff(new.name, (), tuple(_amounts(old, new)), border, collectives, values)
    if not found:
        return found
    return PlanDiff(new.name, tuple(causes(old, new)), found.amounts, border, collectives, values)


def _record(plan: Any) -> RecordedPlan:
    check_plan(plan, or_none=False)
    found: RecordedPlan = plan.record()
    return found


def check_plan(plan: Any, or_none: bool = True) -> None:
    """
    Raises:
        SdyError: something that is no plan is given in the place of one that there may be.
    """
    if not callable(getattr(plan, "record", None)) and not (or_none and plan is None):
        given = with_article(type(plan))
        raise SdyError(f"{given} was given to compare with, expected a plan; to fix: sdy.load_plan(path) reads one")


def _amounts(old: RecordedPlan, new: RecordedPlan) -> Iterator[Amount]:
    yield Amount("on the wire", old.wire_bytes, new.wire_bytes)
    if old.memory is not None and new.memory is not None:
        yield Amount("of memory", old.memory.peak, new.memory.peak)
    if old.time.unit == new.time.unit == "seconds":
        yield Amount("estimated", old.time.total, new.time.total, "seconds")
    yield Amount("collectives", old.transfers.count, new.transfers.count, "transfers")
    if old.flops or new.flops:
        yield Amount("computed", old.flops, new.flops, "flop")


# Arguments and results.


def by_path_or_type(border: RecordedBorder) -> Hashable:
    """What a renamed argument has in common with what it was."""
    return border.tensor.dtype, border.tensor.shape, border.tensor.type


BORDER_KEYS: Sequence[Callable[[RecordedBorder], Hashable]] = (lambda border: border.path, by_path_or_type)


def _border(side: str, old: Sequence[RecordedBorder], new: Sequence[RecordedBorder]) -> Iterator[BorderChange]:
    (same, _), gone, made = matched(old, new, BORDER_KEYS)
    for before, after in same:
        if before.tensor.type != after.tensor.type:
            yield BorderChange(side, after.path, before.tensor.type, after.tensor.type)
    yield from (BorderChange(side, each.path, each.tensor.type, None) for each in gone)
    yield from (BorderChange(side, each.path, None, each.tensor.type) for each in made)


# Collectives.


def _what(c: RecordedCollective) -> tuple[Hashable, ...]:
    return c.kind, c.axes, c.detail, c.reduction, c.type, c.wire_bytes, c.times, c.times_known


def _where(c: RecordedCollective) -> tuple[Hashable, ...]:
    return c.place.scope, c.place.function, c.place.primitive, c.place.backward, c.cause


_COLLECTIVE_KEYS: Sequence[Callable[[RecordedCollective], Hashable]] = (
    lambda c: (_what(c), _where(c)),
    _what,
    lambda c: (_where(c), c.shape, c.kind),
    lambda c: (_where(c), c.shape),
)


def _collectives(old: RecordedPlan, new: RecordedPlan) -> Iterator[CollectiveChange]:
    singles, others = ([one for each in record.collectives for one in each.single] for record in (old, new))
    (_, _, *changed), gone, made = matched(singles, others, _COLLECTIVE_KEYS)
    pairs: list[tuple[RecordedCollective | None, RecordedCollective | None]] = [p for pairs in changed for p in pairs]
    pairs += [(each, None) for each in gone] + [(None, each) for each in made]
    groups: dict[Hashable, list[tuple[RecordedCollective | None, RecordedCollective | None]]] = {}
    for pair in pairs:
        groups.setdefault(tuple(map(_alike, pair)), []).append(pair)
    changes = [CollectiveChange(*group[0], len(group)) for group in groups.values()]
    yield from sorted(changes, key=lambda change: -abs(change.bytes))


def _alike(c: RecordedCollective | None) -> Hashable:
    """Equal for collectives that are listed in one line: of equal layers, at one line."""
    return None if c is None else (_what(c), folded(c.place.scope), c.place.line, c.cause)


# Values.


def _values(old: RecordedPlan, new: RecordedPlan) -> Iterator[ValueChange]:
    keys = (
        lambda made: (made.where, made.op.place.text, made.type),
        lambda made: (made.where, made.type),
        lambda made: (made.where[1:], made.type),
    )
    pairs, _, _ = matched(_made(old), _made(new), keys)
    groups: dict[tuple[str, str, str], list[str]] = {}
    for before, after in (pair for found in pairs for pair in found):
        types = before.value.tensor.type, after.value.tensor.type
        if types[0] != types[1]:
            groups.setdefault((*types, after.op.place.line), []).append(after.value.name)
    for key, names in groups.items():
        yield ValueChange(names[0], *key, len(names))


class _Made:
    """A value that an op of the user's makes."""

    def __init__(self, value: RecordedValue, op: RecordedOp):
        place = op.place
        self.value, self.op = value, op
        self.type = value.tensor.dtype, value.tensor.shape, op.results.index(value.name)
        self.where = place.scope, place.function, place.primitive, place.backward, op.kind


def _made(record: RecordedPlan) -> Iterable[_Made]:
    for value in record.values:
        op = record.ops[value.op] if value.op is not None else None
        if op is not None and not op.kind.startswith("sdy.") and value.name in op.results:
            yield _Made(value, op)
