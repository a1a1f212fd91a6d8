"""The passes after propagation, in order."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.passes.pipelines import PLAN_EXPORT
from sdy_jax.passes.registry import run


def export_module(module: ir.Operation, *, sub_axes: bool = True) -> None:
    """Makes a propagated module's shardings final, in place.

    Args:
      sub_axes: keep sub-axes on main's arguments and results; False drops them as Shardy's pipeline does.
    """
    dropped = ("sdy-remove-sub-axes-in-input-output-shardings",) if sub_axes else ()
    run(module, ",".join(name for name in PLAN_EXPORT if name not in dropped))
