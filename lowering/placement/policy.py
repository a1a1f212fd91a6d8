"""What users decide about partitioning, beside costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sdy_jax.lowering.emission.packed import PACKABLE
from sdy_jax.lowering.placement.compiler import Compiler
from sdy_jax.lowering.reshard.machines import combined_kinds, stacked_kinds

UNEVEN = ("pad", "replicate", "error")
LAYOUTS = ("local", "propagated", "global")

_USABLE = 0.9
"""The share of a device's memory that programs are planned for: estimates are no better."""


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
    def of_devices(cls, said: bool | float | None, platform: str, device_kind: str) -> Combining:
        """That of `partition(..., combine=said)` on a kind of device; a text of bytes as their number.

        By default nothing is rearranged. Copies pay on CPU devices for many weights (GPT with FSDP weights took 0.75 of
        the time), not for few, and take longer to compile. On TPUs blocks of one shape are stacked; to copy all blocks
        takes more than is won: GPT with FSDP weights 1.74 million cycles instead of 1.28, by XLA's estimate for v5e
        (2026-11).
        """
        joined, stacked = (frozenset(found(device_kind)) for found in (combined_kinds, stacked_kinds))
        kinds = joined | PACKABLE
        if said is None:
            return cls() if platform == "cpu" else cls(joined | stacked, stacked, stacked)
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
        memory: the bytes that a device may hold, with "global": arguments, results and what is in between. By default
            most of `device_memory`; where that is not known what the "local" program needs, and one percent.
        recompute: what is held between forward and backward pass may be computed again where a program does not fit.
        effort: how often layouts are chosen for the whole program, at most; as often as it takes by default.
        device_memory: the bytes of a device that programs can have; 0 where that is not known.
        compiler: what the devices' compiler does that decides which arrays they hold.
        runs_early: the devices' compiler runs an op as soon as its operands are there, not when it is needed.
        runs_late: it runs an op no sooner than its result is needed.
        keeps_whole: it keeps all of a value until a part of it is taken, instead of computing that part.
        halo_exchange: ops may take elements of other shards of a dimension that they cut or shift; else it is whole.
        combine: which small collectives run as one.
        lines: per mesh axis its parts that lie along one dimension of a torus of TPUs, major to minor: size and
            dimension.
    """

    optimize_collectives: bool = False
    uneven: str = "pad"
    layouts: str = "global"
    memory: float | None = None
    recompute: bool = True
    effort: int | None = None
    device_memory: float = 0.0
    compiler: Compiler = field(default_factory=Compiler)
    runs_early: bool = False
    runs_late: bool = False
    keeps_whole: bool = False
    halo_exchange: bool = True
    combine: Combining = Combining()
    lines: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = ()

    @property
    def available(self) -> float:
        """The bytes that a device has for the program: those that the user states, else its own; 0 where neither is
        known."""
        return self.memory or self.device_memory

    @property
    def limit(self) -> float:
        """The bytes that a plan may hold on a device; infinite where nothing is known."""
        return self.memory or _USABLE * self.device_memory or math.inf
