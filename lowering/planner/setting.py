"""What a program is planned with: costs, target, the user's policy, and answers that all trials of all forms share."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sdy_jax.lowering.ops.collectives.packing import PACKABLE
from sdy_jax.lowering.planner.facts.factors import Cuts
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.family import Collectives
from sdy_jax.lowering.targets.target import Target
from sdy_jax.shardy.rules import RuleBook

# Answers that are asked for again by each form of a program, and with each border that is tried for it.

T = TypeVar("T")


class Memo:
    """What was computed once with some costs on some mesh. A key says all else that its answer depends on, and what
    kind of answer it is; nobody changes an answer."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned when it was first called with this key."""
        if key not in self._known:
            self._known[key] = make()
        found: T = self._known[key]
        return found


# What users decide about partitioning, beside costs.

UNEVEN = ("pad", "replicate", "error")
LAYOUTS = ("local", "propagated", "global")
CONSTRAINTS = ("kept", "hints")


@dataclass(frozen=True, slots=True)
class Combining:
    """Which small collectives of one kind, group of devices and element type run as one.

    Attributes:
        kinds: those of which any do.
        packed: the kinds whose operands are copied side by side. XLA itself makes one of others that follow each other.
        stacked: those of them whose operands need to have one shape, so that nothing is rearranged.
        sent: the bytes that such a bucket sends at most; by default what the cost model says.
    """

    kinds: frozenset[str] = frozenset()
    packed: frozenset[str] = frozenset()
    stacked: frozenset[str] = frozenset()
    sent: float | None = None

    @classmethod
    def of(cls, said: bool | float | None, collectives: Collectives) -> Combining:
        """That of `partition(..., combine=said)`; a text of bytes as their number.

        By default nothing is rearranged, but blocks of one shape are stacked where that pays. Copies pay on CPU devices
        for many weights (GPT with FSDP weights took 0.75 of the time), not for few, and take longer to compile. On v5e
        to copy all blocks takes more than is won: GPT with FSDP weights 1.74 million cycles instead of 1.28, by XLA's
        estimate (2026-11).
        """
        joined, buckets = collectives.combines, collectives.buckets
        kinds = joined | PACKABLE
        if said is None:
            return cls(buckets, buckets - joined, buckets - joined)
        if isinstance(said, bool):
            return cls(kinds, kinds - joined) if said else cls()
        return cls(kinds, kinds - joined, sent=said)


@dataclass(frozen=True, slots=True)
class Policy:
    """How a program is partitioned.

    Attributes:
        optimize_collectives: sdy collectives that the program holds may be replaced by cheaper ones; else they stay.
        uneven: what becomes of axes that do not divide a dimension. "pad": inside of the program the dimension lies in
            equal blocks, the last ones padded; arguments and results keep the axes that divide. "replicate": only axes
            that divide are used. "error": they are refused.
        layouts: "local": op by op, around the shardings that propagation gave. "propagated": likewise, and each value
            is brought to its propagated sharding right where it is made. "global": layouts and strategies of the whole
            program are chosen together, by what all of it costs; never dearer than "local".
        constraints: what those inside of the program are, with "global". "kept": a value is brought to the layout that
            one states, where that is not dearer than to take it from before. "hints": shardings are propagated from
            them, and then the program is planned without them as well.
        memory: the bytes that a device may hold, with "global": arguments, results and what is in between. By default
            most of what a device has; where that is not known what the "local" program needs, and a quarter.
        recompute: what is held between forward and backward pass may be computed again where a program does not fit.
        effort: how often layouts are chosen for the whole program, at most; as often as it takes by default.
        halo_exchange: ops may take elements of other shards of a dimension that they cut or shift; else it is whole.
        combine: which small collectives run as one.
    """

    optimize_collectives: bool = False
    uneven: str = "pad"
    layouts: str = "global"
    constraints: str = "kept"
    memory: float | None = None
    recompute: bool = True
    effort: int | None = None
    halo_exchange: bool = True
    combine: Combining = Combining()

    @property
    def keeps_declared(self) -> bool:
        """Whether each value is brought to its propagated sharding right where it is made."""
        return self.layouts == "propagated"


# What a program is planned with, which stays the same for all trials of all its forms.

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

    @property
    def unstated_limit(self) -> float:
        """The limit if none were stated; 0 where none is, or none would be known."""
        return 0.0 if self.policy.memory is None else _USABLE * self.target.memory


def available(policy: Policy, target: Target) -> float:
    """The bytes that a device has for the program: those that the user states, else its own; 0 where neither is
    known."""
    return policy.memory or target.memory


def limit(policy: Policy, target: Target) -> float:
    """The bytes that a plan may hold on a device; infinite where nothing is known."""
    return policy.memory or _USABLE * target.memory or math.inf
