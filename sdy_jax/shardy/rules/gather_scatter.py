"""Rules of gather and scatter, which are one rule seen from two sides.

Both move *slices* between an *input* and a tensor of slices, at places given by *indices*: the input is a gather's
operand or a scatter's inputs and results, the slices are a gather's result or a scatter's updates.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.ir.rules import FactorType, OpShardingRule
from sdy_jax.shardy.rules.op_attributes import Dims, gather_dimension_numbers, scatter_dimension_numbers
from sdy_jax.shardy.rules.registry import (
    NEED_REPLICATION,
    PASS_THROUGH,
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
