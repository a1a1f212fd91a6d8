"""Integer tensors that count along one of their dimensions, found by looking at how they are computed.

Index tensors carry positions that the program knows already: `jnp.arange(8)[:, None]` in `x[jnp.arange(8)[:, None], i]`
passes through a broadcast, the arithmetic that moves negative indices to the end, and a concatenation before a gather
reads it. It still counts from 0 to 7.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op, Value

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


def _along(part: _Part, dim: int, start: int = 0) -> Ramp:
    """A count along a dimension of the result, of which only a part may be wanted."""
    if part.at is not None and part.at.dim == dim:
        return Ramp(start + part.at.index)
    return Ramp(start, dim if part.shape[dim] > 1 else None)


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
    "stablehlo.iota": lambda part: _along(part, part.op.int("iota_dimension")),
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
