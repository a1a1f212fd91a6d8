"""The kinds of attributes of the mesh and shard dialects: their Python values, and how either form spells them.

| kind | value | pretty | generic |
|---|---|---|---|
| axes | `(3, 1)` | `[3, 1]` | `array<i16: 3, 1>` |
| index | `1` | `1` | `1 : index` |
| offset | `-2` | `-2` | `-2 : i64` |
| reduction | `"max"` | `max` or `<max>` | `#mesh<partial max>` or `#mesh.partial<max>` |
| axis lists | `((0, 1), ())` | `[[0, 1], []]` | `#mesh<axisarray[[0, 1], []]>` or `#mesh.axisarray<[[0, 1], []]>` |
| indices | `(1, GAP, 3)` | `[1, %r, 3]` | `array<i64: 1, GAP, 3>`, and `%r` among the operands |
| dimensions | `(2, GAP, 4)` | `2x?x4`, `[]` for none | `array<i64: 2, GAP, 4>` |
| unit | `True` | its name | its name alone |
| symbol | `"m"` | `@m` | `@m` |
| name | `"m"` | `@m` | `"m"` |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sdy_jax.representation.type_text import sizes_text
from sdy_jax.text.cursor import INTEGER, SYMBOL, WORD, Cursor

GAP = -(2**63)
"""What stands in a list of indices, or of dimensions, for a number that is not known here."""

REDUCTIONS = ("sum", "max", "min", "product", "average", "bitwise_and", "bitwise_or", "bitwise_xor", "generic")

_DIMENSIONS = re.compile(r"(?:\d{1,20}|\?)(?:x(?:\d{1,20}|\?))*(?![\w?])")
_BARE = re.compile(r"[A-Za-z_][\w$.]*")


@dataclass(frozen=True, slots=True)
class AttributeKind:
    """One kind.

    `read` takes a value in its pretty form from a cursor, or fails there; `pretty` is that form. `generic` is the
    generic form in a dialect; `value` reads that, as jaxlib prints it, or gives None for what is of another kind.
    """

    described: str
    read: Callable[[Cursor], Any]
    pretty: Callable[[Any], str]
    generic: Callable[[Any, str], str]
    value: Callable[[str, str], Any]


def _integers(cursor: Cursor) -> tuple[int, ...]:
    return read_list(cursor, lambda: int(cursor.need(INTEGER, "an integer").text))


def read_list(cursor: Cursor, entry: Callable[[], Any], brackets: str = "[]") -> tuple[Any, ...]:
    """Reads `[entry, entry, ...]`, or such a list between other brackets."""
    cursor.expect(brackets[0])
    entries: list[Any] = []
    while not cursor.take(brackets[1]):
        if entries and not cursor.take(","):
            cursor.fail(f"expected `,` or `{brackets[1]}`")
        entries.append(entry())
    return tuple(entries)


def _reduction(cursor: Cursor) -> str:
    bracketed = cursor.take("<")
    word = cursor.need(WORD, "a reduction").text
    if bracketed:
        cursor.expect(">")
    return word


def _dimensions(cursor: Cursor) -> tuple[int, ...]:
    if cursor.take("["):
        cursor.expect("]")
        return ()
    text = cursor.need(_DIMENSIONS, "dimensions, such as `2x?x4`").text
    return tuple(GAP if size == "?" else int(size) for size in text.split("x"))


def _symbol(cursor: Cursor) -> str:
    return _unquoted(cursor.need(SYMBOL, "a symbol, such as `@m`").text[1:])


def _unquoted(name: str) -> str:
    """A name as it stands between the quotes that it may have, escapes included."""
    return name[1:-1] if name.startswith('"') else name


def _at(name: str) -> str:
    return f"@{name}" if _BARE.fullmatch(name) else f'@"{name}"'


def _array(width: str) -> tuple[Callable[[Any, str], str], Callable[[str, str], Any]]:
    form = re.compile(rf"array<{width}(?:\s*:\s*(?P<entries>[-\d,\s]*))?>")

    def value(text: str, dialect: str) -> tuple[int, ...] | None:
        match = form.fullmatch(text)
        return _split(match["entries"] or "") if match else None

    def generic(entries: tuple[int, ...], dialect: str) -> str:
        return f"array<{width}: {', '.join(map(str, entries))}>" if entries else f"array<{width}>"

    return generic, value


def _split(entries: str) -> tuple[int, ...] | None:
    """The numbers between commas; None for what is no number."""
    numbers = [number.strip() for number in entries.split(",") if number.strip()]
    return tuple(map(int, numbers)) if all(map(INTEGER.fullmatch, numbers)) else None


def _typed(type_: str) -> tuple[Callable[[Any, str], str], Callable[[str, str], Any]]:
    form = re.compile(rf"(-?\d{{1,20}})\s*:\s*{type_}")

    def value(text: str, dialect: str) -> int | None:
        match = form.fullmatch(text)
        return int(match[1]) if match else None

    return lambda number, dialect: f"{number} : {type_}", value


def _own(mnemonic: str) -> Callable[[str, str], str | None]:
    """What is inside an attribute of the dialect: `max` in `#mesh<partial max>` and `#mesh.partial<max>`."""

    def inside(text: str, dialect: str) -> str | None:
        match = re.fullmatch(rf"#{dialect}(?:<\s*{mnemonic}(.*)>|\.{mnemonic}\s*<(.*)>)", text, re.DOTALL)
        if match is None:
            return None
        return (match[1] if match[2] is None else match[2]).strip()

    return inside


_partial, _axisarray = _own("partial"), _own("axisarray")


def _reduction_value(text: str, dialect: str) -> str | None:
    inside = _partial(text, dialect)
    if inside is not None and inside.startswith("<"):
        inside = inside[1:-1].strip()
    return inside if inside in REDUCTIONS else None


def _axis_lists_value(text: str, dialect: str) -> tuple[tuple[int, ...], ...] | None:
    inside = _axisarray(text, dialect)
    if inside is None or not re.fullmatch(r"\[\s*(?:\[[-\d,\s]*\]\s*(?:,\s*)?)*\]", inside):
        return None
    entries = re.findall(r"\[([-\d,\s]*)\]", inside[1:-1])
    lists = tuple(numbers for text in entries if (numbers := _split(text)) is not None)
    return lists if len(lists) == len(entries) else None


def _symbol_value(text: str, dialect: str) -> str | None:
    return _unquoted(text[1:]) if SYMBOL.fullmatch(text) else None


def _name_value(text: str, dialect: str) -> str | None:
    return text[1:-1] if text.startswith('"') and text.endswith('"') else None


def _unit_value(text: str, dialect: str) -> bool | None:
    return True if text == "unit" else None


def _numbers(entries: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, entries))}]"


def _lists(lists: tuple[tuple[int, ...], ...]) -> str:
    return f"[{', '.join(map(_numbers, lists))}]"


def _sizes(sizes: tuple[int, ...]) -> str:
    return sizes_text(None if size == GAP else size for size in sizes)


KINDS: Mapping[str, AttributeKind] = MappingProxyType({
    "axes": AttributeKind("an array of i16", _integers, _numbers, *_array("i16")),
    "index": AttributeKind(
        "an index", lambda cursor: int(cursor.need(INTEGER, "an index").text), str, *_typed("index")
    ),
    "offset": AttributeKind("an i64", lambda cursor: int(cursor.need(INTEGER, "an integer").text), str, *_typed("i64")),
    "reduction": AttributeKind(
        f"one of {', '.join(REDUCTIONS)}",
        _reduction,
        str,
        lambda kind, dialect: f"#{dialect}<partial {kind}>",
        _reduction_value,
    ),
    "axis lists": AttributeKind(
        "lists of axes",
        lambda cursor: read_list(cursor, lambda: _integers(cursor)),
        _lists,
        lambda lists, dialect: f"#{dialect}<axisarray{_lists(lists)}>",
        _axis_lists_value,
    ),
    "indices": AttributeKind("an array of i64", _integers, _numbers, *_array("i64")),
    "dimensions": AttributeKind("an array of i64", _dimensions, _sizes, *_array("i64")),
    "unit": AttributeKind("without a value", lambda cursor: True, str, lambda value, dialect: "unit", _unit_value),
    "symbol": AttributeKind("a symbol", _symbol, _at, lambda name, dialect: _at(name), _symbol_value),
    "name": AttributeKind("a string", _symbol, _at, lambda name, dialect: f'"{name}"', _name_value),
    "segments": AttributeKind("an array of i32", _integers, _numbers, *_array("i32")),
})  # fmt: skip
