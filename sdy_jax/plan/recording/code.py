"""The user's program by its lines."""

from __future__ import annotations

from collections import Counter

from jax.extend.mlir import ir

from sdy_jax.ir.operations import main_function, pre_order
from sdy_jax.plan.record.border import RecordedFrame
from sdy_jax.plan.record.program import RecordedCode, RecordedCount
from sdy_jax.plan.recording.places import Places


def code_of(module: ir.Operation, places: Places) -> tuple[RecordedCode, ...]:
    """The ops of a module before it is partitioned, by the lines at which they stand: what jax calls them, and how many
    there are."""
    found: dict[tuple[RecordedFrame, ...], Counter[str]] = {}
    for op in pre_order(main_function(module)):
        place = places.of(op.location)
        if place.primitive and not op.name.startswith("sdy."):  # those are the annotations
            found.setdefault(place.frames, Counter())[place.primitive] += 1
    return tuple(
        RecordedCode(frames, tuple(RecordedCount(name, count) for name, count in names.items()))
        for frames, names in found.items()
    )
