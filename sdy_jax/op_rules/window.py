"""Rules of ops that slide a window: reduce_window, select_and_scatter."""

from __future__ import annotations

from sdy_jax.ir.graph import Op
from sdy_jax.op_rules.builder import (
    NEED_REPLICATION,
    PASS_THROUGH,
    PERMUTATION,
    REDUCTION,
    RuleBuilder,
    result_shape,
    shape_of,
)
from sdy_jax.op_rules.linearity import Linear, passes_unreduced
from sdy_jax.op_rules.op_attributes import window
from sdy_jax.op_rules.registry import rule
from sdy_jax.representation.rule import OpShardingRule


@rule("stablehlo.reduce_window")
def reduce_window(op: Op, conservative: bool) -> OpShardingRule:
    """Window by window; where windows overlap or skip, shards exchange their borders."""
    builder = RuleBuilder.of(op)
    for dim, (size, over) in enumerate(zip(result_shape(op), window(op), strict=True)):
        kind = PASS_THROUGH if over.is_trivial else PERMUTATION
        builder.add_all(dim, size, kind, blocked=conservative and not over.is_trivial)
    return builder.build()


@rule("stablehlo.reduce_window", beyond=True)
def reduce_window_to_one(op: Op, conservative: bool) -> OpShardingRule:
    """The same, but a dimension with a single window is reduced."""
    builder, shape = RuleBuilder.of(op), shape_of(op)
    for dim, (size, over) in enumerate(zip(result_shape(op), window(op), strict=True)):
        if size == 1 and not over.is_trivial:
            builder.add_operands(dim, shape[dim], REDUCTION, blocked=conservative)
            builder.add_results(dim, size, NEED_REPLICATION)
        else:
            kind = PASS_THROUGH if over.is_trivial else PERMUTATION
            builder.add_all(dim, size, kind, blocked=conservative and not over.is_trivial)
    return builder.build()


@rule("stablehlo.select_and_scatter")
def select_and_scatter(op: Op, conservative: bool) -> OpShardingRule:
    """The result has the operand's layout; the source has one element per window."""
    source, builder = shape_of(op, 1), RuleBuilder.of(op)
    for dim, (size, over) in enumerate(zip(result_shape(op), window(op), strict=True)):
        if over.is_trivial:
            builder.add_all(dim, size)
            continue
        builder.add((None, dim, None), (None,), source[dim], NEED_REPLICATION, blocked=conservative)
        builder.add((dim, None, None), (dim,), size, PERMUTATION, blocked=conservative)
    return builder.build()


@rule("stablehlo.select_and_scatter", beyond=True)
def select_and_scatter_by_window(op: Op, conservative: bool) -> OpShardingRule:
    """The same, but the source is split as the operand is, where it has more than one window."""
    source, builder = shape_of(op, 1), RuleBuilder.of(op)
    for dim, (size, over) in enumerate(zip(result_shape(op), window(op), strict=True)):
        if over.is_trivial:
            builder.add_all(dim, size)
        elif source[dim] > 1:
            builder.add_all(dim, size, PERMUTATION, blocked=conservative)
        else:
            builder.add((None, dim, None), (None,), source[dim], NEED_REPLICATION, blocked=conservative)
            builder.add((dim, None, None), (dim,), size, PERMUTATION, blocked=conservative)
    return builder.build()


passes_unreduced("stablehlo.reduce_window", {"sum": Linear.SUMMED})
