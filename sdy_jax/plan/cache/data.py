"""What a plan says as JSON and back: dataclasses and named tuples as lists of their fields, by their declared types.

Entries are read by the version that wrote them, so nothing says what a field is. Locations of MLIR stand in a table.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jax.extend.mlir import ir


class Writer:
    """Makes JSON; `locations` has what it refers to."""

    def __init__(self) -> None:
        self.locations: list[ir.Location] = []
        self._numbers: dict[ir.Attribute, int] = {}

    def written(self, data: Any) -> Any:
        """What JSON can say of data."""
        if isinstance(data, ir.Location):
            return self._number(data)
        if isinstance(data, Mapping):
            return [[self.written(key), self.written(value)] for key, value in data.items()]
        if is_dataclass(data) and not isinstance(data, type):
            return [self.written(getattr(data, name)) for name, _ in _fields(type(data))]
        if isinstance(data, frozenset):
            return sorted(map(self.written, data))
        return [self.written(each) for each in data] if isinstance(data, (tuple, list)) else data

    def _number(self, location: ir.Location) -> int:
        key = location.attr
        if key not in self._numbers:
            self._numbers[key] = len(self.locations)
            self.locations.append(location)
        return self._numbers[key]


class Reader:
    """Makes data of JSON; `locations`: what it refers to."""

    def __init__(self, locations: Sequence[ir.Location]):
        self._locations = locations

    def read(self, kind: Any, data: Any) -> Any:
        """The data of a type."""
        if data is None or kind in (str, int, bool, Any):
            return data
        if kind is float:
            return float(data)
        if kind is ir.Location:
            return self._locations[data]
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is Literal:
            return data
        if origin in (Union, types.UnionType):
            return self.read(arguments[0], data)  # the others are None, or meshes that programs do not write inline
        if origin in (tuple, frozenset, list):
            return origin(self._entries(origin, arguments, data))
        if origin is not None and issubclass(origin, Mapping):
            return {self.read(arguments[0], key): self.read(arguments[1], value) for key, value in data}
        found = _fields(kind)
        return kind(**{name: self.read(hint, each) for (name, hint), each in zip(found, data, strict=True)})

    def _entries(self, origin: type, arguments: tuple[Any, ...], data: Sequence[Any]) -> list[Any]:
        if origin is tuple and arguments[-1] is not Ellipsis:
            return [self.read(kind, each) for kind, each in zip(arguments, data, strict=True)]
        return [self.read(arguments[0], each) for each in data]


@cache
def _fields(kind: Any) -> list[tuple[str, Any]]:
    """The fields that a dataclass, or a named tuple, is made of, with their types."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind) if field.init] if is_dataclass(kind) else kind._fields
    return [(name, hints[name]) for name in names]
