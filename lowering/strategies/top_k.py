"""The largest elements along a dimension: each shard chooses candidates, and among those of all shards it is chosen again."""

from __future__ import annotations

import jax
from jax import lax

from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.reemitted import re_emit


@emitter("chlo.top_k")
def _top_k(local: LocalOp, operand: jax.Array) -> list[jax.Array]:
    op = local.op
    if op.results[1].dtype != "i32" or not op.flag("is_stable", True):
        return re_emit(local, operand)
    return list(lax.top_k(operand, op.int("k")))
