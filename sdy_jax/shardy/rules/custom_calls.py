"""Rules of custom calls, by target, and of StableHLO's collectives in programs that are written per device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

from sdy_jax.ir.custom_ops import AFTER, CALLBACK, CALLBACK_ON_BLOCKS, INSPECTED, RAGGED, ROUNDED, WORK
from sdy_jax.ir.graph import Op
from sdy_jax.ir.shardings import FactorType, OpShardingRule
from sdy_jax.shardy.rules.linalg import householder_product, library_call, qr, with_batch
from sdy_jax.shardy.rules.registry import (
    NEED_REPLICATION,
    PASS_THROUGH,
    Linear,
    RuleBuilder,
    passes_unreduced,
    result_shape,
    rule,
    shape_of,
)
from sdy_jax.shardy.rules.slicing import PIECES, ROLL, changed_sizes_blocked, pieces, roll

# Rules of custom calls, by target.


def _elementwise(op: Op) -> OpShardingRule:
    return RuleBuilder.of(op).pointwise(result_shape(op)).build()


def _combine_words(op: Op) -> OpShardingRule:
    """Joins two words into a wider one; as the state of a random bit generator it stays whole."""
    if not any(user.name == "stablehlo.rng_bit_generator" for user, _ in op.results[0].uses):
        return _elementwise(op)
    builder = RuleBuilder.of(op)
    builder.add_all(0, result_shape(op)[0], NEED_REPLICATION, blocked=True)
    return builder.build()


def _eigh(op: Op) -> OpShardingRule:
    """A batch of symmetric matrices to their eigenvectors and eigenvalues."""
    builder, row, column, shape = with_batch(op)
    builder.add((row,), (row, None), shape[row])
    builder.add((column,), (column, row), shape[column])
    return builder.build()


def _partial_reduce(op: Op) -> OpShardingRule:
    """Values and indices with two scalar initial values, reduced along some dimension to fewer of both."""
    operand, result, builder = shape_of(op), result_shape(op), RuleBuilder.of(op)
    for dim, size in enumerate(operand):
        if size == result[dim]:
            builder.add_all(dim, size)
            continue
        builder.add((dim, dim, None, None), (None, None), size)
        builder.add_results(dim, result[dim], NEED_REPLICATION, blocked=True)
    return builder.build()


def _apart(op: Op, kind: FactorType) -> OpShardingRule:
    """A factor of its own for each dimension of operands and results, whatever their number."""
    shapes = [[v.shape or () for v in values] for values in (op.operands, op.results)]
    sizes = tuple(size for side in shapes for shape in side for size in shape)
    factors = count()
    operands, results = (tuple(tuple((next(factors),) for _ in shape) for shape in side) for side in shapes)
    whole = frozenset(range(len(sizes)) if kind is NEED_REPLICATION else ())
    return OpShardingRule(sizes, operands, results, need_replication=whole)


OF_XLA_PARTITIONER = (
    "_SPMDInternalOp_MultiPad",
    "_SPMDInternalOp_RotateRight",
    "_SPMDInternalOp_MultiRotate",
    "_SPMDInternalOp_MultiSlice",
    "_SPMDInternalOp_Wrap",
)
"""Targets that XLA's partitioner expands. Shardy propagates along their dimensions, although elements change places."""

ELEMENTWISE_TARGETS = (
    "annotate_device_placement",
    "Cholesky",
    "CompactWyHelper",
    "InspectSharding",
    "InvertDiagBlocksLowerTriangular",
    "InvertDiagBlocksUpperTriangular",
    "LayoutConstraint",
    "mhlo.erf",
    "MoveToDevice",
    "MoveToHost",
    "X64SplitHigh",
    "X64SplitLow",
    "xla.megascale.provide_metadata",
    *OF_XLA_PARTITIONER,
)

STATED_FOR_GSPMD = "Sharding"
"""The target of calls that compute nothing: `mhlo.sharding` says how a value is sharded by XLA's former partitioner."""

TARGETS: dict[str, Callable[[Op], OpShardingRule]] = {
    **dict.fromkeys(ELEMENTWISE_TARGETS, _elementwise),
    "X64Combine": _combine_words,
    "Eigh": _eigh,
    "Qr": qr,
    "QrDecompositionBlock": qr,
    "ProductOfElementaryHouseholderReflectors": householder_product,
    CALLBACK: partial(_apart, kind=NEED_REPLICATION),
    CALLBACK_ON_BLOCKS: partial(_apart, kind=PASS_THROUGH),
    INSPECTED: partial(_apart, kind=PASS_THROUGH),
    AFTER: _elementwise,
    ROUNDED: _elementwise,
    PIECES: pieces,
    ROLL: roll,
    "mhlo.topk": changed_sizes_blocked,
    "ApproxTopK": _partial_reduce,
    "PartialReduce": _partial_reduce,
}


def ragged_exchange(op: Op) -> OpShardingRule:
    """Rows of operand 0 take the places of rows of operand 1, by numbers in the others; what a row holds is moved as it
    is."""
    operand, result, builder = shape_of(op), result_shape(op), RuleBuilder.of(op)
    numbers = len(op.operands) - 2
    builder.add((0, None, *[None] * numbers), (None,), operand[0], NEED_REPLICATION)
    builder.add((None, 0, *[None] * numbers), (0,), result[0], NEED_REPLICATION)
    for dim in range(1, len(result)):
        builder.add((dim, dim, *[None] * numbers), (dim,), result[dim])
    for index in range(numbers):
        places = [0 if number == index else None for number in range(numbers)]
        builder.add((None, None, *places), (None,), shape_of(op, 2 + index)[0], NEED_REPLICATION)
    return builder.build()


@rule("stablehlo.custom_call", reads_neighbours=True)
def custom_call(op: Op, conservative: bool) -> OpShardingRule | None:
    """By target; unknown targets have no rule unless the op carries its own."""
    by_target = TARGETS.get(op.text("call_target_name"))
    return by_target(op) if by_target else None


@rule("stablehlo.custom_call", reads_neighbours=True, beyond=True)
def custom_call_of_libraries(op: Op, conservative: bool) -> OpShardingRule | None:
    """By target, too: the functions of linear algebra libraries, for which Shardy has no rules, exchanges of rows,
    statements for GSPMD, and kernels that state their work and no rule, which are whole on every device."""
    if op.key == RAGGED:
        return ragged_exchange(op)
    if op.text("call_target_name") == STATED_FOR_GSPMD:
        return _elementwise(op)
    is_whole = op.attribute(WORK) is not None and op.attribute("sdy.sharding_rule") is None
    return custom_call(op, conservative) or library_call(op) or (_apart(op, NEED_REPLICATION) if is_whole else None)


passes_unreduced(ROUNDED, {"sum": Linear.DATA})


# Rules of StableHLO's collectives, as they occur in programs written per device.
#
# A dimension that a collective gathers or scatters has different sizes before and after, which have nothing in
# common.


@rule(
    "stablehlo.all_reduce",
    "stablehlo.collective_broadcast",
    "stablehlo.collective_permute",
    "stablehlo.cross-replica-sum",
)
def keeps_shape(op: Op, conservative: bool) -> OpShardingRule:
    """One factor per dimension of the result."""
    return RuleBuilder.of(op).pointwise(result_shape(op)).build()


@rule("stablehlo.all_gather")
def all_gather(op: Op, conservative: bool) -> OpShardingRule:
    return exchanging(op, op.int("all_gather_dim"))


@rule("stablehlo.reduce_scatter")
def reduce_scatter(op: Op, conservative: bool) -> OpShardingRule:
    return exchanging(op, op.int("scatter_dimension"))


@rule("stablehlo.all_to_all")
def all_to_all(op: Op, conservative: bool) -> OpShardingRule:
    return exchanging(op, op.int("split_dimension"), op.int("concat_dimension"))


def exchanging(op: Op, *exchanged: int) -> OpShardingRule:
    """One factor per dimension, but for those that are gathered or scattered."""
    operand, result, builder = shape_of(op), result_shape(op), RuleBuilder.of(op)
    for dim, size in enumerate(operand):
        if dim not in exchanged:
            builder.add_all(dim, size)
    for dim in dict.fromkeys(exchanged):
        builder.add_operands(dim, operand[dim], NEED_REPLICATION)
        builder.add_results(dim, result[dim], NEED_REPLICATION)
    return builder.build()
