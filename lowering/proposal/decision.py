"""The decision how an op runs, with the layouts of its operands and results."""

from __future__ import annotations

from typing import NamedTuple

from sdy_jax.lowering.candidates.op_kinds import Kind
from sdy_jax.lowering.candidates.op_problem import Choice
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import TensorSharding

Shardings = tuple[TensorSharding, ...]
"""The shardings of an op's operands, then of its results."""


class Decision(NamedTuple):
    """An op's kind, the choice for it, and the shardings it runs with (operands, then results) on the program's meshes.

    `at_rest`: operands and results need no reshard, and there is nothing to report.
    """

    kind: Kind
    choice: Choice
    shardings: Shardings
    at_rest: bool

    @property
    def rule(self) -> OpShardingRule:
        return self.kind.rule
