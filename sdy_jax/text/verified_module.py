"""Modules from text that keep the rules of their dialects, with ops that know their lines in the file."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.representation.dialect_rules import RuleError
from sdy_jax.text.modules import error_at, parse_module
from sdy_jax.verification import verify_module


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
