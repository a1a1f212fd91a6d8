"""Records as JSON and back: dataclasses as objects of the fields that differ from their defaults.

Places, frames, tensors and choices, of which many are alike, stand once in tables, and by their numbers elsewhere.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from sdy_jax.errors import SdyError
from sdy_jax.plan.record.border import RecordedFrame, RecordedPlace, RecordedTensor
from sdy_jax.plan.record.choices import RecordedChoice, RecordedChoices, RecordedLayout

_TABLES: dict[type, str] = {
    RecordedFrame: "frames",
    RecordedPlace: "places",
    RecordedTensor: "tensors",
    RecordedLayout: "layouts",
    RecordedChoice: "choices",
}
"""What stands in tables; what others contain comes first."""


class Encoder:
    """Makes JSON of records; `tables` has what they share."""

    def __init__(self) -> None:
        self.tables: dict[str, list[Any]] = {name: [] for name in _TABLES.values()}
        self._numbers: dict[Any, int] = {}

    def encoded(self, data: Any) -> Any:
        """What JSON can say of a record, or a part of one."""
        if isinstance(data, tuple):
            return [self.encoded(each) for each in data]
        if isinstance(data, float) and not math.isfinite(data):
            return str(data)
        if not is_dataclass(data):
            return data
        table = _TABLES.get(type(data))
        if table is None:
            return self._object(data)
        if data not in self._numbers:
            made = self._object(data)
            self._numbers[data] = len(self.tables[table])
            self.tables[table].append(made)
        return self._numbers[data]

    def _object(self, data: Any) -> dict[str, Any]:
        values = ((field, getattr(data, field.name)) for field in fields(data))
        return {field.name: self.encoded(value) for field, value in values if value != field.default}


class Decoder:
    """Makes records of JSON.

    Args:
        tables: as the encoder's.

    Raises:
        SdyError: it is not what an encoder makes; the message says where.
    """

    def __init__(self, tables: Any):
        self._tables: dict[type, list[Any]] = {}
        for kind, name in _TABLES.items():
            entries = _checked(tables, dict, "tables").get(name, [])
            self._tables[kind] = []
            for number, entry in enumerate(_checked(entries, list, f"tables.{name}")):
                self._tables[kind].append(self._object(kind, entry, f"tables.{name}[{number}]"))

    def decoded(self, kind: Any, data: Any, where: str) -> Any:
        """The record, or the part of one, that JSON says.

        Args:
            kind: its type.
            where: what messages call it.
        """
        if get_origin(kind) in (Union, types.UnionType):
            return None if data is None else self.decoded(get_args(kind)[0], data, where)
        if get_origin(kind) is tuple:
            inner, entries = get_args(kind)[0], enumerate(_checked(data, list, where))
            return tuple([self.decoded(inner, each, f"{where}[{number}]") for number, each in entries])
        if kind in self._tables:
            number = _checked(data, int, where)
            if not 0 <= number < len(self._tables[kind]):
                raise SdyError(f"{where} is {number}, of {len(self._tables[kind])} {_TABLES[kind]}")
            return self._tables[kind][number]
        if isinstance(kind, type) and is_dataclass(kind):
            return self._object(kind, data, where)
        return _scalar(kind, data, where)

    def attribute(self, kind: type, data: Any, name: str, where: str) -> Any:
        """An attribute of the record that JSON says, without the others."""
        field, hint = next(found for found in _fields(kind) if found[0].name == name)
        given = _checked(data, dict, where)
        if name in given:
            return self.decoded(hint, given[name], f"{where}.{name}")
        if field.default is MISSING:
            raise SdyError(f"{where} has no {name!r}")
        return field.default

    def _object(self, kind: type, data: Any, where: str) -> Any:
        given, found = _checked(data, dict, where), {}
        for field, hint in _fields(kind):
            if field.name in given:
                found[field.name] = self.decoded(hint, given[field.name], f"{where}.{field.name}")
            elif field.default is MISSING:
                raise SdyError(f"{where} has no {field.name!r}")
        return kind(**found)


def choices_text(choices: RecordedChoices) -> str:
    """Choices as text, apart from a plan."""
    encoder = Encoder()
    said = encoder.encoded(choices)
    return json.dumps([encoder.tables, said])


def choices_from_text(text: str) -> RecordedChoices:
    """The choices that a text says.

    Raises:
        SdyError: it is not what `choices_text` makes.
    """
    tables, said = json.loads(text)
    found: RecordedChoices = Decoder(tables).decoded(RecordedChoices, said, "choices")
    return found


def _scalar(kind: type, data: Any, where: str) -> Any:
    if kind is float and (isinstance(data, str) or type(data) is int):
        try:
            return float(data)
        except ValueError:
            pass
    return _checked(data, kind, where)


def _checked(data: Any, kind: type, where: str) -> Any:
    if type(data) is not kind:
        raise SdyError(f"{where} is {data!r:.40}, expected {_NAMES[kind]}")
    return data


_NAMES: Mapping[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
}


@cache
def _fields(kind: Any) -> list[tuple[Field[Any], Any]]:
    """The fields of a dataclass with their types."""
    hints = get_type_hints(kind)
    return [(field, hints[field.name]) for field in fields(kind)]
