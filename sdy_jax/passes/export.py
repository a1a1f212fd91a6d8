"""The passes after propagation, in order."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.passes.registry import run

PIPELINE = (
    "sdy-constant-or-scalar-merger",
    "sdy-sink-data-flow-edges",
    "sdy-remove-sharding-groups",
    "sdy-sharding-constraint-to-reshard",
    "sdy-update-non-divisible-input-output-shardings",
    "sdy-remove-sub-axes-in-input-output-shardings",
    "sdy-close-shardings",
)
"""Up to shardings that are final; what follows in Shardy's pipeline belongs to partitioning."""


def export_module(module: ir.Operation, *, sub_axes: bool = True) -> None:
    """Makes a propagated module's shardings final, in place.

    Args:
      sub_axes: keep sub-axes on main's arguments and results; False drops them as Shardy's pipeline does.
    """
    dropped = ("sdy-remove-sub-axes-in-input-output-shardings",) if sub_axes else ()
    run(module, ",".join(name for name in PIPELINE if name not in dropped))
