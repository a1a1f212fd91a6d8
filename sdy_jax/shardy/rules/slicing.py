"""Rules of ops that take, put, join or turn around intervals of dimensions."""

from __future__ import annotations

from collections.abc import Iterable

from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.rules import FactorType, OpShardingRule
from sdy_jax.shardy.rules.registry import (
    NEED_REPLICATION,
    PASS_THROUGH,
    PERMUTATION,
    Linear,
    RuleBuilder,
    Shape,
    passes_unreduced,
    result_shape,
    rule,
    shape_of,
)

PIECES = "sdy_jax.pieces"
"""The target of custom calls that make pieces of operands along one dimension; `lowering/ops/slicing.py`."""
ROLL = "sdy_jax.roll"
"""The target of custom calls that rotate a dimension by a scalar operand; `lowering/ops/dynamic_slicing.py`."""

PADDINGS = ("edge_padding_low", "edge_padding_high", "interior_padding")
"""The attributes of a pad, each with a number per dimension."""

CONSTANT_OPS = frozenset({"stablehlo.constant", "sdy.constant", "chlo.constant", "arith.constant"})


@rule("stablehlo.slice", "stablehlo.pad")
def slice_or_pad(op: Op, conservative: bool) -> OpShardingRule:
    """Where the size changes, elements move between shards. The padding value is a scalar and stays out."""
    result, builder = result_shape(op), RuleBuilder.of(op)
    for dim, size in enumerate(shape_of(op)):
        if size == result[dim]:
            builder.add_all(dim, size)
        else:
            builder.add_all(dim, size, PERMUTATION, blocked=conservative)
    return builder.build()


@rule("stablehlo.pad", newer=True)
def pad(op: Op, conservative: bool) -> OpShardingRule:
    """The same, but elements move also where as many are cut off as are added."""
    builder, result = RuleBuilder.of(op), result_shape(op)
    paddings = zip(*map(op.ints, PADDINGS), strict=True)
    for dim, (size, padding) in enumerate(zip(shape_of(op), paddings, strict=True)):
        kind = PERMUTATION if any(padding) else PASS_THROUGH
        builder.add_all(dim, size, kind, blocked=conservative and size != result[dim])
    return builder.build()


@rule("stablehlo.concatenate", reads_neighbours=True)
def concatenate(op: Op, conservative: bool) -> OpShardingRule:
    """Operands are parts of the result along the joined dimension; conservatively they have nothing in common."""
    builder, joined = RuleBuilder.of(op), op.int("dimension")
    for dim, size in enumerate(result_shape(op)):
        if dim != joined:
            builder.add_all(dim, size)
        elif not conservative:
            builder.add_all(dim, size, _join_kind(op.operands))
    return builder.build()


def _join_kind(operands: Iterable[Value]) -> FactorType:
    """Slices put together again are a rotation or a pad by wrapping, which moves borders only."""
    operands = list(operands)
    sliced = [_is_slice(v) for v in operands]
    sources = {_through_slice(v) for v in operands}
    return PERMUTATION if all(sliced) or (any(sliced) and len(sources) == 1) else NEED_REPLICATION


def _is_slice(value: Value) -> bool:
    op = value.defining_op
    return op is not None and op.name == "stablehlo.slice"


def _through_slice(value: Value) -> Value:
    op = value.defining_op
    return op.operands[0] if op is not None and op.name == "stablehlo.slice" else value


@rule("stablehlo.reverse")
def reverse(op: Op, conservative: bool) -> OpShardingRule:
    return RuleBuilder.of(op).pointwise(result_shape(op), op.ints("dimensions"), PERMUTATION).build()


def pieces(op: Op) -> OpShardingRule:
    """As slices and concatenations; the value that fills gaps is a scalar and stays out."""
    builder, moved, whole = RuleBuilder.of(op), op.int("dimension"), op.ints("whole")
    for dim, size in enumerate(result_shape(op)):
        if dim != moved:
            builder.add_all(dim, size)
            continue
        split = [dim if v.shape and i not in whole else None for i, v in enumerate(op.operands)]
        largest = max(v.shape[dim] for v in (*op.operands, *op.results) if v.shape)
        builder.add(split, [dim] * len(op.results), largest, PERMUTATION)
        for i in whole:
            alone = [dim if k == i else None for k in range(len(op.operands))]
            builder.add(alone, [None] * len(op.results), shape_of(op, i)[dim], NEED_REPLICATION, blocked=True)
    return builder.build()


def roll(op: Op) -> OpShardingRule:
    """As a reversal: elements of the rotated dimension change places."""
    return RuleBuilder.of(op).pointwise(result_shape(op), [op.int("dimension")], PERMUTATION).build()


@rule("stablehlo.dynamic_slice")
def dynamic_slice(op: Op, conservative: bool) -> OpShardingRule:
    """Index operands are scalars and stay out."""
    return changed_sizes_blocked(op)


@rule("stablehlo.dynamic_slice", reads_neighbours=True, beyond=True)
def dynamic_slice_or_roll(op: Op, conservative: bool) -> OpShardingRule:
    """A rotation has as much of the rotated dimension as its operand, and is split like it, as slices are."""
    rolled, result, builder = rolled_dim(op), result_shape(op), RuleBuilder.of(op)
    if rolled is None or conservative:
        return changed_sizes_blocked(op)
    for dim, size in enumerate(shape_of(op)):
        builder.add_all(dim, size, PASS_THROUGH if size == result[dim] else PERMUTATION)
    return builder.build()


def rolled_dim(op: Op) -> int | None:
    """The dimension that a dynamic slice rotates: it is as large as a value, out of this value twice in a row."""
    joined = op.operands[0].defining_op
    if joined is None or joined.name != "stablehlo.concatenate" or len(joined.operands) != 2:
        return None
    first, second = joined.operands
    return joined.int("dimension") if first is second and first.shape == op.results[0].shape else None


@rule("stablehlo.dynamic_update_slice", reads_neighbours=True)
def dynamic_update_slice(op: Op, conservative: bool) -> OpShardingRule:
    """The result has the operand's layout; so has the update where it covers a whole dimension."""
    operand, update, indices = shape_of(op, 0), shape_of(op, 1), op.operands[2:]
    kind = PASS_THROUGH if all(map(_is_constant, indices)) else NEED_REPLICATION
    builder, scalars = RuleBuilder.of(op), (None,) * len(indices)
    for dim, size in enumerate(operand):
        if update[dim] == size:
            builder.add_all(dim, size)
            continue
        builder.add((dim, None, *scalars), (dim,), size)
        builder.add((None, dim, *scalars), (None,), update[dim], kind)
    return builder.build()


@rule("stablehlo.dynamic_update_slice", newer=True)
def dynamic_update_slice_in_places(op: Op, conservative: bool) -> OpShardingRule:
    """The same, but where the update covers a part, elements of both move between shards."""
    operand, update, scalars = shape_of(op, 0), shape_of(op, 1), (None,) * (len(op.operands) - 2)
    builder = RuleBuilder.of(op)
    for dim, size in enumerate(operand):
        if update[dim] == size:
            builder.add_all(dim, size)
            continue
        builder.add((dim, None, *scalars), (dim,), size, PERMUTATION)
        builder.add((None, dim, *scalars), (None,), update[dim], PERMUTATION)
    return builder.build()


def _is_constant(value: Value) -> bool:
    op = value.defining_op
    return op is not None and op.name in CONSTANT_OPS


def changed_sizes_blocked(op: Op) -> OpShardingRule:
    """Dimensions that keep their size pass through; the others need all of the operand, and nothing propagates."""
    operand: Shape = shape_of(op)
    result, builder = result_shape(op), RuleBuilder.of(op)
    for dim, size in enumerate(operand):
        if size == result[dim]:
            builder.add_all(dim, size)
        else:
            builder.add_all(dim, size, NEED_REPLICATION, blocked=True)
    return builder.build()


passes_unreduced("stablehlo.slice", {"*": Linear.DATA})
passes_unreduced("stablehlo.reverse", {"*": Linear.DATA})
passes_unreduced("stablehlo.dynamic_slice", {"*": Linear.DATA})
passes_unreduced(ROLL, {"*": Linear.DATA})
passes_unreduced("stablehlo.concatenate", {"*": Linear.EVERY})
passes_unreduced("stablehlo.pad", {"sum": Linear.SUMMANDS})
passes_unreduced(PIECES, {"sum": Linear.SUMMANDS})
passes_unreduced("stablehlo.dynamic_update_slice", {"sum": Linear.UPDATED})
