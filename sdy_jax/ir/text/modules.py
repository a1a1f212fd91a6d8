"""Reading MLIR text into a module, with errors that say where and name the rule."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import version

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func, sdy, stablehlo
from jax.interpreters import mlir

from sdy_jax.base.errors import ParseError, SdyError, nearest
from sdy_jax.ir.attributes import REDUCTION, SAYABLE
from sdy_jax.ir.shardings import REDUCTION_KINDS
from sdy_jax.ir.text.cursor import NO_BRACKET, STRING, STRING_OR_COMMENT, AssemblyError, Lines, Position, closing
from sdy_jax.ir.text.translation import (
    SourceText,
    name_in,
    of_other_dialect,
    of_unknown_dialects,
    parsed_position,
    unknown,
)
from sdy_jax.ir.validity import DOCUMENTED_RULES, RULES, RuleError
from sdy_jax.ir.verification import explain, verify_module

# Where modules that sdy_jax reads live.


def new_context() -> ir.Context:
    """A context that knows the dialects of JAX's programs, in which MLIR runs on the caller's thread alone.

    JAX's contexts share a pool of threads. Those of a process that was forked have none, so that MLIR waits forever
    for the functions of a module to be verified; and a thread of the pool that reports a mistake may wait for Python's
    lock, which is held by who waits for it (jaxlib 0.10).
    """
    context = mlir.make_ir_context()
    context.enable_multithreading(False)
    return context


# Mistakes in MLIR text that jaxlib's verifiers do not report but die of, and the process with them.
#
# They are looked for in the text. What hides behind an attribute alias is not found, nor a single-device mesh in the
# generic form of an op that has its attributes after its region. A value used above its region is said by jaxlib, but
# breaks the memory of what is parsed next (jaxlib 0.10). One more kills jaxlib 0.12 alone, and is no mistake for
# 0.10: propagation edges on an `sdy.data_flow_edge` of a value that no data-flow op makes.

_NEGATIVE_VALUE = re.compile(rf"{STRING_OR_COMMENT}|(?P<found>\b(?:operand|result)--\d+)")

_SYMBOL = r'@[\w$.]+|@"[^"]*"'
_MESH = re.compile(rf"\bsdy\.mesh\s+({_SYMBOL})\s*=")
_REFERENCE = re.compile(rf"{STRING_OR_COMMENT}|<\s*(?P<found>{_SYMBOL})\s*,\s*\[")

_SINGLE_DEVICE = r"<\s*\[\s*\]\s*,\s*device_ids"
_SINGLE_DEVICE_MESH = re.compile(rf"{_MESH.pattern}\s*{_SINGLE_DEVICE}")
_INLINE = rf"mesh(?=\s*{_SINGLE_DEVICE})"
_MANUAL = re.compile(r'//[^\n]*|(?P<found>\bsdy\.manual_computation\b(?P<generic>")?)')


MOST_NESTED = 256
"""How many brackets may be open at once. Parsers and printers call themselves for what is inside. Measured (2026-11,
jaxlib 0.10): its stack of 8 MB overflows at somewhere between 3,000 and 10,000 brackets, Python's limit at less than
1,000 regions."""

_OWN_REGIONS = re.compile(r"\bsdy\.(?:named|manual)_computation\b")
"""Ops whose own parsers read regions, and let go of them where the text ends or breaks inside."""

_VALUE = r"%[\w$.-]+"
_RESULTS = rf"(?:^|(?<=[{{}}]))[ \t]*(?P<results>{_VALUE}(?::\d+)?(?:[ \t]*,[ \t]*{_VALUE}(?::\d+)?)*)[ \t]*="
_VALUES = re.compile(
    rf"{NO_BRACKET}|(?P<open>{{)|(?P<close>}})|{_RESULTS}|(?P<made>{_VALUE})(?=:[^:\d]|[ \t]*=)|(?P<used>{_VALUE})",
    re.MULTILINE,
)

_BRACKETS = re.compile(rf"{NO_BRACKET}|(?P<open>[(\[{{<])|(?P<close>[)\]}}>])")


def fatal_mistakes(text: str) -> Iterator[tuple[int, str]]:
    """Where in a text such mistakes are, and what to say of them."""
    if (deepest := _too_deep(text)) is not None:
        yield deepest, f"more than {MOST_NESTED} brackets are open here; a module must not be nested so deeply"
    if "propagation_edges" in text:
        yield from _negative_values(text)
        yield from _unknown_meshes(text)
    if "sdy.manual_computation" in text:
        yield from _manual_on_single_device(text)
    if _OWN_REGIONS.search(text):
        yield from _used_above_their_region(text)


def _too_deep(text: str) -> int | None:
    """Where a bracket is opened while as many are as may be."""
    depth = 0
    for match in _BRACKETS.finditer(text):
        depth += {"open": 1, "close": -1}.get(match.lastgroup or "", 0)
        if depth > MOST_NESTED:
            return match.start()
    return None


def _negative_values(text: str) -> Iterator[tuple[int, str]]:
    for match in _NEGATIVE_VALUE.finditer(text):
        if match["found"]:
            yield match.start(), f"[D1] `{match[0]}`: operands and results count from 0; {RULES['D1']}"


def _unknown_meshes(text: str) -> Iterator[tuple[int, str]]:
    known = set(_MESH.findall(text))
    for match in _REFERENCE.finditer(text):
        if match["found"] and match["found"] not in known:
            meshes = ", ".join(sorted(known)) or "none"
            yield match.start("found"), f"[S2] unknown mesh {match['found']}; the meshes are: {meshes}"


def _manual_on_single_device(text: str) -> Iterator[tuple[int, str]]:
    symbols = [rf"{re.escape(name)}(?=\s*,)" for name in _SINGLE_DEVICE_MESH.findall(text)]
    sharding = re.compile(rf"<\s*({'|'.join([*symbols, _INLINE])})")
    for match in _MANUAL.finditer(text):
        if not match["found"]:
            continue
        end = text.find("({" if match["generic"] else "manual_axes", match.end())
        found = sharding.search(text, match.end(), max(end, match.end()))
        if found:
            problem = f"sdy.manual_computation: a sharding is on a single device, {found[1]}"
            yield found.start(1), f"[O2a] {problem}; {RULES['O2a']}"


def _used_above_their_region(text: str) -> Iterator[tuple[int, str]]:
    """Uses of values that only a region below makes; uses outlive the region where the parser lets go of it."""
    regions: list[set[str]] = [set()]
    waiting: dict[str, tuple[int, int]] = {}
    for match in _VALUES.finditer(text):
        match match.lastgroup:
            case "open":
                regions.append(set())
            case "close" if len(regions) > 1:
                regions.pop()
            case "used":
                if not any(match["used"] in region for region in regions):
                    waiting.setdefault(match["used"], (match.start(), len(regions)))
            case "results" | "made" as group:
                names = set(re.findall(_VALUE, match[group]))
                regions[-1] |= names
                for name in sorted(names & waiting.keys()):
                    start, depth = waiting.pop(name)
                    if depth < len(regions):
                        yield start, f"{name} is used here, and made inside of a region below, which alone may use it"


# Reading MLIR text into a module, with errors that say where and name the rule.
#
# jaxlib parses and verifies; ops of the mesh and shard dialects, which it does not know, are rewritten for it first.
# Its diagnostics become one `SourceError`: `FILE:LINE:COLUMN: error: MESSAGE`, below it the line with a mark under
# the column, and what the diagnostic adds. Lines count from the start of the file, also where a file holds several
# modules.

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
      context: where its types and attributes live, such as `sdy_jax.ir.text.modules.new_context()`.
      file: the name for errors.

    Raises:
      SourceError: the text is no module, or breaks a rule.
    """
    if "\0" in text:  # jaxlib would take it for the end
        raise _error_in(text, text.index("\0"), "a NUL character", file)
    for offset, message in fatal_mistakes(text):
        raise _error_in(text, offset, message, file)
    try:
        source = SourceText(text, context)
    except AssemblyError as error:
        raise _error_in(text, error.offset, error.message, file) from None
    try:
        module = ir.Module.parse(source.parsed, context)
    except ir.MLIRError as error:
        raise _source_error(error, source, file) from None
    source.settle(module, file)
    for location, message in of_unknown_dialects(module):
        raise error_at(SdyError(message), str(location), text, file)
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
    message = _with_known(message, text)
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


def _source_error(error: ir.MLIRError, source: SourceText, file: str) -> SourceError:
    if not error.error_diagnostics:
        return SourceError(str(error), file)
    first, *others = error.error_diagnostics
    text, position = source.text, source.position(str(first.location))
    details = []
    if position is None:
        position = _without_locations(text)
        details.append(_origin(str(first.location), file))
    other_op = _OTHER_OP.search(first.message)
    if other_op is not None:
        return SourceError(unknown(other_op["name"]), file, position, _excerpt(text, position))
    other_type = _OTHER_TYPE.search(first.message)
    if other_type is not None:
        return SourceError(of_other_dialect(other_type["dialect"]), file, position, _excerpt(text, position))
    shown = _with_found(first.message, text, position) + _meant(first.message)
    # The text of the op that is wrong begins with its name; it can be long.
    context = [*(o.message for o in others if _follows(o.message)), *(note.message[:_OF_NOTE] for note in first.notes)]
    message = _with_known(explain(shown, "\n".join(context)), text)
    for note in first.notes:
        if not note.message.startswith("see current operation"):
            details.append(f"{_prefix(file, source.position(str(note.location)))}: note: {note.message}")
    for other in others:
        if not _follows(other.message):
            details.append(f"{_prefix(file, source.position(str(other.location)))}: error: {explain(other.message)}")
    return SourceError(message, file, position, [*_excerpt(text, position), *details])


_OTHER_OP = re.compile(r"Dialect `\w+' not found for custom op '(?P<name>[\w.$]+)'")


_OTHER_TYPE = re.compile(
    r"^`[!#]\"?(?P<dialect>\w+).*` (?:type|attribute) created with unregistered dialect", re.DOTALL
)
_UNKNOWN_OP = re.compile(r"custom op '(?P<name>[\w.$]+)' is unknown")
_MESH_LINE = re.compile(rf"{STRING_OR_COMMENT}|\bsdy\.mesh\s+(?P<found>(?:{_SYMBOL})\s*=\s*<[^>]*>)")


def _meant(message: str) -> str:
    """What is added to what jaxlib says of an op that a dialect has not."""
    match = _UNKNOWN_OP.match(message)
    if match is None:
        return ""
    if "." not in match["name"]:
        return "; expected MLIR: `module {` or `func.func @main(...)`, and ops such as stablehlo.add"
    near = nearest(match["name"], _known_ops())
    return f"; did you mean {near}?" if near else ""


@cache
def _known_ops() -> tuple[str, ...]:
    """The names of the ops of programs."""
    kinds = (kind for dialect in (stablehlo, sdy, func) for kind in vars(dialect).values())
    return tuple(sorted({name for kind in kinds if isinstance(name := getattr(kind, "OPERATION_NAME", None), str)}))


def _with_known(message: str, text: str) -> str:
    """A message about a mesh or an axis that is not there, with the meshes of the text."""
    if not message.startswith(("[S2]", "[A1]")) or "the meshes are" in message or "the axes of" in message:
        return message
    known = [" ".join(match["found"].split()) for match in _MESH_LINE.finditer(text) if match["found"]]
    return f"{message}; the text has {', '.join(known) or 'no sdy.mesh'}"


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


# Modules from text that keep the rules of their dialects, with ops that know their lines in the file.


def text_module(text: str, context: ir.Context, file: str, strict: bool = True) -> ir.Module:
    """A verified module from text; its ops know their lines in the file. `strict` is as for `load`.

    Raises:
      SourceError: the text is no module, or breaks a rule of a dialect.
    """
    module = parse_module(text, context, file)
    try:
        verify_module(module.operation, tolerant=not strict)
    except RuleError as error:
        raise error_at(error, error.location, text, file) from None
    return module
