"""What a program keeps in the memory of its host: the arguments and results that lie there, and what moves between host
and devices, at which line and how often.

The moves are read off the function as jax traced it: for CPUs jax lowers them to nothing, so that the partitioned
program does not have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    known, moved = _border(program.jaxpr, arguments, results), list(_moves(program.jaxpr))
    by_itself = {id(known[end]) for move in moved for end in move.ends if end in known}
    for what, border, there in (
        ("argument", arguments, program.host_arguments),
        ("result", results, program.host_results),
    ):
        for number, value in enumerate(border):
            if number in there:
                times = 0 if id(value) in by_itself else 1
                yield RecordedHostMemory(what, value.path, value.tensor.type, value.tensor.bytes, times=times)
    layouts, beside = _Layouts(values if moved else (), ops), _Beside(ops if moved else ())
    for move in moved:
        own = next((known[end] for end in move.ends if end in known), None)
        tensor = own.tensor if own is not None else layouts.of(move.type, move.place.line)
        what, op = "to the host" if move.leaves else "to devices", beside.op(move, own.path if own is not None else "")
        yield RecordedHostMemory(what, "", tensor.type, tensor.bytes, *move.place, op=op)


def _border(
    jaxpr: ClosedJaxpr | None, arguments: Sequence[RecordedBorder], results: Sequence[RecordedBorder]
) -> dict[Var, RecordedBorder]:
    """The variables of a program that are its arguments, which come behind closed-over arrays, and results."""
    if jaxpr is None:
        return {}
    taken = jaxpr.jaxpr.invars[len(jaxpr.jaxpr.invars) - len(arguments) :]
    made = zip(jaxpr.jaxpr.outvars, results, strict=True)
    return {v: each for v, each in made if isinstance(v, Var)} | dict(zip(taken, arguments, strict=True))


class _Place(NamedTuple):
    """Where an equation stands: its line, how often it runs, whether that is known, and whether it is of a backward
    pass."""

    line: str = ""
    times: int = 1
    known: bool = True
    backward: bool = False


class _Move(NamedTuple):
    """A value that moves: its type without axes, before and after as variables, whether it moves to the host, and where
    that stands."""

    type: str
    ends: tuple[Any, ...]
    leaves: bool
    place: _Place


def _moves(jaxpr: ClosedJaxpr | None) -> Iterator[_Move]:
    if any(map(_moved, all_equations(jaxpr))):
        same = dict[Var, Any]()
        for equation, place in _equations(jaxpr, _Place(), same):
            for before, after in _moved(equation):
                type_ = array_text(jax.ShapeDtypeStruct(after.aval.shape, after.aval.dtype))
                ends = tuple(same.get(v, v) for v in (before, after) if isinstance(v, Var))
                yield _Move(type_, ends, is_on_host(after.aval), place)


def _moved(equation: Any) -> list[tuple[Any, Any]]:
    """What an equation brings into the other memory, before and after."""
    if equation.primitive.name != "device_put":
        return []
    pairs = zip(equation.invars, equation.outvars, strict=True)
    return [(before, after) for before, after in pairs if is_on_host(before.aval) != is_on_host(after.aval)]


_CALLS = ("jit", "pjit", "closed_call", "checkpoint")
"""Equations whose jaxprs take what they take, and make what they make."""


def _equations(x: Any, around: _Place, same: dict[Var, Any]) -> Iterator[tuple[Any, _Place]]:
    """The equations in a jaxpr or a parameter. Those that jax writes, as policies offload by, are at the line of what
    makes their operand, or of the equation around them. `same`: variables inside of calls by those around."""
    if isinstance(x, tuple | list):
        for each in x:
            yield from _equations(each, around, same)
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
        if equation.primitive.name in _CALLS:
            same.update(_joined(equation, same))
        for parameter in equation.params.values():
            yield from _equations(parameter, inside, same)


def _joined(equation: Any, same: Mapping[Var, Any]) -> Iterator[tuple[Var, Any]]:
    """The variables inside of a call with those around that are the same values."""
    inner = equation.params["jaxpr"] if "jaxpr" in equation.params else equation.params["call_jaxpr"]
    inner = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
    for own, around in ((inner.invars, equation.invars), (inner.outvars, equation.outvars)):
        for a, b in zip(own, around, strict=True):
            if isinstance(a, Var) and isinstance(b, Var):
                yield a, same.get(b, b)


class _Layouts:
    """The layouts of values by their types without axes and the lines that make them; first of what calls to compilers
    make, by which programs for accelerators move values."""

    _CALL = "stablehlo.custom_call"

    def __init__(self, values: Sequence[RecordedValue], ops: Sequence[RecordedOp]):
        self._found: dict[tuple[str, str], set[RecordedTensor]] = {}
        for value in values:
            line = ops[value.op].place.line if value.op is not None else ""
            plain = f"{value.tensor.dtype}[{','.join(map(str, value.tensor.shape))}]"
            by_call = value.op is not None and ops[value.op].kind == self._CALL
            for key in ((plain, line), (plain, ""), *[(plain, self._CALL)] * by_call):
                self._found.setdefault(key, set()).add(value.tensor)

    def of(self, type_: str, line: str) -> RecordedTensor:
        """The layout of what has a type and is made on a line; without bytes where those that are so differ in them."""
        for key in ((type_, self._CALL), (type_, line), (type_, "")):
            found = self._found.get(key, set())
            if len({tensor.bytes for tensor in found}) == 1:
                return min(found, key=lambda tensor: (len(tensor.type), tensor.type))
        return RecordedTensor(type_)


class _Beside:
    """Finds the ops beside which values move: those that take an argument; else of those of the same pass that run as
    often, those on the line first."""

    def __init__(self, ops: Sequence[RecordedOp]):
        self._found: dict[tuple[Any, ...], list[int]] = {}
        self._takes, backward = dict[str, int](), list[bool]()
        for number, op in enumerate(ops):
            for name in op.operands:
                self._takes.setdefault(name, number)
            backward.append(op.place.backward or (op.parent is not None and backward[op.parent]))
            for line in (op.place.line, ""):
                self._found.setdefault((line, op.times, backward[number]), []).append(number)

    def op(self, move: _Move, path: str) -> int | None:
        """The last such op of what moves to the host, the first one of what comes to devices; `path`: of an argument or
        result."""
        if not move.leaves and path in self._takes:
            return self._takes[path]
        for line in (move.place.line, ""):
            if found := self._found.get((line, move.place.times, move.place.backward)):
                return found[-1] if move.leaves else found[0]
        return None
