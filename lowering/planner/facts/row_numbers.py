"""Numbers that follow from the place of a row before a sort, as those by which rows are looked up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.kernels.index_arithmetic import INTEGER_FUNCTIONS
from sdy_jax.lowering.ops.elementwise import known_scalar
from sdy_jax.lowering.ops.re_emission import numpy_dtype
from sdy_jax.shardy.rules.elementwise import ELEMENTWISE

# Of each row that is sorted, `order` says where it was, and `order // k` from which token it is. Such numbers are known
# before anything is sorted, as a function of the place: here they are evaluated for all places, in NumPy.
#
#     place        0  1  2  3 | 4  5  6  7        two devices have four rows each
#     order // 2   0  0  1  1 | 2  2  3  3        each device's rows are of two tokens, which it has as well
#     order < 0    f  f  f  f | f  f  f  f        says the same of all rows

Numbers = np.ndarray
"""Of integers or booleans: a number for each place, or one for all of them."""

MOST = 1 << 25
"""Places for which numbers are evaluated. Guessed, a guard of planning time and memory: 0.1 s an op; 4,096 devices with
as many tokens in two copies each have as many."""

_NAMES: Mapping[str, str] = {
    "abs": "abs",
    "add": "add",
    "and": "and",
    "clamp": "clamp",
    "divide": "div",
    "maximum": "max",
    "minimum": "min",
    "multiply": "mul",
    "negate": "neg",
    "not": "not",
    "or": "or",
    "remainder": "rem",
    "shift_left": "shift_left",
    "shift_right_arithmetic": "shift_right_arithmetic",
    "sign": "sign",
    "subtract": "sub",
    "xor": "xor",
}
"""Ops, without their dialect, as primitives of jax."""

_DIVIDING = frozenset(("stablehlo.divide", "stablehlo.remainder"))
_SPREAD = frozenset(("stablehlo.broadcast_in_dim", "stablehlo.reshape"))


def is_integer(value: Value) -> bool:
    """Whether a value is of integers or booleans."""
    return value.dtype.startswith(("i", "ui"))


def evaluated(op: Op, operands: Sequence[Numbers]) -> Numbers | None:
    """What an element-wise op makes of numbers; None for other ops, and for numbers that it cannot take."""
    if not all(map(is_integer, (*op.operands, *op.results))) or len(op.results) != 1:
        return None
    function = _function(op)
    if function is None or (op.name in _DIVIDING and not np.all(operands[1])):
        return None
    with np.errstate(all="ignore"):  # numbers that wrap around do so in the program as well
        return np.asarray(function(*operands)).astype(numpy_dtype(op.results[0].dtype))


def _function(op: Op) -> Callable[..., Numbers] | None:
    name = op.name.removeprefix("stablehlo.")
    if name == "compare":
        return INTEGER_FUNCTIONS[op.text("comparison_direction").lower()]
    if name == "convert":
        return (lambda numbers: numbers != 0) if op.results[0].dtype == "i1" else np.asarray
    return np.where if name == "select" else INTEGER_FUNCTIONS.get(_NAMES.get(name, ""))


class OneNumber:
    """The numbers of which arrays consist, however they are computed of constants; each is found out once."""

    def __init__(self) -> None:
        self._known: dict[Value, Numbers | None] = {}

    def of(self, value: Value) -> Numbers | None:
        """That of an array of one number; None for other arrays."""
        if value not in self._known:
            self._known[value] = self._found(value)
        return self._known[value]

    def _found(self, value: Value) -> Numbers | None:
        known, op = known_scalar(value), value.defining_op
        if known is not None or op is None or not op.operands or not is_integer(value):
            return known
        operands = [found for operand in op.operands if (found := self.of(operand)) is not None]
        if len(operands) < len(op.operands):
            return None
        return operands[0] if op.name in _SPREAD else evaluated(op, operands)


@dataclass(frozen=True)
class RowFacts:
    """What is found out of a program's values, once for all sorts."""

    one: OneNumber = field(default_factory=OneNumber)
    _alike: dict[tuple[Value, int], bool] = field(default_factory=dict)

    def are_alike(self, value: Value, dim: int) -> bool:
        """Whether all rows along a dimension are alike, as they are constants or one row again and again."""
        key = value, dim
        if key not in self._alike:
            self._alike[key] = self._found(value, dim)
        return self._alike[key]

    def _found(self, value: Value, dim: int) -> bool:
        op = value.defining_op
        if op is None or len(op.results) != 1:
            return False
        if op.name == "stablehlo.iota":
            return op.int("iota_dimension") != dim
        if op.name == "stablehlo.broadcast_in_dim":
            at = spread_along(op, dim)
            return at is None or self.are_alike(op.operands[0], at)
        if op.name in ELEMENTWISE:
            return all(not operand.rank or self.are_alike(operand, dim) for operand in op.operands)
        return is_splat(op)


def is_splat(op: Op) -> bool:
    """Whether an op is a constant of one number."""
    attribute = op.attributes.get("value") if not op.operands else None
    return isinstance(attribute, ir.DenseElementsAttr) and attribute.is_splat


def spread_along(op: Op, dim: int) -> int | None:
    """The dimension of a broadcast's operand that a dimension of its result is; None where one row is repeated."""
    dims, operand = op.ints("broadcast_dimensions"), op.operands[0]
    at = dims.index(dim) if dim in dims else None
    return None if at is None or (operand.shape or ())[at] == 1 else at


def step_of(numbers: Numbers, blocks: int) -> int | None:
    """How much greater numbers are in each block of places than in the one before, where that is the same for all
    places of a block and for all blocks; 0 where blocks have the same numbers.

    >>> step_of(np.array([0, 0, 1, 1, 2, 2, 3, 3]), blocks=2)
    2
    >>> step_of(np.array([0, 0, 1, 1, 5, 2, 3, 3]), blocks=2) is None
    True
    """
    if not numbers.ndim:
        return 0
    by_block = numbers.reshape(blocks, -1).astype(np.int64)
    step = int(by_block[1, 0] - by_block[0, 0])
    moved = by_block - step * np.arange(blocks)[:, None]
    return step if (moved == by_block[0]).all() else None
