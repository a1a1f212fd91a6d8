"""Telling whether two functions compute the same, whatever their shardings."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from jax.extend.mlir import ir

from sdy_jax.ir.operations import pre_order, read_attributes

_OF_SHARDING = ("sharding", "out_sharding", "in_shardings", "out_shardings")
_OF_FUNCTIONS = ("sym_name", "sym_visibility", "arg_attrs", "res_attrs", "callee")


def computation_of(function: ir.Operation, name_of_callee: Callable[[ir.Operation], str]) -> Hashable:
    """A key that functions share if their ops are the same, on the same operands, with shardings left out.

    Args:
      function: a `func.func`.
      name_of_callee: which function a call means; calls of functions with one name count as the same.
    """
    numbers: dict[ir.Value, int] = {}
    return tuple(
        (_key(op, numbers), name_of_callee(op) if op.name == "func.call" else "") for op in pre_order(function)
    )


def _key(op: ir.Operation, numbers: dict[ir.Value, int]) -> Hashable:
    """One op; `numbers` are those of the values so far, and get the values that the op introduces."""
    operands = tuple(numbers[value] for value in op.operands)
    arguments = [a for region in op.regions for block in region.blocks for a in block.arguments]
    introduced = [*op.results, *arguments]
    for value in introduced:
        numbers[value] = len(numbers)
    attributes = tuple(
        (name, attribute)
        for name, attribute in sorted(read_attributes(op).items(), key=lambda item: item[0])
        if not name.startswith("sdy.") and name not in _OF_SHARDING and name not in _OF_FUNCTIONS
    )
    return (op.name, operands, tuple(value.type for value in introduced), attributes)
