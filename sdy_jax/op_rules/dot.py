"""Rules of matrix products."""

from __future__ import annotations

from sdy_jax.ir.graph import Op
from sdy_jax.op_rules.builder import REDUCTION, RuleBuilder, result_shape, shape_of
from sdy_jax.op_rules.linearity import Linear, passes_unreduced
from sdy_jax.op_rules.op_attributes import Dims, DotDimensionNumbers, dot_dimension_numbers
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


def _contraction(op: Op, numbers: DotDimensionNumbers) -> OpShardingRule:
    """The result has the batching dimensions, then what remains of the left side, then of the right side."""
    lhs, rhs, result = shape_of(op, 0), shape_of(op, 1), result_shape(op)
    builder = RuleBuilder.of(op)
    kept: list[tuple[int | None, int | None]] = [
        *zip(numbers.lhs_batching, numbers.rhs_batching, strict=True),
        *((dim, None) for dim in _others(len(lhs), numbers.lhs_batching + numbers.lhs_contracting)),
        *((None, dim) for dim in _others(len(rhs), numbers.rhs_batching + numbers.rhs_contracting)),
    ]
    for out, (left, right) in enumerate(kept):
        builder.add((left, right), (out,), result[out])
    for left, right in zip(numbers.lhs_contracting, numbers.rhs_contracting, strict=True):
        builder.add((left, right), (None,), lhs[left], REDUCTION)
    return builder.build()


def _others(rank: int, dims: Dims) -> list[int]:
    return [dim for dim in range(rank) if dim not in dims]


passes_unreduced("stablehlo.dot_general", {"sum": Linear.ONE_FACTOR})
