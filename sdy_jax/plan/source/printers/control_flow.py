"""Loops and branches, whose bodies are local functions."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sdy_jax.plan.source.expressions import Expr, tuple_text, without_parentheses
from sdy_jax.plan.source.loops import CALL, FOR, Layer
from sdy_jax.plan.source.printers.registry import Call, Function, Parameter, printer
from sdy_jax.plan.source.steps import Value


@printer("while")
def _while(call: Call) -> Expr:
    condition, body = call.step.blocks
    asks = call.writer.function(Function(condition, "goes_on", _carried(condition.inputs), condition.outputs))
    runs = call.writer.function(Function(body, "loop", _carried(body.inputs), _returned(body.outputs)))
    return _looped(call, f"lax.while_loop({asks}, {runs}, ", call.texts())


def _carried(values: Sequence[Value]) -> tuple[Parameter, ...]:
    """What a loop carries: a value, or a tuple of several."""
    return (values[0],) if len(values) == 1 else (("carry", values),)


def _returned(values: Sequence[Value]) -> tuple[Value | Sequence[Value], ...]:
    return (values[0],) if len(values) == 1 else (values,)


def _looped(call: Call, beginning: str, initial: Sequence[str]) -> Expr:
    """The loop, from the text before its initial values."""
    if len(initial) == 1:
        return call.result(f"{beginning}{initial[0]})")
    return Expr(f"{beginning}{tuple_text(initial)})", (), groups=(len(initial),))


@printer(FOR)
def _for(call: Call) -> Expr:
    (body,) = call.step.blocks
    index, *carried = body.inputs
    runs = call.writer.function(Function(body, "loop", (index, *_carried(carried)), _returned(body.outputs)))
    first, last, *rest = call.texts()
    if not call.writer.is_wide:  # numbers become what the indices are
        first, last = call.operand(0).text, call.operand(1).text
    return _looped(call, f"lax.fori_loop({first}, {last}, {runs}, ", rest)


@printer("scan")
def _scan(call: Call) -> Expr:
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
def _called(call: Call) -> Expr:
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
def _cond(call: Call) -> Expr:
    """Branches without arguments: they use values from outside."""
    names = [_branch(call, number) for number in range(len(call.step.blocks))]
    if call.params.get("branches_platforms"):
        text = f"lax.platform_dependent({', '.join(_by_platform(call, names))})"
    elif len(names) == 2:
        text = f"lax.cond({_predicate(call.array(0))}, {names[1]}, {names[0]})"
    else:
        text = f"lax.switch({call.array(0).text}, [{', '.join(names)}])"
    return call.result(text) if len(call.step.outputs) == 1 else Expr(text, (), groups=(len(call.step.outputs),))


def _branch(call: Call, number: int) -> str:
    block = call.step.blocks[number]
    platforms = call.params.get("branches_platforms")
    hint = f"branch_{number}" if len(call.step.blocks) > 2 else ("when_false", "when_true")[number]
    if platforms:
        hint = f"on_{'_'.join(platforms[number] or ('others',))}"
    return call.writer.function(
        Function(block, hint, (), block.outputs if len(block.outputs) == 1 else (block.outputs,))
    )


def _by_platform(call: Call, names: list[str]) -> list[str]:
    pairs = zip(call.params["branches_platforms"], names, strict=True)
    return [f"{platform}={name}" for platforms, name in pairs for platform in platforms or ("default",)]


_AS_INDEX = ".astype(jnp.int32)"


def _predicate(index: Expr) -> str:
    """The condition that has been made an index of two branches."""
    if index.text.endswith(_AS_INDEX):
        return without_parentheses(index.text.removesuffix(_AS_INDEX))
    return f"{index.atom} != 0"
