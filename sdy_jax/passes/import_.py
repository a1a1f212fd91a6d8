"""The passes before propagation, in order."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.passes.registry import run

PIPELINE = (
    "sdy-lift-inlined-meshes",
    "sdy-remove-size-one-axes",
    "inline-calls",
    "sdy-constant-or-scalar-splitter",
    "sdy-manual-axes-cleanup",
    "sdy-add-data-flow-edges",
    "sdy-apply-sharding-constraints",
    "sdy-sharding-group-import",
)


def import_module(module: ir.Operation, compat: str | None = None) -> None:
    """Prepares a module for propagation, in place.

    Args:
      module: a `builtin.module`.
      compat: `"shardy"` leaves out what only sdy_jax does (edges of `stablehlo.if`).
    """
    edges = "sdy-add-data-flow-edges"
    run(module, ",".join(f"{name}{{compat={compat}}}" if compat and name == edges else name for name in PIPELINE))
