"""Meshes and references to their axes: the algebra that everything else is written in.

Source: the SDY dialect reference, attributes `mesh`, `mesh_axis`, `axis_ref` and `sub_axis_info`.

An axis of size S is a number of digits: reshape it to `[pre, size, S / (pre * size)]` and the middle digit is the
sub-axis `"a":(pre)size`. With S = 8, `"a":(2)2` is the middle binary digit. A full axis is written by its name alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from sdy_jax.representation.hash_once import hash_once


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
        """`Mesh.of(data=2, model=4)`."""
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
