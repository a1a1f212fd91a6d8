"""Loops and branches, whose bodies are local functions, and ops that were emitted as they are.

They are emitted so because lax's functions do more or less than the op in some cases (complex numbers, element types of
few bits); in text the readable form counts, where it computes the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op
from sdy_jax.ir.text.modules import new_context
from sdy_jax.lowering.ops.elementwise import constant_value
from sdy_jax.plan.source.expressions import (
    PRINTERS,
    Expr,
    Function,
    Parameter,
    PrimitiveCall,
    dtype_text,
    printer,
    shape_text,
    tuple_text,
    without_parentheses,
)
from sdy_jax.plan.source.loops import CALL, FOR, Layer
from sdy_jax.plan.source.steps import LocalValue, Step
from sdy_jax.shardy.rules.op_attributes import dot_dimension_numbers

# Loops and branches, whose bodies are local functions.


@printer("while")
def _while(call: PrimitiveCall) -> Expr:
    condition, body = call.step.blocks
    asks = call.writer.function(Function(condition, "goes_on", _carried(condition.inputs), condition.outputs))
    runs = call.writer.function(Function(body, "loop", _carried(body.inputs), _returned(body.outputs)))
    return _looped(call, f"lax.while_loop({asks}, {runs}, ", call.texts())


def _carried(values: Sequence[LocalValue]) -> tuple[Parameter, ...]:
    """What a loop carries: a value, or a tuple of several."""
    return (values[0],) if len(values) == 1 else (("carry", values),)


def _returned(values: Sequence[LocalValue]) -> tuple[LocalValue | Sequence[LocalValue], ...]:
    return (values[0],) if len(values) == 1 else (values,)


def _looped(call: PrimitiveCall, beginning: str, initial: Sequence[str]) -> Expr:
    """The loop, from the text before its initial values."""
    if len(initial) == 1:
        return call.result(f"{beginning}{initial[0]})")
    return Expr(f"{beginning}{tuple_text(initial)})", (), groups=(len(initial),))


@printer(FOR)
def _for(call: PrimitiveCall) -> Expr:
    (body,) = call.step.blocks
    index, *carried = body.inputs
    runs = call.writer.function(Function(body, "loop", (index, *_carried(carried)), _returned(body.outputs)))
    first, last, *rest = call.texts()
    if not call.writer.is_wide:  # numbers become what the indices are
        first, last = call.operand(0).text, call.operand(1).text
    return _looped(call, f"lax.fori_loop({first}, {last}, {runs}, ", rest)


@printer("scan")
def _scan(call: PrimitiveCall) -> Expr:
    (body,) = call.step.blocks
    p, count = call.params, call.params["num_carry"]
    given = (("carry", body.inputs[:count]), ("slices", body.inputs[count:]))
    runs = call.writer.function(Function(body, "scan", given, (body.outputs[:count], body.outputs[count:])))
    texts = call.texts()
    slices = tuple_text(texts[count:]) if texts[count:] else "None"
    options = ["" if texts[count:] else f"length={p['length']}", "reverse=True" if p["reverse"] else ""]
    said = ", ".join(filter(None, [runs, tuple_text(texts[:count]), slices, *options]))
    return Expr(f"lax.scan({said})", (), groups=(count, len(body.outputs) - count))


@printer(CALL)
def _called(call: PrimitiveCall) -> Expr:
    """A call of a function that stands before the first of its calls."""
    layer: Layer = call.params["layer"]
    if call.step.blocks:
        (body,) = call.step.blocks
        hints = {inner: _without_number(call.array(i).text) for i, inner in enumerate(body.inputs)}
        about = f"One of {layer.count} equal parts of the program."
        fields: list[str] = []
        layer.name = call.writer.function(Function(body, "layer", body.inputs, (body.outputs,), hints, about, fields))
        layer.fields = tuple(fields)
    text = f"{layer.name}({', '.join(call.texts())})"
    return call.result(text) if len(layer.fields) == 1 else Expr(text, (), fields=layer.fields)


def _without_number(name: str) -> str:
    """`params_layers_qkv` of `params_layers_0_qkv`."""
    return re.sub(r"_\d+(?=_|$)", "", name)


@printer("cond")
def _cond(call: PrimitiveCall) -> Expr:
    """Branches without arguments: they use values from outside."""
    names = [_branch(call, number) for number in range(len(call.step.blocks))]
    if call.params.get("branches_platforms"):
        text = f"lax.platform_dependent({', '.join(_by_platform(call, names))})"
    elif len(names) == 2:
        text = f"lax.cond({_predicate(call.array(0))}, {names[1]}, {names[0]})"
    else:
        text = f"lax.switch({call.array(0).text}, [{', '.join(names)}])"
    return call.result(text) if len(call.step.outputs) == 1 else Expr(text, (), groups=(len(call.step.outputs),))


def _branch(call: PrimitiveCall, number: int) -> str:
    block = call.step.blocks[number]
    platforms = call.params.get("branches_platforms")
    hint = f"branch_{number}" if len(call.step.blocks) > 2 else ("when_false", "when_true")[number]
    if platforms:
        hint = f"on_{'_'.join(platforms[number] or ('others',))}"
    return call.writer.function(
        Function(block, hint, (), block.outputs if len(block.outputs) == 1 else (block.outputs,))
    )


def _by_platform(call: PrimitiveCall, names: list[str]) -> list[str]:
    pairs = zip(call.params["branches_platforms"], names, strict=True)
    return [f"{platform}={name}" for platforms, name in pairs for platform in platforms or ("default",)]


_AS_INDEX = ".astype(jnp.int32)"


def _predicate(index: Expr) -> str:
    """The condition that has been made an index of two branches."""
    if index.text.endswith(_AS_INDEX):
        return without_parentheses(index.text.removesuffix(_AS_INDEX))
    return f"{index.atom} != 0"


# Ops that were emitted as they are: those that lax has a function for by that, the others as StableHLO.

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
def _op(call: PrimitiveCall) -> Expr:
    text = call.params["text"]
    with new_context() as context, ir.Location.unknown(context):
        graph = Graph(ir.Module.parse(text, context).operation)  # its ops live as long as it
        op = graph.main.blocks[0].ops[0]
        written = _TABLE.get(op.name, _primitive)(call, op)
    return _as_it_is(call, text) if written is None else written


def _as(call: PrimitiveCall, primitive: str, inputs: list[LocalValue] | None = None, **params: object) -> Expr:
    step = Step(primitive, params, call.inputs if inputs is None else inputs, call.step.outputs, call.step.op)
    return PRINTERS[primitive](PrimitiveCall(step, call.writer))


def _primitive(call: PrimitiveCall, op: Op) -> Expr | None:
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


def _compare(call: PrimitiveCall, op: Op) -> Expr | None:
    if op.text("compare_type") == "TOTALORDER":
        return None
    return _as(call, _COMPARISONS[op.text("comparison_direction")])


def _constant(call: PrimitiveCall, op: Op) -> Expr | None:
    value = constant_value(op)
    if value is None:
        value = _complex_splat(op, call.out)
    if value is None:
        return None
    return call.writer.expression(LocalValue(call.out.shape, value.dtype, np.broadcast_to(value, call.out.shape)))


def _complex_splat(op: Op, out: LocalValue) -> np.ndarray | None:
    """A complex number, which MLIR's bindings cannot read."""
    found = re.match(r"dense<\(([^,()]+),([^,()]+)\)>", str(op.attributes.get("value")))
    if found is None or "0x" in found[0]:
        return None
    return np.asarray(complex(float(found[1]), float(found[2])), out.dtype)


def _iota(call: PrimitiveCall, op: Op) -> Expr | None:
    if not np.issubdtype(call.out.dtype, np.integer):
        return None
    return _as(call, "iota", dimension=op.int("iota_dimension"))


def _dot_general(call: PrimitiveCall, op: Op) -> Expr | None:
    if "algorithm" in op.attributes or call.inputs[0].dtype != call.inputs[1].dtype:
        return None
    found = dot_dimension_numbers(op)
    numbers = (found.lhs_contracting, found.rhs_contracting), (found.lhs_batching, found.rhs_batching)
    if "HIGH" in str(op.attributes.get("precision_config")):
        return None
    return _as(call, "dot_general", dimension_numbers=numbers, precision=None, preferred_element_type=call.out.dtype)


_TABLE: dict[str, Callable[[PrimitiveCall, Op], Expr | None]] = {
    "stablehlo.compare": _compare,
    "stablehlo.constant": _constant,
    "sdy.constant": _constant,
    "stablehlo.iota": _iota,
    "stablehlo.dot_general": _dot_general,
}


def _as_it_is(call: PrimitiveCall, text: str) -> Expr:
    """A call of the module's helper, with the op's text."""
    name = call.writer.helper("stablehlo")
    types = [f"({shape_text(v.shape)}, {dtype_text(v.dtype)})" for v in call.step.outputs]
    given = [call.writer.text(text), f"({', '.join(types)},)", *call.texts()]
    return call.many(f"{name}({', '.join(given)})")
