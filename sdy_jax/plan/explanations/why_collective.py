"""Why a collective runs: what it moves from which layout to which, for which op, and where the first layout is from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from sdy_jax.errors import SdyError
from sdy_jax.ir.collectives import KINDS
from sdy_jax.ir.locations import is_line, short_source
from sdy_jax.ir.type_text import bytes_text, count_text
from sdy_jax.lowering.planner.report import CollectiveRecord
from sdy_jax.plan.explanations.why import Why
from sdy_jax.plan.record.program import RecordedCollective, RecordedTensor
from sdy_jax.plan.record.record import PlanRecord

_LISTED = 5
"""Collectives that an error names. Chosen: for a reader."""

_NAMED = re.compile(rf"({'|'.join(sorted(KINDS, key=len, reverse=True))})\s.*?([^\s]+:\d+)")
"""A collective as a page names it: by its kind and its source line."""


class AskedPlan(Protocol):
    """The plan that is asked."""

    @property
    def collectives(self) -> Sequence[CollectiveRecord]:
        """Those of the partitioned program."""

    def record(self) -> PlanRecord:
        """All that it says as plain data."""

    def why(self, value: str) -> Why:
        """Why a value is sharded as it is."""


@dataclass(frozen=True)
class WhyCollective(Why):
    """The answer of `plan.why(collective)`: `reasons` has a paragraph per collective; `chains` and the other parts are
    about the values that they move."""

    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        about = super().__str__()
        return "\n\n".join([*self.reasons, *([about] if about else [])])


def is_collective(name: object) -> bool:
    """Whether a question is about a collective: `all_gather at model.py:42`, `all_gather(params['w1'])`."""
    is_made = isinstance(name, str) and any(name.startswith(f"{kind}(") for kind in KINDS)
    return is_made or (isinstance(name, str) and _NAMED.fullmatch(name) is not None)


def why_collective(plan: AskedPlan, asked: CollectiveRecord | RecordedCollective | str) -> WhyCollective:
    """See `Plan.why`."""
    record = plan.record()
    found = list(_found(plan, record, asked))
    if not found:
        known = dict.fromkeys(f"{each.kind} at {each.place.line}" for of in record.collectives for each in of.single)
        there = f"of this plan are {', '.join(list(known)[:_LISTED])}" if known else "this plan has none"
        raise SdyError(f"no collective is called {asked!r}; {there}")
    reasons = dict.fromkeys(_reason(record, each) for each in found)
    about = _about(plan, found)
    return WhyCollective(
        about.types, about.chains, about.instead, about.notes, about.again, about.blocked, tuple(reasons)
    )


def _found(
    plan: AskedPlan, record: PlanRecord, asked: CollectiveRecord | RecordedCollective | str
) -> Iterator[RecordedCollective]:
    if isinstance(asked, CollectiveRecord):
        for own, said in zip(plan.collectives, record.collectives, strict=True):
            pairs = zip((own, *own.members), (said, *said.members), strict=True)
            yield from (each for given, each in pairs if given is asked)
        return
    for each in (one for of in record.collectives for one in of.single):
        if asked in (each, each.result) or (isinstance(asked, str) and _is_named(each, asked)):
            yield each


def _is_named(each: RecordedCollective, name: str) -> bool:
    match = _NAMED.fullmatch(name)
    if match is None or match[1] != each.kind:
        return False
    return is_line(each.place.line, short_source(match[2])) or is_line(each.place.library, match[2])


def _reason(record: PlanRecord, each: RecordedCollective) -> str:
    """What it moves, why that takes it, and for which op."""
    head = f"{each.kind} {each.detail}, {bytes_text(each.wire_bytes)}{count_text(each.times)} per device"
    scope = f" in {each.place.scope}" if each.place.scope else ""
    lines = [head, f"  for {each.cause} at {each.place.lines}{scope}"]
    before, after = record.value_of.get(each.value), record.value_of.get(each.result)
    if before is not None and after is not None:
        lines.append(f"  brings {each.value} from {before.tensor.type} to {after.tensor.type}")
        lines += [f"    {change}" for change in _changes(before.tensor, after.tensor)]
    if each.origin == "user":
        lines.append("  the program holds it itself")
    return "\n".join(lines)


def _changes(before: RecordedTensor, after: RecordedTensor) -> Iterator[str]:
    """What is different after a collective, in words."""
    summed = [axis for axis in before.unreduced if axis not in after.unreduced]
    if summed:
        yield f"devices along {_listed(summed)} hold terms of a sum, which is taken"
    for dim, (old, new) in enumerate(zip(before.axes, after.axes, strict=True)):
        lost, gained = [a for a in old if a not in new], [a for a in new if a not in old]
        if lost:
            yield f"dim {dim} is no longer split along {_listed(lost)}"
        if gained:
            yield f"dim {dim} is split along {_listed(gained)}"


def _listed(axes: Sequence[str]) -> str:
    return ", ".join(f"'{axis}'" for axis in axes)


def _about(plan: AskedPlan, found: Sequence[RecordedCollective]) -> Why:
    """How the values that are moved came to their layouts: arguments by their paths, others by the line that makes
    them."""
    record, answers = plan.record(), list[Why]()
    for name in dict.fromkeys(each.value for each in found):
        value = record.value_of.get(name)
        op = record.ops[value.op] if value is not None and value.op is not None else None
        try:
            answer = plan.why(name if op is None else op.place.library or op.place.line)
        except SdyError:  # the planner made it
            continue
        shape = value.tensor.shape if value is not None else ()
        answers.append(answer if op is None else _of_shape(answer, shape))
    types = tuple(dict.fromkeys(each for answer in answers for each in answer.types))
    chains = tuple(dict.fromkeys(chain for answer in answers for chain in answer.chains))
    instead = tuple(dict.fromkeys(reason for answer in answers for reason in answer.instead))
    return Why(types, chains, instead)


def _of_shape(answer: Why, shape: Sequence[int]) -> Why:
    """The part of an answer on a line that is about values of one shape; the last of these."""
    alike = [pair for pair in answer.types if _shape(pair[1]) == tuple(shape)][-1:]
    chains = tuple(chain for chain in answer.chains if (chain.value, chain.type) in alike)
    return replace(answer, types=tuple(alike), chains=chains)


def _shape(type_: str) -> tuple[int, ...]:
    """`(8, 4)` of `f32[8@data,4@(x,y)]`."""
    sizes = re.sub(r"@\([^)]*\)(?=[,\]])|@[^,\]]*", "", type_.partition("[")[2].partition("]")[0])
    return tuple(int(size) for size in sizes.split(",") if size.isdecimal())
