"""Rules of the mesh and shard dialects' collectives, as they occur in manual computations.

Send and recv have none: what is received has the sharding of an operand that is not the op's own.
"""

from __future__ import annotations

from sdy_jax.ir.graph import Op
from sdy_jax.op_rules.builder import NEED_REPLICATION, RuleBuilder, result_shape
from sdy_jax.op_rules.collective import exchanging
from sdy_jax.op_rules.registry import names, rule
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.shard.result_shapes import CHANGED_DIMENSIONS
from sdy_jax.shard.view import view


def _both(words: str) -> tuple[str, ...]:
    return (*names("mesh", words), *names("shard", words))


@rule(*_both("all_reduce broadcast reduce shift"), extra=True)
def keeps_shape(op: Op, conservative: bool) -> OpShardingRule:
    """One factor per dimension of the result."""
    return RuleBuilder.of(op).pointwise(result_shape(op)).build()


@rule(*_both("update_halo"), extra=True)
def update_halo(op: Op, conservative: bool) -> OpShardingRule:
    """Dimensions with a halo are exchanged as they are."""
    split = [dim for dim, axes in enumerate(view(op.mlir)["split_axes"]) if axes]
    return RuleBuilder.of(op).pointwise(result_shape(op), split, NEED_REPLICATION).build()


@rule(*_both(" ".join(CHANGED_DIMENSIONS)), extra=True)
def exchanges(op: Op, conservative: bool) -> OpShardingRule:
    """Dimensions that become shorter or longer are exchanged as they are."""
    attributes = CHANGED_DIMENSIONS[op.name.partition(".")[2]]
    return exchanging(op, *(op.int(name) for name in attributes if name))
