"""Modules from text that keep the rules of their dialects, with ops that know their lines in the file."""

from __future__ import annotations

import re

from jax.extend.mlir import ir

from sdy_jax.representation.dialect_rules import RuleError
from sdy_jax.source_text import error_at, parse_module
from sdy_jax.verification import verify_module


def text_module(text: str, context: ir.Context, file: str, strict: bool = True) -> ir.Module:
    """A verified module from text; its ops know their lines in the file. `strict` is as for `verify_module`.

    Raises:
      SourceError: the text is no module, or breaks a rule of a dialect.
    """
    module = parse_module(text, context, file)
    try:
        verify_module(module.operation, strict)
    except RuleError as error:
        raise error_at(error.message, error.location, text, file) from None
    _name_file(module.operation, file)
    return module


_PARSED = re.compile(r'^loc\("-":(\d+):(\d+)\)$')


def _name_file(module: ir.Operation, file: str) -> None:
    """The parser calls every file `-`; ops get the name by which the user knows it."""

    def rename(op: ir.Operation) -> ir.WalkResult:
        match = _PARSED.match(str(op.location))
        if match:
            op.location = ir.Location.file(file, int(match[1]), int(match[2]), op.context)
        return ir.WalkResult.ADVANCE

    module.walk(rename)
