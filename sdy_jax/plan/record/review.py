"""The part of a plan that people review: arguments, results, collectives, and what they come from."""

from __future__ import annotations

from dataclasses import replace

from sdy_jax.plan.record.program import RecordedCollective
from sdy_jax.plan.record.record import PlanRecord


def reviewed(record: PlanRecord) -> PlanRecord:
    """A record without ops, values and the course of memory, of which there are as many as there are ops."""
    memory = record.memory
    if memory is not None:
        memory = replace(memory, timeline=(), buffers=(), largest=())
    collectives = tuple(map(_alone, record.collectives))
    return replace(record, ops=(), values=(), memory=memory, collectives=collectives)


def _alone(collective: RecordedCollective) -> RecordedCollective:
    """A collective that does not refer to ops."""
    return replace(collective, op=None, serves=None, members=tuple(map(_alone, collective.members)))
