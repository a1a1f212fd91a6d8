"""What is verified and what came out: jobs and their outcomes as plain data, and the `Verification` of all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sdy_jax.base.errors import VerificationError
from sdy_jax.base.files import explained, write_whole
from sdy_jax.base.jax_calls import api_boundary
from sdy_jax.equivalence.kernels import VerifiedKernel
from sdy_jax.ir.meshes import Mesh
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.plan.page.text import aligned

# What a process is given to verify, and what it answers: plain data, which goes from process to process.


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


# What `verify` found, to print, to ask, and to raise.

_RIGHT = ("same", "rounding")


@dataclass(frozen=True, slots=True)
class VerifiedCase:
    """A program on a mesh by some costs, beside the plain one.

    Attributes:
        mesh: its axes with their sizes.
        target: by whose costs it was planned: "cpu", "gpu", "tpu", the name of a machine, or "own".
        is_derivative: it is the function's derivative: gradients for random cotangents.
        is_uneven: the mesh has sizes that divide few others.
        outcome: what came of it.
    """

    mesh: str
    target: str
    is_derivative: bool
    is_uneven: bool
    outcome: Outcome

    @property
    def ok(self) -> bool:
        """Whether the numbers are the same but for rounding, or an error says why there are none."""
        return self.outcome.status in ("same", "rounding", "refused")

    @property
    def row(self) -> Sequence[str]:
        """As a row of a table."""
        found, what = self.outcome, "derivative" if self.is_derivative else "forward"
        figures = (
            (f"{found.largest:.2g}", f"{found.allowed:.2g}") if found.status in ("same", "different") else ("", "")
        )
        place = self.mesh, "uneven" if self.is_uneven else "", self.target, what
        like = f", the program by {found.like}" if found.like else ""
        said = f": {' '.join(found.problem.split())}" if found.problem else ""
        return (*place, *figures, f"{found.status}{like}{said}")


@dataclass(frozen=True)
class Verification:
    """What `verify` found: a line per case, and the first wrong value. True where nothing differs.

    Attributes:
        name: the function's.
        cases: in the order in which they ran.
        notes: what was left out, and why.
        kernels: the custom ops of the program, on blocks by all factors of their rules.

    Example:
        found = sdy.verify(step, state, batch)
        print(found)
        assert found

    See also:
        `verify`: makes it.
    """

    name: str
    cases: tuple[VerifiedCase, ...]
    notes: tuple[str, ...] = ()
    kernels: tuple[VerifiedKernel, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every case is the same or refused, and one at least has run, and no kernel is wrong."""
        has_run = any(case.outcome.status in _RIGHT for case in self.cases)
        return has_run and all(case.ok for case in self.cases) and all(kernel.ok for kernel in self.kernels)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What is wrong first, in each case that was looked into."""
        return tuple(case.outcome.fault for case in self.cases if case.outcome.fault is not None)

    @api_boundary
    def raise_for_difference(self) -> Verification:
        """
        Returns:
            This.

        Raises:
            VerificationError: something differs; the message is all that `print` shows.
        """
        if not self.ok:
            raise VerificationError(self)
        return self

    def write_reproducer(self, path: str) -> bool:
        """Writes the Python program that shows the first fault by itself. Returns whether there is one.

        Raises:
            SdyError: the file cannot be written.
        """
        programs = [fault.reproducer for fault in self.faults if fault.reproducer]
        if programs:
            with explained(f"cannot write {path!r}", "give a path in a folder that can be written to"):
                write_whole(path, programs[0])
        return bool(programs)

    def to_json(self) -> str:
        """All of it as JSON."""
        kernels = [asdict(kernel) | {"ok": kernel.ok} for kernel in self.kernels]
        plain = {"cases": list(map(_plain, self.cases)), "notes": self.notes, "kernels": kernels}
        return json.dumps({"name": self.name, "ok": self.ok} | plain)

    @property
    def headline(self) -> str:
        """The first line."""
        wrong = sum(not case.ok for case in self.cases) + sum(not kernel.ok for kernel in self.kernels)
        refused = sum(case.outcome.status == "refused" for case in self.cases)
        count = f"{len(self.cases)} case{'s' if len(self.cases) != 1 else ''}"
        count += f" and {len(self.kernels)} kernel{'s' if len(self.kernels) != 1 else ''}" if self.kernels else ""
        said = [f"{wrong} wrong"] if wrong else []
        said += [f"{refused} refused"] if refused else []
        return f"verify of {self.name}: {count}, {', '.join(said) or 'all the same as the plain function'}"

    def __str__(self) -> str:
        header = ("mesh", "", "costs", "program", "largest error", "allowed", "")
        table = aligned([header, *(case.row for case in self.cases)]) if self.cases else []
        faults = [line for fault in self.faults for line in ("", *str(fault).splitlines())]
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([self.headline, "", *table, *map(str, self.kernels), *notes, *faults])

    def __repr__(self) -> str:
        return f"<{self.headline}>"


def _plain(case: VerifiedCase) -> dict[str, Any]:
    found = asdict(case) | {"ok": case.ok}
    for name in ("largest", "allowed"):
        value = found["outcome"][name]
        found["outcome"][name] = value if abs(value) < float("inf") else None
    return found
