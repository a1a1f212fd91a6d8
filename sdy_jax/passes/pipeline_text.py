"""The grammar of textual pass pipelines, as MLIR writes them.

    pipeline := (pass ("," pass)*)?
    pass     := name options? | anchor "(" pipeline ")"
    options  := "{" (name ("=" value)?)* "}"
    value    := text without spaces, or a text in quotes or braces

Anchors such as `func.func(...)`, `builtin.module(...)` and `any(...)` say on which ops MLIR runs a pass. Our passes run
on modules, so anchors are accepted and ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from sdy_jax.errors import ParseError
from sdy_jax.representation.brackets import closing

_SHOWN = 12
"""Characters of the text that an error shows. Chosen: a name or two."""

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_BARE = re.compile(r"[^\s{}'\"]+")
_PAIRS = {"{": "}", "'": "'", '"': '"'}


@dataclass(frozen=True, slots=True)
class WrittenPass:
    """One pass as it is written; `position` is where its name begins in the text, counted from 0."""

    name: str
    position: int
    options: dict[str, str] = field(default_factory=dict)


def written_passes(text: str) -> list[WrittenPass]:
    """The passes of a pipeline in order, nesting removed.

    Raises:
      ParseError: the text is not a pipeline.

    >>> [written.name for written in written_passes("func.func(sdy-sink-data-flow-edges), cse")]
    ['sdy-sink-data-flow-edges', 'cse']
    """
    reader = _Reader(text)
    found = list(reader.pipeline())
    if not reader.is_at_end():
        raise reader.error("a comma or the end")
    return found


def quoted(value: str) -> str | None:
    """The text of an option's value, in quotes or braces where it needs them; None if nothing can hold it."""
    written = (value, f"{{{value}}}", f"'{value}'", f'"{value}"')
    return next((text for text in written if _read_back(text) == value), None)


def _read_back(value: str) -> str | None:
    reader = _Reader(value)
    try:
        found = reader.value()
    except ParseError:
        return None
    return found if reader.is_at_end() else None


def error_at(text: str, position: int, message: str) -> ParseError:
    """An error that shows the place in the pipeline."""
    return ParseError(f"pipeline, column {position + 1}: {message}\n  {text}\n  {' ' * position}^")


class _Reader:
    def __init__(self, text: str):
        self._text, self._at = text, 0

    def error(self, expected: str) -> ParseError:
        self._skip_space()
        found = repr(self._text[self._at : self._at + _SHOWN]) if self._at < len(self._text) else "the end"
        return error_at(self._text, self._at, f"expected {expected}, found {found}")

    def is_at_end(self) -> bool:
        self._skip_space()
        return self._at == len(self._text)

    def pipeline(self) -> Iterator[WrittenPass]:
        self._skip_space()
        if self.is_at_end() or self._text[self._at] == ")":
            return
        yield from self._pass()
        while self._take(","):
            yield from self._pass()

    def _pass(self) -> Iterator[WrittenPass]:
        name = self._match(_NAME, "a pass name")
        position = self._at - len(name)
        if self._take("("):
            yield from self.pipeline()
            if not self._take(")"):
                raise self.error(f"the ')' that closes {name}(")
            return
        yield WrittenPass(name, position, dict(self._options()) if self._take("{") else {})

    def _options(self) -> Iterator[tuple[str, str]]:
        while not self._take("}"):
            name = self._match(_NAME, "an option name or '}'")
            yield name, self.value() if self._take("=") else ""

    def value(self) -> str:
        """Pieces of text side by side, as in `a,"b c",{d e}`, up to the next space."""
        start = self._at
        while self._at < len(self._text) and not self._text[self._at].isspace() and self._text[self._at] != "}":
            if self._text[self._at] in _PAIRS:
                self._skip_enclosed()
            else:
                self._match(_BARE, "a value")
        value = self._text[start : self._at]
        return value[1:-1] if value[:1] in _PAIRS and _PAIRS[value[0]] == value[-1] else value

    def _skip_enclosed(self) -> None:
        opening = self._text[self._at]
        last = closing(self._text, self._at) if opening == "{" else self._text.find(opening, self._at + 1)
        if last is None or last < 0:
            raise self.error(f"a {_PAIRS[opening]} that closes this {opening}")
        self._at = last + 1

    def _skip_space(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1

    def _take(self, character: str) -> bool:
        self._skip_space()
        if not self._text.startswith(character, self._at):
            return False
        self._at += 1
        return True

    def _match(self, pattern: re.Pattern[str], expected: str) -> str:
        self._skip_space()
        match = pattern.match(self._text, self._at)
        if match is None:
            raise self.error(expected)
        self._at = match.end()
        return match[0]
