"""The passes before propagation, in order."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.passes.registry import run


def import_module(module: ir.Operation, compat: str | None = None) -> None:
    """Prepares a module for propagation, in place.

    Args:
      module: a `builtin.module`.
      compat: `"shardy"` leaves out what only sdy_jax does (edges of `stablehlo.if`).
    """
    options = f"{{compat={compat}}}" if compat else ""
    run(module, f"sdy-import-pipeline{options}")
