"""Cumulative sums are written alike for all platforms, so that plans are: as a window over all elements up to each one.

For GPUs jax 0.12 writes an op of its own. The local part of the sum is lax's again, for whatever it runs on.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.mlir import ir
from jax.interpreters import mlir

from sdy_jax.annotate.site import Site, emission


@emission(lax.cumsum_p)
def _emit_cumulative_sum(
    site: Site, ctx: mlir.LoweringRuleContext, x: ir.Value, *, axis: int, reverse: bool
) -> list[Any]:
    return list(mlir.lower_fun(_as_window, multiple_results=False)(ctx, x, axis=axis, reverse=reverse))


def _as_window(x: jax.Array, *, axis: int, reverse: bool) -> jax.Array:
    size = x.shape[axis]
    if not size:
        return x
    before, after = (0, size - 1) if reverse else (size - 1, 0)
    window = [size if d == axis else 1 for d in range(x.ndim)]
    padding = [(before, after) if d == axis else (0, 0) for d in range(x.ndim)]
    sums: jax.Array = lax.reduce_window(x, jnp.zeros((), x.dtype), lax.add, window, (1,) * x.ndim, padding)
    return sums
