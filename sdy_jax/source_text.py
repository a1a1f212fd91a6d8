"""Reading MLIR text into a module, with errors that say where and name the rule.

jaxlib parses and verifies. Its diagnostics become one `SourceError`: `FILE:LINE:COLUMN: error: MESSAGE`, below it the
line with a mark under the column, and what the diagnostic adds. Lines count from the start of the file, also where a
file holds several modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax.extend.mlir import ir

from sdy_jax.diagnostics import explain
from sdy_jax.errors import ParseError
from sdy_jax.fatal_mistakes import fatal_mistakes

SEPARATOR = "// -----"

_SEPARATOR_LINE = re.compile(r"^[ \t]*// -----[ \t]*\r?$", re.MULTILINE)
_POSITION = re.compile(r'^(?:loc\()?"-":(\d+):(\d+)\)?$')
_CONSEQUENCE = re.compile(r"failed to (parse|infer)\b")
_LOCATION = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|(?P<alias>#\w+\s*=\s*)?\bloc\(')
_IN_LOCATION = re.compile(r'"(?:[^"\\\n]|\\.)*"|[()]')


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a file; lines and columns count from 1."""

    line: int
    column: int


class SourceError(ParseError):
    """Text that is no valid module.

    `message` is the error alone; `str` has the place before it, and the line and the notes below it.
    """

    def __init__(self, message: str, file: str, position: Position | None = None, details: Sequence[str] = ()):
        self.message, self.file, self.position = message, file, position
        super().__init__("\n".join([f"{_prefix(file, position)}: error: {message}", *details]))


def _prefix(file: str, position: Position | None) -> str:
    return file if position is None else f"{file}:{position.line}:{position.column}"


def split_modules(text: str) -> Iterator[str]:
    """The modules of a text that lie between lines `// -----`.

    Each begins with as many empty lines as were before it, so that positions in it are positions in the whole text.
    """
    start = 0
    for end in (*(m.start() for m in _SEPARATOR_LINE.finditer(text)), len(text)):
        yield "\n" * text.count("\n", 0, start) + text[start:end]
        rest = text.find("\n", end)
        start = rest if rest >= 0 else len(text)


def parse_module(text: str, context: ir.Context, file: str = "-") -> ir.Module:
    """Parses and verifies a module.

    Args:
      text: the module, with or without `module { ... }` around it.
      context: where its types and attributes live, such as `jax.interpreters.mlir.make_ir_context()`.
      file: the name for errors.

    Raises:
      SourceError: the text is no module, or breaks a rule.
    """
    if "\0" in text:  # jaxlib would take it for the end
        raise _error_in(text, text.index("\0"), "a NUL character", file)
    for offset, message in fatal_mistakes(text):
        raise _error_in(text, offset, message, file)
    try:
        return ir.Module.parse(text, context)
    except ir.MLIRError as error:
        raise _source_error(error, text, context, file) from None


def error_at(message: str, location: str | None, text: str, file: str) -> SourceError:
    """An error about an op of a parsed module, by the op's MLIR location."""
    position = _position(location) if location else None
    return SourceError(message, file, position, _excerpt(text, position))


def _source_error(error: ir.MLIRError, text: str, context: ir.Context, file: str) -> SourceError:
    if not error.error_diagnostics:
        return SourceError(str(error), file)
    first, *others = error.error_diagnostics
    position = _position(str(first.location))
    details = []
    if position is None:
        position = _without_locations(text, context)
        details.append(f"{file}: note: the operation comes from {_inside(str(first.location))}")
    shown = _with_found(first.message, text, position)
    # The text of the op that is wrong begins with its name; it can be long.
    context = [*(o.message for o in others if _follows(o.message)), *(note.message[:100] for note in first.notes)]
    message = explain(shown, "\n".join(context))
    for note in first.notes:
        if not note.message.startswith("see current operation"):
            details.append(f"{_prefix(file, _position(str(note.location)))}: note: {note.message}")
    for other in others:
        if not _follows(other.message):
            details.append(f"{_prefix(file, _position(str(other.location)))}: error: {explain(other.message)}")
    return SourceError(message, file, position, [*_excerpt(text, position), *details])


def _follows(message: str) -> bool:
    """The diagnostic only repeats that something failed."""
    return _CONSEQUENCE.search(message) is not None


def _with_found(message: str, text: str, position: Position | None) -> str:
    """A complaint about a missing token, with what stands there instead."""
    if position is None or not re.fullmatch(r"(custom op '[\w.]+' )?expected '.+'", message):
        return message
    line = _line(text, position)[_index(text, position) :].strip()
    return f"{message}, got `{line[0]}`" if line else f"{message}, got the end of the line"


def _position(location: str) -> Position | None:
    """Where an MLIR location lies in the parsed text; None for locations that the text gives to its ops."""
    match = _POSITION.match(location)
    return Position(int(match[1]), int(match[2])) if match and int(match[1]) else None


def _inside(location: str) -> str:
    return location.removeprefix("loc(").removesuffix(")")


def _line(text: str, position: Position) -> str:
    lines = text.split("\n")
    return lines[position.line - 1] if position.line <= len(lines) else ""


def _index(text: str, position: Position) -> int:
    """Where in its line a position is: columns count bytes."""
    return len(_line(text, position).encode()[: position.column - 1].decode(errors="replace"))


def _excerpt(text: str, position: Position | None) -> list[str]:
    """The line of a position and a mark under its column."""
    if position is None:
        return []
    line = _line(text, position).expandtabs(1).rstrip()
    if not line.strip() or len(line) > 1000:
        return []
    return [f"  {line}", "  " + " " * _index(text, position) + "^"]


def _without_locations(text: str, context: ir.Context) -> Position | None:
    """Where the error is that an op with a location of its own hides: the text is parsed again without those."""
    try:
        ir.Module.parse(_blank_locations(text), context)
    except ir.MLIRError as error:
        return next(iter(filter(None, (_position(str(d.location)) for d in error.error_diagnostics))), None)
    return None


def _blank_locations(text: str) -> str:
    """The text with spaces in place of each op's `loc(...)`, so that every position stays."""
    pieces, kept = [], 0
    for match in _LOCATION.finditer(text):
        if match.start() < kept or not match[0].endswith("loc(") or match["alias"]:
            continue
        end = _closing(text, match.end())
        pieces += [text[kept : match.start()], re.sub(r"[^\n]", " ", text[match.start() : end])]
        kept = end
    return "".join([*pieces, text[kept:]])


def _closing(text: str, start: int) -> int:
    """The end of a location whose opening parenthesis lies before `start`."""
    depth = 1
    for token in _IN_LOCATION.finditer(text, start):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    return len(text)


def _error_in(text: str, offset: int, message: str, file: str) -> SourceError:
    before = text[:offset].rpartition("\n")[2]
    position = Position(text.count("\n", 0, offset) + 1, len(before.encode()) + 1)
    return SourceError(message, file, position, _excerpt(text, position))
