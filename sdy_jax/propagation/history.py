"""The history of a propagation: its steps, what each value id was given, and where each axis of it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sdy_jax.propagation.engine import Engine
from sdy_jax.propagation.record import Event, RecordedStep
from sdy_jax.propagation.solver import dim_of
from sdy_jax.propagation.spread import Spread
from sdy_jax.propagation.value_ids import NO_VALUE
from sdy_jax.representation.axes import contains, overlaps
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.sharding import TensorSharding


@dataclass(frozen=True, slots=True)
class Write:
    """A step stored a sharding for a value id: as tensor `tensor` of its op, or because that one, at value id
    `through`, and this value id are members of one sharding group."""

    step: RecordedStep
    tensor: int
    through: int
    sharding: TensorSharding


@dataclass(frozen=True, slots=True)
class Cause:
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

    def cause(self, value_id: int, dim: int, axis: AxisRef) -> Cause | None:
        """The first step that gave a value id an axis; None: no step did, or it was there from the start (`is_given`).

        A source had the axis before the step, so that following causes ends at an axis that was given.
        """
        for write in self.writes.get(value_id, ()):
            if has_axis(write.sharding, dim, axis):
                if write.through != value_id:
                    return Cause(write, None, None, write.through, dim, axis)
                return self._cause(write, dim, axis)
        return None

    def is_given(self, value_id: int, dim: int, axis: AxisRef) -> bool:
        """The value id had the axis before propagation."""
        return has_axis(self.engine.given(value_id), dim, axis)

    def _cause(self, write: Write, dim: int, axis: AxisRef) -> Cause | None:
        step = write.step
        for spread in step.spreads:
            piece = next((a for a in gained(spread) if overlaps(a, axis)), None)
            if spread.target != write.tensor or spread.dim != dim or piece is None:
                continue
            source = spread.source
            if source is None:
                source = self._holder(step, spread, piece)
            if source is None:
                return Cause(write, spread, None, write.through, dim, axis)
            there = dim_of(step.rule.mappings[source], spread.factor)
            held = axis_at(step.before[source], there, piece) or piece
            return Cause(write, spread, source, step.tensors[source], there, held)
        return Cause(write, None, None, write.through, dim, axis)

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
