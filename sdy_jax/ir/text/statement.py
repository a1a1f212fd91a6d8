"""One op of the dialects as text: its parts, and their generic form."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sdy_jax.ir.text.cursor import STRING, VALUE, WORD, Cursor, TextSpan
from sdy_jax.ir.text.mesh_dialects import ALIASES, KINDS, PARSED_NAMES, SEGMENTS, Declaration, read_list

_NAME = re.compile(rf"{WORD.pattern}|{STRING}")
_PIECE = re.compile(rf"{STRING}|->|[^\s,\"()\[\]{{}}<>]+")


@dataclass(frozen=True, slots=True)
class Statement:
    """An op without its results' names: operands and types in order, attributes by name in their generic form."""

    op: Declaration
    operands: tuple[TextSpan, ...]
    attributes: Mapping[str, TextSpan]
    operand_types: tuple[TextSpan, ...]
    result_types: tuple[TextSpan, ...]

    def same_as(self, other: Statement) -> bool:
        """Whether the two say the same, wherever they stand."""
        return _texts(self) == _texts(other)

    def groups(self) -> dict[str, Sequence[TextSpan]] | None:
        """The operands of each group; None if there are not as many as the op takes."""
        given = self.attributes.get(SEGMENTS)
        return self.op.groups(self.operands, KINDS["segments"].value(given.text, self.op.dialect) if given else None)


def _texts(statement: Statement) -> tuple[object, ...]:
    return (
        statement.op,
        [operand.text for operand in statement.operands],
        {name: value.text for name, value in statement.attributes.items()},
        [type_.text for type_ in statement.operand_types],
        [type_.text for type_ in statement.result_types],
    )


def make_statement(
    op: Declaration,
    groups: Mapping[str, Sequence[TextSpan]],
    attributes: Mapping[str, TextSpan],
    operand_types: tuple[TextSpan, ...],
    result_types: tuple[TextSpan, ...],
) -> Statement:
    """A statement with these groups of operands; says the sizes of the groups where the op needs that."""
    operands = tuple(value for operand in op.operands for value in groups.get(operand.name, ()))
    attributes = dict(attributes)
    if op.segmented:
        sizes = tuple(len(groups.get(operand.name, ())) for operand in op.operands)
        at = operands[0].at if operands else next(iter(attributes.values()), TextSpan("", 0)).at
        attributes[SEGMENTS] = TextSpan(KINDS["segments"].generic(sizes, op.dialect), at)
    return Statement(op, operands, attributes, operand_types, result_types)


def read_generic(op: Declaration, cursor: Cursor) -> Statement:
    """Reads the generic form, from its operands on.

    Attributes may stand in `<{...}>`, in `{...}`, or in both.

    Raises:
      AssemblyError: it is not the generic form of an op without regions and successors.
    """
    operands = read_list(cursor, lambda: cursor.need(VALUE, "a value"), "()")
    attributes: dict[str, TextSpan] = {}
    if cursor.take("<"):
        read_dictionary(cursor, attributes)
        cursor.expect(">")
    if cursor.peek("{"):
        read_dictionary(cursor, attributes)
    cursor.expect(":")
    return Statement(op, operands, attributes, *read_function_type(cursor))


def read_dictionary(cursor: Cursor, into: dict[str, TextSpan]) -> None:
    """Reads `{name = value, name, ...}`.

    Raises:
      AssemblyError: it is not of that form, or a name is there already.
    """
    if not cursor.peek("{"):
        cursor.fail("expected `{`")
    inside = cursor.bracket()
    entries = Cursor(cursor.text, inside.at)
    end = inside.at + len(inside.text)
    while entries.next < end:
        name = entries.need(_NAME, "the name of an attribute")
        key = name.text.strip('"')
        key = ALIASES.get(key, key)
        if key in into:
            entries.fail(f"attribute {key} is given twice", name.at)
        into[key] = _value(entries, end) if entries.take("=") else TextSpan("unit", name.at)
        if entries.next < end:
            entries.expect(",")


def _value(cursor: Cursor, end: int) -> TextSpan:
    """An attribute's value: all up to the next comma outside of brackets."""
    start = cursor.next
    while (at := cursor.next) < end and not cursor.peek(","):
        if cursor.text[at] in "([{<":
            cursor.bracket()
        else:
            cursor.need(_PIECE, "an attribute")
    if at == start:
        cursor.fail("expected an attribute")
    return TextSpan(cursor.text[start : cursor.at], start)


def read_function_type(cursor: Cursor) -> tuple[tuple[TextSpan, ...], tuple[TextSpan, ...]]:
    """Reads `(types) -> types`."""
    operands = _types_between(cursor)
    cursor.expect("->")
    return operands, _types_between(cursor) if cursor.peek("(") else (need_type(cursor),)


def _types_between(cursor: Cursor) -> tuple[TextSpan, ...]:
    return read_list(cursor, lambda: need_type(cursor), "()")


def need_type(cursor: Cursor) -> TextSpan:
    return cursor.type() or cursor.fail("expected a type")


def generic_form(statement: Statement, properties: bool = False) -> Iterator[TextSpan]:
    """The pieces of the generic form, after the names of the results. Those that stand nowhere are at -1.

    Args:
      properties: the op's own attributes stand in `<{...}>`, as tools want it that know the dialect; else the form is
        for jaxlib, with the names that attributes have there.
    """
    names = {} if properties else PARSED_NAMES
    attributes = {names.get(name, name): value for name, value in sorted(statement.attributes.items())}
    own = {name: value for name, value in attributes.items() if properties and "." not in name}
    others = {name: value for name, value in attributes.items() if name not in own}
    yield _made(f'"{statement.op.full_name}"(')
    yield from _between(statement.operands)
    yield _made(")")
    yield from _dictionary(" <{", own, "}>")
    yield from _dictionary(" {", others, "}")
    yield _made(" : (")
    yield from _between(statement.operand_types)
    yield _made(") -> ")
    yield from _results(statement.result_types)


def _made(text: str) -> TextSpan:
    return TextSpan(text, -1)


def _between(pieces: tuple[TextSpan, ...]) -> Iterator[TextSpan]:
    """Pieces with commas between them."""
    for number, piece in enumerate(pieces):
        if number:
            yield _made(", ")
        yield piece


def _results(types: tuple[TextSpan, ...]) -> Iterator[TextSpan]:
    if len(types) == 1:
        yield types[0]
        return
    yield _made("(")
    yield from _between(types)
    yield _made(")")


def _dictionary(open_: str, attributes: Mapping[str, TextSpan], close: str) -> Iterator[TextSpan]:
    for number, (name, value) in enumerate(attributes.items()):
        yield _made(", " if number else open_)
        yield TextSpan(entry_name(name), value.at)
        if value.text != "unit":
            yield _made(" = ")
            yield value
    if attributes:
        yield _made(close)


def entry_name(name: str) -> str:
    """The name of an attribute as a dictionary has it."""
    return name if WORD.fullmatch(name) else f'"{name}"'
