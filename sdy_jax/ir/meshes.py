"""Meshes, references to their axes, and the algebra of lists of axes: what shardings are written in."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from sdy_jax.base.errors import ShardingError

# Objects that remember their hash.

T = TypeVar("T")


def hash_once(cls: type[T]) -> type[T]:
    """Decorates a frozen dataclass without slots whose objects are parts of many keys: each is hashed once."""
    compute = cls.__hash__

    def remembered(self: T) -> int:
        known = self.__dict__
        if "_hash" not in known:
            known["_hash"] = compute(self)
        return known["_hash"]  # type: ignore[no-any-return]

    def state(self: T) -> dict[str, Any]:
        """For pickling: strings have other hashes in other processes."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    cls.__hash__ = remembered  # type: ignore[method-assign, assignment]
    cls.__getstate__ = state  # type: ignore[method-assign, assignment]
    return cls


# Meshes and references to their axes: the algebra that everything else is written in.
#
# Source: the SDY dialect reference, attributes `mesh`, `mesh_axis`, `axis_ref` and `sub_axis_info`.
#
# An axis of size S is a number of digits: reshape it to `[pre, size, S / (pre * size)]` and the middle digit is the
# sub-axis `"a":(pre)size`. With S = 8, `"a":(2)2` is the middle binary digit. A full axis is written by its name
# alone.


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """A named axis of a mesh and the number of devices along it.

    Attributes:
        name: the axis.
        size: the number of devices along it.

    Example:
        >>> MeshAxis("data", 2).size
        2

    See also:
        `Mesh`: what holds them.
    """

    name: str
    size: int

    def __str__(self) -> str:
        return f"{quoted(self.name)}={self.size}"


@hash_once
@dataclass(frozen=True)
class Mesh:
    """An ordered list of axes, and the device at each position (row-major) where that is not the identity.

    No axes and one device id is a *maximal* mesh (the whole value on that device); no axes and no ids is *empty*.

    Attributes:
        axes: the axes, major to minor.
        device_ids: the device at each position, empty where that is the identity.

    Example:
        >>> Mesh.of(data=2, model=4).size
        8

    See also:
        `jax.make_mesh`: a mesh with its devices, which `partition` takes as well.
    """

    axes: tuple[MeshAxis, ...]
    device_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, **sizes: int) -> Mesh:
        """`Mesh.of(data=2, model=4)`.

        Raises:
            ShardingError: a size is no number of devices.
        """
        for name, size in sizes.items():
            if not hasattr(size, "__index__") or size < 1:
                raise ShardingError(f"Mesh.of: {name}={size!r}; expected a number of devices, 1 or more")
        return cls(tuple(MeshAxis(name, size) for name, size in sizes.items()))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The size of each axis by its name."""
        return {axis.name: axis.size for axis in self.axes}

    @cached_property
    def positions(self) -> dict[str, int]:
        """Where each axis name stands in the mesh, major first."""
        return {axis.name: i for i, axis in enumerate(self.axes)}

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the axes, major to minor."""
        return tuple(axis.name for axis in self.axes)

    @cached_property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def is_maximal(self) -> bool:
        """Whether it is one device on which a value is whole."""
        return not self.axes and len(self.device_ids) == 1

    @property
    def is_empty(self) -> bool:
        """Whether it has neither axes nor devices."""
        return not self.axes and not self.device_ids

    def __str__(self) -> str:
        axes = ", ".join(map(str, self.axes))
        ids = f", device_ids=[{', '.join(map(str, self.device_ids))}]" if self.device_ids else ""
        return f"<[{axes}]{ids}>"


@dataclass(frozen=True, slots=True)
class SubAxisInfo:
    """The digit of an axis that a sub-axis is: the product of the sizes to its left, and its own size."""

    pre_size: int
    size: int

    @property
    def next_pre_size(self) -> int:
        """The `pre_size` of the part that is minor to it."""
        return self.pre_size * self.size

    def __str__(self) -> str:
        return f"({self.pre_size}){self.size}"


@dataclass(frozen=True, slots=True)
class AxisRef:
    """A full axis, or a sub-axis of one. `size` and `next_pre_size` of a full axis need its mesh.

    Attributes:
        name: the axis.
        sub_axis: the part of it, None for all.

    Example:
        >>> str(AxisRef("data"))
        '"data"'

    See also:
        `DimensionSharding`: what holds them.
    """

    name: str
    sub_axis: SubAxisInfo | None = field(default=None)

    @classmethod
    def sub(cls, name: str, pre_size: int, size: int) -> AxisRef:
        """The part of an axis of this size that has `pre_size` positions before it: `"data":(1)2`."""
        return cls(name, SubAxisInfo(pre_size, size))

    @classmethod
    def canonical(cls, name: str, pre_size: int, size: int, mesh: Mesh) -> AxisRef:
        """The digit `(pre_size)size` of an axis; the plain axis where that is all of it."""
        return cls(name) if size == mesh.sizes[name] else cls.sub(name, pre_size, size)

    @property
    def pre_size(self) -> int:
        """The product of the sizes of the parts of its axis that are major to it; 1 for a full axis."""
        return self.sub_axis.pre_size if self.sub_axis else 1

    def size(self, mesh: Mesh) -> int:
        """The number of devices along it, on a mesh."""
        return self.sub_axis.size if self.sub_axis else mesh.sizes[self.name]

    def next_pre_size(self, mesh: Mesh) -> int:
        """The `pre_size` of the part that is minor to it, on a mesh."""
        return self.sub_axis.next_pre_size if self.sub_axis else mesh.sizes[self.name]

    def __str__(self) -> str:
        return quoted(self.name) if self.sub_axis is None else f"{quoted(self.name)}:{self.sub_axis}"


Axes = tuple[AxisRef, ...]
"""Mesh axes, major to minor."""


def axes_size(axes: Iterable[AxisRef], mesh: Mesh) -> int:
    """The number of shards that a list of axes makes."""
    count = 1
    for axis in axes:
        count *= axis.size(mesh)
    return count


@lru_cache(maxsize=1024)
def primes(number: int) -> tuple[int, ...]:
    """The prime factors of a size, ascending: the smallest parts that an axis may be cut into.

    >>> primes(12)
    (2, 2, 3)
    """
    found, prime = [], 2
    while number > 1:
        while number % prime == 0:
            found.append(prime)
            number //= prime
        prime += 1
    return tuple(found)


@lru_cache(maxsize=1024)
def quoted(name: str) -> str:
    """`name` as an MLIR string literal."""
    return '"' + "".join(map(_escaped, name.encode(errors="surrogateescape"))) + '"'


_PRINTABLE = range(0x20, 0x7F)
"""Given by ASCII."""


def _escaped(byte: int) -> str:
    if byte == ord("\\"):
        return "\\\\"
    return chr(byte) if byte in _PRINTABLE and byte != ord('"') else f"\\{byte:02X}"


@lru_cache(maxsize=1024)
def symbol(name: str) -> str:
    """A reference to the symbol `name` in MLIR text; unusual names are quoted."""
    return f"@{name}" if re.fullmatch(r"[A-Za-z_][\w$.]*", name, re.ASCII) else f"@{quoted(name)}"


# The algebra of axis references and of lists of them.
#
# An axis reference denotes the digits `[pre, next)` of its axis, where `next` is `pre_size * size`; a full axis
# denotes all of them. Axes of different names share no digit. Lists are major to minor. A function takes a mesh only
# where the size of a full axis, or the order of the mesh's axes, matters. "An axis reference or nothing" is `AxisRef
# | None`. See docs/explanation/propagation.md#sub-axes.

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
