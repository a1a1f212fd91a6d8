"""Batching dimensions of gathers and scatters made explicit, where parts of the indices count along a dimension."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.operations import has_users, named
from sdy_jax.shardy.propagation.worklist import is_removable
from sdy_jax.shardy.rules import Compat
from sdy_jax.shardy.rules.op_attributes import Dims, gather_dimension_numbers, scatter_dimension_numbers

# Integer tensors that count along one of their dimensions, found by looking at how they are computed.
#
# Index tensors carry positions that the program knows already: `jnp.arange(8)[:, None]` in `x[jnp.arange(8)[:, None],
# i]` passes through a broadcast, the arithmetic that moves negative indices to the end, and a concatenation before a
# gather reads it. It still counts from 0 to 7.

_DEPTH = 32
"""How many ops deep is looked. Guessed, a guard: jax's arithmetic on an index takes about ten."""
_INTEGER = re.compile(r"(u?)i(\d+)")


@dataclass(frozen=True, slots=True)
class Ramp:
    """Elements that are `start` plus their position along `dim`; without a `dim`, all are `start`."""

    start: int
    dim: int | None = None


@dataclass(frozen=True, slots=True)
class At:
    """The part of a tensor that has this index along this dimension."""

    dim: int
    index: int


class Ramps:
    """Finds ramps, and remembers what it found: the ops that it looked at must not change meanwhile."""

    def __init__(self) -> None:
        self._known: dict[tuple[Value, At | None], Ramp | None] = {}

    def of(self, value: Value, at: At | None = None, depth: int = 0) -> Ramp | None:
        """The ramp that a tensor, or its part `at`, is; None: it is none, or nobody knows."""
        key = (value, at)
        if key not in self._known:
            self._known[key] = self._found(value, at, depth)
        return self._known[key]

    def _found(self, value: Value, at: At | None, depth: int) -> Ramp | None:
        op = value.defining_op
        if op is None or depth > _DEPTH or op.name not in _OPS or not _INTEGER.fullmatch(value.dtype):
            return None
        found = _OPS[op.name](_Part(self, op, at, depth))
        return found if found is not None and _fits(found, value) else None


def _fits(ramp: Ramp, value: Value) -> bool:
    """Whether no number of a ramp is too large for its tensor's type, which would wrap around."""
    match = _INTEGER.fullmatch(value.dtype)
    assert match is not None
    bits, is_signed = int(match[2]), not match[1] and match[2] != "1"
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if is_signed else (0, 2**bits)
    return low <= ramp.start and _last(ramp, value) < high


def _last(ramp: Ramp, value: Value) -> int:
    assert value.shape is not None
    return ramp.start + (0 if ramp.dim is None else value.shape[ramp.dim] - 1)


@dataclass(frozen=True, slots=True)
class _Part:
    """The part `at` of an op's result, with what is known of the op's operands."""

    ramps: Ramps
    op: Op
    at: At | None
    depth: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.op.results[0].shape or ()

    def operand(self, index: int, at: At | None) -> Ramp | None:
        return self.ramps.of(self.op.operands[index], at, self.depth + 1)

    def alike(self, index: int) -> Ramp | None:
        """An operand of the result's shape, or a scalar."""
        return self.operand(index, self.at if self.op.operands[index].rank else None)

    def moved(self, dims: dict[int, int]) -> Ramp | None:
        """The first operand, whose dimension d is the result's `dims[d]`; one that is not in `dims` is not followed."""
        inner = next((d for d, outer in dims.items() if self.at and outer == self.at.dim), None)
        at = None if inner is None or self.at is None else At(inner, self.at.index)
        ramp = self.operand(0, at)
        if ramp is None or ramp.dim is None:
            return ramp
        return Ramp(ramp.start, dims[ramp.dim]) if ramp.dim in dims else None


def _ramp_along(part: _Part, dim: int) -> Ramp:
    """A count along a dimension of the result, of which only a part may be wanted."""
    if part.at is not None and part.at.dim == dim:
        return Ramp(part.at.index)
    return Ramp(0, dim if part.shape[dim] > 1 else None)


def _constant(part: _Part) -> Ramp | None:
    attribute = part.op.attributes.get("value")
    if not isinstance(attribute, ir.DenseElementsAttr):
        return None
    if attribute.is_splat:
        return Ramp(int(attribute.get_splat_value().value))
    return _ramp_of(np.array(attribute).astype(np.int64), part.at)


def _ramp_of(numbers: np.ndarray, at: At | None) -> Ramp | None:
    if at is not None:
        numbers = np.take(numbers, [at.index], axis=at.dim)
    if not numbers.size:
        return None
    start = numbers.flat[0]
    candidates = [None, *(d for d, size in enumerate(numbers.shape) if size > 1)]
    return next((Ramp(int(start), d) for d in candidates if _counts_along(numbers - start, d)), None)


def _counts_along(numbers: np.ndarray, dim: int | None) -> bool:
    if dim is None:
        return not numbers.any()
    sizes = [size if d == dim else 1 for d, size in enumerate(numbers.shape)]
    return bool((numbers == np.arange(numbers.shape[dim]).reshape(sizes)).all())


def _broadcast(part: _Part) -> Ramp | None:
    inner = part.op.operands[0].shape or ()
    dims = part.op.ints("broadcast_dimensions")
    return part.moved({d: outer for d, outer in enumerate(dims) if inner[d] > 1})


def _reshape(part: _Part) -> Ramp | None:
    """A dimension stays what it is if it has as many elements, and as many before it, as before."""
    inner, outer, at = part.op.operands[0].shape or (), part.shape, part.at
    places = {(math.prod(outer[:d]), size): d for d, size in enumerate(outer) if size > 1}
    keys = {d: (math.prod(inner[:d]), size) for d, size in enumerate(inner)}
    dims = {d: places[key] for d, key in keys.items() if key in places}
    if at is not None and outer[at.dim] > 1 and at.dim not in dims.values():
        return None
    return part.moved(dims)


def _add(part: _Part) -> Ramp | None:
    a, b = part.alike(0), part.alike(1)
    if a is None or b is None or (a.dim is not None and b.dim is not None):
        return None
    return Ramp(a.start + b.start, b.dim if a.dim is None else a.dim)


def _subtract(part: _Part) -> Ramp | None:
    a, b = part.alike(0), part.alike(1)
    return None if a is None or b is None or b.dim is not None else Ramp(a.start - b.start, a.dim)


def _compare(part: _Part) -> Ramp | None:
    """True or false where it is the same for all elements."""
    a, b = part.alike(0), part.alike(1)
    direction = part.op.text("comparison_direction")
    if a is None or b is None or direction not in ("LT", "LE", "GT", "GE"):
        return None
    x, y = part.op.operands
    low, high = a.start - _last(b, y), _last(a, x) - b.start  # of the differences
    if direction in ("GT", "GE"):
        low, high = -high, -low
    limit = 0 if direction in ("LT", "GT") else 1
    if high < limit:
        return Ramp(1)
    return Ramp(0) if low >= limit else None


def _select(part: _Part) -> Ramp | None:
    condition = part.alike(0)
    return None if condition is None or condition.dim is not None else part.alike(1 if condition.start else 2)


def _clamp(part: _Part) -> Ramp | None:
    low, x, high = (part.alike(i) for i in range(3))
    if low is None or x is None or high is None:
        return None
    is_inside = _last(low, part.op.operands[0]) <= x.start and _last(x, part.op.operands[1]) <= high.start
    return x if is_inside else None


def _minimum(part: _Part) -> Ramp | None:
    return _lower(part, 0, 1) or _lower(part, 1, 0)


def _maximum(part: _Part) -> Ramp | None:
    if _lower(part, 0, 1):
        return part.alike(1)
    return part.alike(0) if _lower(part, 1, 0) else None


def _lower(part: _Part, one: int, other: int) -> Ramp | None:
    """Operand `one`, if no element of it is above any of the other."""
    a, b = part.alike(one), part.alike(other)
    return a if a is not None and b is not None and _last(a, part.op.operands[one]) <= b.start else None


def _concatenate(part: _Part) -> Ramp | None:
    dim, at = part.op.int("dimension"), part.at
    if at is None or at.dim != dim:
        return None
    before = 0
    for index, operand in enumerate(part.op.operands):
        size = (operand.shape or ())[dim]
        if at.index < before + size:
            return part.operand(index, At(dim, at.index - before))
        before += size
    return None


def _slice(part: _Part) -> Ramp | None:
    starts, strides, at = part.op.ints("start_indices"), part.op.ints("strides"), part.at
    inner = at and At(at.dim, starts[at.dim] + at.index * strides[at.dim])
    ramp = part.operand(0, inner)
    if ramp is None or ramp.dim is None:
        return ramp
    start = ramp.start + starts[ramp.dim]
    if part.shape[ramp.dim] == 1:
        return Ramp(start)
    return Ramp(start, ramp.dim) if strides[ramp.dim] == 1 else None


_OPS: dict[str, Callable[[_Part], Ramp | None]] = {
    "stablehlo.iota": lambda part: _ramp_along(part, part.op.int("iota_dimension")),
    "stablehlo.constant": _constant,
    "sdy.constant": _constant,
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.reshape": _reshape,
    "stablehlo.transpose": lambda part: part.moved({d: outer for outer, d in enumerate(part.op.ints("permutation"))}),
    "stablehlo.convert": lambda part: part.alike(0),
    "stablehlo.add": _add,
    "stablehlo.subtract": _subtract,
    "stablehlo.compare": _compare,
    "stablehlo.select": _select,
    "stablehlo.minimum": _minimum,
    "stablehlo.maximum": _maximum,
    "stablehlo.clamp": _clamp,
    "stablehlo.concatenate": _concatenate,
    "stablehlo.slice": _slice,
}


# Batching dimensions of gathers and scatters that hide in iota parts of the indices become explicit.
#
# Where an element of the index vectors counts along a dimension of the indices, as `jnp.arange(8)[:, None]` does in
# `x[jnp.arange(8)[:, None], i]`, the input is read or written batch by batch. That is a batching dimension, along
# which input, indices and result can be split alike; hidden in the indices, it makes the whole input be gathered.

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
        along = _counted_dim(indexing, ramps, element)
        if along is None or along in (*indexing.indices_batching, *found.values()) or dim not in indexing.single:
            continue
        if (indexing.indices.shape or ())[along] == indexing.inputs[dim]:
            found[element] = along
    return found


def _counted_dim(indexing: _BatchedIndexing, ramps: Ramps, element: int) -> int | None:
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
