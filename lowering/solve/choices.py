"""Choices for a planning problem, as many as planning may take the time for."""

from __future__ import annotations

import math

from sdy_jax.lowering.model.nodes import Chosen
from sdy_jax.lowering.model.planning_problem import PlanningProblem
from sdy_jax.lowering.solve.improvement import improved


class Choices:
    """Makes choices for a planning problem; `left` is how many may still be made."""

    def __init__(self, program: PlanningProblem, left: float = math.inf):
        self.program, self.left = program, left

    def improved(self, start: Chosen) -> Chosen:
        """A choice that costs no more than a given one, or than the walk's; that itself where none may be made."""
        program = self.program
        if start != program.start:
            start = min(program.start, start, key=program.model.cost)
        if self.left < 1:
            return start
        self.left -= 1
        return improved(program.model, start, program.table, program.atoms)
