"""The pretty forms of ops: the elements of assembly formats, and the engine that reads and prints by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from sdy_jax.ir.text.cursor import INTEGER, VALUE, AssemblyError, Cursor, TextSpan
from sdy_jax.ir.text.mesh_dialects import ALIASES, GAP, KINDS, REQUIRED, Attribute, Declaration, Operand, read_list
from sdy_jax.ir.text.statement import (
    Statement,
    entry_name,
    make_statement,
    need_type,
    read_dictionary,
    read_function_type,
)

# The elements of assembly formats: how each is read, and what it prints.

_SPELLINGS = {name: (name, *(a for a, other in ALIASES.items() if other == name)) for name in ALIASES.values()}


@dataclass(slots=True)
class Parts:
    """What has been read of a statement."""

    op: Declaration
    groups: dict[str, list[TextSpan]] = field(default_factory=dict)
    attributes: dict[str, TextSpan] = field(default_factory=dict)
    types: dict[str, tuple[TextSpan, ...]] = field(default_factory=dict)


class Unprintable(Exception):
    """The statement says something that the pretty form cannot."""


@dataclass(frozen=True, slots=True)
class PrintedStatement:
    """What is to be printed: a statement with its groups of operands."""

    statement: Statement
    groups: Mapping[str, Sequence[TextSpan]]

    def value(self, attribute: Attribute) -> object:
        """The value of an attribute, its default where it is absent."""
        span = self.statement.attributes.get(attribute.name)
        if span is None:
            return attribute.default
        value = KINDS[attribute.kind].value(span.text, self.statement.op.dialect)
        if value is None:
            raise Unprintable
        return value


class Element:
    """A part of a format."""

    def read(self, cursor: Cursor, parts: Parts) -> None:
        """Takes it from the text."""
        raise NotImplementedError

    def words(self, given: PrintedStatement) -> Iterator[str]:
        """Its text."""
        raise NotImplementedError

    def says(self, given: PrintedStatement) -> bool:
        """Whether the statement has something for it that goes not without saying."""
        return False


@dataclass(frozen=True, slots=True)
class Word(Element):
    text: str

    def read(self, cursor: Cursor, parts: Parts) -> None:
        if not any(cursor.take(spelling) for spelling in _SPELLINGS.get(self.text, (self.text,))):
            cursor.fail(f"expected `{self.text}`")

    def words(self, given: PrintedStatement) -> Iterator[str]:
        yield self.text


@dataclass(frozen=True, slots=True)
class Plain(Element):
    """An attribute without gaps."""

    attribute: Attribute

    def read(self, cursor: Cursor, parts: Parts) -> None:
        kind, at = KINDS[self.attribute.kind], cursor.next
        text = kind.generic(kind.read(cursor), parts.op.dialect)
        parts.attributes[self.attribute.name] = TextSpan(text, at)

    def words(self, given: PrintedStatement) -> Iterator[str]:
        value = given.value(self.attribute)
        if value is None or value is REQUIRED:
            raise Unprintable
        yield KINDS[self.attribute.kind].pretty(value)

    def says(self, given: PrintedStatement) -> bool:
        return bool(given.value(self.attribute) != self.attribute.default)


@dataclass(frozen=True, slots=True)
class UnitAttribute(Element):
    """A unit attribute: its name, or nothing."""

    attribute: Attribute

    def read(self, cursor: Cursor, parts: Parts) -> None:
        at = cursor.next
        if cursor.take(self.attribute.name):
            parts.attributes[self.attribute.name] = TextSpan("unit", at)

    def words(self, given: PrintedStatement) -> Iterator[str]:
        if self.says(given):
            yield self.attribute.name

    def says(self, given: PrintedStatement) -> bool:
        return bool(given.value(self.attribute))


@dataclass(frozen=True, slots=True)
class Indices(Element):
    """A list of numbers and values: the values are operands, and the attribute has gaps for them."""

    attribute: Attribute

    def read(self, cursor: Cursor, parts: Parts) -> None:
        at = cursor.next
        values: list[TextSpan] = []

        def entry() -> int:
            value = cursor.match(VALUE)
            if value is not None:
                values.append(value)
            if value is not None or cursor.take("?"):
                return GAP
            return int(cursor.need(INTEGER, "an integer or a value").text)

        entries = read_list(cursor, entry)
        parts.attributes[self.attribute.name] = TextSpan(KINDS["indices"].generic(entries, parts.op.dialect), at)
        parts.groups[self._group] = values

    def words(self, given: PrintedStatement) -> Iterator[str]:
        entries, values = given.value(self.attribute), iter(given.groups[self._group])
        if not isinstance(entries, tuple):
            raise Unprintable
        yield f"[{', '.join(next(values, _NOTHING).text if entry == GAP else str(entry) for entry in entries)}]"

    def says(self, given: PrintedStatement) -> bool:
        return bool(given.groups[self._group]) or given.value(self.attribute) != self.attribute.default

    @property
    def _group(self) -> str:
        return self.attribute.dynamic or ""


_NOTHING = TextSpan("?", -1)


@dataclass(frozen=True, slots=True)
class OperandGroup(Element):
    """A group of operands."""

    operand: Operand

    def read(self, cursor: Cursor, parts: Parts) -> None:
        values = parts.groups[self.operand.name] = []
        if not self.operand.variadic:
            values.append(cursor.need(VALUE, "a value"))
            return
        values += _listed(cursor, lambda: cursor.match(VALUE))

    def words(self, given: PrintedStatement) -> Iterator[str]:
        if values := given.groups[self.operand.name]:
            yield ", ".join(value.text for value in values)

    def says(self, given: PrintedStatement) -> bool:
        return bool(given.groups[self.operand.name])


@dataclass(frozen=True, slots=True)
class Optional(Element):
    """Elements that may be left out together; the first is a word."""

    elements: tuple[Element, ...]

    def read(self, cursor: Cursor, parts: Parts) -> None:
        key = self.elements[0]
        if isinstance(key, Word) and cursor.peek(key.text):
            for element in self.elements:
                element.read(cursor, parts)

    def words(self, given: PrintedStatement) -> Iterator[str]:
        if self.says(given):
            for element in self.elements:
                yield from element.words(given)

    def says(self, given: PrintedStatement) -> bool:
        return any(element.says(given) for element in self.elements)


class Rest(Element):
    """`attr-dict`: the attributes that the op does not declare."""

    def read(self, cursor: Cursor, parts: Parts) -> None:
        if cursor.peek("{"):
            read_dictionary(cursor, parts.attributes)

    def words(self, given: PrintedStatement) -> Iterator[str]:
        entries = [
            entry_name(name) if value.text == "unit" else f"{entry_name(name)} = {value.text}"
            for name, value in sorted(given.statement.attributes.items())
            if name not in given.statement.op.own
        ]
        if entries:
            yield f"{{{', '.join(entries)}}}"


@dataclass(frozen=True, slots=True)
class Type(Element):
    """The type of an operand or of the one result."""

    name: str

    def read(self, cursor: Cursor, parts: Parts) -> None:
        parts.types[self.name] = (need_type(cursor),)

    def words(self, given: PrintedStatement) -> Iterator[str]:
        types = given.statement.result_types if self.name == "result" else given.statement.operand_types
        yield types[0].text if types else ""


class ResultTypes(Element):
    """The types of all results."""

    def read(self, cursor: Cursor, parts: Parts) -> None:
        parts.types["result"] = tuple(_listed(cursor, cursor.type))

    def words(self, given: PrintedStatement) -> Iterator[str]:
        if given.statement.result_types:
            yield ", ".join(type_.text for type_ in given.statement.result_types)


class FunctionType(Element):
    """The types of all operands and results."""

    def read(self, cursor: Cursor, parts: Parts) -> None:
        parts.types["operands"], parts.types["result"] = read_function_type(cursor)

    def words(self, given: PrintedStatement) -> Iterator[str]:
        operands, results = (
            ", ".join(type_.text for type_ in types)
            for types in (given.statement.operand_types, given.statement.result_types)
        )
        yield f"({operands}) -> {results}"


def _listed(cursor: Cursor, entry: Callable[[], TextSpan | None]) -> Iterator[TextSpan]:
    """Entries between commas, as long as there is one."""
    while found := entry():
        yield found
        if not cursor.take(","):
            return


# One engine for the pretty forms: reads an op's statement by its format, and prints it.
#
# A format is compiled to elements once. Reading runs them over the text, printing over the statement. A statement
# that says more than the form can is not printed in it: what is printed always reads back as the same.

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
        words = [
            word for element in _elements(statement.op) for word in element.words(PrintedStatement(statement, groups))
        ]
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


def _operand_types(parts: Parts, results: tuple[TextSpan, ...]) -> tuple[TextSpan, ...]:
    """The types of all operands: those that were read, and those that go without saying."""
    if "operands" in parts.types:
        return parts.types["operands"]
    types: list[TextSpan] = []
    for operand in parts.op.operands:
        for value in parts.groups.get(operand.name, ()):
            types += parts.types.get(operand.name) or _implied(operand, parts.op, results, value)
    return tuple(types)


def _implied(operand: Operand, op: Declaration, results: tuple[TextSpan, ...], value: TextSpan) -> tuple[TextSpan, ...]:
    if operand.type == "result":
        return results
    return (TextSpan(f"!{op.dialect}.sharding" if operand.type == "sharding" else operand.type, value.at),)


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
        return OperandGroup(next(operand for operand in op.operands if operand.name == name))
    if attribute.kind == "unit":
        return UnitAttribute(attribute)
    return Indices(attribute) if attribute.dynamic else Plain(attribute)
