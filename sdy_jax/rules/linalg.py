"""Rules of matrix decompositions and solvers: batch dimensions pass, matrix dimensions are needed whole."""

from __future__ import annotations

from sdy_jax.graph import Op
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.rules.builder import NEED_REPLICATION, RuleBuilder, result_shape, shape_of
from sdy_jax.rules.registry import rule


@rule("stablehlo.cholesky")
def cholesky(op: Op, conservative: bool) -> OpShardingRule:
    shape = result_shape(op)
    return RuleBuilder.of(op).pointwise(shape, (len(shape) - 2, len(shape) - 1), NEED_REPLICATION).build()


@rule("stablehlo.triangular_solve")
def triangular_solve(op: Op, conservative: bool) -> OpShardingRule:
    """Solves `a x = b`, or `x a = b` where `left_side` is false.

    Of a's two matrix dimensions one is contracted with x; the other one lies along b.
    """
    a, b = shape_of(op, 0), shape_of(op, 1)
    row, column = len(a) - 2, len(a) - 1
    left = op.flag("left_side")
    kept, contracted = (row, column) if left else (column, row)
    if op.text("transpose_a") in ("TRANSPOSE", "ADJOINT"):
        kept, contracted = contracted, kept
    solved, free = (row, column) if left else (column, row)  # of b and x

    builder = RuleBuilder.of(op).pointwise(a[:-2])
    along_a = ((kept, solved), (None,), a[kept])
    along_b = ((None, free), (free,), b[free])
    for operands, results, size in (along_a, along_b) if left else (along_b, along_a):
        builder.add(operands, results, size, NEED_REPLICATION)
    builder.add((contracted, None), (solved,), a[contracted], NEED_REPLICATION)
    return builder.build()
