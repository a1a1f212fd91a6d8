"""What a program may hold on a device, and which of several programs is the best within that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from sdy_jax.lowering.whole_program.partitioned_program import PartitionedProgram

_COMPARED = 2
"""How often its small price holding has where trials are compared. Measured (2026-11, `scripts/bench_models`): a step
that holds 48 of 60 GiB for 4 percent of the time, as hidden collectives count, stood beside one that holds 11, and won
with 1."""


class MemoryBudget(NamedTuple):
    """What a program may hold.

    `limit`: bytes per device. `memory`: of these a device has; 0 where that is not known. `holding`: the share of a
    program's cost that it is worth to hold nothing instead of all of it. `saves_bytes`: it may send little more than
    the proposal, where that fits, and only to save time: a model of time says what it saves, but not what it costs
    others on the links. `known`: what a program costs that is known to fit.
    """

    limit: float
    memory: float
    holding: float
    saves_bytes: bool = False
    known: float = math.inf

    def byte(self, cost: float) -> float:
        """What it is worth not to hold a byte, in a program of this cost: a little, and always, where the memory of
        devices is known."""
        return self.holding * cost / self.memory if self.memory else 0.0

    def fits(self, trial: PartitionedProgram) -> bool:
        """Whether a trial keeps within the limit."""
        return trial.peak.total <= self.limit

    def is_dear(self, trial: PartitionedProgram) -> bool:
        """Whether a trial costs more than what is known to fit."""
        return trial.cost > self.known

    def allows(self, trial: PartitionedProgram, proposed: PartitionedProgram) -> bool:
        """Whether a trial may be chosen, beside the proposal: it fits, and sends no more than may be."""
        if not self.fits(trial):
            return False
        return not (self.saves_bytes and self.fits(proposed) and trial.sends_too_much_beside(proposed))

    def best(self, trials: Sequence[PartitionedProgram]) -> PartitionedProgram:
        """The trial that costs least beside what is hidden, with a little for what it holds."""
        byte = _COMPARED * self.byte(min(trial.cost for trial in trials))
        return min(trials, key=lambda trial: (trial.exposed + byte * trial.peak.total, trial.cost))

    def candidates(self, trials: Sequence[PartitionedProgram]) -> list[PartitionedProgram]:
        """Those of which one is the best, whatever a byte is worth: of no other one is less exposed and held."""
        found = list[PartitionedProgram]()
        for trial in sorted(trials, key=lambda trial: (trial.exposed, trial.cost)):
            if not found or (self.memory and trial.peak.total < found[-1].peak.total):
                found.append(trial)
        return found
