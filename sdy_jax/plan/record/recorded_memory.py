"""What a step holds, on the device by phases and in the memory of its host, as plain data."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from sdy_jax.annotate.jaxprs import all_equations, line_of
from sdy_jax.annotate.pipeline_schedules import Kind, mark_in, row_scope
from sdy_jax.annotate.program import Program
from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.jax_shardings import array_text
from sdy_jax.ir.locations import RUN_AGAIN, is_computed_again, may_mention, short_source
from sdy_jax.lowering.planner.memory.buffers import HeldBuffer, LocalBytes
from sdy_jax.lowering.planner.memory.live_ranges import peak_and_buffers
from sdy_jax.lowering.targets.target import Target
from sdy_jax.plan.questions import Answers
from sdy_jax.plan.record.program import (
    RecordedBorder,
    RecordedBuffer,
    RecordedHeld,
    RecordedHostMemory,
    RecordedMemory,
    RecordedOp,
    RecordedTensor,
    RecordedValue,
)
from sdy_jax.plan.record.recorded_ops import OpRecords
from sdy_jax.runtime.boundary import is_on_host

# The phases of a step, and what in it is computed again: by the names of scopes, and by which op depends on which.


def phases_of(ops: OpRecords, again: Collection[str] = ()) -> dict[Op, str]:
    """The phases of a program's ops: forward pass, backward pass, and the update of weights; none where nothing is of a
    backward pass. An op is of the update if it depends on one of the backward pass and is none itself, or if nothing
    but the update takes what it makes. What is in a loop of one phase is of that phase, but for loops that hold a whole
    step, as those that add up gradients.

    Args:
        again: the locations of ops that the planner runs once more.
    """
    reader = _Reader(ops, again)
    reader.read(ops.graph.main.blocks[0], "forward")
    reader.read_users(ops.graph.main.blocks[0])
    return reader.found if "backward" in reader.found.values() else {}


def locations_again(plan: Answers) -> frozenset[str]:
    """The locations of the ops that the planner runs once more, for the sake of memory."""
    found = plan.recomputed
    return frozenset(str(each.location) for each in found.ops) if found is not None else frozenset()


def computed_again(graph: Graph, phases: Mapping[Op, str], again: Collection[str]) -> Iterator[Op]:
    """The ops of a forward pass that run once more in the backward pass, for `jax.checkpoint` or the planner."""
    for op, phase in phases.items() if again or may_mention(graph.module, RUN_AGAIN) else ():
        if phase == "backward" and (is_computed_again(op.mlir.location) or str(op.mlir.location) in again):
            yield op


class _Reader:
    def __init__(self, ops: OpRecords, again: Collection[str]):
        self.found = dict[Op, str]()
        self._ops, self._again = ops, again

    def read(self, block: Block, around: str, in_pipeline: bool = False) -> bool:
        """Finds the phases of a block's ops, and whether any is of the backward pass. In a pipeline rows of both passes
        take turns, and say by their scopes which they are."""
        found, behind, any_backward = self.found, set[Op](), False
        known = [op for op in block.ops if op in self._ops.index]
        for op in known:
            is_behind = not in_pipeline and any(value.defining_op in behind for value in op.operands)
            is_backward = around == "backward" or self._is_backward(op, in_pipeline)
            is_backward = is_backward or (is_behind and bool(self._again) and str(op.mlir.location) in self._again)
            found[op] = "backward" if is_backward else "update" if is_behind else around
            is_pipeline = in_pipeline or _is_pipeline(op)
            inside = [self.read(inner, found[op], is_pipeline) for inner in op.blocks]
            if is_backward or any(inside):
                any_backward = True
            if is_backward or is_behind or any(inside):
                behind.add(op)
        return any_backward

    def _is_backward(self, op: Op, in_pipeline: bool) -> bool:
        place = self._ops.names.place(op)
        return not _BACKWARD.isdisjoint(place.scope.split("/")) if in_pipeline else place.backward

    def read_users(self, block: Block) -> None:
        """What nothing but the update takes is of it, as `0.9 * momentum`."""
        for op in reversed([op for op in block.ops if self.found.get(op) == "forward" and not op.blocks]):
            users = {user.ancestor_in(block) for value in op.results for user, _ in value.uses}
            if {self.found.get(user) for user in users} == {"update"} and block.terminator not in users:
                self.found[op] = "update"


_BACKWARD = frozenset((row_scope(Kind.BACKWARD), row_scope(Kind.WEIGHTS)))


def _is_pipeline(op: Op) -> bool:
    return op.name == "sdy.manual_computation" and mark_in(str(op.mlir.location)) is not None


# What a device holds: when, of which kind, and made by which op.
#
# Kinds of temporaries are told by which phase makes a value, and which needs it last; those of arguments by which
# phases read them.

_BY_PHASES = {("forward", "backward"): "activations", ("backward", "update"): "gradients"}


def memory_record(
    ops: OpRecords, phases: Mapping[Op, str], again: Collection[str], target: Target, available: float
) -> RecordedMemory:
    """What a device holds, of what it has.

    Args:
        ops: of the partitioned program.
        phases, again: as `phases_of` says them, and what it takes.
        target: which device that is.
        available: what it has for the program.
    """
    peak, buffers = peak_and_buffers(ops.graph, target)
    kinds = _Kinds(ops, phases, frozenset(computed_again(ops.graph, phases, again)))
    held = [kinds.recorded(buffer) for buffer in buffers]
    spans = {(buffer.value, buffer.bytes): buffer for buffer in held}
    largest = [spans[ops.names.of(live.value), live.bytes] for live in peak.live]
    timeline, always = tuple(size for _, size in peak.at), list(kinds.always(LocalBytes(ops.graph, target.arrays)))
    if own_results := peak.results - peak.shared:
        always.append(RecordedHeld("results", own_results))
    border = peak.arguments, peak.results, peak.bytes, peak.shared
    return RecordedMemory(*border, timeline, tuple(held), tuple(largest), available, tuple(always))


class _Kinds:
    def __init__(self, ops: OpRecords, phases: Mapping[Op, str], again: Collection[Op]):
        self._ops, self._phases, self._again = ops, phases, again

    def recorded(self, buffer: HeldBuffer) -> RecordedBuffer:
        """A temporary with its kind and its maker."""
        maker = _maker(buffer.value)
        number = self._ops.index.get(maker) if maker is not None else None
        kind = self._kind(maker, self._ops.order[buffer.last])
        return RecordedBuffer(self._ops.names.of(buffer.value), buffer.bytes, buffer.first, buffer.last, kind, number)

    def _kind(self, maker: Op | None, last: Op) -> str:
        if maker is None:
            return "temporaries"
        if maker.name == "sdy.all_gather":
            return "gathered"
        if maker in self._again:
            return "recomputed"
        phases = self._phases.get(maker, ""), self._phases.get(last, "")
        return _BY_PHASES.get(phases, "temporaries")

    def always(self, sizes: LocalBytes) -> Iterator[RecordedHeld]:
        """The arguments by what they are."""
        found = dict[str, float]()
        for value in self._ops.graph.arguments:
            kind = self._of_argument(value)
            found[kind] = found.get(kind, 0.0) + sizes.of(value)
        for kind in ("weights", "optimizer state", "arguments"):
            if found.get(kind):
                yield RecordedHeld(kind, found[kind])

    def _of_argument(self, value: Value) -> str:
        """Weights are read by the passes and the update, state of the optimizer by that alone."""
        block = self._ops.graph.main.blocks[0]
        read = {self._phases.get(user.ancestor_in(block), "") for user, _ in value.uses} - {""}
        if "update" not in read:
            return "arguments"
        return "weights" if len(read) > 1 else "optimizer state"


def _maker(value: Value) -> Op | None:
    """The op that makes a value, or around it."""
    made = value.defining_op
    return made if made is not None else value.owner.parent if isinstance(value.owner, Block) else None


# What a program keeps in the memory of its host: the arguments and results that lie there, and what moves between host
# and devices, at which line and how often.
#
# The moves are read off the function as jax traced it: for CPUs jax lowers them to nothing, so that the partitioned
# program does not have them.


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
