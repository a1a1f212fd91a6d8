"""The passes after propagation, in order."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.passes.pipelines import PLAN_EXPORT
from sdy_jax.passes.registry import run


def export_module(module: ir.Operation) -> None:
    """Makes a propagated module's shardings final, in place."""
    run(module, ",".join(PLAN_EXPORT))
