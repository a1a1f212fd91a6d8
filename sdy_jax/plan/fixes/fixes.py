"""Trying changes, and offering those that save something."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from sdy_jax.errors import SdyError
from sdy_jax.ir.locations import short_source
from sdy_jax.plan.fixes.border import border_changes
from sdy_jax.plan.fixes.change import Change
from sdy_jax.plan.fixes.sizes import size_changes
from sdy_jax.plan.fixes.statements import statement_changes
from sdy_jax.plan.fixes.states import state_change
from sdy_jax.plan.plan import Plan
from sdy_jax.representation.type_text import bytes_text

_MOST = 8
"""Changes that are tried, each by planning the program again. Guessed: more take longer than one waits for a page."""

_WORTH, _NO_MORE = 0.005, 1.01
"""The least share of the bytes on the wire, or of the memory, that a fix-it saves; and what it may cost of the other,
and of the devices' work. Chosen: less is not worth a line of a program."""


@dataclass(frozen=True, slots=True)
class Fix:
    """A change of one line that saves bytes: the plan of the changed program was made.

    Attributes:
        kind: "argument", "result", "constraint", "state", "size" or "option".
        line: the line of the user's code.
        text: what to write there.
        wire_bytes: what each device sends less, per call.
        memory: the bytes that it holds less at the most.
        share: of all that it sends.
    """

    kind: str
    line: str
    text: str
    wire_bytes: float
    memory: float
    share: float

    def __str__(self) -> str:
        return f"{short_source(self.line)}: {self.text}: {self.saves}"

    @property
    def saves(self) -> str:
        """`saves 24.0 KiB on the wire (100%) and 1.5 KiB of memory`."""
        sent = [f"{bytes_text(self.wire_bytes)} on the wire ({self.share:.0%})"] if self.wire_bytes > 0 else []
        held = [f"{bytes_text(self.memory)} of memory"] if self.memory > 0 else []
        return f"saves {' and '.join([*sent, *held])}"


@dataclass(frozen=True)
class Fixes(Sequence[Fix]):
    """Fix-its, those that save most first; `tried` changes were planned."""

    found: tuple[Fix, ...]
    tried: int

    @overload
    def __getitem__(self, index: int) -> Fix: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Fix]: ...

    def __getitem__(self, index: int | slice) -> Fix | Sequence[Fix]:
        return self.found[index]

    def __len__(self) -> int:
        return len(self.found)

    def __str__(self) -> str:
        if self.found:
            return "\n".join(map(str, self.found))
        return (
            f"no fix-its: of {self.tried} changes that were tried, none saves anything" if self.tried else "no fix-its"
        )


def changes(plan: Plan) -> list[Change]:
    """The changes that may be worth a try, the largest first; nothing is planned for them, except for layouts that
    follow propagation, beside which those of the whole program are looked at once."""
    if plan.planner is None:
        return []
    state = state_change(plan)
    found = [*([state] if state else []), *border_changes(plan, state.leaves if state else ())]
    found += [*statement_changes(plan), *size_changes(plan)]
    return sorted(found, key=lambda change: -change.size)[:_MOST]


def fixes(plan: Plan) -> Fixes:
    """The changes that save something, by the plans of the changed programs."""
    tried = changes(plan)
    found = [fix for change in tried for fix in _worth(plan, change)]
    return Fixes(tuple(sorted(found, key=lambda fix: (-fix.wire_bytes, -fix.memory))), len(tried))


def _worth(plan: Plan, change: Change) -> Iterator[Fix]:
    try:
        after = plan.replanned(change.program(), change.policy)
    except SdyError:  # what would not even be planned is not offered
        return
    sent, held = plan.wire_bytes - after.wire_bytes, plan.memory.peak - after.memory.peak
    if after.memory.fits and not plan.memory.fits:
        yield _fix(plan, change, sent, held)
        return
    if after.wire_bytes > _NO_MORE * plan.wire_bytes or after.memory.peak > _NO_MORE * plan.memory.peak:
        return
    if after.work_cost > _NO_MORE * plan.work_cost:
        return
    if sent > _WORTH * plan.wire_bytes or held > _WORTH * plan.memory.peak:
        yield _fix(plan, change, sent, held)


def _fix(plan: Plan, change: Change, sent: float, held: float) -> Fix:
    """The fix-it of a change that saves so many bytes on the wire and of memory."""
    share = sent / plan.wire_bytes if plan.wire_bytes else 0.0
    return Fix(change.kind, change.line, change.text, max(0.0, sent), max(0.0, held), share)
