"""The values of small arrays of integers in a module, as far as they are constants: tables of kernels, bounds of loops.

A value is followed backwards through calls of functions, computations and loops that pass it on as it is, to a constant
or to an argument of the program whose value is known. Inside of a manual computation it is a block, if all are equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir

from sdy_jax.ir.operations import (
    CALL,
    COMPUTATIONS,
    CONSTRAINTS,
    callee_of,
    calls_in,
    defining_op,
    functions,
    main_of,
    owning_op,
    returned_by,
    symbol,
)

_MOST = 1 << 20
"""Elements of an array that is read. Guessed: a mask of 128k tokens in blocks of 128, and a megabyte of bytes."""

_PASSING = CONSTRAINTS | {"stablehlo.optimization_barrier", "sdy.data_flow_edge"}
"""Ops whose results are their operands."""


class ConstantValues:
    """The values of a module.

    Args:
        module: a `builtin.module`.
        arguments: those of the first arguments of its main function; only NumPy's and JAX's arrays are looked into.
    """

    def __init__(self, module: ir.Operation, arguments: Sequence[Any]):
        self._functions = functions(module)
        self._main, self._arguments = symbol(main_of(self._functions)), arguments
        self._calls: dict[str, list[ir.Operation]] = {}
        for call in calls_in(module):
            self._calls.setdefault(callee_of(call), []).append(call)

    def of(self, value: ir.Value) -> np.ndarray | None:
        """The elements of a value; None where they are not known, or no integers, or too many."""
        type_ = value.type
        if not isinstance(type_, ir.RankedTensorType) or not isinstance(type_.element_type, ir.IntegerType):
            return None
        if not type_.has_static_shape or math.prod(type_.shape) > _MOST:
            return None
        return self._result(value) if isinstance(value, ir.OpResult) else self._argument(ir.BlockArgument(value))

    def _result(self, value: ir.Value) -> np.ndarray | None:
        op, number = defining_op(value), ir.OpResult(value).result_number
        assert op is not None
        if op.name == "stablehlo.constant":
            return np.array(ir.DenseElementsAttr(op.attributes["value"]))
        if op.name == CALL:
            return self.of(returned_by(self._functions[callee_of(op)])[number])
        if op.name in _PASSING:
            return self.of(op.operands[number])
        if op.name == "stablehlo.while":
            return self._carried(op, number)
        if op.name == "stablehlo.reshape":
            found = self.of(op.operands[0])
            return None if found is None else found.reshape(ir.RankedTensorType(value.type).shape)
        return None

    def _argument(self, value: ir.BlockArgument) -> np.ndarray | None:
        op, number = owning_op(value), value.arg_number
        if op.name == "stablehlo.while":
            return self._carried(op, number)
        if op.name in COMPUTATIONS:
            return _block(self.of(op.operands[number]), ir.RankedTensorType(value.type).shape)
        if op.name != "func.func":
            return None
        if symbol(op) == self._main:
            return _elements(self._arguments[number]) if number < len(self._arguments) else None
        found = [self.of(call.operands[number]) for call in self._calls.get(symbol(op), ())]
        first = found[0] if found else None
        is_same = first is not None and all(x is not None and np.array_equal(x, first) for x in found)
        return first if is_same else None

    def _carried(self, loop: ir.Operation, number: int) -> np.ndarray | None:
        """What a loop carries, where its body returns it as it was."""
        body = loop.regions[1].blocks[0]
        returned = body.operations[len(body.operations) - 1].operation.operands[number]
        return self.of(loop.operands[number]) if returned == body.arguments[number] else None


def _block(whole: np.ndarray | None, shape: Sequence[int]) -> np.ndarray | None:
    """A block of this shape of an array whose blocks are equal; None where they are not."""
    if whole is None or any(n % block for n, block in zip(whole.shape, shape, strict=True)):
        return None
    first: np.ndarray = whole[tuple(slice(n) for n in shape)]
    counts = [n // block for n, block in zip(whole.shape, shape, strict=True)]
    return first if np.array_equal(whole, np.tile(first, counts)) else None


def _elements(x: Any) -> np.ndarray | None:
    is_array = isinstance(x, np.ndarray) or (isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer))
    if not is_array or not getattr(x, "is_fully_addressable", True):
        return None
    return np.asarray(x)
