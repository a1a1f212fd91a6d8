"""Comparing two plans.

Nothing is compared by line numbers or positions. Collectives and ops are matched by their name scopes, functions and
kinds, in order; arguments by their paths, or by types in order where they were renamed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

from sdy_jax.errors import SdyError, with_article
from sdy_jax.plan.record.border import RecordedBorder
from sdy_jax.plan.record.causes import causes
from sdy_jax.plan.record.differences import Amount, BorderChange, CollectiveChange, PlanDiff, ValueChange
from sdy_jax.plan.record.matching import matched
from sdy_jax.plan.record.program import RecordedCollective, RecordedOp, RecordedValue
from sdy_jax.plan.record.recorded_plan import RecordedPlan


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
    made = getattr(plan, "record", None)
    if not callable(made):
        given = with_article(type(plan))
        raise SdyError(f"{given} was given to compare with, expected a plan; to fix: sdy.load_plan(path) reads one")
    found: RecordedPlan = made()
    return found


def _amounts(old: RecordedPlan, new: RecordedPlan) -> Iterator[Amount]:
    yield Amount("on the wire", old.wire_bytes, new.wire_bytes)
    if old.memory is not None and new.memory is not None:
        yield Amount("of memory", old.memory.peak, new.memory.peak)
    if old.time.unit == new.time.unit == "seconds":
        yield Amount("estimated", old.time.total, new.time.total, "seconds")


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
    return None if c is None else (_what(c), folded_scope(c.place.scope), c.place.line, c.cause)


def folded_scope(scope: str) -> str:
    """`layer_*/mlp` for `layer_3/mlp`."""
    return re.sub(r"\d+", "*", scope)


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
