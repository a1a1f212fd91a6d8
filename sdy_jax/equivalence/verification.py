"""What `verify` found, to print, to ask, and to raise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sdy_jax.equivalence.job import Fault, Outcome
from sdy_jax.equivalence.kernels import VerifiedKernel
from sdy_jax.errors import VerificationError
from sdy_jax.files.whole import explained, write_whole
from sdy_jax.jax_internals.tracebacks import api_boundary
from sdy_jax.plan.page.columns import aligned

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
