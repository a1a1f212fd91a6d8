"""What a process is given to verify, and what it answers: plain data, which goes from process to process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.representation.mesh import Mesh


@dataclass(frozen=True)
class Subject:
    """A program to verify.

    Attributes:
        name: the function's.
        source: the line at which it was partitioned.
        text: its module in StableHLO and SDY, as it was traced, with source lines.
        plain: what jax makes of the function without us, in StableHLO; empty where that is the module, without what it
            says of meshes. It takes the last of the values: arrays that are closed over are constants in it.
        mesh_name: the symbol of its mesh.
        values: the arguments of its main function; of random keys the words.
        outputs: what its results are called.
        automatic_arguments, automatic_results: those whose layouts the planner chooses.
        is_derivative: it is the derivative of the function.
    """

    name: str
    source: str
    text: str
    plain: str
    mesh_name: str
    values: tuple[np.ndarray, ...]
    outputs: tuple[str, ...]
    automatic_arguments: frozenset[int] = frozenset()
    automatic_results: frozenset[int] = frozenset()
    is_derivative: bool = False


@dataclass(frozen=True)
class Trial:
    """A program on a mesh, planned by some costs.

    Attributes:
        subject: its index in the job.
        mesh: on which it runs.
        target: what the costs are called.
        costs: None for those of the mesh.
        is_uneven: the mesh was made for its sizes, which divide few others.
    """

    subject: int
    mesh: Mesh
    target: str
    costs: CostModel | None = None
    is_uneven: bool = False


@dataclass(frozen=True)
class Job:
    """Programs and trials; `options` are those of `partition` that are about planning."""

    subjects: tuple[Subject, ...]
    trials: tuple[Trial, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    rtol: float | None = None
    atol: float = 0.0
    finds: bool = True
    """Whether what is wrong is looked for where a trial fails."""
    reproduces: bool = False
    """Whether a program that shows it is written, too."""

    @property
    def devices(self) -> int:
        """How many the trials need."""
        return max((trial.mesh.size for trial in self.trials), default=1)


@dataclass(frozen=True)
class Fault:
    """What is wrong first, in words.

    Attributes:
        op: the name of the op whose result is wrong though its operands are right; empty where no single op is.
        source: the line of the user's code that it comes from; `library` and `scope` as in a plan.
        strategy: the types of its operands and results with the axes that split them, `f32[8@data] -> f32[]`.
        collectives: those that make its operands.
        users: where it is a collective itself, what it says and the ops that it is for.
        within: the loops and branches around it, outermost first.
        difference: how its result differs.
        culprit: whose mistake it is: "sdy_jax", "XLA" or "unknown", and `evidence` why; "rounding" where it is none.
        reproducer: a Python program that shows it by itself; empty where none is asked for or none shows it.
    """

    op: str
    source: str
    difference: str
    culprit: str
    evidence: str
    library: str = ""
    scope: str = ""
    strategy: str = ""
    collectives: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    reproducer: str = ""

    def __str__(self) -> str:
        where = f" ({self.library})" if self.library else ""
        lines = [f"first wrong value: {self.op} at {self.source}{where}: {self.difference}"]
        lines += [f"  inside {place}" for place in self.within]
        lines += [f"  runs as {self.strategy}"] if self.strategy else []
        lines += [f"  takes what is made by {each}" for each in self.collectives]
        lines += [f"  moves its operand for {each}" for each in self.users]
        lines += [f"  in {self.scope}"] if self.scope else []
        return "\n".join([*lines, f"  mistake of {self.culprit}: {self.evidence}"])


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Attributes:
        status: "same", "different", or "rounding", where results differ and every op is right alone; "refused" by an
            error that explains itself, or "failed" by any other.
        problem: what differs; or why it could not run.
        largest, allowed: of the result that is furthest off, beside what is allowed.
        like: the target that had the same program, where it was not run again.
        fault: what is wrong first.
    """

    status: str
    problem: str = ""
    largest: float = 0.0
    allowed: float = 0.0
    like: str = ""
    fault: Fault | None = None
