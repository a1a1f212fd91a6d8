"""From text with mesh and shard ops to text that jaxlib parses, with the user's positions, and from modules to text."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from jax.extend.mlir import ir

from sdy_jax.ir.operations import pre_order
from sdy_jax.ir.text.assembly import canonical, pretty_form, read_pretty
from sdy_jax.ir.text.cursor import COMMENT, STRING, AssemblyError, Cursor, Lines, Position, TextSpan
from sdy_jax.ir.text.mesh_dialects import NOUNS, OPS
from sdy_jax.ir.text.statement import Statement, generic_form, read_generic

# Text with mesh and shard ops becomes text that jaxlib parses.
#
# jaxlib does not know the two dialects. It parses their ops in the generic form, but shows no attributes of theirs
# that stand in `<{...}>`. So each op's statement is read here, in whichever form it is, and written anew in the
# generic form with its attributes in `{...}`. All else stays, and every op stays on its line.

_MENTION = re.compile(r"\b(?:mesh|shard)[.<]")
_SCAN = re.compile(
    rf'"(?P<generic>(?:mesh|shard)\.[\w$.]+)"|{STRING}|{COMMENT}'
    r"|(?<![\w$.#!@%^-])(?:(?P<location>loc\b)|(?P<pretty>(?:mesh|shard)\.[\w$.]+))"
)
_FOREIGN = re.compile(rf"{STRING}|{COMMENT}|[#!](?P<dialect>[A-Za-z_][\w$]*)[.<]")


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A text as jaxlib parses it.

    `starts` are offsets in it, ascending, of pieces that begin there; `origins` are where in the user's text each
    piece comes from, with the number of characters that it has in common with that.
    """

    text: str
    starts: tuple[int, ...] = (0,)
    origins: tuple[tuple[int, int], ...] = ((0, 2**63),)

    def origin(self, offset: int) -> int:
        """Where in the user's text a place comes from."""
        number = bisect_right(self.starts, offset) - 1
        start, common = self.origins[number]
        distance = offset - self.starts[number]
        return start + (distance if distance <= common else 0)


def mentions(text: str) -> bool:
    """Whether a text may have ops, types or attributes of the two dialects."""
    return _MENTION.search(text) is not None


def rewrite(text: str) -> Rewritten:
    """The text as jaxlib parses it.

    Raises:
      AssemblyError: a statement does not fit its op's form, or there is no such op.
    """
    pieces, kept = [], 0
    for start, end, statement in statements(text):
        pieces.append(TextSpan(text[kept:start], kept))
        new = [piece if piece.at >= 0 else TextSpan(piece.text, start) for piece in generic_form(canonical(statement))]
        fewer = text.count("\n", start, end) - sum(piece.text.count("\n") for piece in new)
        pieces += [*new, TextSpan("\n" * fewer, end)]
        kept = end
    return _joined(text, [*pieces, TextSpan(text[kept:], kept)])


def foreign(text: str) -> Iterator[tuple[int, str]]:
    """Where a text has an attribute or type of another dialect than the two, and which dialect that is."""
    for match in _FOREIGN.finditer(text):
        if match["dialect"] and match["dialect"] not in NOUNS:
            yield match.start(), match["dialect"]


def _joined(text: str, pieces: Sequence[TextSpan]) -> Rewritten:
    starts, origins, length = [], [], 0
    for piece in pieces:
        starts.append(length)
        same = text.startswith(piece.text, piece.at)
        origins.append((piece.at, len(piece.text) if same else 0))
        length += len(piece.text)
    return Rewritten("".join(piece.text for piece in pieces), tuple(starts), tuple(origins))


def statements(text: str) -> Iterator[tuple[int, int, Statement]]:
    """The statements of the two dialects' ops: where they start, after their results' names, and end."""
    at = 0
    while match := _SCAN.search(text, at):
        at = match.end()
        cursor = Cursor(text, at)
        if match["location"] and cursor.peek("("):
            at = _after_location(cursor)
            continue
        read = _reader(match, cursor)
        if read is not None:
            yield match.start(), cursor.at, read
            at = cursor.at


def _reader(match: re.Match[str], cursor: Cursor) -> Statement | None:
    """The statement that begins with a name; None if the name stands for something else."""
    name = match["generic"] or match["pretty"]
    if name is None or not _begins(match, cursor):
        return None
    op = OPS.get(name)
    if op is None:
        raise AssemblyError(unknown(name), match.start())
    try:
        return (read_generic if match["generic"] else read_pretty)(op, cursor)
    except AssemblyError as error:
        raise AssemblyError(f"{name}: {error.message}", error.offset) from None


def _begins(match: re.Match[str], cursor: Cursor) -> bool:
    """Whether a name begins a statement: quoted ones are strings elsewhere, bare ones names of attributes."""
    if match["generic"]:
        return cursor.peek("(")
    return not any(map(cursor.peek, ("=", ",", "}", ":")))


def unknown(name: str) -> str:
    """What to say of an op that does not exist."""
    dialect = name.partition(".")[0]
    if dialect not in NOUNS:
        return (
            f"{name}: unknown dialect `{dialect}`; to fix: lower it to StableHLO by that dialect's own passes, or "
            f"write it as a stablehlo.custom_call @{name.partition('.')[2]} with an sdy.sharding_rule"
        )
    names = ", ".join(op.name for op in OPS.values() if op.dialect == dialect)
    return f"{name}: the {dialect} dialect has no such op; it has {names}"


def _after_location(cursor: Cursor) -> int:
    """The end of a location, in which names of ops may stand."""
    with suppress(AssemblyError):
        cursor.bracket()
    return cursor.at


# A user's text, the text that jaxlib parses in its place, and the map from positions in that to the user's.

_BEFORE = 1000
"""Characters before an op in which its results are looked for. Guessed, a guard: with fewer, ops with many results are
not named."""

_POSITION = re.compile(r'^(?:loc\()?("(?:[^"\\]|\\.)*"):(\d+):(\d+)\)?$')
_RESULTS = re.compile(r"(%[\w.$-]+(?::\d+)?(?:\s*,\s*%[\w.$-]+(?::\d+)?)*)\s*=\s*$")
_VALUE = re.compile(r"%[\w.$-]+")


def parsed_position(location: str, file: str = "-") -> Position | None:
    """The position of an MLIR location in `file`, by default the parsed text; None in other files or without a line."""
    match = _POSITION.match(location)
    if match is None or match[1] != quoted_file(file):
        return None
    return Position(int(match[2]), int(match[3])) if int(match[2]) else None


@cache
def quoted_file(file: str) -> str:
    """A file's name as MLIR writes it in locations."""
    return str(ir.Location.file(file, 1, 1, ir.Context())).removeprefix("loc(").removesuffix(":1:1)")


def name_in(text: str, position: Position, result: int | None) -> str | None:
    """What a text calls a value.

    Args:
      position: the op's that has it as its result of this number, or an argument's own, which is no result.
    """
    offset = Lines(text).offset(position)
    if result is None:
        match = _VALUE.match(text, offset)
        return match[0] if match else None
    before = _RESULTS.search(text[max(0, offset - _BEFORE) : offset])
    for entry in before[1].split(",") if before else ():
        name, _, count = entry.strip().partition(":")
        if result < int(count or 1):
            return f"{name}#{result}" if count else name
        result -= int(count or 1)
    return None


class SourceText:
    """A text that may have mesh and shard ops. `parsed` is the text for jaxlib.

    Raises:
      AssemblyError: a statement is wrong, or the text has values of types of a dialect that is not known. Attributes of
        such a dialect are carried through.
    """

    def __init__(self, text: str, context: ir.Context):
        self.text = text
        if any(not _is_known(dialect, context) for dialect in _carried(text)):
            context.allow_unregistered_dialects = True
        self._rewritten = _rewritten(text, context) if mentions(text) else Rewritten(text)
        self.parsed = self._rewritten.text

    def position(self, location: str) -> Position | None:
        """The position of an MLIR location in the user's text; None for locations that the text gives to its ops."""
        position = parsed_position(location)
        if position is None or self.parsed is self.text:
            return position
        return self._own_lines.position(self._rewritten.origin(self._parsed_lines.offset(position)))

    @cached_property
    def _own_lines(self) -> Lines:
        return Lines(self.text)

    @cached_property
    def _parsed_lines(self) -> Lines:
        return Lines(self.parsed)

    def settle(self, module: ir.Module, file: str) -> None:
        """Gives the ops of the parsed module, and the arguments of its blocks, their locations in the user's file.

        A text may itself contain locations that look like positions in it; these cannot be distinguished, and stay.
        """
        if '"-":' in self.text or (self.parsed is self.text and file == "-"):
            return

        def settled(location: ir.Location) -> ir.Location | None:
            place = self.position(str(location))
            return place and ir.Location.file(file, place.line, place.column, module.context)

        for op in pre_order(module.operation):
            if location := settled(op.location):
                op.location = location
            for value in (value for region in op.regions for block in region.blocks for value in block.arguments):
                if location := settled(value.location):
                    value.set_location(location)


_OTHER_OP = re.compile(r'//[^\n]*|"(?P<dialect>[A-Za-z_]\w*)\.[\w.]+"\s*\(')


def _carried(text: str) -> Iterator[str]:
    """The dialects that attributes are of, types as attributes as well, and ops in the generic form."""
    yield from (dialect for offset, dialect in foreign(text) if _is_attribute(text, offset))
    yield from (match["dialect"] for match in _OTHER_OP.finditer(text) if match["dialect"])


def _rewritten(text: str, context: ir.Context) -> Rewritten:
    """The text for jaxlib, with a context that takes what is in it."""
    for offset, dialect in foreign(text):
        if not _is_attribute(text, offset) and not _is_known(dialect, context):
            raise AssemblyError(f"unknown dialect `{dialect}`", offset)
    context.allow_unregistered_dialects = True
    return rewrite(text)


def _is_attribute(text: str, offset: int) -> bool:
    """Whether an attribute or type at a place is an attribute, as in `{my.type = !my.type<i32>}`."""
    end = offset
    while end and text[end - 1].isspace():
        end -= 1
    return text[offset] == "#" or text[end - 1 : end] == "="


def _is_known(dialect: str, context: ir.Context) -> bool:
    try:
        context.dialects[dialect]
    except IndexError:
        return False
    return True


def of_unknown_dialects(module: ir.Module) -> Iterator[tuple[ir.Location, str]]:
    """Where a module has ops that neither jaxlib knows nor the two dialects have, and values of types that nobody
    knows, and what to say of each."""
    context = module.context
    if not context.allow_unregistered_dialects:
        return
    types: dict[ir.Type, str | None] = {}
    for op in pre_order(module.operation):
        if op.name not in OPS and not context.is_registered_operation(op.name):
            yield op.location, unknown(op.name)
        arguments = (value for region in op.regions for block in region.blocks for value in block.arguments)
        for value in (*arguments, *op.results):
            if value.type not in types:
                types[value.type] = next((d for _, d in foreign(str(value.type)) if not _is_known(d, context)), None)
            if (dialect := types[value.type]) is not None:
                yield value.location, of_other_dialect(dialect)


def of_other_dialect(dialect: str) -> str:
    """What to say of a type or attribute of a dialect that nobody knows."""
    return (
        f"a type or attribute of the unknown dialect `{dialect}`; to fix: lower the program to StableHLO by that "
        "dialect's own passes"
    )


# Modules with mesh and shard ops as text: in the dialects' pretty forms, or in the form that other tools want.


def module_text(module: ir.Module | ir.Operation, generic: bool = False, **options: Any) -> str:
    """The text of a module, which reads back as the same module.

    Mesh and shard ops are in their pretty form, one that says something which the form cannot in the generic one.

    Args:
      module: a module, or any op.
      generic: every op is in the generic form, with its own attributes in `<{...}>`, as tools read it that know the
        two dialects.
      options: as `ir.Operation.get_asm` takes them, such as `enable_debug_info=True`.

    Example:
      >>> from jax.interpreters import mlir
      >>> from sdy_jax.ir.text.modules import parse_module
      >>> module = parse_module("mesh.mesh @ring(shape = 2x?)", mlir.make_ir_context())
      >>> print(module_text(module), end="")
      module {
        mesh.mesh @ring(shape = 2x?)
      }
    """
    text: str = module.operation.get_asm(print_generic_op_form=generic, **options)
    return restyled(text, generic) if mentions(text) else text


def restyled(text: str, generic: bool = False) -> str:
    """Text that jaxlib has printed, with the two dialects' ops in their pretty form, or with `<{...}>`."""
    pieces, kept = [], 0
    for start, end, statement in statements(text):
        pieces += [text[kept:start], _styled(statement, generic) or text[start:end]]
        kept = end
    return "".join([*pieces, text[kept:]])


def _styled(statement: Statement, generic: bool) -> str | None:
    if generic:
        return "".join(piece.text for piece in generic_form(statement, properties=True))
    return pretty_form(statement)
