"""A text of the user beside what jaxlib parses for it, and the way back from places in that."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property

from jax.extend.mlir import ir

from sdy_jax.dialects.cursor import AssemblyError
from sdy_jax.dialects.ops import OPS
from sdy_jax.dialects.reader import Rewritten, foreign, mentions, rewrite, unknown
from sdy_jax.graph import pre_order
from sdy_jax.positions import Lines, Position

_POSITION = re.compile(r'^(?:loc\()?"-":(\d+):(\d+)\)?$')


def parsed_position(location: str) -> Position | None:
    """Where an MLIR location lies in the parsed text; None for locations that the text gives to its ops."""
    match = _POSITION.match(location)
    return Position(int(match[1]), int(match[2])) if match and int(match[1]) else None


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
        """Where in the user's text an MLIR location lies; None for locations that the text gives to its ops."""
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

    def settle(self, module: ir.Module) -> None:
        """Gives the ops of the parsed module their locations in the user's text.

        A text may itself give locations that look like places in it; they cannot be told from them, and stay.
        """
        if self.parsed is self.text or '"-":' in self.text:
            return
        for op in pre_order(module.operation):
            position = self.position(str(op.location))
            if position is not None:
                op.location = ir.Location.file("-", position.line, position.column, module.context)


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
