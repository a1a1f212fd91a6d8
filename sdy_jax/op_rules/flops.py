"""How many operations an op performs on whole tensors, as far as it states them or they follow from its shapes.

Multiplications and additions count one each, as do comparisons of a sort. Ops that only move data are not in the table,
nor are those that look up or scatter: they perform none, or as many on each device however their table is split.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sdy_jax.ir.extensions import registered
from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.stated_work import stated_work
from sdy_jax.op_rules.library_work import operations_of_library
from sdy_jax.op_rules.linalg import cholesky_is_lower, is_householder_product, is_qr, triangular_system
from sdy_jax.op_rules.op_attributes import (
    convolution_dimension_numbers,
    dot_dimension_numbers,
    ragged_dot_dimension_numbers,
    window,
)
from sdy_jax.op_rules.predicates import is_elementwise

Count = Callable[[Op], float]

OPERATIONS: dict[str, Count] = {}


def operations_of(op: Op) -> float:
    """The operations of one execution of an op: what a call states, else by its shapes; 0 where they are not known."""
    work = stated_work(op) if op.name == "stablehlo.custom_call" else None
    if work is not None:
        return work.flops
    if op.name in OPERATIONS:
        return OPERATIONS[op.name](op)
    return _size(op.results[0]) if is_elementwise(op) else 0


def _operations(*names: str) -> Callable[[Count], Count]:
    return registered(OPERATIONS, names, "numbers of operations")


def _size(value: Value) -> int:
    return math.prod(value.shape or ())


@_operations("stablehlo.dot")
def _dot(op: Op) -> float:
    lhs = op.operands[0].shape or ()
    return 2 * _size(op.results[0]) * lhs[-1]


@_operations("stablehlo.dot_general")
def _dot_general(op: Op) -> float:
    lhs = op.operands[0].shape or ()
    return 2 * _size(op.results[0]) * math.prod(lhs[d] for d in dot_dimension_numbers(op).lhs_contracting)


@_operations("chlo.ragged_dot")
def _ragged_dot(op: Op) -> float:
    """Each row of the left side meets one matrix of the right side."""
    numbers = ragged_dot_dimension_numbers(op)
    taken = {*numbers.product.rhs_batching, *numbers.product.rhs_contracting, numbers.groups}
    return 2 * _size(op.operands[0]) * math.prod(n for d, n in enumerate(op.operands[1].shape or ()) if d not in taken)


@_operations("stablehlo.convolution")
def _convolution(op: Op) -> float:
    """Every element of the result takes a window of the kernel; a kernel holds the input features of one group."""
    kernel = op.operands[1]
    features = (kernel.shape or ())[convolution_dimension_numbers(op).kernel_output_feature]
    return 2 * _size(op.results[0]) * _size(kernel) / features if features else 0


@_operations("stablehlo.reduce")
def _reduce(op: Op) -> float:
    return sum(map(_size, op.operands[: len(op.results)]))


@_operations("stablehlo.reduce_window")
def _reduce_window(op: Op) -> float:
    return sum(map(_size, op.results)) * math.prod(dim.size for dim in window(op))


@_operations("stablehlo.select_and_scatter")
def _select_and_scatter(op: Op) -> float:
    return _size(op.operands[1]) * math.prod(dim.size for dim in window(op))


@_operations("stablehlo.sort")
def _sort(op: Op) -> float:
    shape = op.operands[0].shape or ()
    length = shape[op.int("dimension", len(shape) - 1)] if shape else 1
    return _size(op.operands[0]) * math.log2(max(length, 1))


@_operations("stablehlo.fft")
def _fft(op: Op) -> float:
    points = math.prod(op.ints("fft_length"))
    return 5 * max(_size(op.operands[0]), _size(op.results[0])) * math.log2(max(points, 1))


@_operations("stablehlo.cholesky", "stablehlo.triangular_solve", "stablehlo.custom_call")
def _linear_algebra(op: Op) -> float:
    """Of decompositions and solvers; 0 for other calls."""
    if triangular_system(op) is not None:
        return _size(op.results[0]) * (op.operands[0].shape or (1,))[-1]
    if cholesky_is_lower(op) is not None:
        return _size(op.results[0]) * (op.results[0].shape or (1,))[-1] / 3
    if is_qr(op) or is_householder_product(op):
        rows, columns = (op.operands[0].shape or ())[-2:]
        return 2 * _size(op.operands[0]) * columns * max(0.0, 1 - columns / (3 * rows)) if rows else 0
    return operations_of_library(op) or 0
