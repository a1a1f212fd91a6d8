"""What users demand of plans: budgets of bytes, memory and collectives, and axes along which nothing moves
unasked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.base.errors import ContractError, SdyError, ShardingError
from sdy_jax.base.jax_calls import api_class
from sdy_jax.ir.collectives import REDUCING
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.jax_shardings import bytes_of_text, bytes_text
from sdy_jax.ir.locations import STRICT, may_mention, place_of, strict_axes
from sdy_jax.ir.operations import main_function
from sdy_jax.ir.stored_shardings import function_shardings
from sdy_jax.lowering.planner.report import CollectiveRecord
from sdy_jax.plan.explanations.origins import spec_text
from sdy_jax.plan.notices import warn_of
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.record.program import RecordedCollective
from sdy_jax.plan.record.record import check_kinds, line_of, listed
from sdy_jax.plan.record.recorded_ops import recorded_collectives
from sdy_jax.plan.record.recording import linked_collectives
from sdy_jax.shardy.rules.elementwise import ELEMENTWISE

# Budgets: what a plan may send and hold, and by which collectives.


@api_class
@dataclass(frozen=True)
class Budget:
    """What the plans of a function may do: `partition(..., budget=)` raises a `ContractError` while it traces where
    they do more.

    Attributes:
        wire_bytes: what a device sends per call at most: a number, or a text such as `"10MiB"`.
        memory: what a device holds at most, by estimate, likewise. `partition(memory=)` makes the planner look for a
            program that fits.
        forbid: kinds of collectives that must not send anything.
        axes: mesh axes, each with the kinds of collectives that may send along it; others are as they like.

    Raises:
        SdyError: an amount is none, or there is no such kind.

    Example:
        >>> Budget(wire_bytes="10MiB", forbid=("all_gather",), axes={"model": ("all_reduce",)}).wire_bytes
        10485760.0

    See also:
        `strict`: where bytes may move.
        `partition`: its `budget`.
    """

    wire_bytes: int | float | str | None = None
    memory: int | float | str | None = None
    forbid: Sequence[str] = ()
    axes: Mapping[str, Sequence[str]] | None = None

    def __post_init__(self) -> None:
        for name in ("wire_bytes", "memory"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, _amount(given, name))
        object.__setattr__(self, "forbid", _kinds(self.forbid, "forbid"))
        if self.axes is not None:
            if not isinstance(self.axes, Mapping):
                raise SdyError(f"Budget: axes={self.axes!r}; expected a dict such as {{'model': ('all_reduce',)}}")
            axes = {str(axis): _kinds(kinds, f"axes[{axis!r}]") for axis, kinds in self.axes.items()}
            object.__setattr__(self, "axes", axes)

    def problems(self, plan: Plan, collectives: Sequence[RecordedCollective]) -> Iterator[str]:
        """What of a plan breaks the budget, in words, with the lines.

        Raises:
            SdyError: the plan's mesh has no axis of a name in `axes`.
        """
        self._check_axes(plan)
        sending = [one for one in collectives if one.wire_bytes]
        yield from self._wire_problems(plan, sending)
        yield from self._memory_problems(plan)
        for kind in self.forbid:
            yield from _problem(f"{kind} is forbidden", [one for one in sending if one.kind == kind])
        for axis, kinds in (self.axes or {}).items():
            along = [one for one in sending if runs_along(one, axis) and one.kind not in kinds]
            yield from _problem(f"along '{axis}' only {' and '.join(kinds) or 'nothing'} may send", along)

    def _check_axes(self, plan: Plan) -> None:
        names = plan.program.axis_names
        for axis in self.axes or {}:
            if axis not in names:
                raise SdyError(f"Budget: axes has {axis!r}, the mesh of {plan.name} has {', '.join(map(repr, names))}")

    def _wire_problems(self, plan: Plan, sending: Sequence[RecordedCollective]) -> Iterator[str]:
        limit = self.wire_bytes
        if not isinstance(limit, float) or plan.wire_bytes <= limit:
            return
        least = "" if plan.totals.known else "at least "
        said = f"{least}{bytes_text(plan.wire_bytes)} on the wire per device, {bytes_text(limit)} are allowed"
        yield "\n".join([said, *listed(sending)])
        bound = plan.findings.bound if plan.costs.unit == "bytes" else None
        if bound is not None and bound > limit:
            yield f"no layouts meet that: with these shardings all send {bytes_text(bound)} at least"

    def _memory_problems(self, plan: Plan) -> Iterator[str]:
        limit = self.memory
        if not isinstance(limit, float) or plan.memory.peak <= limit:
            return
        memory = plan.memory
        lines = [f"{bytes_text(memory.peak)} of memory per device, {bytes_text(limit)} are allowed"]
        lines.append(f"  {bytes_text(memory.border)} are arguments and results; of temporaries the largest are")
        lines += [f"  {held.source}: {held.type}, {bytes_text(held.bytes)}" for held in memory.largest[:4]]
        yield "\n".join(lines)
        if memory.border > limit:
            border = bytes_text(memory.border)
            yield f"no plan meets that: arguments and results alone take {border}; shard them further"


def runs_along(one: RecordedCollective, axis: str) -> bool:
    """Whether a collective runs over a mesh axis or a part of it; devices that are permuted may send along any."""
    return not one.axes or any(name == axis or name.startswith(f"{axis}:") for name in one.axes)


def _problem(what: str, found: Sequence[RecordedCollective]) -> Iterator[str]:
    if found:
        yield "\n".join([what, *listed(found)])


def _amount(given: object, name: str) -> float:
    found = bytes_of_text(given) if isinstance(given, str) else given
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    if not is_number or not 0 <= float(found) < math.inf:  # type: ignore[arg-type]
        raise SdyError(f"Budget: {name}={given!r}; expected a number of bytes per device, or a text such as '10MiB'")
    return float(found)  # type: ignore[arg-type]


def _kinds(given: Iterable[str] | str, name: str) -> tuple[str, ...]:
    kinds = (given,) if isinstance(given, str) else tuple(given)
    check_kinds(kinds, f"Budget: {name}")
    return kinds


# Which collectives the user asked for: statements of layouts beside the ops that need them.

_STATEMENTS = frozenset({"sdy.reshard", "sdy.sharding_constraint", "sdy.manual_computation"})
_SPREAD = frozenset({"stablehlo.broadcast_in_dim", "stablehlo.constant", "sdy.constant"})
"""Ops that make what is added to a value, or multiplied with it, without being one of its kind."""


class Asked:
    """Answers for a plan's collectives.

    One is asked for where it is the user's own, where a statement needs it, and where what it moves is stated: the
    value that its op makes, or takes, up to ops in between that compute element by element of nothing else. Where the
    planner knows something cheaper than what is stated, such as scattering a sum instead of reducing it, that is asked
    for as well.
    """

    def __init__(self, plan: Plan):
        self._results = function_shardings(main_function(plan.stages["traced"]), "res_attrs")
        graph = Graph(plan.stages["propagated"])
        self._ops: dict[tuple[str, str], list[Op]] = {}
        for op in graph.main.walk():
            self._ops.setdefault((str(op.mlir.location), op.title), []).append(op)
        self._graph, self._has_own = graph, bool(plan.local_sorts)

    def is_asked(self, record: CollectiveRecord, side: str, origin: Op | None = None) -> bool:
        """Whether the user asked for a collective, which moves the "operand" or the "result" of its op, or either.

        Args:
            record: the collective.
            side: "operand", "result", or empty.
            origin: the op of the partitioned program that made the terms of a sum, where it reduces one.
        """
        if record.origin == "user" or (record.cause in _STATEMENTS and self._is_written(record.location, record.cause)):
            return True
        if record.cause == "func.return":
            returned = zip(self._graph.outputs, self._results, strict=True)
            return any(stated is not None and value.shape == record.shape for value, stated in returned)
        if origin is not None and self._is_stated_by(origin, record.shape):
            return True
        ops = self._ops.get((str(record.location), record.cause), [])
        made = [value for op in ops for value in op.results if value.shape == record.shape and side != "operand"]
        taken = [value for op in ops for value in op.operands if value.shape == record.shape and side != "result"]
        return any(map(self._is_stated_after, made)) or any(map(_is_stated_before, taken))

    def _is_written(self, location: ir.Location, name: str) -> bool:
        """Whether the program has a statement, which is none of a sort by devices."""
        return not self._has_own or (str(location), name) in self._ops

    def _is_stated_by(self, op: Op, shape: tuple[int, ...]) -> bool:
        if op.name in _STATEMENTS:
            return self._is_written(op.mlir.location, op.name)
        return self._is_stated_where_made(op, shape)

    def _is_stated_where_made(self, op: Op, shape: tuple[int, ...]) -> bool:
        found = self._ops.get((str(op.mlir.location), op.title), [])
        return any(self._is_stated_after(v) for each in found for v in each.results if v.shape == shape)

    def _is_stated_after(self, value: Value) -> bool:
        for user, operand in value.uses:
            if user.name in _STATEMENTS:
                return True
            if user.name == "func.return" and self._results[operand] is not None:
                return True
            if _main_operand(user) is value and self._is_stated_after(user.results[0]):
                return True
        return False


def _is_stated_before(value: Value) -> bool:
    while (op := value.defining_op) is not None:
        if op.name in _STATEMENTS:
            return True
        main = _main_operand(op)
        if main is None:
            return False
        value = main
    return False


def _main_operand(op: Op) -> Value | None:
    """The only operand that an element-wise op changes; None for other ops."""
    if op.name not in ELEMENTWISE:
        return None
    own = [v for v in op.operands if v.defining_op is None or v.defining_op.name not in _SPREAD]
    return own[0] if len(own) == 1 else None


# What moves along strict axes although nobody asked for it.


def unasked(plan: Plan, strict: Sequence[str]) -> list[str]:
    """What moves unasked along strict axes, in words, with what to write. Where a region only warns, it is warned of.

    Args:
        plan: the plan.
        strict: the axes that are strict everywhere.
    """
    if not strict and not _has_regions(plan):
        return []
    ops, linked = linked_collectives(plan)
    moves = [move for record, one in linked if one.wire_bytes for move in _moves(plan, record, one, ops, strict)]
    asked, texts = Asked(plan), dict[str, list[str]](error=[], warn=[])
    for move in moves:
        if not asked.is_asked(move.record, move.side, move.origin):
            texts[move.on_move].append(_text(move))
    warn_of(texts["warn"])
    return list(dict.fromkeys(texts["error"]))


def _has_regions(plan: Plan) -> bool:
    """Whether a program that sends anything has strict regions."""
    module = plan.stages.get("partitioned")
    return module is not None and bool(plan.wire_bytes) and may_mention(module, STRICT)


class _Move(NamedTuple):
    """A collective along a strict axis: what becomes of it, and whether it moves the "operand" or the "result" of the
    op that needs it; empty where that op sends by itself. Where it reduces a sum, `origin` made the terms."""

    axis: str
    on_move: str
    record: CollectiveRecord
    one: RecordedCollective
    side: str
    origin: Op | None


def _moves(
    plan: Plan, record: CollectiveRecord, one: RecordedCollective, ops: Sequence[Op], strict: Sequence[str]
) -> Iterator[_Move]:
    at = one.op if one.op is not None else one.serves
    names = {axis.name for axis in record.axes}
    origin = _origin(ops[one.op], names) if one.op is not None and record.kind in REDUCING else None
    found = _axes_at(ops[at] if at is not None else None) | _axes_at(origin)
    found |= strict_axes(record.location) | dict.fromkeys(strict, "error")
    names |= {*map(plan.program.axis_of_function, names)}
    for axis, on_move in found.items():
        if axis in names or not record.axes:
            yield _Move(axis, on_move, record, one, _side(one), origin)
            return


def _axes_at(op: Op | None) -> dict[str, str]:
    """The axes that are strict at an op, or in the loops and branches around it: their bodies have no scopes of
    outside."""
    found: dict[str, str] = {}
    while op is not None:
        found = strict_axes(op.mlir.location) | found
        op = op.parent
    return found


def _origin(op: Op, axes: Set[str]) -> Op | None:
    """The op that made the terms of the sum that a collective reduces along some axes: the planner may reduce it after
    further ops."""
    found = None
    while op.operands:
        terms = (v for v in op.operands if v.sharding and axes & {a.name for a in v.sharding.unreduced_axes})
        made = next((v.defining_op for v in terms if v.defining_op is not None), None)
        if made is None:
            return found
        found = op = made
    return found


def _side(one: RecordedCollective) -> str:
    if one.op is None or one.serves is None:
        return ""
    return "result" if one.serves < one.op else "operand"


def _text(move: _Move) -> str:
    what = f"{_what(move)}, {move.record.dtype}{list(move.record.shape)}"
    return "\n".join(
        [
            f"strict({move.axis!r}): bytes move along it unasked",
            f"  {line_of(move.one)}",
            f"  to allow it, write sdy.reshard(x, {spec_text(move.record.result)}) around {what}",
        ]
    )


def _what(move: _Move) -> str:
    """What is to be stated: where terms of a sum are made, the sum; else what the collective moves."""
    if move.origin is not None:
        place = place_of(move.origin.mlir.location)
        return f"the result of {place.primitive or move.origin.name} at {place.lines}"
    return f"the {move.side or 'operand'} of {move.one.place.primitive or move.record.cause}"


# Checking a plan against what its function may do.

_MOST_TO_FIX = 200
"""Collectives up to which fix-its are looked for before an error is raised. Guessed: each is another plan, and an error
should not come minutes late."""


class Advice(NamedTuple):
    """Where one reads more: what shows the plan, and what looks for changes."""

    plan: str
    fixes: str


IN_PYTHON = Advice("print(error.plan)", "error.plan.fixes")


def check(plan: Plan, budget: Budget | None, strict: Sequence[str], advice: Advice = IN_PYTHON) -> None:
    """Checks a plan that was made.

    Args:
        plan: the plan.
        budget: what it may send and hold.
        strict: the axes along which nothing may move unasked, beside those of `sdy.strict` inside of the function.
        advice: where the reader of an error reads more.

    Raises:
        ContractError: it does more than it may.
        ShardingError: the mesh has no such axis.
    """
    for axis in strict:
        if axis not in plan.program.axis_names:
            names = ", ".join(map(repr, plan.program.axis_names))
            raise ShardingError(f"strict: the mesh has no axis {axis!r}; expected one of {names}")
    problems = unasked(plan, strict)
    spent = list(budget.problems(plan, recorded_collectives(plan))) if budget is not None else []
    if problems or spent:
        raise _error(plan, [*problems, *spent, *(_advice(plan, advice) if spent else [])])


def _error(plan: Plan, problems: Sequence[str]) -> ContractError:
    axes = ", ".join(f"{axis.name}={axis.size}" for axis in plan.program.mesh.axes)
    text = "\n".join([f"{plan.name} on mesh {axes}:", *problems])
    error = ContractError(text.replace("\n", "\n  "))
    error.plan = plan
    return error


def _advice(plan: Plan, advice: Advice) -> list[str]:
    """Changes that save bytes, and where to read more."""
    if len(plan.collectives) > _MOST_TO_FIX:
        return [f"to fix: {advice.plan} and {advice.fixes} say what causes it, and what would save bytes"]
    fixes = [f"  {fix}" for fix in plan.fixes]
    return ["to fix:", *fixes] if fixes else [f"to fix: {advice.plan} shows the plan, and what causes it"]
