"""Convolutions: batches, features and groups can be sharded, and contracted features leave partial sums.

Space is not split: a block of the result needs its neighbours' borders.
"""

from __future__ import annotations

import jax

from sdy_jax.graph import Op
from sdy_jax.lowering.generic import re_emit
from sdy_jax.lowering.strategies.dot import sum_kind, without_padding
from sdy_jax.lowering.strategies.registry import (
    LocalOp,
    Strategy,
    emitter,
    pass_through_factors,
    strategies,
)
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.rules.attributes import convolution_dimension_numbers


@strategies("stablehlo.convolution")
def _convolution_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    dims = convolution_dimension_numbers(op)
    spatial = frozenset(f for d in dims.input_spatial for f in rule.operand_mappings[0][d])
    spatial |= frozenset(f for d in dims.kernel_spatial for f in rule.operand_mappings[1][d])
    splittable = (pass_through_factors(rule) | rule.reduction) - spatial
    return [Strategy("partial", splittable, sum_kind(op.results[0].dtype))]


@emitter("stablehlo.convolution")
def _convolution(local: LocalOp, lhs: jax.Array, rhs: jax.Array) -> list[jax.Array]:
    """Groups are counted again from the local shapes: a device holds whole groups, or parts of a single one."""
    dims = convolution_dimension_numbers(local.op)
    lhs, rhs = without_padding(local, lhs, rhs, (dims.input_feature,), (dims.kernel_input_feature,))
    counts = {
        "feature_group_count": _ratio(lhs.shape[dims.input_feature], rhs.shape[dims.kernel_input_feature]),
        "batch_group_count": _ratio(lhs.shape[dims.input_batch], local.result_shape()[dims.output_batch]),
    }
    return re_emit(local, lhs, rhs, attributes={name: f"{n} : i64" for name, n in counts.items() if n})


def _ratio(whole: int, part: int) -> int:
    return whole // part if part else 0
