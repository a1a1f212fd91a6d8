"""One engine for the pretty forms: reads an op's statement by its format, and prints it.

A format is compiled to elements once. Reading runs them over the text, printing over the statement. A statement that
says more than the form can is not printed in it: what is printed always reads back as the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

from sdy_jax.text.cursor import AssemblyError, Cursor, Span
from sdy_jax.text.declarations import Declaration, Operand
from sdy_jax.text.elements import (
    Element,
    FunctionType,
    Given,
    Indices,
    Optional,
    Parts,
    Plain,
    Rest,
    ResultTypes,
    Type,
    Unit,
    Unprintable,
    Values,
    Word,
)
from sdy_jax.text.kinds import KINDS
from sdy_jax.text.statement import Statement, make_statement

_BRACKETS = ("(", ")", "[", "]")


def read_pretty(op: Declaration, cursor: Cursor) -> Statement:
    """Reads the pretty form, from what follows the op's name on.

    Raises:
      AssemblyError: the text does not fit the op's format.
    """
    parts = Parts(op)
    for element in _elements(op):
        element.read(cursor, parts)
    results = parts.types.get("result", ())
    return make_statement(op, parts.groups, parts.attributes, _operand_types(parts, results), results)


def pretty_form(statement: Statement) -> str | None:
    """The pretty form of a statement, from its name on; None if it says something that the form cannot."""
    groups = statement.groups()
    if groups is None or any(name in statement.attributes for name in statement.op.unprinted):
        return None
    statement = canonical(statement)
    try:
        words = [word for element in _elements(statement.op) for word in element.words(Given(statement, groups))]
        text = statement.op.full_name + _joined(words)
        again = read_pretty(statement.op, Cursor(text, len(statement.op.full_name)))
    except (AssemblyError, Unprintable):
        return None
    return text if canonical(again).same_as(statement) else None


def canonical(statement: Statement) -> Statement:
    """The statement with its attributes in their usual spelling, and without those that only say their default."""
    attributes = dict(statement.attributes)
    for attribute in statement.op.attributes:
        if attribute.name not in attributes:
            continue
        kind, span = KINDS[attribute.kind], attributes[attribute.name]
        value = kind.value(span.text, statement.op.dialect)
        if value is not None and value == attribute.default:
            del attributes[attribute.name]
        elif value is not None:
            attributes[attribute.name] = replace(span, text=kind.generic(value, statement.op.dialect))
    return replace(statement, attributes=attributes)


def _joined(words: list[str]) -> str:
    """Words with spaces between them, but none inside of brackets that stand for themselves, nor before those."""
    text = ""
    for word in words:
        text += word if word in _BRACKETS or text.endswith(("(", "[")) else f" {word}"
    return text


def _operand_types(parts: Parts, results: tuple[Span, ...]) -> tuple[Span, ...]:
    """The types of all operands: those that were read, and those that go without saying."""
    if "operands" in parts.types:
        return parts.types["operands"]
    types: list[Span] = []
    for operand in parts.op.operands:
        for value in parts.groups.get(operand.name, ()):
            types += parts.types.get(operand.name) or _implied(operand, parts.op, results, value)
    return tuple(types)


def _implied(operand: Operand, op: Declaration, results: tuple[Span, ...], value: Span) -> tuple[Span, ...]:
    if operand.type == "result":
        return results
    return (Span(f"!{op.dialect}.sharding" if operand.type == "sharding" else operand.type, value.at),)


@cache
def _elements(op: Declaration) -> tuple[Element, ...]:
    words = iter(op.format.split())
    return tuple(_compiled(op, words))


def _compiled(op: Declaration, words: Iterator[str]) -> Iterator[Element]:
    """Compiles a format up to the end, or to the end of a group."""
    for word in words:
        if word == ")?":
            return
        if word == "(":
            yield Optional(tuple(_compiled(op, words)))
        elif word in _SPECIAL:
            yield _SPECIAL[word]
        elif word.startswith("type("):
            yield Type(word[len("type($") : -1])
        elif word.startswith("$"):
            yield _named(op, word[1:])
        else:
            yield Word(word.strip("'"))


_SPECIAL: Mapping[str, Element] = {
    "attr-dict": Rest(),
    "types(results)": ResultTypes(),
    "functional-type": FunctionType(),
}


def _named(op: Declaration, name: str) -> Element:
    """The element for an attribute or operand."""
    attribute = next((a for a in op.attributes if a.name == name), None)
    if attribute is None:
        return Values(next(operand for operand in op.operands if operand.name == name))
    if attribute.kind == "unit":
        return Unit(attribute)
    return Indices(attribute) if attribute.dynamic else Plain(attribute)
