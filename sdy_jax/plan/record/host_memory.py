"""What a program keeps in the memory of its host: the arguments and results that lie there, and what moves between host
and devices, at which line and how often.

The moves are read off the function as jax traced it: for CPUs jax lowers them to nothing, so that the partitioned
program does not have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from sdy_jax.annotate.jaxprs import all_equations, line_of
from sdy_jax.annotate.program import Program
from sdy_jax.ir.jax_shardings import array_text
from sdy_jax.ir.locations import short_source
from sdy_jax.plan.record.program import RecordedBorder, RecordedHostMemory, RecordedOp, RecordedTensor, RecordedValue
from sdy_jax.runtime.boundary import is_on_host


def host_memory(
    program: Program,
    arguments: Sequence[RecordedBorder],
    results: Sequence[RecordedBorder],
    values: Sequence[RecordedValue],
    ops: Sequence[RecordedOp],
) -> Iterator[RecordedHostMemory]:
    """What lies there and what moves, in program order.

    Args:
        program: the partitioned one.
        arguments, results: its border, without closed-over arrays.
        values, ops: of the partitioned program, whose layouts values that move have.
    """
    for what, border, there in (
        ("argument", arguments, program.host_arguments),
        ("result", results, program.host_results),
    ):
        for number, value in enumerate(border):
            if number in there:
                yield RecordedHostMemory(what, value.path, value.tensor.type, value.tensor.bytes)
    if not any(map(_moved, all_equations(program.jaxpr))):
        return
    layouts = _Layouts(values, ops)
    for equation, place in _equations(program.jaxpr, _Place()):
        for aval in _moved(equation):
            type_ = array_text(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
            tensor, what = layouts.of(type_, place.line), "to the host" if is_on_host(aval) else "to devices"
            yield RecordedHostMemory(what, "", tensor.type, tensor.bytes, *place)


def _moved(equation: Any) -> list[Any]:
    """The types of what an equation brings into the other memory."""
    if equation.primitive.name != "device_put":
        return []
    pairs = zip(equation.invars, equation.outvars, strict=True)
    return [after.aval for before, after in pairs if is_on_host(before.aval) != is_on_host(after.aval)]


class _Place(NamedTuple):
    """Where an equation stands: its line, how often it runs, whether that is known, and whether it is of a backward
    pass."""

    line: str = ""
    times: int = 1
    known: bool = True
    backward: bool = False


def _equations(x: Any, around: _Place) -> Iterator[tuple[Any, _Place]]:
    """The equations in a jaxpr or a parameter. Those that jax writes, as policies offload by, are at the line of what
    makes their operand, or of the equation around them."""
    if isinstance(x, tuple | list):
        for each in x:
            yield from _equations(each, around)
    if not isinstance(x, Jaxpr | ClosedJaxpr):
        return
    lines: dict[Any, str] = {}
    for equation in x.eqns:
        made = (lines[v] for v in equation.invars if isinstance(v, Var) and v in lines)
        line = short_source(line_of(equation)) or next(made, around.line)
        lines.update(dict.fromkeys(equation.outvars, line))
        backward = around.backward or "transpose(" in str(equation.source_info.name_stack)
        yield equation, _Place(line, around.times, around.known, backward)
        trips = equation.params["length"] if equation.primitive.name == "scan" else 1
        inside = _Place(line, around.times * trips, around.known and equation.primitive.name != "while", backward)
        for parameter in equation.params.values():
            yield from _equations(parameter, inside)


class _Layouts:
    """The layouts of values by their types without axes and the lines that make them."""

    def __init__(self, values: Sequence[RecordedValue], ops: Sequence[RecordedOp]):
        self._found: dict[tuple[str, str], set[RecordedTensor]] = {}
        for value in values:
            line = ops[value.op].place.line if value.op is not None else ""
            plain = f"{value.tensor.dtype}[{','.join(map(str, value.tensor.shape))}]"
            for key in ((plain, line), (plain, "")):
                self._found.setdefault(key, set()).add(value.tensor)

    def of(self, type_: str, line: str) -> RecordedTensor:
        """The layout of what has a type and is made on a line, if all that is so has one; else without bytes."""
        for key in ((type_, line), (type_, "")):
            if len(found := self._found.get(key, set())) == 1:
                return next(iter(found))
        return RecordedTensor(type_)
