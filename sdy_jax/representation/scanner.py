"""A position in a text of the dialect, and the tokens that its forms share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn, TypeVar

from sdy_jax.errors import ParseError

_SHOWN = 20
"""Characters of the text that an error shows. Chosen: a name or two."""

_HEX = 16
"""Given: the base."""

T = TypeVar("T")
_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"((?:[^"\\\n]|\\(?:[0-9A-Fa-f]{2}|["\\nt]))*)"')
_ESCAPE = re.compile(r'\\([0-9A-Fa-f]{2}|["\\nt])')
_INTEGER = re.compile(r"-?\d+")


class Scanner:
    """A position in a text; every method skips white space first."""

    def __init__(self, text: str):
        self.text = text
        self.position = 0

    def accept(self, token: str) -> bool:
        """Steps over `token` if it comes next."""
        self._skip()
        if not self.text.startswith(token, self.position):
            return False
        self.position += len(token)
        return True

    def expect(self, token: str) -> None:
        if not self.accept(token):
            self.fail(f"expected `{token}`")

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self._skip()
        found = pattern.match(self.text, self.position)
        if found:
            self.position = found.end()
        return found

    def require(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        return self.match(pattern) or self.fail(f"expected {what}")

    def peek(self, token: str) -> bool:
        self._skip()
        return self.text.startswith(token, self.position)

    def end(self) -> None:
        self._skip()
        if self.position < len(self.text):
            self.fail("expected the end")

    def items(self, item: Callable[[Scanner], T], close: str) -> tuple[T, ...]:
        """Comma-separated items up to and with `close`; possibly none."""
        if self.accept(close):
            return ()
        found = [item(self)]
        while self.accept(","):
            found.append(item(self))
        if not self.accept(close):
            self.fail(f"expected `,` or `{close}`")
        return tuple(found)

    def fail(self, expected: str) -> NoReturn:
        rest = self.text[self.position :]
        got = f"`{rest[:_SHOWN]}`" if rest else "the end"
        pointer = f"\n  {self.text}\n  {' ' * self.position}^" if "\n" not in self.text else ""
        raise ParseError(f"column {self.position + 1}: {expected}, got {got}{pointer}")

    def _skip(self) -> None:
        space = _SPACE.match(self.text, self.position)
        self.position = space.end() if space else self.position


def unwrapped(text: str, attribute: str, body: Callable[[Scanner], T]) -> T:
    scanner = Scanner(text)
    named = scanner.accept(attribute)
    wrapped = scanner.accept("<")
    if named and not wrapped:
        scanner.fail("expected `<`")
    parsed = body(scanner)
    if wrapped:
        scanner.expect(">")
    scanner.end()
    return parsed


def scan_string(scanner: Scanner, what: str) -> str:
    literal = scanner.require(_STRING, what)
    name = bytearray()
    position, body = 0, literal[1]
    for escape in _ESCAPE.finditer(body):
        name += body[position : escape.start()].encode() + _escape(escape[1])
        position = escape.end()
    name += body[position:].encode()
    return name.decode(errors="surrogateescape")


def _escape(code: str) -> bytes:
    plain = {'"': b'"', "\\": b"\\", "n": b"\n", "t": b"\t"}
    return plain[code] if code in plain else bytes([int(code, _HEX)])


def scan_integer(scanner: Scanner) -> int:
    return int(scanner.require(_INTEGER, "an integer")[0])
