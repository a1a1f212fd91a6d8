"""Rules of matrix products."""

from __future__ import annotations

from sdy_jax.ir.graph import Op
from sdy_jax.op_rules.builder import NEED_REPLICATION, PASS_THROUGH, REDUCTION, RuleBuilder, result_shape, shape_of
from sdy_jax.op_rules.linearity import Linear, passes_unreduced
from sdy_jax.op_rules.op_attributes import (
    Dims,
    DotDimensionNumbers,
    dot_dimension_numbers,
    ragged_dot_dimension_numbers,
)
from sdy_jax.op_rules.registry import rule
from sdy_jax.representation.rule import OpShardingRule


@rule("stablehlo.dot")
def dot(op: Op, conservative: bool) -> OpShardingRule:
    """Contracts the last dimension of the left side with the first one of the right side; each is 1-D or 2-D."""
    last = op.operands[0].rank - 1
    return _contraction(op, DotDimensionNumbers((), (), (last,), (0,)))


@rule("stablehlo.dot_general")
def dot_general(op: Op, conservative: bool) -> OpShardingRule:
    return _contraction(op, dot_dimension_numbers(op))


@rule("chlo.ragged_dot", extra=True)
def ragged_dot(op: Op, conservative: bool) -> OpShardingRule | None:
    """As a product, and along groups: each device can take the rows of those that it has. Groups of elements of a
    batching dimension, and groups that differ along others, stay whole."""
    numbers, rhs = ragged_dot_dimension_numbers(op), shape_of(op, 1)
    if op.operands[2].rank != 1:
        return None
    product, builder, of_sums = numbers.product, RuleBuilder.of(op), numbers.ragged in numbers.product.lhs_contracting
    grouped = () if numbers.groups is None else (numbers.groups,)
    for out, (left, right) in enumerate(_kept(op, product, grouped), start=int(of_sums)):
        whole = left == numbers.ragged and right is not None
        builder.add((left, right, None), (out,), result_shape(op)[out], NEED_REPLICATION if whole else PASS_THROUGH)
    for left, right in zip(product.lhs_contracting, product.rhs_contracting, strict=True):
        builder.add((left, right, None), (None,), rhs[right], REDUCTION)
    if of_sums:
        builder.add((None, None, None), (0,), result_shape(op)[0])
    for group in grouped:
        builder.add((None, group, None), (None,), rhs[group], REDUCTION)
    builder.add((None, None, 0), (None,), shape_of(op, 2)[0], NEED_REPLICATION)
    return builder.build()


def _contraction(op: Op, numbers: DotDimensionNumbers) -> OpShardingRule:
    """The result has the batching dimensions, then what remains of the left side, then of the right side."""
    builder = RuleBuilder.of(op)
    for out, (left, right) in enumerate(_kept(op, numbers)):
        builder.add((left, right), (out,), result_shape(op)[out])
    for left, right in zip(numbers.lhs_contracting, numbers.rhs_contracting, strict=True):
        builder.add((left, right), (None,), shape_of(op)[left], REDUCTION)
    return builder.build()


def _kept(op: Op, numbers: DotDimensionNumbers, groups: Dims = ()) -> list[tuple[int | None, int | None]]:
    """The dimensions of both sides that a dimension of the result is, of which `groups` are none."""
    left, right = numbers.lhs_batching + numbers.lhs_contracting, numbers.rhs_batching + numbers.rhs_contracting
    return [
        *zip(numbers.lhs_batching, numbers.rhs_batching, strict=True),
        *((dim, None) for dim in _others(op.operands[0].rank, left)),
        *((None, dim) for dim in _others(op.operands[1].rank, right + groups)),
    ]


def _others(rank: int, dims: Dims) -> list[int]:
    return [dim for dim in range(rank) if dim not in dims]


passes_unreduced("stablehlo.dot_general", {"sum": Linear.ONE_FACTOR})
