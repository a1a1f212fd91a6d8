"""Batching dimensions of gathers and scatters that hide in iota parts of the indices become explicit.

Where an element of the index vectors counts along a dimension of the indices, as `jnp.arange(8)[:, None]` does in
`x[jnp.arange(8)[:, None], i]`, the input is read or written batch by batch. That is a batching dimension, along which
input, indices and result can be split alike; hidden in the indices, it makes the whole input be gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.operations import has_users, named
from sdy_jax.op_rules import Compat
from sdy_jax.op_rules.op_attributes import Dims, gather_dimension_numbers, scatter_dimension_numbers
from sdy_jax.passes.ramps import At, Ramps
from sdy_jax.propagation.liveness import is_removable

_GATHER, _SCATTER, _CONCATENATE = "stablehlo.gather", "stablehlo.scatter", "stablehlo.concatenate"
INDEXING = (_GATHER, _SCATTER)
_RULE = "sdy.sharding_rule"
"""On ops whose dimensions the user numbered: they stay as they are."""


def make_batching_explicit(module: ir.Operation, *, compat: Compat = "shardy") -> None:
    """Turns elements of index vectors that count along a dimension of the indices into batching dimensions.

    One element is left in any case, as an index vector is never empty.

    Args:
      module: a `builtin.module`, edited in place.
      compat: with Shardy's, only dimension 0 of an input along dimension 0 of its indices, where there is no other
        batching dimension and the count is an iota, broadcast or reshaped, and perhaps concatenated with the rest; with
        `"sdy_jax"`, any.
    """
    if not any(map(_has_elements, named(module, *INDEXING))):
        return
    ramps, ops = Ramps(), Graph(module).ops
    replaced: list[Op] = []
    for op in ops:
        if op.name not in INDEXING or _RULE in op.attributes:
            continue
        indexing = _BatchedIndexing.of(op)
        found = _leading(indexing) if compat != "sdy_jax" else _counted(indexing, ramps)
        if found:
            _change(indexing, found)
            replaced += [producer] if (producer := indexing.indices.defining_op) is not None else []
    _erase_unused(ops, replaced)


def _has_elements(op: ir.Operation) -> bool:
    """Whether the index vectors of a gather or scatter have several elements."""
    if op.name == _GATHER:
        return len(stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"]).start_index_map) > 1
    numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    return len(numbers.scattered_dims_to_operand_dims) > 1


@dataclass(frozen=True, slots=True)
class _BatchedIndexing:
    """A gather or scatter under common names: `indexed[k]` is the input's dimension that element k of a vector is for.

    `single` are the input's dimensions of which one element is taken and which the slices do not have.
    """

    op: Op
    indices: Value
    inputs: tuple[int, ...]
    vector_dim: int
    single: Dims
    indexed: Dims
    input_batching: Dims
    indices_batching: Dims

    @classmethod
    def of(cls, op: Op) -> _BatchedIndexing:
        position = len(op.results) if op.name == _SCATTER else 1
        shape = op.operands[0].shape or ()
        if op.name == _GATHER:
            g = gather_dimension_numbers(op)
            sizes = op.ints("slice_sizes")
            single = tuple(d for d in g.collapsed_slice_dims if sizes[d] == 1)
            pairs = g.operand_batching_dims, g.start_indices_batching_dims
            return cls(op, op.operands[position], shape, g.index_vector_dim, single, g.start_index_map, *pairs)
        s = scatter_dimension_numbers(op)
        pairs = s.input_batching_dims, s.scatter_indices_batching_dims
        indexed = s.scatter_dims_to_operand_dims
        return cls(op, op.operands[position], shape, s.index_vector_dim, s.inserted_window_dims, indexed, *pairs)


Counted = dict[int, int]
"""By element of the index vectors: the dimension of the indices along which it counts."""


def _counted(indexing: _BatchedIndexing, ramps: Ramps) -> Counted:
    found: Counted = {}
    for element, dim in enumerate(indexing.indexed):
        if len(found) == len(indexing.indexed) - 1:
            break
        along = _along(indexing, ramps, element)
        if along is None or along in (*indexing.indices_batching, *found.values()) or dim not in indexing.single:
            continue
        if (indexing.indices.shape or ())[along] == indexing.inputs[dim]:
            found[element] = along
    return found


def _along(indexing: _BatchedIndexing, ramps: Ramps, element: int) -> int | None:
    """The dimension of the indices along which an element of the vectors counts from 0."""
    is_implicit = indexing.vector_dim == indexing.indices.rank
    ramp = ramps.of(indexing.indices, None if is_implicit else At(indexing.vector_dim, element))
    return ramp.dim if ramp is not None and ramp.start == 0 else None


def _leading(indexing: _BatchedIndexing) -> Counted:
    """What Shardy sees: dimension 0 of the input along dimension 0 of the indices."""
    shape = indexing.indices.shape or ()
    if indexing.input_batching or 0 not in indexing.single or 0 not in indexing.indexed or len(indexing.indexed) < 2:
        return {}
    element = indexing.indexed.index(0)
    is_counted = indexing.vector_dim > 0 and shape[0] == indexing.inputs[0] and _counts_at_first(indexing, element)
    return {element: 0} if is_counted else {}


def _counts_at_first(indexing: _BatchedIndexing, element: int) -> bool:
    value: Value | None = [piece for piece, size in _pieces(indexing) for _ in range(size)][element]
    while value is not None and (op := value.defining_op) is not None:
        if op.name == "stablehlo.iota":
            return op.int("iota_dimension") == 0
        stays = op.name == "stablehlo.reshape" or op.ints("broadcast_dimensions")[:1] == (0,)
        inner = op.operands[0] if stays else None
        value = inner if inner and inner.shape and value.shape and inner.shape[0] == value.shape[0] else None
    return False


def _pieces(indexing: _BatchedIndexing) -> list[tuple[Value, int]]:
    """What the index vectors are concatenated of, each with the number of its elements."""
    op = indexing.indices.defining_op
    is_joined = op is not None and op.name == _CONCATENATE and op.int("dimension") == indexing.vector_dim
    values = op.operands if op is not None and is_joined else [indexing.indices]
    return [(value, (value.shape or ())[indexing.vector_dim]) for value in values]


# The change.


def _change(indexing: _BatchedIndexing, counted: Counted) -> None:
    """Edits an op: the counted elements leave the index vectors and become batching dimensions."""
    op = indexing.op
    pairs = dict(zip(indexing.input_batching, indexing.indices_batching, strict=True))
    pairs |= {indexing.indexed[element]: along for element, along in counted.items()}
    kept = [e for e in range(len(indexing.indexed)) if e not in counted]
    position = next(i for i, operand in enumerate(op.operands) if operand is indexing.indices)
    op.mlir.operands[position] = _without(indexing, kept)
    _set_numbers(op, dict(sorted(pairs.items())), tuple(indexing.indexed[e] for e in kept))


def _set_numbers(op: Op, batching: dict[int, int], indexed: Dims) -> None:
    pairs = {"context": op.mlir.context}
    inputs, indices = list(batching), list(batching.values())
    if op.name == _GATHER:
        g = gather_dimension_numbers(op)
        collapsed = [d for d in g.collapsed_slice_dims if d not in batching]
        op.mlir.attributes["dimension_numbers"] = stablehlo.GatherDimensionNumbers.get(
            list(g.offset_dims), collapsed, inputs, indices, list(indexed), g.index_vector_dim, **pairs
        )
        return
    s = scatter_dimension_numbers(op)
    inserted = [d for d in s.inserted_window_dims if d not in batching]
    op.mlir.attributes["scatter_dimension_numbers"] = stablehlo.ScatterDimensionNumbers.get(
        list(s.update_window_dims), inserted, inputs, indices, list(indexed), s.index_vector_dim, **pairs
    )


def _without(indexing: _BatchedIndexing, kept: Sequence[int]) -> ir.Value:
    """The indices with these elements of their vectors: pieces of a concatenation, or slices side by side."""
    pieces = _pieces(indexing)
    if all(size == 1 for _, size in pieces):
        return _joined(indexing, [pieces[e][0].mlir for e in kept])
    runs = [[e for _, e in run] for _, run in groupby(enumerate(kept), key=lambda pair: pair[1] - pair[0])]
    return _joined(indexing, [_sliced(indexing, run[0], run[-1] + 1) for run in runs])


def _joined(indexing: _BatchedIndexing, values: Sequence[ir.Value]) -> ir.Value:
    if len(values) == 1:
        return values[0]
    dim = indexing.vector_dim
    size = sum(value.type.shape[dim] for value in values)
    attributes = {"dimension": ir.IntegerAttr.get(ir.IntegerType.get_signless(64, indexing.op.mlir.context), dim)}
    return _created(indexing, _CONCATENATE, values, size, attributes)


def _sliced(indexing: _BatchedIndexing, start: int, stop: int) -> ir.Value:
    shape, dim, context = indexing.indices.shape or (), indexing.vector_dim, indexing.op.mlir.context
    starts = [start if d == dim else 0 for d in range(len(shape))]
    stops = [stop if d == dim else size for d, size in enumerate(shape)]
    attributes = {
        name: ir.DenseI64ArrayAttr.get(numbers, context)
        for name, numbers in (("start_indices", starts), ("limit_indices", stops), ("strides", [1] * len(shape)))
    }
    return _created(indexing, "stablehlo.slice", [indexing.indices.mlir], stop - start, attributes)


def _created(
    indexing: _BatchedIndexing, name: str, operands: Sequence[ir.Value], size: int, attributes: dict[str, ir.Attribute]
) -> ir.Value:
    """The result of a new op before the gather or scatter: index vectors with `size` elements."""
    op = indexing.op.mlir
    shape = list(indexing.indices.shape or ())
    shape[indexing.vector_dim] = size
    type_ = ir.RankedTensorType.get(shape, operands[0].type.element_type, loc=op.location)
    new = ir.Operation.create(
        name, results=[type_], operands=list(operands), attributes=attributes, loc=op.location, ip=ir.InsertionPoint(op)
    )
    return new.results[0]


def _erase_unused(ops: Sequence[Op], starts: Sequence[Op]) -> None:
    """Erases those of `starts` that nobody reads any more, and what was only computed for them.

    Users come after what they use in `ops`, so that going backwards every op is reached when its users are gone.
    """
    numbers = {op: number for number, op in enumerate(ops)}
    waiting = {numbers[op] for op in starts}
    while waiting:
        op = ops[max(waiting)]
        waiting.remove(numbers[op])
        if not is_removable(op) or has_users(op.mlir):
            continue
        waiting |= {numbers[producer] for v in op.operands if (producer := v.defining_op) is not None}
        op.mlir.erase()
