"""Modules with mesh and shard ops as text: in the dialects' pretty forms, or in the form that other tools want."""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir

from sdy_jax.text.assembly import pretty_form
from sdy_jax.text.reader import mentions, statements
from sdy_jax.text.statement import Statement, generic_form


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
      >>> from sdy_jax.text.modules import parse_module
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
