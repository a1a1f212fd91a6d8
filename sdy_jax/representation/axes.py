"""The algebra of axis references and of lists of them.

An axis reference denotes the digits `[pre, next)` of its axis, where `next` is `pre_size * size`; a full axis denotes
all of them. Axes of different names share no digit. Lists are major to minor. A function takes a mesh only where the
size of a full axis, or the order of the mesh's axes, matters. "An axis reference or nothing" is `AxisRef | None`.
See docs/explanation/propagation.md#sub-axes.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence

from sdy_jax.representation.mesh import AxisRef, Mesh

SortKey = tuple[int | str, int, float]


def braces(items: Iterable[object]) -> str:
    """A list as the dialect writes it: `{"x", "y":(1)2}`."""
    return "{" + ", ".join(map(str, items)) + "}"


# Predicates on two axis references.


def contains(a: AxisRef, b: AxisRef) -> bool:
    """Every digit of `b` is in `a`."""
    if a.name != b.name:
        return False
    if a.sub_axis is None or b.sub_axis is None:
        return a.sub_axis is None
    return a.sub_axis.pre_size <= b.sub_axis.pre_size and a.sub_axis.next_pre_size >= b.sub_axis.next_pre_size


def prefix_of(a: AxisRef, b: AxisRef) -> bool:
    """`a` is a major part of `b`, or equal to it."""
    return a.pre_size == b.pre_size and contains(b, a)


def suffix_of(a: AxisRef, b: AxisRef, mesh: Mesh) -> bool:
    """`a` is a minor part of `b`, or equal to it."""
    return contains(b, a) and a.next_pre_size(mesh) == b.next_pre_size(mesh)


def overlaps(a: AxisRef, b: AxisRef) -> bool:
    """`a` and `b` share a digit."""
    if a.name != b.name:
        return False
    if a.sub_axis is None or b.sub_axis is None:
        return True
    return a.sub_axis.pre_size < b.sub_axis.next_pre_size and b.sub_axis.pre_size < a.sub_axis.next_pre_size


def can_coexist(a: AxisRef, b: AxisRef) -> bool:
    """One reshape of the axis has both `a` and `b` as products of its digits; `(1)2` and `(3)2` do not."""
    if a.name != b.name or a.sub_axis is None or b.sub_axis is None:
        return True
    first_pre, last_pre = sorted((a.sub_axis.pre_size, b.sub_axis.pre_size))
    first_next, last_next = sorted((a.sub_axis.next_pre_size, b.sub_axis.next_pre_size))
    if first_next <= last_pre:
        return last_pre % first_next == 0
    return first_next % last_pre == 0 and last_pre % first_pre == 0 and last_next % first_next == 0


def can_merge(a: AxisRef, b: AxisRef) -> bool:
    """`b` begins where `a` ends, so that the list `a, b` is one axis reference."""
    if a.name != b.name or a.sub_axis is None or b.sub_axis is None:
        return False
    return a.sub_axis.next_pre_size == b.sub_axis.pre_size


# Operations on two axis references.


def merge(a: AxisRef, b: AxisRef, mesh: Mesh) -> AxisRef:
    """The axis reference equal to the list `a, b`; they must satisfy `can_merge`."""
    return AxisRef.canonical(a.name, a.pre_size, a.size(mesh) * b.size(mesh), mesh)


def overlap(a: AxisRef, b: AxisRef) -> AxisRef | None:
    """The digits that `a` and `b` share."""
    if a.name != b.name:
        return None
    if a.sub_axis is None or b.sub_axis is None:
        return b if a.sub_axis is None else a
    pre = max(a.sub_axis.pre_size, b.sub_axis.pre_size)
    end = min(a.sub_axis.next_pre_size, b.sub_axis.next_pre_size)
    return AxisRef.sub(a.name, pre, end // pre) if pre < end and can_coexist(a, b) else None


def prefix_without_overlap(a: AxisRef, b: AxisRef) -> AxisRef | None:
    """The major part of `a` before the first digit of `b`: all of `a` where they share none."""
    if not can_coexist(a, b):
        return None
    if not overlaps(a, b):
        return a
    pre, end = a.pre_size, b.pre_size
    return AxisRef.sub(a.name, pre, end // pre) if pre < end else None


def prefix_without_overlaps(a: AxisRef, others: Iterable[AxisRef]) -> AxisRef | None:
    """The major part of `a` that shares no digit with any of `others`."""
    prefix: AxisRef | None = a
    for other in others:
        if prefix is None:
            return None
        prefix = prefix_without_overlap(prefix, other)
    return prefix


def suffix_without_overlap(a: AxisRef, b: AxisRef, mesh: Mesh) -> AxisRef | None:
    """The minor part of `a` after the last digit of `b`: all of `a` where they share none."""
    if not can_coexist(a, b):
        return None
    if not overlaps(a, b):
        return a
    start, end = b.next_pre_size(mesh), a.next_pre_size(mesh)
    return AxisRef.sub(a.name, start, end // start) if start < end else None


# Orders. A sub-axis that starts the axis precedes the full axis, which precedes every other sub-axis.


def mesh_order(mesh: Mesh, axis: AxisRef) -> SortKey:
    """Sort key: by the axis's place in the mesh, then by its digits."""
    return (mesh.positions[axis.name], *_digits(axis))


def natural_order(axis: AxisRef) -> SortKey:
    """Sort key: by the axis's name, then by its digits."""
    return (axis.name, *_digits(axis))


def _digits(axis: AxisRef) -> tuple[int, float]:
    return (axis.sub_axis.pre_size, axis.sub_axis.size) if axis.sub_axis else (1, math.inf)


def sort_axes(axes: Iterable[AxisRef], mesh: Mesh) -> tuple[AxisRef, ...]:
    """`axes` in mesh order."""
    return tuple(sorted(axes, key=lambda axis: mesh_order(mesh, axis)))


# Operations on lists.


class PrefixStatus(enum.Enum):
    """How one list relates to another of which it may be the beginning."""

    EQUAL = "equal"
    STRICT = "strict"
    NOT = "not"


def add_or_merge(axes: Sequence[AxisRef], axis: AxisRef, mesh: Mesh) -> tuple[AxisRef, ...]:
    """`axes` with `axis` appended at the minor end, merged with the last one if it continues it."""
    if axes and can_merge(axes[-1], axis):
        return (*axes[:-1], merge(axes[-1], axis, mesh))
    return (*axes, axis)


def merge_neighbours(axes: Iterable[AxisRef], mesh: Mesh) -> tuple[AxisRef, ...]:
    """The canonical form of a list: no two neighbours that can merge."""
    merged: tuple[AxisRef, ...] = ()
    for axis in axes:
        merged = add_or_merge(merged, axis, mesh)
    return merged


def sort_and_merge(axes: Iterable[AxisRef], mesh: Mesh) -> tuple[AxisRef, ...]:
    """The canonical form of a set of axes: in mesh order, neighbours merged."""
    return merge_neighbours(sort_axes(axes, mesh), mesh)


def prefix_status(first: Sequence[AxisRef], second: Sequence[AxisRef]) -> PrefixStatus:
    """Whether `first` equals `second`, strictly begins it (its last axis may be a major part), or neither."""
    if tuple(first) == tuple(second):
        return PrefixStatus.EQUAL
    if not first:
        return PrefixStatus.STRICT
    last = len(first) - 1
    if len(first) > len(second) or tuple(first[:last]) != tuple(second[:last]):
        return PrefixStatus.NOT
    return PrefixStatus.STRICT if prefix_of(first[last], second[last]) else PrefixStatus.NOT


def set_difference(axes: Iterable[AxisRef], removed: Iterable[AxisRef], mesh: Mesh) -> tuple[AxisRef, ...]:
    """What is left of each of `axes`, in their order, without the digits of `removed`."""
    ordered = sorted(removed, key=natural_order)
    left: list[AxisRef] = []
    for axis in axes:
        left.extend(_without(axis, ordered, mesh))
    return tuple(left)


def _without(axis: AxisRef, removed: Sequence[AxisRef], mesh: Mesh) -> list[AxisRef]:
    left: list[AxisRef] = []
    rest: AxisRef | None = axis
    for other in removed:  # in digit order, so what is before `other` overlaps none of those to come
        if rest is None:
            return left
        if not overlaps(rest, other):
            continue
        before = prefix_without_overlap(rest, other)
        if before:
            left.append(before)
        rest = suffix_without_overlap(rest, other, mesh)
    return [*left, rest] if rest else left


def truncate_overlaps(axes: Sequence[AxisRef], others: Sequence[AxisRef]) -> tuple[AxisRef, ...]:
    """The longest beginning of the list `axes` that shares no digit with `others`."""
    kept: list[AxisRef] = []
    for axis in axes:
        prefix = prefix_without_overlaps(axis, others)
        if prefix:
            kept.append(prefix)
        if prefix != axis:
            break
    return tuple(kept)
