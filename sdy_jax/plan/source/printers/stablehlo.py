"""Ops that were emitted as they are: those that lax has a function for by that, the others as StableHLO.

They are emitted so because lax's functions do more or less than the op in some cases (complex numbers, element types of
few bits); in text the readable form counts, where it computes the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op
from sdy_jax.ir.text.modules import new_context
from sdy_jax.lowering.ops.elementwise import constant_value
from sdy_jax.plan.source.expressions import Expr, dtype_text, shape_text
from sdy_jax.plan.source.printers.registry import PRINTERS, Call, printer
from sdy_jax.plan.source.steps import Step, Value
from sdy_jax.shardy.rules.op_attributes import dot_dimension_numbers

_PRIMITIVES = {
    "stablehlo.abs": "abs",
    "stablehlo.add": "add",
    "stablehlo.and": "and",
    "stablehlo.atan2": "atan2",
    "stablehlo.ceil": "ceil",
    "stablehlo.complex": "complex",
    "stablehlo.convert": "convert_element_type",
    "stablehlo.cosine": "cos",
    "stablehlo.count_leading_zeros": "clz",
    "stablehlo.divide": "div",
    "stablehlo.exponential": "exp",
    "stablehlo.exponential_minus_one": "expm1",
    "stablehlo.floor": "floor",
    "stablehlo.imag": "imag",
    "stablehlo.is_finite": "is_finite",
    "stablehlo.log": "log",
    "stablehlo.log_plus_one": "log1p",
    "stablehlo.logistic": "logistic",
    "stablehlo.maximum": "max",
    "stablehlo.minimum": "min",
    "stablehlo.multiply": "mul",
    "stablehlo.negate": "neg",
    "stablehlo.not": "not",
    "stablehlo.or": "or",
    "stablehlo.popcnt": "population_count",
    "stablehlo.power": "pow",
    "stablehlo.real": "real",
    "stablehlo.remainder": "rem",
    "stablehlo.rsqrt": "rsqrt",
    "stablehlo.select": "select_n",
    "stablehlo.sign": "sign",
    "stablehlo.sine": "sin",
    "stablehlo.sqrt": "sqrt",
    "stablehlo.subtract": "sub",
    "stablehlo.tanh": "tanh",
    "stablehlo.xor": "xor",
    "chlo.erf": "erf",
    "chlo.erf_inv": "erf_inv",
    "chlo.lgamma": "lgamma",
    "chlo.square": "square",
}
"""The primitives that lower to an op."""

_OF_BITS = frozenset({"and", "or", "xor", "not", "select_n", "convert_element_type"})
"""What lax computes of booleans as StableHLO does."""

_COMPARISONS = {"EQ": "eq", "NE": "ne", "GE": "ge", "GT": "gt", "LE": "le", "LT": "lt"}


@printer("stablehlo_op")
def _op(call: Call) -> Expr:
    text = call.params["text"]
    with new_context() as context, ir.Location.unknown(context):
        graph = Graph(ir.Module.parse(text, context).operation)  # its ops live as long as it
        op = graph.main.blocks[0].ops[0]
        written = _TABLE.get(op.name, _primitive)(call, op)
    return _as_it_is(call, text) if written is None else written


def _as(call: Call, primitive: str, inputs: list[Value] | None = None, **params: object) -> Expr:
    step = Step(primitive, params, call.inputs if inputs is None else inputs, call.step.outputs, call.step.op)
    return PRINTERS[primitive](Call(step, call.writer))


def _primitive(call: Call, op: Op) -> Expr | None:
    primitive = _PRIMITIVES.get(op.name)
    said = [name for name in op.attributes if name != "result_accuracy"]
    shapes = {value.shape for value in (*call.inputs, *call.step.outputs)}
    is_of_bits = call.inputs[0].dtype == np.bool_ if call.inputs else False
    if primitive is None or said or len(shapes) > 1 or (is_of_bits and primitive not in _OF_BITS):
        return None
    if primitive == "select_n":
        which, when_true, when_false = call.inputs
        return _as(call, primitive, [which, when_false, when_true])
    return _as(call, primitive)


def _compare(call: Call, op: Op) -> Expr | None:
    if op.text("compare_type") == "TOTALORDER":
        return None
    return _as(call, _COMPARISONS[op.text("comparison_direction")])


def _constant(call: Call, op: Op) -> Expr | None:
    value = constant_value(op)
    if value is None:
        value = _complex_splat(op, call.out)
    if value is None:
        return None
    return call.writer.expression(Value(call.out.shape, value.dtype, np.broadcast_to(value, call.out.shape)))


def _complex_splat(op: Op, out: Value) -> np.ndarray | None:
    """A complex number, which MLIR's bindings cannot read."""
    found = re.match(r"dense<\(([^,()]+),([^,()]+)\)>", str(op.attributes.get("value")))
    if found is None or "0x" in found[0]:
        return None
    return np.asarray(complex(float(found[1]), float(found[2])), out.dtype)


def _iota(call: Call, op: Op) -> Expr | None:
    if not np.issubdtype(call.out.dtype, np.integer):
        return None
    return _as(call, "iota", dimension=op.int("iota_dimension"))


def _dot_general(call: Call, op: Op) -> Expr | None:
    if "algorithm" in op.attributes or call.inputs[0].dtype != call.inputs[1].dtype:
        return None
    found = dot_dimension_numbers(op)
    numbers = (found.lhs_contracting, found.rhs_contracting), (found.lhs_batching, found.rhs_batching)
    if "HIGH" in str(op.attributes.get("precision_config")):
        return None
    return _as(call, "dot_general", dimension_numbers=numbers, precision=None, preferred_element_type=call.out.dtype)


_TABLE: dict[str, Callable[[Call, Op], Expr | None]] = {
    "stablehlo.compare": _compare,
    "stablehlo.constant": _constant,
    "sdy.constant": _constant,
    "stablehlo.iota": _iota,
    "stablehlo.dot_general": _dot_general,
}


def _as_it_is(call: Call, text: str) -> Expr:
    """A call of the module's helper, with the op's text."""
    name = call.writer.helper("stablehlo")
    types = [f"({shape_text(v.shape)}, {dtype_text(v.dtype)})" for v in call.step.outputs]
    given = [call.writer.text(text), f"({', '.join(types)},)", *call.texts()]
    return call.many(f"{name}({', '.join(given)})")
