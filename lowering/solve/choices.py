"""Choices for a planning problem, as many as planning may take the time for."""

from __future__ import annotations

import math

from sdy_jax.lowering.model.nodes import Chosen
from sdy_jax.lowering.model.planning_problem import PlanningProblem
from sdy_jax.lowering.solve.improvement import improved, improved_nearby

_WIDE = 200_000
"""Candidates of all nodes from which on a choice near another one is made by changes of one node after the other.
Measured (2026-11): the step of a pipeline of 2 stages on parts 2 x 2 x 2 has 441,000; three prices of holding took 26
of 38 CPU s of planning by solves, whose last trial held 4.4 MB at 1.02 of the cost of the first, and 1 s so, which held
4.0 MB at 1.04. Steps of four layers on 4 x 2 have 30,000 to 40,000, and are solved in 0.3 s."""


class Choices:
    """Makes choices for a planning problem; `left` is how many may still be made."""

    def __init__(self, program: PlanningProblem, left: float = math.inf):
        self.program, self.left = program, left

    def improved(self, start: Chosen, nearby: bool = False) -> Chosen:
        """A choice that costs no more than a given one, or than the walk's; that itself where none may be made.

        `nearby`: the given one was the best at prices that were a little different.
        """
        program = self.program
        if start != program.start:
            start = min(program.start, start, key=program.model.cost)
        if self.left < 1:
            return start
        self.left -= 1
        is_wide = nearby and sum(len(node.candidates) for node in program.model.nodes) >= _WIDE
        return (improved_nearby if is_wide else improved)(program.model, start, program.table, program.atoms)
