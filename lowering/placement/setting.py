"""What a program is planned with, which stays the same for all walks over all its forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sdy_jax.lowering.placement.policy import Policy
from sdy_jax.lowering.reshard.cost import CostModel
from sdy_jax.op_rules import RuleBook


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """What planning is given beside the program.

    Attributes:
        mesh_name: the mesh of the program.
        costs: what collectives and computing cost.
        rules: those that propagation used, so that none is computed twice.
        policy: what the user decided.
        inputs: what the user calls the arguments of the main function.
    """

    mesh_name: str
    costs: CostModel
    rules: RuleBook = field(default_factory=RuleBook)
    policy: Policy = field(default_factory=Policy)
    inputs: Sequence[str] = ()
