"""`checkify.check` in a partitioned function: left out of the plan, and recorded."""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir
from jax.interpreters import mlir

from sdy_jax.annotate.site import Site, emission
from sdy_jax.jax_internals.checks import check_p


@emission(check_p)
def _emit(site: Site, ctx: mlir.LoweringRuleContext, *_: ir.Value, err_tree: Any, debug: bool) -> list[ir.Value]:
    site.unchecked |= not debug
    return []
