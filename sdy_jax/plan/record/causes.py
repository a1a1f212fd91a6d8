"""Why two plans differ: the mesh, options, annotations, lines of code, arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

from sdy_jax.plan.record.border import RecordedAnnotation, RecordedBorder
from sdy_jax.plan.record.code import CodeChange, code_changes
from sdy_jax.plan.record.differences import Cause
from sdy_jax.plan.record.matching import matched
from sdy_jax.plan.record.recorded_plan import RecordedPlan

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
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _surroundings(old: RecordedPlan, new: RecordedPlan) -> Iterator[Cause]:
    if (old.time.unit, old.time.origin) != (new.time.unit, new.time.origin):
        costs = (record.time.origin or f"in {record.time.unit}" for record in (old, new))
        yield Cause("costs", new.line.line, f"costs {' -> '.join(costs)}", new.line.text)
    elif old.versions != new.versions:
        yield Cause("version", "", f"{', '.join(old.versions)} -> {', '.join(new.versions)}")
