"""The elements of assembly formats: how each is read, and what it prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sdy_jax.text.cursor import INTEGER, VALUE, Cursor, Span
from sdy_jax.text.declarations import REQUIRED, Attribute, Declaration, Operand
from sdy_jax.text.kinds import GAP, KINDS, read_list
from sdy_jax.text.mesh_ops import ALIASES
from sdy_jax.text.statement import Statement, entry_name, need_type, read_attributes, read_function_type

_SPELLINGS = {name: (name, *(a for a, other in ALIASES.items() if other == name)) for name in ALIASES.values()}


@dataclass(slots=True)
class Parts:
    """What has been read of a statement."""

    op: Declaration
    groups: dict[str, list[Span]] = field(default_factory=dict)
    attributes: dict[str, Span] = field(default_factory=dict)
    types: dict[str, tuple[Span, ...]] = field(default_factory=dict)


class Unprintable(Exception):
    """The statement says something that the pretty form cannot."""


@dataclass(frozen=True, slots=True)
class Given:
    """What is to be printed: a statement with its groups of operands."""

    statement: Statement
    groups: Mapping[str, Sequence[Span]]

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

    def words(self, given: Given) -> Iterator[str]:
        """Its text."""
        raise NotImplementedError

    def says(self, given: Given) -> bool:
        """Whether the statement has something for it that goes not without saying."""
        return False


@dataclass(frozen=True, slots=True)
class Word(Element):
    text: str

    def read(self, cursor: Cursor, parts: Parts) -> None:
        if not any(cursor.take(spelling) for spelling in _SPELLINGS.get(self.text, (self.text,))):
            cursor.fail(f"expected `{self.text}`")

    def words(self, given: Given) -> Iterator[str]:
        yield self.text


@dataclass(frozen=True, slots=True)
class Plain(Element):
    """An attribute without gaps."""

    attribute: Attribute

    def read(self, cursor: Cursor, parts: Parts) -> None:
        kind, at = KINDS[self.attribute.kind], cursor.next
        text = kind.generic(kind.read(cursor), parts.op.dialect)
        parts.attributes[self.attribute.name] = Span(text, at)

    def words(self, given: Given) -> Iterator[str]:
        value = given.value(self.attribute)
        if value is None or value is REQUIRED:
            raise Unprintable
        yield KINDS[self.attribute.kind].pretty(value)

    def says(self, given: Given) -> bool:
        return bool(given.value(self.attribute) != self.attribute.default)


@dataclass(frozen=True, slots=True)
class Unit(Element):
    """A unit attribute: its name, or nothing."""

    attribute: Attribute

    def read(self, cursor: Cursor, parts: Parts) -> None:
        at = cursor.next
        if cursor.take(self.attribute.name):
            parts.attributes[self.attribute.name] = Span("unit", at)

    def words(self, given: Given) -> Iterator[str]:
        if self.says(given):
            yield self.attribute.name

    def says(self, given: Given) -> bool:
        return bool(given.value(self.attribute))


@dataclass(frozen=True, slots=True)
class Indices(Element):
    """A list of numbers and values: the values are operands, and the attribute has gaps for them."""

    attribute: Attribute

    def read(self, cursor: Cursor, parts: Parts) -> None:
        at = cursor.next
        values: list[Span] = []

        def entry() -> int:
            value = cursor.match(VALUE)
            if value is not None:
                values.append(value)
            if value is not None or cursor.take("?"):
                return GAP
            return int(cursor.need(INTEGER, "an integer or a value").text)

        entries = read_list(cursor, entry)
        parts.attributes[self.attribute.name] = Span(KINDS["indices"].generic(entries, parts.op.dialect), at)
        parts.groups[self._group] = values

    def words(self, given: Given) -> Iterator[str]:
        entries, values = given.value(self.attribute), iter(given.groups[self._group])
        if not isinstance(entries, tuple):
            raise Unprintable
        yield f"[{', '.join(next(values, _NOTHING).text if entry == GAP else str(entry) for entry in entries)}]"

    def says(self, given: Given) -> bool:
        return bool(given.groups[self._group]) or given.value(self.attribute) != self.attribute.default

    @property
    def _group(self) -> str:
        return self.attribute.dynamic or ""


_NOTHING = Span("?", -1)


@dataclass(frozen=True, slots=True)
class Values(Element):
    """A group of operands."""

    operand: Operand

    def read(self, cursor: Cursor, parts: Parts) -> None:
        values = parts.groups[self.operand.name] = []
        if not self.operand.variadic:
            values.append(cursor.need(VALUE, "a value"))
            return
        values += _listed(cursor, lambda: cursor.match(VALUE))

    def words(self, given: Given) -> Iterator[str]:
        if values := given.groups[self.operand.name]:
            yield ", ".join(value.text for value in values)

    def says(self, given: Given) -> bool:
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

    def words(self, given: Given) -> Iterator[str]:
        if self.says(given):
            for element in self.elements:
                yield from element.words(given)

    def says(self, given: Given) -> bool:
        return any(element.says(given) for element in self.elements)


class Rest(Element):
    """`attr-dict`: the attributes that the op does not declare."""

    def read(self, cursor: Cursor, parts: Parts) -> None:
        if cursor.peek("{"):
            read_attributes(cursor, parts.attributes)

    def words(self, given: Given) -> Iterator[str]:
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

    def words(self, given: Given) -> Iterator[str]:
        types = given.statement.result_types if self.name == "result" else given.statement.operand_types
        yield types[0].text if types else ""


class ResultTypes(Element):
    """The types of all results."""

    def read(self, cursor: Cursor, parts: Parts) -> None:
        parts.types["result"] = tuple(_listed(cursor, cursor.type))

    def words(self, given: Given) -> Iterator[str]:
        if given.statement.result_types:
            yield ", ".join(type_.text for type_ in given.statement.result_types)


class FunctionType(Element):
    """The types of all operands and results."""

    def read(self, cursor: Cursor, parts: Parts) -> None:
        parts.types["operands"], parts.types["result"] = read_function_type(cursor)

    def words(self, given: Given) -> Iterator[str]:
        operands, results = (
            ", ".join(type_.text for type_ in types)
            for types in (given.statement.operand_types, given.statement.result_types)
        )
        yield f"({operands}) -> {results}"


def _listed(cursor: Cursor, entry: Callable[[], Span | None]) -> Iterator[Span]:
    """Entries between commas, as long as there is one."""
    while found := entry():
        yield found
        if not cursor.take(","):
            return
