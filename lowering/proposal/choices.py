"""What was chosen where a program was partitioned, from which it can be partitioned again without a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.candidates.op_problem import Decision
from sdy_jax.lowering.interface.report import PartitionReport
from sdy_jax.lowering.interface.setting import Setting
from sdy_jax.lowering.proposal.layout_plan import LayoutPlan

Kind = Literal["again", "loops", "parts"]


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rewrite of a program for the sake of memory, or of time that memory takes.

    Attributes:
        kind: "again": what is held is computed again; "loops": what loops hold for other loops is; "parts": the largest
            values are made part by part.
        price: of holding a byte, in seconds, at which ops run again.
        keeps_named: values that the user names are held.
        in_parts: what is computed again is so part by part, of what passes between them.
        shared: the bytes from which on a value that two groups share is computed again.
        size: the bytes that the values of a group may take.
    """

    kind: Kind
    price: float = 0.0
    keeps_named: bool = False
    in_parts: bool = True
    shared: float = 0.0
    size: float = 0.0


@dataclass(frozen=True, slots=True)
class ProgramChoices:
    """The choices that were searched for; all else follows from them, the program and its setting.

    Attributes:
        plan: the layouts of the whole program, once it was rewritten; None where it stayed as it was proposed.
        decided: how ops run, by their numbers, where it did.
        rewrites: those that were made before, each with the plan by which values were priced for it.
        saved: the bytes that are held less, of what is computed again.
    """

    plan: LayoutPlan | None = None
    decided: Mapping[int, Decision] = field(default_factory=dict)
    rewrites: tuple[tuple[Rewrite, LayoutPlan | None], ...] = ()
    saved: float = 0.0


class Follow(Protocol):
    """Gives choices in place of a search."""

    @property
    def rewrites(self) -> Sequence[Rewrite]:
        """Those of the program, in order."""

    @property
    def saved(self) -> float:
        """As of `ProgramChoices`."""

    def plan(self, number: int, graph: Graph, setting: Setting) -> LayoutPlan | None:
        """The plan of the program after so many rewrites."""


class Keep(Protocol):
    """Gives choices for some ops of a program, which are kept where they can be; all else is searched for."""

    @property
    def is_compared(self) -> bool:
        """Whether the plan says what it would cost if nothing were kept."""

    def plan(self, graph: Graph, setting: Setting) -> LayoutPlan:
        """What is kept of a program."""


class Partitioned(NamedTuple):
    """A program that was partitioned: what was inserted, and what was chosen."""

    report: PartitionReport
    choices: ProgramChoices
