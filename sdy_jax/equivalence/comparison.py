"""Two arrays that should be the same, compared by what rounding errors allow, or by a more exact program."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import ml_dtypes
import numpy as np
from jax.extend.mlir import ir

from sdy_jax.base.errors import SdyError, UnsupportedError
from sdy_jax.equivalence.extraction import constant_from, on_whole_arrays, run_plain
from sdy_jax.ir.operations import copied, named, pre_order, replace_op, text_of_constant, update_function_type

# Two arrays that should be the same, compared by what errors of floating-point numbers allow.

TOLERANCE = {
    "bfloat16": 3e-2,
    "float16": 5e-3,
    "float32": 2e-5,
    "complex64": 2e-5,
    "float64": 1e-12,
    "complex128": 1e-12,
}
"""Relative tolerances by dtype. Guessed, some ten roundings of the type: what reassociating a reduction over a few
thousand terms of similar size can change. With less, right programs fail; with more, a wrong term among thousands
passes."""

_SMALLEST = 1e-30
"""Guessed: the scale of arrays of zeros, of which a relative error would say nothing."""

_AS_FAR = 8.0
"""How many times further from a more exact result than the plain program's a partitioned one may be. Guessed: rounding
errors of two orders of a sum differ by a few times; a wrong term is off by the size of the result."""


_NO_ROUNDING = 64.0
"""How many times further off than arguments that are rounded otherwise move it a plain result may be. Guessed: one
after the other, thousands of terms round worse than once each; what a compiler has wrong is off by its size."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far an array is from the one that it should be.

    Attributes:
        problem: what is wrong, as a sentence without a subject; empty if nothing is.
        largest, allowed: the largest error of an element, and what is allowed of it; both 0 where elements are compared
            exactly and are the same, and infinite where no number says it.
    """

    problem: str = ""
    largest: float = 0.0
    allowed: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problem


def compared(found: np.ndarray, wanted: np.ndarray, rtol: float | None = None, atol: float = 0.0) -> Difference:
    """How `found` differs from `wanted`.

    Integers and booleans must be equal; floating-point numbers may differ by `rtol` times the largest magnitude of
    `wanted` plus `atol`. NaNs and infinities must be at the same places.
    """
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        problem = f"is {found.dtype}{list(found.shape)}, expected {wanted.dtype}{list(wanted.shape)}"
        return Difference(problem, np.inf, 0.0)
    if wanted.dtype.name not in TOLERANCE:
        count = int(np.sum((found != wanted) & ~(_is_nan(found) & _is_nan(wanted))))
        return Difference(f"differs in {count} of {wanted.size} elements" if count else "", float(count), 0.0)
    a, b = _widened(found), _widened(wanted)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return Difference("has NaN or infinity at other places", np.inf, 0.0)
    scale = float(np.abs(b[finite]).max(initial=0.0))
    largest = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
    allowed = atol + (rtol if rtol is not None else TOLERANCE[wanted.dtype.name]) * max(scale, _SMALLEST)
    problem = f"differs by {largest:.3g}, allowed are {allowed:.3g}" if not largest <= allowed else ""
    return Difference(problem, largest, allowed)


def decided_by(found: np.ndarray, wanted: np.ndarray, exact: np.ndarray, moved: np.ndarray | None = None) -> Difference:
    """As `compared`, where the plain result is itself off by rounding: `exact` is what the plain program gives where it
    is computed more exactly, from which `found` may be a small multiple as far as `wanted` is; or as far as `moved` is
    from `wanted`, the plain result for arguments that are rounded otherwise."""
    plain = compared(found, wanted)
    if plain.ok or exact.shape != wanted.shape or not np.isfinite(plain.largest) or plain.allowed == 0:
        return plain
    ours, theirs = _largest(found, exact), _largest(wanted, exact)
    sway = np.inf if moved is None else _largest(moved, wanted)
    if theirs > _NO_ROUNDING * max(sway, plain.allowed):
        problem = f"{plain.problem}; the plain one is off by {theirs:.3g} of a more exact result, which is no rounding"
        return Difference(problem, plain.largest, plain.allowed)
    theirs = max(theirs, 0.0 if moved is None else sway)
    allowed = max(_AS_FAR * theirs, plain.allowed)
    if ours <= allowed:
        return Difference("", ours, allowed)
    return Difference(f"is off by {ours:.3g} of a more exact result, the plain one by {theirs:.3g}", ours, allowed)


def _largest(x: np.ndarray, y: np.ndarray) -> float:
    """The largest difference of elements that are finite in both."""
    a, b = _widened(x), _widened(y)
    finite = np.isfinite(a) & np.isfinite(b)
    return float(np.abs(a[finite] - b[finite]).max(initial=0.0))


def _is_nan(x: np.ndarray) -> np.ndarray:
    """Also of float8, of which numpy does not know that they are floats."""
    return np.asarray(np.isnan(x.astype(np.float32))) if x.dtype.kind in "fV" else np.zeros(x.shape, bool)


def _widened(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


# A program computed more exactly than it says: what decides where it is itself far off by rounding.

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
                argument.set_type(_wide_type(argument.type))
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
        result.set_type(_wide_type(result.type))
    if op.name == "stablehlo.constant":
        op.attributes["value"] = _wide_elements(op.attributes["value"], op.results[0].type)


def _wide_type(type_: ir.Type) -> ir.Type:
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
        wide = _wide_type(result.type)
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
