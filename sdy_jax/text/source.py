"""A user's text, the text that jaxlib parses in its place, and the map from positions in that to the user's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, cached_property

from jax.extend.mlir import ir

from sdy_jax.ir.operations import pre_order
from sdy_jax.text.cursor import AssemblyError
from sdy_jax.text.mesh_ops import OPS
from sdy_jax.text.positions import Lines, Position
from sdy_jax.text.reader import Rewritten, foreign, mentions, rewrite, unknown

_BEFORE = 1000
"""Characters before an op in which its results are looked for. Guessed, a guard: with fewer, ops with many results are
not named."""

_POSITION = re.compile(r'^(?:loc\()?("(?:[^"\\]|\\.)*"):(\d+):(\d+)\)?$')
_RESULTS = re.compile(r"(%[\w.$-]+(?::\d+)?(?:\s*,\s*%[\w.$-]+(?::\d+)?)*)\s*=\s*$")
_VALUE = re.compile(r"%[\w.$-]+")


def parsed_position(location: str, file: str = "-") -> Position | None:
    """The position of an MLIR location in `file`, by default the parsed text; None in other files or without a line."""
    match = _POSITION.match(location)
    if match is None or match[1] != quoted(file):
        return None
    return Position(int(match[2]), int(match[3])) if int(match[2]) else None


@cache
def quoted(file: str) -> str:
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


class Source:
    """A text that may have mesh and shard ops. `parsed` is the text for jaxlib.

    Raises:
      AssemblyError: a statement is wrong, or the text has types or attributes of a dialect that is not known.
    """

    def __init__(self, text: str, context: ir.Context):
        self.text = text
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


def _rewritten(text: str, context: ir.Context) -> Rewritten:
    """The text for jaxlib, with a context that takes what is in it."""
    for offset, dialect in foreign(text):
        if not _is_known(dialect, context):
            raise AssemblyError(f"unknown dialect `{dialect}`", offset)
    context.allow_unregistered_dialects = True
    return rewrite(text)


def _is_known(dialect: str, context: ir.Context) -> bool:
    try:
        context.dialects[dialect]
    except IndexError:
        return False
    return True


def unknown_ops(module: ir.Module) -> Iterator[tuple[ir.Operation, str]]:
    """The ops that neither jaxlib knows nor the two dialects have, and what to say of each."""
    if not module.context.allow_unregistered_dialects:
        return
    for op in pre_order(module.operation):
        if op.name not in OPS and not module.context.is_registered_operation(op.name):
            yield op, unknown(op.name)
