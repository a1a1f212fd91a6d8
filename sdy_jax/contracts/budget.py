"""Budgets: what a plan may send and hold, and by which collectives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sdy_jax.errors import SdyError
from sdy_jax.jax_internals.tracebacks import api_boundary
from sdy_jax.plan.record.counts import check_kinds, listed
from sdy_jax.plan.record.program import RecordedCollective
from sdy_jax.representation.type_text import bytes_of_text, bytes_text

if TYPE_CHECKING:
    from sdy_jax.plan.plan import Plan


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

    @api_boundary
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
