"""Explanations of a propagation: where each axis of a value came from, and what keeps an axis from spreading."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from sdy_jax.ir.meshes import Axes, AxisRef, axes_size, contains, overlaps, prefix_of
from sdy_jax.ir.shardings import OpShardingRule, TensorSharding
from sdy_jax.shardy.propagation.engine import Engine, Event, RecordedStep
from sdy_jax.shardy.propagation.factors import (
    Direction,
    FactorProblem,
    FactorSharding,
    Spread,
    allowed_within,
    compatible_axes,
)
from sdy_jax.shardy.propagation.solver import FACTOR_STRATEGIES, dim_of
from sdy_jax.shardy.propagation.worklist import NO_VALUE, WorklistEntry

# The history of a propagation: its steps, what each value id was given, and where each axis of it came from.


@dataclass(frozen=True, slots=True)
class Write:
    """A step stored a sharding for a value id: as tensor `tensor` of its op, or because that one, at value id
    `through`, and this value id are members of one sharding group."""

    step: RecordedStep
    tensor: int
    through: int
    sharding: TensorSharding


@dataclass(frozen=True, slots=True)
class AxisOrigin:
    """The origin of an axis: a write, and the value id, dimension and axis from which the axis spread.

    `source` is the index of the tensor of the step's op that had the axis; None: the axis came through the sharding
    group of the value id, or no single tensor had it.
    """

    write: Write
    spread: Spread | None
    source: int | None
    value_id: int
    dim: int
    axis: AxisRef


class History:
    """The recorded steps of an engine, ready for questions.

    Args:
      engine: in its final state.
      events: what it recorded.
    """

    def __init__(self, engine: Engine, events: Sequence[Event]):
        self.engine, self._events = engine, events
        self._known: dict[object, tuple[Spread, ...]] = {}

    @cached_property
    def steps(self) -> list[RecordedStep]:
        """All steps in order."""
        return [self._step(number, event) for number, event in enumerate(self._events)]

    def _step(self, number: int, event: Event) -> RecordedStep:
        entry, tensors, directions, strategy, level, priority = event
        solver, shardings = self.engine.solver, self.engine.solver.shardings
        question = (entry.kind, tensors, directions, strategy)
        if question not in self._known:
            self._known[question] = solver.spreads(*question)
        rule = solver.kind_of(entry.kind).rule
        last = len(tensors) - 1
        written = []
        for tensor, new in solver.solve(*question):
            sharding = shardings[self.engine.stored(entry, new) if tensor == last else new]
            if entry.value_ids[tensor] != NO_VALUE and sharding is not None:
                written.append((tensor, sharding))
        before = tuple(shardings[n] for n in tensors)
        return RecordedStep(number, entry, level, priority, rule, before, self._known[question], tuple(written))

    @cached_property
    def writes(self) -> dict[int, list[Write]]:
        """Per value id, the writes to it in order."""
        found: dict[int, list[Write]] = {}
        for step in self.steps:
            for tensor, sharding in step.written:
                value_id = step.tensors[tensor]
                found.setdefault(value_id, []).append(Write(step, tensor, value_id, sharding))
                for peer in self.engine.peers.get(value_id, ()):
                    found.setdefault(peer, []).append(Write(step, tensor, value_id, sharding))
        return found

    def cause(self, value_id: int, dim: int, axis: AxisRef) -> AxisOrigin | None:
        """The first step that gave a value id an axis; None: no step did, or it was there from the start (`is_given`).

        A source had the axis before the step, so that following causes ends at an axis that was given.
        """
        for write in self.writes.get(value_id, ()):
            if has_axis(write.sharding, dim, axis):
                if write.through != value_id:
                    return AxisOrigin(write, None, None, write.through, dim, axis)
                return self._cause(write, dim, axis)
        return None

    def is_given(self, value_id: int, dim: int, axis: AxisRef) -> bool:
        """The value id had the axis before propagation."""
        return has_axis(self.engine.given(value_id), dim, axis)

    def _cause(self, write: Write, dim: int, axis: AxisRef) -> AxisOrigin | None:
        step = write.step
        for spread in step.spreads:
            piece = next((a for a in gained(spread) if overlaps(a, axis)), None)
            if spread.target != write.tensor or spread.dim != dim or piece is None:
                continue
            source = spread.source
            if source is None:
                source = self._holder(step, spread, piece)
            if source is None:
                return AxisOrigin(write, spread, None, write.through, dim, axis)
            there = dim_of(step.rule.mappings[source], spread.factor)
            held = axis_at(step.before[source], there, piece) or piece
            return AxisOrigin(write, spread, source, step.tensors[source], there, held)
        return AxisOrigin(write, None, None, write.through, dim, axis)

    @staticmethod
    def _holder(step: RecordedStep, spread: Spread, piece: AxisRef) -> int | None:
        """The first tensor that had a part of the piece in a dimension of the factor."""
        for tensor, mapping in enumerate(step.rule.mappings):
            dim = dim_of(mapping, spread.factor)
            if tensor != spread.target and dim >= 0 and axis_at(step.before[tensor], dim, piece):
                return tensor
        return None


def gained(spread: Spread) -> tuple[AxisRef, ...]:
    """The axes that are new; the last old one as well if it has become longer."""
    kept = len(spread.before)
    if kept and spread.before[-1] != spread.axes[kept - 1]:
        kept -= 1
    return spread.axes[kept:]


def has_axis(sharding: TensorSharding | None, dim: int, axis: AxisRef) -> bool:
    """A dimension is split along all of an axis."""
    return sharding is not None and any(contains(a, axis) for a in sharding.dimensions[dim].axes)


def axis_at(sharding: TensorSharding | None, dim: int, piece: AxisRef) -> AxisRef | None:
    """The axis of a dimension that shares a digit with `piece`."""
    axes = sharding.dimensions[dim].axes if sharding is not None else ()
    return next((a for a in axes if overlaps(a, piece)), None)


# What keeps an axis from spreading through an op, read off the final state.
#
# At the fixed point every spread that is still possible is blocked, and the rules of propagation say by what: each
# `Blockage` names one reason, the tensor that gives it, and the axes that stand in the way.


class Reason(enum.Enum):
    """Why an op does not give an axis to a tensor."""

    MESHES = "the tensors of the op lie on different meshes"
    BLOCKED_FACTOR = "the op's rule lets nothing propagate along this dimension"
    DIRECTION = "the op does not let shardings pass in this direction"
    FACTOR_CONFLICT = "tensors of the op that share the dimension disagree on its axes"
    CLOSED = "the dimension is closed"
    REPLICATED = "the axis is explicitly replicated on the tensor"
    UNREDUCED = "the tensor is unreduced along the axis"
    USED = "the axis already splits another dimension of the tensor"
    OVERFLOW = "the dimension's axes do not fit the part of it that the op sees"
    MAJOR_FIRST = "the part of the dimension before it is not split to its end"
    INDIVISIBLE = "the axis does not divide the dimension's part that the op sees"
    CONSERVATIVE = "conservative propagation does not split axes"


@dataclass(frozen=True, slots=True)
class Blockage:
    """An op that does not give an axis to tensor `target` along a factor.

    `source` is a tensor that has the axis. `at` is the tensor that is in the way: the target, or another one that may
    not be left behind. `dim` is its dimension concerned, and `axes` what stands there. `candidate` is the axis that
    cannot spread: the one asked for, or one that has to come before it.
    """

    entry: WorklistEntry
    factor: int
    source: int
    target: int
    reason: Reason
    at: int
    dim: int
    axes: Axes = ()
    candidate: AxisRef | None = None


class Blockers:
    """Finds what blocks axes at the ops of a propagated graph.

    Args:
      engine: in its final state.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self.entries: dict[int, list[WorklistEntry]] = {}
        """Per value id, the ops that it is an operand or result of."""
        for entry in (*(i for i in engine.entries if i is not None), *engine.result_entries):
            if entry.op not in engine.liveness.dead:
                for value_id in dict.fromkeys(entry.value_ids):
                    self.entries.setdefault(value_id, []).append(entry)

    def rule(self, entry: WorklistEntry) -> OpShardingRule:
        return self._engine.solver.kind_of(entry.kind).rule

    def seen(self, entry: WorklistEntry) -> list[TensorSharding | None]:
        """The present shardings of an op's tensors, as the op sees them."""
        found = [self._engine.sharding(value_id) for value_id in entry.value_ids]
        if entry.view is not None:
            found[-1] = entry.view.seen(found[-1])
        return found

    def neighbours(self, entry: WorklistEntry, target: int, dim: int) -> Iterator[tuple[int, int, int]]:
        """(factor, tensor, dimension) for each other tensor of the op that shares a factor of the dimension."""
        rule = self.rule(entry)
        for factor in rule.mappings[target][dim]:
            for tensor, mapping in enumerate(rule.mappings):
                there = dim_of(mapping, factor)
                if tensor != target and there >= 0:
                    yield factor, tensor, there

    def block(self, entry: WorklistEntry, target: int, factor: int, source: int, axis: AxisRef) -> Blockage | None:
        """Why the op does not give `axis` of tensor `source` to tensor `target` along a factor.

        None: `source` has the axis along another factor of its dimension, so that there is nothing to give.
        """
        engine, rule = self._engine, self.rule(entry)
        shardings = self.seen(entry)
        numbers = tuple(engine.solver.shardings.number(s) for s in shardings)
        posed = engine.solver.pose(engine.solver.kind_of(entry.kind), numbers, entry.directions[-1])  # the last level's
        if posed is None:
            at = self._on_other_mesh(shardings, source, target)
            return Blockage(entry, factor, source, target, Reason.MESHES, at, dim_of(rule.mappings[at], factor))
        search = Search(posed[0], entry, rule, factor, source, target)
        owned = search.problem.tensors[source].factors.get(factor)
        if owned is None or not any(overlaps(a, axis) for a in owned.axes):
            return None
        return search.find(axis, everywhere=self._engine.strategies[-1] is FACTOR_STRATEGIES["basic"][-1])

    @staticmethod
    def _on_other_mesh(shardings: list[TensorSharding | None], source: int, target: int) -> int:
        own = shardings[source]
        assert own is not None
        others = (n for n, s in enumerate(shardings) if s is not None and s.mesh != own.mesh)
        return next(others, target)


@dataclass(frozen=True, slots=True)
class Search:
    """One question to one op: why does `target` not get axes along `factor` that `source` has?"""

    problem: FactorProblem
    entry: WorklistEntry
    rule: OpShardingRule
    factor: int
    source: int
    target: int

    def find(self, axis: AxisRef, everywhere: bool) -> Blockage:
        """The reason that keeps back an axis of the source; `everywhere`: all tensors must be able to take it."""
        if self.factor in self.rule.blocked:
            return self._because(Reason.BLOCKED_FACTOR)
        candidates = compatible_axes(self.problem, self.factor)
        value_id = next((i for i, a in enumerate(candidates) if overlaps(a, axis)), None)
        if value_id is None:
            if self._wrong_direction():
                return self._because(Reason.DIRECTION)
            at = self._disagreeing()
            return self._because(Reason.FACTOR_CONFLICT, at, self.problem.tensors[at].factors[self.factor].axes)
        previous = 1
        for candidate in candidates[: value_id + 1]:
            for tensor in self._concerned(everywhere):
                found = self.obstacle(tensor, candidate, previous)
                if found is not None:
                    return found
            previous *= candidate.size(self.problem.mesh)
        return self._leftover(candidates[value_id], axis)

    def _leftover(self, candidate: AxisRef, axis: AxisRef) -> Blockage:
        """Why a candidate that every tensor could take does not spread; it may be a part of `axis`."""
        owned = next(a for a in self.problem.tensors[self.source].factors[self.factor].axes if overlaps(a, axis))
        if not contains(candidate, owned):
            at = self._disagreeing()
            return self._because(Reason.FACTOR_CONFLICT, at, self.problem.tensors[at].factors[self.factor].axes)
        if self._unfilled_before() is not None:
            return self._because(Reason.MAJOR_FIRST, axes=(candidate,), candidate=axis)
        return self._because(Reason.INDIVISIBLE, axes=(candidate,), candidate=axis)

    def _unfilled_before(self) -> int | None:
        """A factor of the target's dimension that precedes this one and is not split to its end."""
        mapping, factors = self.rule.mappings[self.target], self.problem.tensors[self.target].factors
        dim = mapping[dim_of(mapping, self.factor)]
        for factor in dim[: dim.index(self.factor)]:
            if axes_size(factors[factor].axes, self.problem.mesh) < self.problem.sizes[factor]:
                return factor
        return None

    def _concerned(self, everywhere: bool) -> list[int]:
        """The tensors that have to be able to take an axis: the target, and those that it may not overtake."""
        first = self.problem.num_operands
        others = range(len(self.problem.tensors)) if everywhere else ()
        if not everywhere and self.problem.elementwise and self.target < first:
            others = range(first, len(self.problem.tensors))
        return [self.target, *(n for n in others if n != self.target)]

    def _wrong_direction(self) -> bool:
        direction = self.problem.directions[self.factor]
        wanted = Direction.FORWARD if self.source < self.problem.num_operands else Direction.BACKWARD
        return direction is not Direction.BOTH and direction is not wanted

    def _disagreeing(self) -> int:
        """A tensor whose axes are neither a beginning nor a continuation of the source's: the target, if it is one."""
        tensors = self.problem.tensors
        own = tensors[self.source].factors[self.factor].axes
        for tensor in (self.target, *(n for n in range(len(tensors)) if n not in (self.source, self.target))):
            sharding = tensors[tensor].factors.get(self.factor)
            if sharding is not None and _disagree(sharding.axes, own):
                return tensor
        return self.target

    def _because(
        self, reason: Reason, at: int | None = None, axes: Axes = (), dim: int = -1, candidate: AxisRef | None = None
    ) -> Blockage:
        at = self.target if at is None else at
        dim = dim_of(self.rule.mappings[at], self.factor) if dim < 0 else dim
        return Blockage(self.entry, self.factor, self.source, self.target, reason, at, dim, axes, candidate)

    def obstacle(self, tensor: int, axis: AxisRef, previous: int) -> Blockage | None:
        """The reason why `tensor` cannot take an axis behind `previous` shards of the factor; None if it can."""
        projection = self.problem.tensors[tensor]
        own = projection.factors.get(self.factor)
        if own is not None and any(contains(a, axis) for a in own.axes):
            return None
        for other, sharding in projection.factors.items():
            taken = _overlapping((*sharding.overflow, *sharding.axes), axis)
            if other != self.factor and taken:
                dim = dim_of(self.rule.mappings[tensor], other)
                return self._because(Reason.USED, tensor, taken, dim, axis)
        return None if own is None else self._obstacle_within(tensor, own, axis, previous)

    def _obstacle_within(self, tensor: int, own: FactorSharding, axis: AxisRef, previous: int) -> Blockage | None:
        """The reason, in the tensor's own factor, why it cannot take an axis; None if there is none."""
        projection = self.problem.tensors[tensor]
        for reason, axes in (
            (Reason.REPLICATED, _overlapping(projection.replicated, axis)),
            (Reason.UNREDUCED, _overlapping(projection.unreduced, axis)),
            (Reason.OVERFLOW, own.overflow),
        ):
            if axes:
                return self._because(reason, tensor, axes, candidate=axis)
        before = self._overflow_before(tensor)
        if before:
            return self._because(Reason.OVERFLOW, tensor, before, candidate=axis)
        if own.closed:
            return self._because(Reason.CLOSED, tensor, own.axes, candidate=axis)
        fitting = allowed_within(projection, self.factor, axis, previous, self.problem)
        if fitting != axis:
            return self._because(Reason.INDIVISIBLE, tensor, (axis,), candidate=axis)
        if self.problem.conservative and axis.sub_axis is not None:
            return self._because(Reason.CONSERVATIVE, tensor, (axis,), candidate=axis)
        return None

    def _overflow_before(self, tensor: int) -> Axes:
        """Axes of the tensor's dimension that did not fit a factor before this one; they leave no room for more."""
        mapping, factors = self.rule.mappings[tensor], self.problem.tensors[tensor].factors
        dim = mapping[dim_of(mapping, self.factor)]
        found = (factors[f].overflow for f in dim[: dim.index(self.factor)] if f in factors)
        return next((overflow for overflow in found if overflow), ())


def _overlapping(axes: Axes, axis: AxisRef) -> Axes:
    return tuple(a for a in axes if overlaps(a, axis))


def _disagree(a: Axes, b: Axes) -> bool:
    """Whether neither list is a prefix of the other."""
    for i, (left, right) in enumerate(zip(a, b, strict=False), 1):
        if left != right:
            return not ((i == len(a) and prefix_of(left, right)) or (i == len(b) and prefix_of(right, left)))
    return False
