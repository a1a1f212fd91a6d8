"""What a plan was made with as plain data and back: costs, devices, the user's decisions."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from sdy_jax.base.errors import SdyError
from sdy_jax.lowering.ops.collectives.packing import PACKABLE
from sdy_jax.lowering.planner.setting import LAYOUTS, UNEVEN, Combining, Policy
from sdy_jax.lowering.targets.axis_rates import PerAxis
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.rates import Copies
from sdy_jax.lowering.targets.target import FAMILIES, UNKNOWN, Target
from sdy_jax.plan.record.recorded_plan import (
    RecordedChoices,
    RecordedCosts,
    RecordedLine,
    RecordedPolicy,
    RecordedRate,
    RecordedTarget,
)
from sdy_jax.plan.stages import PlannedWith

_BY_AXIS = ("latency", "bandwidth", "start")
_UNSAID = -1
"""Given: what stands in records for a number that nobody states."""


def recorded_costs(costs: CostModel) -> RecordedCosts:
    """A cost model as data."""
    said = {field.name: getattr(costs, field.name) for field in fields(RecordedCosts)}
    said |= {name: _rates(said[name]) for name in _BY_AXIS}
    return RecordedCosts(**{**said, "copies": tuple(map(float, said["copies"]))})


def _rates(given: PerAxis) -> tuple[RecordedRate, ...]:
    pairs = [("", given)] if isinstance(given, (int, float)) else dict(given).items()
    return tuple(RecordedRate(axis, float(value)) for axis, value in pairs)


def costs_from(recorded: RecordedCosts) -> CostModel:
    """The cost model that data says."""
    said: dict[str, Any] = {field.name: getattr(recorded, field.name) for field in fields(recorded)}
    said |= {name: _per_axis(said[name]) for name in _BY_AXIS}
    sent, exchanged, lanes, *others = recorded.copies
    return CostModel(**{**said, "copies": Copies(sent, exchanged, int(lanes), *others)})


def _per_axis(rates: tuple[RecordedRate, ...]) -> PerAxis:
    found = {rate.axis: rate.value for rate in rates}
    return found[""] if "" in found else tuple(found.items())


def recorded_target(target: Target) -> RecordedTarget:
    """The devices of a plan as data."""
    lines = tuple(RecordedLine(axis, parts) for axis, parts in target.lines)
    return RecordedTarget(target.family.name, target.memory, lines)


def target_from(recorded: RecordedTarget) -> Target:
    """The devices that data says.

    Raises:
        SdyError: they are of a family that is not known here.
    """
    known = {UNKNOWN.name: UNKNOWN, **FAMILIES}
    if recorded.family not in known:
        raise SdyError(f"it was made for {recorded.family!r} devices, of which nothing is known here")
    lines = tuple((line.axis, tuple((size, dim) for size, dim in line.parts)) for line in recorded.lines)
    return Target(known[recorded.family], recorded.memory, lines)


def recorded_policy(policy: Policy) -> RecordedPolicy:
    """The user's decisions as data."""
    combine = policy.combine
    return RecordedPolicy(
        policy.optimize_collectives,
        policy.uneven,
        policy.layouts,
        _UNSAID if policy.memory is None else policy.memory,
        policy.recompute,
        _UNSAID if policy.effort is None else int(policy.effort),
        policy.halo_exchange,
        tuple(sorted(combine.kinds)),
        tuple(sorted(combine.packed)),
        tuple(sorted(combine.stacked)),
        _UNSAID if combine.sent is None else combine.sent,
    )


def policy_from(recorded: RecordedPolicy) -> Policy:
    """The user's decisions that data says.

    Raises:
        SdyError: there are no such decisions.
    """
    if recorded.uneven not in UNEVEN or recorded.layouts not in LAYOUTS:
        raise SdyError(f"uneven={recorded.uneven!r} or layouts={recorded.layouts!r} is not known here")
    return Policy(
        recorded.optimize_collectives,
        recorded.uneven,
        recorded.layouts,
        _said(recorded.memory),
        recorded.recompute,
        None if recorded.effort == _UNSAID else recorded.effort,
        recorded.halo_exchange,
        Combining(
            frozenset(recorded.combined),
            frozenset(recorded.packed) & PACKABLE,
            frozenset(recorded.stacked),
            _said(recorded.sent),
        ),
    )


def _said(number: float) -> float | None:
    return None if number == _UNSAID else number


@dataclass(frozen=True, slots=True)
class RecordedSetting:
    """What a plan was made with."""

    costs: RecordedCosts
    policy: RecordedPolicy
    target: RecordedTarget

    @classmethod
    def of(cls, given: PlannedWith) -> RecordedSetting:
        """That as data."""
        return cls(recorded_costs(given.costs), recorded_policy(given.policy), recorded_target(given.target))


def planned_with_from(recorded: RecordedChoices | RecordedSetting, inner: bool) -> PlannedWith:
    """With what the plan was made whose choices, or setting, data says.

    Raises:
        SdyError: it names what is not known here.
    """
    costs, policy = costs_from(recorded.costs), policy_from(recorded.policy)
    return PlannedWith(costs, policy, target_from(recorded.target), inner)
