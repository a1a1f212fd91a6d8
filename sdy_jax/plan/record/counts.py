"""Demands on the number of collectives."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from sdy_jax.errors import SdyError
from sdy_jax.plan.record.program import RecordedCollective
from sdy_jax.plan.record.recorded_plan import RecordedPlan
from sdy_jax.representation.sdy_collectives import KINDS
from sdy_jax.representation.type_text import bytes_text, count_text

_IN_JAX = {"psum": "all_reduce", "psum_scatter": "reduce_scatter", "ppermute": "collective_permute"}

_LISTED = 8
"""Collectives that a message lists. Chosen: for a reader."""


def check_counts(record: RecordedPlan, expected: Mapping[str, int]) -> None:
    """
    Raises:
        AssertionError: a kind of collective runs more or less often than expected.
        SdyError: there is no such kind.
    """
    check_kinds(expected, "assert_collectives")
    problems = []
    for kind, count in expected.items():
        found = [one for one in record.counted if one.kind == kind]
        executions, known = sum(one.times for one in found), all(one.times_known for one in found)
        if executions != count or not known:
            at_least = "" if known else "at least "
            lines = [f"{kind}: {at_least}{executions} per call, expected {count}", *listed(found)]
            problems.append("\n".join(lines))
    if problems:
        raise AssertionError("\n".join([f"collectives of {record.name} on mesh {record.mesh}", *problems]))


def check_kinds(kinds: Iterable[str], what: str) -> None:
    """
    Raises:
        SdyError: one of them is no kind of collective.
    """
    for kind in kinds:
        if kind not in KINDS:
            near = [_IN_JAX[kind]] if kind in _IN_JAX else difflib.get_close_matches(str(kind), KINDS, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise SdyError(
                f"{what}: no collective is called {kind!r}; {meant}expected one of {', '.join(sorted(KINDS))}"
            )


def listed(collectives: Iterable[RecordedCollective]) -> list[str]:
    """A line for each of the largest."""
    found = sorted(collectives, key=lambda one: -one.total_wire_bytes)
    more = [f"  and {len(found) - _LISTED} more"] if len(found) > _LISTED else []
    return [*(f"  {line_of(one)}" for one in found[:_LISTED]), *more]


def line_of(one: RecordedCollective) -> str:
    """`model.py:9: all_reduce {"model"} of f32[8@data,16], 384 B x 3, for stablehlo.dot_general in mlp`."""
    said, times = f"{one.kind} {one.detail}".rstrip(), count_text(one.times)
    scope = f" in {one.place.scope}" if one.place.scope else ""
    return f"{one.place.lines}: {said} of {one.type}, {bytes_text(one.wire_bytes)}{times}, for {one.cause}{scope}"
