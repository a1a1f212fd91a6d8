"""EXPLAIN ANALYZE: a plan is run, and what is measured stands beside what was estimated, to print or to ask."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

import jax

from sdy_jax.base.errors import SdyError
from sdy_jax.ir.jax_shardings import bytes_text, seconds_text
from sdy_jax.lowering.targets.measurements import MeasuredSends, StepProfile
from sdy_jax.plan.estimates import MemoryUse, compiled_memory
from sdy_jax.plan.page.text import aligned
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.profile import Instruction, MeasuredTimes, Scope, instructions, measured, module_name, scopes
from sdy_jax.plan.record.recorded_time import lanes_of, links_of
from sdy_jax.plan.record.timeline import RecordedExecution, RecordedRun

# What `Plan.analyze` found, to print or to ask.

_OFF = 2.0
"""How many times more or less than estimated is worth a warning. Chosen: estimates are of rates that are published."""

_LEAST = 0.01
"""The share of all that was measured of collectives below which nothing is warned of. Chosen: it would be noise."""

_SCOPES = 20
"""How many scopes are printed. Chosen: a page has room for them; all are in `Analysis.scopes`."""


@dataclass(frozen=True, slots=True)
class MeasuredCollective:
    """The collectives of a plan that profilers show under one name: one kind, on the same axes, for one source line.

    Attributes:
        name: as profilers show it, `sdy.all_reduce[data] model.py:12`.
        planned: executions per call in the plan.
        wire_bytes: what a device sends in them, by the plan.
        estimated: their time by the cost model, in its unit.
        instructions: the compiled program's instructions for them: fewer than planned where XLA merges some.
        measured: the seconds they took per call; None where the profiler says nothing of them.
        kind, axes: which they are; axes as texts, major to minor.
        runs_beside: others run while they do, so that the profiler sees when they start and are awaited only.
    """

    name: str
    planned: int
    wire_bytes: float
    estimated: float
    instructions: int
    measured: float | None
    kind: str = ""
    axes: tuple[str, ...] = ()
    runs_beside: bool = False

    @property
    def sends(self) -> MeasuredSends | None:
        """What a cost model can learn of them; None where that is nothing."""
        if self.measured is None or self.runs_beside or not self.wire_bytes:
            return None
        return MeasuredSends(self.kind, self.axes, self.planned, self.wire_bytes, self.measured)


@dataclass(frozen=True, slots=True)
class MeasuredScope:
    """What the ops of a part of the model took, in seconds per call.

    Attributes:
        name: its name scopes, of flax's modules and of `jax.named_scope`; empty for ops without any.
        seconds: of all instructions, each on the device that took least.
        backward: of those of the backward pass.
        sending: of those that are of collectives.
    """

    name: str
    seconds: float
    backward: float
    sending: float

    def with_more(self, seconds: float, is_backward: bool, is_sending: bool) -> MeasuredScope:
        """With the seconds of a further instruction."""
        return MeasuredScope(
            self.name,
            self.seconds + seconds,
            self.backward + seconds * is_backward,
            self.sending + seconds * is_sending,
        )


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Bytes per device by the compiler: arguments, results that do not lie in donated arguments, temporaries."""

    arguments: float
    results: float
    temporaries: float

    @classmethod
    def of(cls, held: MemoryUse) -> MeasuredMemory:
        """The same of what was estimated, or of what the compiler says."""
        return cls(held.arguments, held.own_results, held.temporaries)

    @property
    def peak(self) -> float:
        """All together."""
        return self.arguments + self.results + self.temporaries

    def __str__(self) -> str:
        parts = {"arguments": self.arguments, "results": self.results, "temporaries": self.temporaries}
        return ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items())


@dataclass(frozen=True)
class Analysis:
    """A plan beside what was measured when it ran. Printing it is like SQL's EXPLAIN ANALYZE.

    Attributes:
        plan: the plan.
        seconds: of a call, the median of some.
        collectives: those that took longest first; slices, which nothing is sent for, are left out.
        memory: None where the compiler does not say.
        scopes: the parts of the model, those that took longest first.
        run: one call on one device over time.
    """

    plan: Plan
    seconds: float
    collectives: tuple[MeasuredCollective, ...]
    memory: MeasuredMemory | None
    scopes: tuple[MeasuredScope, ...] = ()
    run: RecordedRun | None = None

    @cached_property
    def scale(self) -> float | None:
        """Seconds per unit of the cost model: 1 where that is a second, else such that all collectives together take
        what was measured. None where nothing was."""
        if self.plan.costs.unit == "seconds":
            return 1.0
        seen = [each for each in self.collectives if each.measured is not None]
        estimated = sum(each.estimated for each in seen)
        return sum(each.measured or 0.0 for each in seen) / estimated if estimated else None

    @cached_property
    def _sending(self) -> float:
        """The seconds of all collectives that were measured."""
        return sum(each.measured or 0.0 for each in self.collectives)

    @property
    def profile(self) -> StepProfile:
        """What `CostModel.calibrate` learns from. Work is what is left of a call for it."""
        plan, costs = self.plan, self.plan.costs
        return StepProfile(
            plan.device_kind,
            dict(plan.program.mesh.sizes),
            tuple([sends for each in self.collectives if (sends := each.sends)]),
            max(self.seconds - self._sending, 0.0),
            plan.time.compute,
            costs.flop,
            costs.memory,
            plan.name,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes what was measured to a file, of which `CostModel.calibrate(mesh, from_plan=path)` learns.

        Raises:
            SdyError: it cannot be written.

        Example:
            step.plan(state, batch).analyze(state, batch).save("step.profile.json")
        """
        self.profile.save(path)

    def estimated_seconds(self, collective: MeasuredCollective) -> float | None:
        """A row's estimate in seconds."""
        return None if self.scale is None else collective.estimated * self.scale

    def off(self, collective: MeasuredCollective) -> float | None:
        """How many times the estimate was measured; None where either is not known, or the model counts bytes: it says
        of no collective how long it takes to start, which is all that small ones take."""
        if self.plan.costs.unit != "seconds":
            return None
        estimated = self.estimated_seconds(collective)
        return collective.measured / estimated if estimated and collective.measured is not None else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Where the cost model, if it is one of seconds, is off by more than 2 times, of what matters."""
        return tuple(self._warnings())

    def _warnings(self) -> Iterator[str]:
        for each in self.collectives:
            off, most = self.off(each), max(each.measured or 0.0, self.estimated_seconds(each) or 0.0)
            if off is not None and most > _LEAST * self._sending and not 1 / _OFF <= off <= _OFF:
                yield f"{each.name}: took {_times(off)} times what the cost model says"

    def __str__(self) -> str:
        lines = [*self._totals(), "", *self._scope_rows(), *self._rows(), *(f"! {text}" for text in self.warnings)]
        if self.plan.costs.unit != "seconds" and self.collectives:
            lines.append(_NO_SECONDS)
        return "\n".join(lines)

    def _totals(self) -> Iterator[str]:
        plan = self.plan
        yield f"{plan.headline}, run on {plan.device_kind}"
        yield f"time    {seconds_text(self.seconds)} a call, {seconds_text(self._sending)} of it in collectives"
        yield f"        estimated {plan.time}"
        if self.memory is not None:
            yield f"memory  {self.memory}"
            yield f"        estimated {MeasuredMemory.of(plan.memory)}"

    def _scope_rows(self) -> Iterator[str]:
        if not any(scope.name for scope in self.scopes):
            return
        whole = sum(scope.seconds for scope in self.scopes)
        header = ("scopes", "measured", "share", "backward", "in collectives")
        rows = aligned([header, *(_scope_row(scope, whole) for scope in self.scopes[:_SCOPES])])
        yield from (row.removeprefix("  ") for row in rows)
        if rest := self.scopes[_SCOPES:]:
            yield f"  {len(rest)} further scopes: {seconds_text(sum(scope.seconds for scope in rest))}"
        yield ""

    def _rows(self) -> Iterator[str]:
        share = "" if self.plan.costs.unit == "seconds" else " (share of what was measured)"
        header = ("collectives", "planned", "compiled", "bytes", f"estimated{share}", "measured", "")
        rows = aligned([header, *(self._row(each) for each in self.collectives)])
        yield from (row.removeprefix("  ") for row in rows)  # the header stands further left

    def _row(self, each: MeasuredCollective) -> Sequence[str]:
        off, estimated = self.off(each), self.estimated_seconds(each)
        return (
            f"  {each.name}",
            str(each.planned),
            str(each.instructions),
            bytes_text(each.wire_bytes),
            seconds_text(estimated) if estimated is not None else "",
            seconds_text(each.measured) if each.measured is not None else "not seen",
            f"{_times(off)} x" if off is not None else "",
        )


def _scope_row(scope: MeasuredScope, whole: float) -> Sequence[str]:
    parts = (seconds_text(each) if each else "" for each in (scope.backward, scope.sending))
    return f"  {scope.name or 'no scope'}", seconds_text(scope.seconds), f"{scope.seconds / whole:.0%}", *parts


_NO_SECONDS = (
    "the cost model counts bytes, so it is compared with no times; sdy.CostModel.calibrate(mesh, from_plan=...) makes "
    "one of seconds of this analysis"
)


def _times(off: float) -> str:
    return f"{off:.2g}" if off < 10 else f"{off:,.0f}"


# EXPLAIN ANALYZE: a plan is run, and what is measured stands beside what was estimated.


def analyze(plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Analysis:
    """Runs a plan's function, and measures.

    Raises:
        SdyError: the plan has no function, or the arguments have another plan; or its mesh has no devices.
    """
    function = _function_of(plan, args, kwargs)
    lowered = function.lower(*args, **kwargs)
    call = _repeatable(function, lowered, args, kwargs)
    jax.block_until_ready(call())  # compiles, or says what is wrong with the arguments
    compiled = lowered.compile()
    text = compiled.as_text()
    found = measured(call, module_name(text))
    sent = scopes(plan.collectives, text)
    rows = [_row(scope, plan, found) for scope in sent]
    rows = sorted([row for row in rows if row.wire_bytes or row.instructions], key=_weight, reverse=True)
    held = compiled_memory(compiled)
    memory = MeasuredMemory.of(held) if held is not None else None
    known = list(instructions(text))
    run = _run(plan, found, sent, {each.name: each for each in known})
    return Analysis(plan, found.seconds, tuple(rows), memory, _by_scope(known, found), run)


def _run(plan: Plan, found: MeasuredTimes, sent: Sequence[Scope], known: Mapping[str, Instruction]) -> RecordedRun:
    """The last call on a device, by lanes. Instructions of collectives that profilers show under one name are those of
    the plan in their order, where as many are left, else all of the first."""
    number = {id(record): n for n, record in enumerate(plan.collectives)}
    collective = dict[str, int]()
    for scope in sent:
        alike = len(scope.instructions) == len(scope.records)
        for n, name in enumerate(scope.instructions):
            collective[name] = number[id(scope.records[n if alike else 0])]
    lane_of = {n: links_of(plan.collectives[n], plan.program.mesh) for n in collective.values()}
    lanes, slices = lanes_of(lane_of.values()), list[RecordedExecution]()
    for name, start, seconds in found.last:
        one, own = collective.get(name), known.get(name)
        if own is not None:
            lane = lanes.index(lane_of[one]) if one is not None else 0
            slices.append(RecordedExecution(lane, start, seconds, name, own.scope, own.is_backward, one))
    return RecordedRun(plan.device_kind, found.seconds, lanes, tuple(slices))


def _function_of(plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    function = plan.function()
    if function is None:
        raise SdyError(f"analyze: the function of {plan.name} is gone; to fix: keep `step` as long as step.plan(...)")
    own = function.plan(*args, **kwargs)
    found, wanted = ([(v.path, v.type) for v in each.arguments] for each in (own, plan))
    if found != wanted:
        have, want = next(pair for pair in zip_longest(found, wanted, fillvalue=("", "nothing")) if pair[0] != pair[1])
        raise SdyError(
            f"analyze: `{have[0] or want[0]}` is {have[1]} here and {want[1]} in the plan; to fix: give arguments like "
            "those that the plan was made for"
        )
    return function


def _repeatable(
    function: Any, lowered: jax.stages.Lowered, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[[], Any]:
    """A call that may run many times: where arguments are donated, each call gets copies."""
    if not any(leaf.donated for leaf in jax.tree.leaves(lowered.args_info)):
        return lambda: function(*args, **kwargs)

    def call() -> Any:
        copied, named = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, (args, dict(kwargs)))
        return function(*copied, **named)

    return call


def _row(scope: Scope, plan: Plan, found: MeasuredTimes) -> MeasuredCollective:
    costs, mesh, counted = plan.costs, plan.program.mesh, set(map(id, plan.totals.counted))
    records = [record for record in scope.records if id(record) in counted]
    seen = [found.instructions[name] for name in scope.instructions if name in found.instructions]
    return MeasuredCollective(
        scope.name,
        sum(record.times for record in records),
        sum(record.total_wire_bytes for record in records),
        sum(record.estimated_times * record.sending_time(costs, mesh) for record in records),
        len(scope.instructions),
        sum(seen) if seen else None,
        scope.first.kind,
        tuple(map(str, scope.first.axes)),
        any("-start" in name or "-done" in name for name in scope.instructions),
    )


def _by_scope(known: Sequence[Instruction], found: MeasuredTimes) -> tuple[MeasuredScope, ...]:
    """What was measured by the scopes of the user's ops, those that took longest first."""
    scopes: dict[str, MeasuredScope] = {}
    for each in known:
        seconds = found.instructions.get(each.name)
        if seconds is not None:
            before = scopes.get(each.scope, MeasuredScope(each.scope, 0.0, 0.0, 0.0))
            scopes[each.scope] = before.with_more(seconds, each.is_backward, each.is_sending)
    return tuple(sorted(scopes.values(), key=lambda scope: scope.seconds, reverse=True))


def _weight(row: MeasuredCollective) -> tuple[float, float]:
    """What rows are sorted by: those that took longest first, then those that send most."""
    return row.measured or 0.0, row.wire_bytes
