"""Reading MLIR text into a module, with errors that say where and name the rule.

jaxlib parses and verifies; ops of the mesh and shard dialects, which it does not know, are rewritten for it first. Its
diagnostics become one `SourceError`: `FILE:LINE:COLUMN: error: MESSAGE`, below it the line with a mark under the
column, and what the diagnostic adds. Lines count from the start of the file, also where a file holds several modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.metadata import version

from jax.extend.mlir import ir

from sdy_jax.errors import ParseError, SdyError
from sdy_jax.ir.context import new_context
from sdy_jax.representation.attributes import REDUCTION, SAYABLE
from sdy_jax.representation.brackets import STRING, STRING_OR_COMMENT, closing
from sdy_jax.representation.dialect_rules import DOCUMENTED_RULES, RuleError
from sdy_jax.representation.sharding import REDUCTION_KINDS
from sdy_jax.text.crash_guards import fatal_mistakes
from sdy_jax.text.cursor import AssemblyError
from sdy_jax.text.positions import Lines, Position
from sdy_jax.text.source import Source, name_in, parsed_position, unknown_ops
from sdy_jax.verification import verify_module
from sdy_jax.verification.diagnostics import explain

_LONGEST_LINE = 1000
"""Characters of a line that an error shows. Chosen: constants may be longer than a screen."""

_OF_NOTE = 100
"""Characters of a note in which the name of an op is looked for. Guessed: it stands in front."""

SEPARATOR = "// -----"

_SEPARATOR_LINE = re.compile(r"^[ \t]*// -----[ \t]*\r?$", re.MULTILINE)
_CONSEQUENCE = re.compile(r"failed to (parse|infer)\b")
_LOCATION = re.compile(rf"{STRING_OR_COMMENT}|(?P<alias>#\w+\s*=\s*)?\bloc\(")
_REDUCTION = re.compile(rf"({'|'.join(REDUCTION_KINDS)})\b(?=\s*[{{\[])")
_DEVICE_IDS = re.compile(rf"{STRING}\s*=\s*\d+\s*\]\s*,\s*device_ids\s*=\s*\[(?P<ids>[\d,\s]*)\]|{STRING_OR_COMMENT}")


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
      context: where its types and attributes live, such as `sdy_jax.ir.context.new_context()`.
      file: the name for errors.

    Raises:
      SourceError: the text is no module, or breaks a rule.
    """
    if "\0" in text:  # jaxlib would take it for the end
        raise _error_in(text, text.index("\0"), "a NUL character", file)
    for offset, message in fatal_mistakes(text):
        raise _error_in(text, offset, message, file)
    try:
        source = Source(text, context)
    except AssemblyError as error:
        raise _error_in(text, error.offset, error.message, file) from None
    try:
        module = ir.Module.parse(source.parsed, context)
    except ir.MLIRError as error:
        raise _source_error(error, source, file) from None
    source.settle(module, file)
    for op, message in unknown_ops(module):
        raise error_at(SdyError(message), str(op.location), text, file)
    return module


def check_device_ids(text: str, file: str) -> None:
    """Checks rule M7, which no module can break: the parser leaves the device ids out that it is about.

    Raises:
      SourceError: a mesh in the text has device ids that are 0, 1, 2, ... in order.
    """
    for match in _DEVICE_IDS.finditer(text):
        ids = [int(number) for number in (match["ids"] or "").split(",") if number.strip()]
        if ids and ids == list(range(len(ids))):
            problem = f"[M7] sdy.mesh: its device ids are 0..{len(ids) - 1} in order; {DOCUMENTED_RULES['M7']}"
            raise _error_in(text, match.start("ids"), problem, file)


def error_at(error: SdyError, location: str | None, text: str, file: str) -> SourceError:
    """An error about an op of a parsed module, by the op's MLIR location, with the text's names for values."""
    message = _in_own_names(error, text, file) if isinstance(error, RuleError) else str(error)
    position, details = parsed_position(location or "", file), []
    if position is None and location is not None:
        position = _without_locations(text)
        details.append(_origin(location, file))
    return SourceError(message, file, position, [*_excerpt(text, position), *details])


def _in_own_names(error: RuleError, text: str, file: str) -> str:
    """The message with the names that values have in the text; printers number them anew."""
    message = error.message
    for printed, (location, result) in error.values.items():
        position = parsed_position(location, file)
        name = name_in(text, position, result) if position else None
        message = re.sub(rf"{re.escape(printed)}(?![\w.$#-])", name or printed, message)
    return message


def _source_error(error: ir.MLIRError, source: Source, file: str) -> SourceError:
    if not error.error_diagnostics:
        return SourceError(str(error), file)
    first, *others = error.error_diagnostics
    text, position = source.text, source.position(str(first.location))
    details = []
    if position is None:
        position = _without_locations(text)
        details.append(_origin(str(first.location), file))
    shown = _with_found(first.message, text, position)
    # The text of the op that is wrong begins with its name; it can be long.
    context = [*(o.message for o in others if _follows(o.message)), *(note.message[:_OF_NOTE] for note in first.notes)]
    message = explain(shown, "\n".join(context))
    for note in first.notes:
        if not note.message.startswith("see current operation"):
            details.append(f"{_prefix(file, source.position(str(note.location)))}: note: {note.message}")
    for other in others:
        if not _follows(other.message):
            details.append(f"{_prefix(file, source.position(str(other.location)))}: error: {explain(other.message)}")
    return SourceError(message, file, position, [*_excerpt(text, position), *details])


def _follows(message: str) -> bool:
    """The diagnostic only repeats that something failed."""
    return _CONSEQUENCE.search(message) is not None


def _with_found(message: str, text: str, position: Position | None) -> str:
    """A complaint about a missing token, with what stands there instead."""
    if position is None or not re.fullmatch(r"(custom op '[\w.]+' )?expected '.+'", message):
        return message
    lines = Lines(text)
    line = lines.line(position)[lines.index(position) :].strip()
    word = _REDUCTION.match(line)
    if word and word[0] not in SAYABLE:
        known, jaxlib = ", ".join(SAYABLE), version("jaxlib")
        remedy = f'to fix: leave the word out and give the op {{{REDUCTION} = "{word[0]}"}}'
        return f"reduction `{word[0]}`: the SDY dialect of jaxlib {jaxlib} can say {known} only; {remedy}"
    return f"{message}, got `{line[0]}`" if line else f"{message}, got the end of the line"


def _origin(location: str, file: str) -> str:
    return f"{file}: note: the operation comes from {location.removeprefix('loc(').removesuffix(')')}"


def _excerpt(text: str, position: Position | None) -> list[str]:
    """The line of a position and a mark under its column."""
    if position is None:
        return []
    lines = Lines(text)
    line = lines.line(position).expandtabs(1).rstrip()
    if not line.strip() or len(line) > _LONGEST_LINE:
        return []
    return [f"  {line}", "  " + " " * lines.index(position) + "^"]


def _without_locations(text: str) -> Position | None:
    """Where the mistake is that an op with a location of its own hides: the text is read again without those."""
    bare = _blank_locations(text)
    if bare == text:
        return None
    try:
        verify_module(parse_module(bare, new_context()).operation)
    except SourceError as error:
        return error.position
    except RuleError as error:
        return parsed_position(error.location or "")
    return None


def _blank_locations(text: str) -> str:
    """The text with spaces in place of each op's `loc(...)`, so that every position stays."""
    pieces, kept = [], 0
    for match in _LOCATION.finditer(text):
        if match.start() < kept or not match[0].endswith("loc(") or match["alias"]:
            continue
        last = closing(text, match.end() - 1, comments=True)
        end = len(text) if last is None else last + 1
        pieces += [text[kept : match.start()], re.sub(r"[^\n]", " ", text[match.start() : end])]
        kept = end
    return "".join([*pieces, text[kept:]])


def _error_in(text: str, offset: int, message: str, file: str) -> SourceError:
    position = Lines(text).position(offset)
    return SourceError(message, file, position, _excerpt(text, position))
