"""The passes before propagation, in order."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.passes.pipelines import PLAN_IMPORT
from sdy_jax.passes.registry import COMPAT, options_of, run


def import_module(module: ir.Operation, compat: str | None = None) -> None:
    """Prepares a module for propagation, in place.

    Args:
      module: a `builtin.module`.
      compat: `"shardy"` leaves out what only sdy_jax does.
    """
    options = f"{{compat={compat}}}" if compat else ""
    run(module, ",".join(name + (options if COMPAT in options_of(name) else "") for name in PLAN_IMPORT))
