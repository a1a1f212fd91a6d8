"""A program computed more exactly than it says: what decides where it is itself far off by rounding."""

from __future__ import annotations

import re
from collections.abc import Sequence

import jax
import ml_dtypes
import numpy as np
from jax.extend.mlir import ir

from sdy_jax.equivalence.extraction import constant_from, on_whole_arrays
from sdy_jax.equivalence.reference import run_plain
from sdy_jax.errors import SdyError, UnsupportedError
from sdy_jax.ir.operations import copied, named, pre_order, replace_op, text_of_constant, update_function_type

_NARROW = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
"""The element types that become float64."""

_AS_THEY_ARE = frozenset(("stablehlo.bitcast_convert", "stablehlo.custom_call", "stablehlo.rng_bit_generator"))
"""Ops that are about the bits of a type, or call code for one: they keep it, between conversions."""


def in_float64(module: ir.Operation, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of a module's main function for whole arguments, computed in float64 and complex128.

    Raises:
        UnsupportedError: an op has no such form.
    """
    plain = on_whole_arrays(copied(module))
    if named(plain, "stablehlo.rng", "sdy.manual_computation", "stablehlo.composite"):
        raise UnsupportedError("the program draws other numbers in float64, or has no plain form")
    with plain.context, ir.Location.unknown(plain.context):
        for op in pre_order(plain):
            _widen(op)
        for function in named(plain, "func.func"):
            update_function_type(function)
    if not plain.verify():
        raise UnsupportedError("the program has no form in float64")
    return run_plain(plain, [_wide_array(x) for x in arguments])


_FAILURES = (SdyError, ValueError, TypeError, ir.MLIRError, jax.errors.JaxRuntimeError)
"""What is raised where a program has no such form."""


def more_exact(module: ir.Operation, arguments: Sequence[np.ndarray], of_wide: bool) -> list[np.ndarray] | None:
    """Results that say how far off a program's own are by rounding. In float64; where they are that already, which
    `of_wide` says, those for arguments that are rounded otherwise. None where they cannot be had."""
    if of_wide:
        return rounded_otherwise(module, arguments)
    try:
        return in_float64(module, arguments)
    except _FAILURES:
        return None


def rounded_otherwise(module: ir.Operation, arguments: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """The results of a module's main function for arguments that are off by as much as their types round; None where
    they cannot be had."""
    rng = np.random.default_rng(0)
    try:
        return run_plain(on_whole_arrays(copied(module)), [_off_by_one(x, rng) for x in arguments])
    except _FAILURES:
        return None


def _off_by_one(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    try:
        step = float(ml_dtypes.finfo(x.dtype).eps)
    except ValueError:  # integers
        return x
    return np.asarray(x * (1 + step * rng.choice([-1.0, 1.0], x.shape))).astype(x.dtype)


def is_wide(dtype: np.dtype) -> bool:
    """Whether nothing on the devices is more exact than a type."""
    return dtype in (np.float64, np.complex128)


def _wide_array(x: np.ndarray) -> np.ndarray:
    if x.dtype in _NARROW.values():
        return x.astype(np.float64)
    return x.astype(np.complex128) if x.dtype == np.complex64 else x


def _widen(op: ir.Operation) -> None:
    for region in op.regions:
        for block in region.blocks:
            for argument in block.arguments:
                argument.set_type(_wide(argument.type))
    if op.name in _AS_THEY_ARE:
        _surround(op)
        return
    if "algorithm" in op.attributes and op.name == "stablehlo.dot_general":
        del op.attributes["algorithm"]
    if op.name == "stablehlo.constant" and "complex<" in str(op.results[0].type):
        text = text_of_constant(op).replace("complex<f32>", "complex<f64>")
        replace_op(op, list(constant_from(text, op).results))
        return
    for result in op.results:
        result.set_type(_wide(result.type))
    if op.name == "stablehlo.constant":
        op.attributes["value"] = _wide_elements(op.attributes["value"], op.results[0].type)


def _wide(type_: ir.Type) -> ir.Type:
    if not isinstance(type_, ir.RankedTensorType):
        return type_
    tensor = ir.RankedTensorType(type_)
    element = str(tensor.element_type)
    if element in _NARROW:
        return ir.RankedTensorType.get(tensor.shape, ir.F64Type.get())
    if element == "complex<f32>":
        return ir.RankedTensorType.get(tensor.shape, ir.ComplexType.get(ir.F64Type.get()))
    return type_


def _surround(op: ir.Operation) -> None:
    """Operands, which are wide by now, are converted back to what they were, and results after it."""
    narrow = _narrow_operands(op)
    for index, type_ in enumerate(narrow):
        if type_ != op.operands[index].type:
            op.operands[index] = _converted(op.operands[index], type_, ir.InsertionPoint(op))
    for result in op.results:
        wide = _wide(result.type)
        if wide != result.type:
            uses = [(use.owner, use.operand_number) for use in result.uses]
            found = _converted(result, wide, _after(op))
            for user, number in uses:
                user.operands[number] = found


def _narrow_operands(op: ir.Operation) -> list[ir.Type]:
    """The types that operands had. Which of the wide ones were float32, types say no more; of those, most were."""
    return [_narrow(operand.type) for operand in op.operands]


def _narrow(type_: ir.Type) -> ir.Type:
    text = str(type_)
    return ir.Type.parse(re.sub(r"\bf64\b|(?<=x)f64", "f32", text)) if "f64" in text else type_


def _converted(value: ir.Value, type_: ir.Type, ip: ir.InsertionPoint) -> ir.Value:
    return ir.Operation.create("stablehlo.convert", [type_], [value], ip=ip).results[0]


def _after(op: ir.Operation) -> ir.InsertionPoint:
    following = iter(op.operation.block)
    for each in following:
        if each.operation == op:
            return ir.InsertionPoint(next(following))
    raise UnsupportedError("an op is in no block")


_BITS = re.compile(r"dense<0x([0-9A-Fa-f]+)>")


def _wide_elements(attribute: ir.Attribute, type_: ir.Type) -> ir.Attribute:
    """The elements of a constant in float64; through numpy where that knows their type, else through their text."""
    text = str(attribute)
    element = next((name for name in _NARROW if re.search(rf"\b{name}>$|x{name}>$", text)), "")
    if not element:
        return attribute
    if element == "bf16":
        if bits := _BITS.match(text):
            value = np.frombuffer(bytes.fromhex(bits[1])[::-1], ml_dtypes.bfloat16).astype(np.float64)[0]
            return ir.DenseElementsAttr.get_splat(type_, ir.FloatAttr.get(ir.F64Type.get(), float(value)))
        return ir.Attribute.parse(re.sub(r"bf16>$", "f64>", text))
    elements = np.asarray(ir.DenseElementsAttr(attribute)).astype(np.float64)
    return ir.DenseElementsAttr.get(np.ascontiguousarray(elements), type=ir.F64Type.get(), shape=list(elements.shape))
