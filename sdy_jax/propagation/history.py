"""The history of a propagation: its steps, what each place was given, and where each axis of it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sdy_jax.propagation.engine import Engine
from sdy_jax.propagation.places import NOWHERE
from sdy_jax.propagation.record import Event, Spread, Step
from sdy_jax.propagation.solver import FactorSpread
from sdy_jax.representation.axes import contains, overlaps
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.rule import TensorMapping
from sdy_jax.representation.sharding import TensorSharding


@dataclass(frozen=True, slots=True)
class Write:
    """A step stored a sharding at a place: as tensor `tensor` of its op, or because that one, at place `through`, and
    this place are members of one sharding group."""

    step: Step
    tensor: int
    through: int
    sharding: TensorSharding


@dataclass(frozen=True, slots=True)
class Cause:
    """The origin of an axis: a write, and the place, dimension and axis from which the axis spread.

    `source` is the index of the tensor of the step's op that had the axis; None: the axis came through the sharding
    group of the place, or no single tensor had it.
    """

    write: Write
    spread: Spread | None
    source: int | None
    place: int
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
        self._known: dict[object, tuple[FactorSpread, ...]] = {}

    @cached_property
    def steps(self) -> list[Step]:
        """All steps in order."""
        return [self._step(number, event) for number, event in enumerate(self._events)]

    def _step(self, number: int, event: Event) -> Step:
        item, tensors, directions, strategy, level, priority = event
        solver, shardings = self.engine.solver, self.engine.solver.shardings
        question = (item.kind, tensors, directions, strategy)
        if question not in self._known:
            self._known[question] = solver.spreads(*question)
        rule = solver.kind_of(item.kind).rule
        spreads = tuple(
            Spread(s.factor, dim_of(rule.mappings[s.target], s.factor), s.before, s.axes, s.source, s.target)
            for s in self._known[question]
        )
        last = len(tensors) - 1
        written = []
        for tensor, new in solver.solve(*question).updates:
            sharding = shardings[self.engine.stored(item, new) if tensor == last else new]
            if item.places[tensor] != NOWHERE and sharding is not None:
                written.append((tensor, sharding))
        before = tuple(shardings[n] for n in tensors)
        return Step(number, item, level, priority, rule, before, spreads, tuple(written))

    @cached_property
    def writes(self) -> dict[int, list[Write]]:
        """Per place, the writes to it in order."""
        found: dict[int, list[Write]] = {}
        for step in self.steps:
            for tensor, sharding in step.written:
                place = step.tensors[tensor]
                found.setdefault(place, []).append(Write(step, tensor, place, sharding))
                for peer in self.engine.peers.get(place, ()):
                    found.setdefault(peer, []).append(Write(step, tensor, place, sharding))
        return found

    def cause(self, place: int, dim: int, axis: AxisRef) -> Cause | None:
        """The first step that gave a place an axis; None: no step did, or it was there from the start (`is_given`).

        A source had the axis before the step, so that following causes ends at an axis that was given.
        """
        for write in self.writes.get(place, ()):
            if has_axis(write.sharding, dim, axis):
                if write.through != place:
                    return Cause(write, None, None, write.through, dim, axis)
                return self._cause(write, dim, axis)
        return None

    def is_given(self, place: int, dim: int, axis: AxisRef) -> bool:
        """The place had the axis before propagation."""
        return has_axis(self.engine.given(place), dim, axis)

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
    def _holder(step: Step, spread: Spread, piece: AxisRef) -> int | None:
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


def dim_of(mapping: TensorMapping, factor: int) -> int:
    """The dimension of a tensor that a factor belongs to; -1 if the tensor does not have it."""
    return next((dim for dim, factors in enumerate(mapping) if factor in factors), -1)


def has_axis(sharding: TensorSharding | None, dim: int, axis: AxisRef) -> bool:
    """A dimension is split along all of an axis."""
    return sharding is not None and any(contains(a, axis) for a in sharding.dimensions[dim].axes)


def axis_at(sharding: TensorSharding | None, dim: int, piece: AxisRef) -> AxisRef | None:
    """The axis of a dimension that shares a digit with `piece`."""
    axes = sharding.dimensions[dim].axes if sharding is not None else ()
    return next((a for a in axes if overlaps(a, piece)), None)
