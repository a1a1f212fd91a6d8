"""What a program is planned with, which stays the same for all trials of all its forms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from sdy_jax.lowering.analysis.cuts import Cuts
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.interface.memo import Memo
from sdy_jax.lowering.interface.policy import Policy
from sdy_jax.lowering.targets.target import Target
from sdy_jax.op_rules import RuleBook

_USABLE = 0.9
"""The share of a device's memory that programs are planned for. Guessed: estimates are no better, and compilers need
some of it; with all of it, programs that are estimated to fit do not."""


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """What planning is given beside the program.

    Attributes:
        mesh_name: the mesh of the program.
        costs: what collectives and computing cost.
        rules: those that propagation used, so that none is computed twice.
        policy: what the user decided.
        target: the devices for which it is planned.
        inputs: what the user calls the arguments of the main function.
        cuts: where layouts may cut mesh axes, beside those of the border; anywhere by default.
        whole_axes: layouts cut mesh axes only where the program itself states parts of them: a coarser search.
        memo: what is known of programs on this mesh with these costs; settings for other borders may share it.
    """

    mesh_name: str
    costs: CostModel
    rules: RuleBook = field(default_factory=RuleBook)
    policy: Policy = field(default_factory=Policy)
    target: Target = field(default_factory=Target)
    inputs: Sequence[str] = ()
    cuts: Cuts | None = None
    whole_axes: bool = False
    memo: Memo = field(default_factory=Memo)

    @property
    def available(self) -> float:
        """As `available`."""
        return available(self.policy, self.target)

    @property
    def limit(self) -> float:
        """As `limit`."""
        return limit(self.policy, self.target)


def available(policy: Policy, target: Target) -> float:
    """The bytes that a device has for the program: those that the user states, else its own; 0 where neither is
    known."""
    return policy.memory or target.memory


def limit(policy: Policy, target: Target) -> float:
    """The bytes that a plan may hold on a device; infinite where nothing is known."""
    return policy.memory or _USABLE * target.memory or math.inf
