"""Rules of ops that take, put, join or turn around intervals of dimensions, or elements by their indices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.ir.shardings import FactorType, OpShardingRule
from sdy_jax.shardy.rules.op_attributes import Dims, gather_dimension_numbers, scatter_dimension_numbers
from sdy_jax.shardy.rules.registry import (
    NEED_REPLICATION,
    PASS_THROUGH,
    PERMUTATION,
    REDUCTION,
    Dim,
    Linear,
    RuleBuilder,
    Shape,
    passes_unreduced,
    result_shape,
    rule,
    shape_of,
)

# Rules of ops that take, put, join or turn around intervals of dimensions.

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
    return _resized(op, PERMUTATION, conservative)


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
    return _resized(op, NEED_REPLICATION, True)


def _resized(op: Op, changed: FactorType, blocked: bool) -> OpShardingRule:
    """Dimensions that keep their size pass through; the factors of others are of a type."""
    result, builder = result_shape(op), RuleBuilder.of(op)
    for dim, size in enumerate(shape_of(op)):
        if size == result[dim]:
            builder.add_all(dim, size)
        else:
            builder.add_all(dim, size, changed, blocked=blocked)
    return builder.build()


passes_unreduced("stablehlo.slice", {"*": Linear.DATA})
passes_unreduced("stablehlo.reverse", {"*": Linear.DATA})
passes_unreduced("stablehlo.dynamic_slice", {"*": Linear.DATA})
passes_unreduced(ROLL, {"*": Linear.DATA})
passes_unreduced("stablehlo.concatenate", {"*": Linear.EVERY})
passes_unreduced("stablehlo.pad", {"sum": Linear.SUMMANDS})
passes_unreduced(PIECES, {"sum": Linear.SUMMANDS})
passes_unreduced("stablehlo.dynamic_update_slice", {"sum": Linear.UPDATED})


# Rules of gather and scatter, which are one rule seen from two sides.
#
# Both move *slices* between an *input* and a tensor of slices, at places given by *indices*: the input is a gather's
# operand or a scatter's inputs and results, the slices are a gather's result or a scatter's updates.

_REDUCERS = frozenset(f"stablehlo.{name}" for name in ("add", "multiply", "maximum", "minimum"))
_BOOLEAN_REDUCERS = frozenset({"stablehlo.and", "stablehlo.or"})


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Dimension numbers under the names that gather and scatter share, and the kind of an index batch dimension.

    `batch_kind` holds for the dimensions of the indices that are not paired with one of the input.
    """

    offset: Dims
    collapsed: Dims
    input_batching: Dims
    indices_batching: Dims
    index_vector: int
    batch_kind: FactorType


@rule("stablehlo.gather")
def gather(op: Op, conservative: bool) -> OpShardingRule:
    numbers = gather_dimension_numbers(op)
    common = _Numbers(
        numbers.offset_dims,
        numbers.collapsed_slice_dims,
        numbers.operand_batching_dims,
        numbers.start_indices_batching_dims,
        numbers.index_vector_dim,
        PASS_THROUGH,
    )
    return _Gather(op, common, shape_of(op, 0), shape_of(op, 1), result_shape(op)).build()


@rule("stablehlo.scatter")
def scatter(op: Op, conservative: bool) -> OpShardingRule:
    numbers, count = scatter_dimension_numbers(op), len(op.results)
    common = _Numbers(
        numbers.update_window_dims,
        numbers.inserted_window_dims,
        numbers.input_batching_dims,
        numbers.scatter_indices_batching_dims,
        numbers.index_vector_dim,
        REDUCTION if reduces(op.blocks[0], count) else NEED_REPLICATION,
    )
    return _Scatter(op, common, shape_of(op, 0), shape_of(op, count), shape_of(op, count + 1)).build()


class _Indexing:
    """Places the factors in the order of the slices' dimensions, then the collapsed ones, then the index vector."""

    def __init__(self, op: Op, numbers: _Numbers, inputs: Shape, indices: Shape, slices: Shape):
        self.numbers, self.inputs, self.indices, self.slices = numbers, inputs, indices, slices
        self.builder, self.count = RuleBuilder.of(op), len(op.results)

    def build(self) -> OpShardingRule:
        skipped = self.numbers.collapsed + self.numbers.input_batching
        windows = iter([dim for dim in range(len(self.inputs)) if dim not in skipped])
        batches = iter([dim for dim in range(len(self.indices)) if dim != self.numbers.index_vector])
        for dim in range(len(self.slices)):
            if dim in self.numbers.offset:
                self.add_window(next(windows), dim)
            else:
                self.add_batch(next(batches), dim)
        for dim in self.numbers.collapsed:
            self.add_collapsed(dim)
        if self.numbers.index_vector < len(self.indices):
            at = self.numbers.index_vector
            self.emit(None, at, None, self.indices[at], NEED_REPLICATION)
        return self.builder.build()

    def add_window(self, inside: int, dim: int) -> None:
        """A dimension of the slices that lies along one of the input: all of it, or a part."""
        if self.inputs[inside] == self.slices[dim]:
            self.emit(inside, None, dim, self.slices[dim], PASS_THROUGH)
        else:
            self.add_partial_window(inside, dim)

    def add_batch(self, at: int, dim: int) -> None:
        """A dimension of the indices is one of the slices, and one of the input where the two are paired."""
        batching = self.numbers.indices_batching
        if at in batching:
            paired = self.numbers.input_batching[batching.index(at)]
            self.emit(paired, at, dim, self.slices[dim], PASS_THROUGH)
        else:
            self.emit(None, at, dim, self.slices[dim], self.numbers.batch_kind)

    def add_partial_window(self, inside: int, dim: int) -> None:
        raise NotImplementedError

    def add_collapsed(self, dim: int) -> None:
        raise NotImplementedError

    def emit(self, inside: Dim, at: Dim, dim: Dim, size: int, kind: FactorType, *, blocked: bool = False) -> None:
        """Places a factor on a dimension of the input, of the indices and of the slices."""
        raise NotImplementedError


class _Gather(_Indexing):
    def add_partial_window(self, inside: int, dim: int) -> None:
        """One element of a dimension is a lookup, which shards answer by a masked sum; longer parts need all of it."""
        if self.slices[dim] == 1:
            self.emit(inside, None, None, self.inputs[inside], REDUCTION)
            self.emit(None, None, dim, 1, NEED_REPLICATION)
        else:
            self.emit(inside, None, dim, self.inputs[inside], NEED_REPLICATION, blocked=True)

    def add_collapsed(self, dim: int) -> None:
        size = self.inputs[dim]
        self.emit(dim, None, None, size, NEED_REPLICATION if size == 1 else REDUCTION)

    def emit(self, inside: Dim, at: Dim, dim: Dim, size: int, kind: FactorType, *, blocked: bool = False) -> None:
        self.builder.add((inside, at), (dim,), size, kind, blocked=blocked)


class _Scatter(_Indexing):
    def add_partial_window(self, inside: int, dim: int) -> None:
        self.emit(inside, None, None, self.inputs[inside], NEED_REPLICATION)
        self.emit(None, None, dim, self.slices[dim], NEED_REPLICATION)

    def add_collapsed(self, dim: int) -> None:
        self.emit(dim, None, None, self.inputs[dim], PASS_THROUGH)

    def emit(self, inside: Dim, at: Dim, dim: Dim, size: int, kind: FactorType, *, blocked: bool = False) -> None:
        inputs, updates = (inside,) * self.count, (dim,) * self.count
        self.builder.add((*inputs, at, *updates), inputs, size, kind, blocked=blocked)


def reduces(body: Block, count: int) -> bool:
    """Whether each of `count` results combines its old and its new value by the same associative op.

    The body has the old values, then the new ones, as arguments: argument n is combined with argument n + count.
    """
    returned = body.terminator.operands
    combiners = {_combiner(value, body.arguments[n], body.arguments[n + count]) for n, value in enumerate(returned)}
    return len(combiners) == 1 and None not in combiners


def _combiner(value: Value, old: Value, new: Value) -> str | None:
    op = value.defining_op
    if op is None or op.operands not in ([old, new], [new, old]):
        return None
    known = op.name in _REDUCERS or (op.name in _BOOLEAN_REDUCERS and value.dtype == "i1")
    return op.name if known else None


passes_unreduced("stablehlo.gather", {"*": Linear.DATA})
