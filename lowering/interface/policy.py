"""What users decide about partitioning, beside costs."""

from __future__ import annotations

from dataclasses import dataclass

from sdy_jax.lowering.collectives.packing import PACKABLE
from sdy_jax.lowering.targets.compiler import Collectives

UNEVEN = ("pad", "replicate", "error")
LAYOUTS = ("local", "propagated", "global")


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
        memory: the bytes that a device may hold, with "global": arguments, results and what is in between. By default
            most of what a device has; where that is not known what the "local" program needs, and one percent.
        recompute: what is held between forward and backward pass may be computed again where a program does not fit.
        effort: how often layouts are chosen for the whole program, at most; as often as it takes by default.
        halo_exchange: ops may take elements of other shards of a dimension that they cut or shift; else it is whole.
        combine: which small collectives run as one.
    """

    optimize_collectives: bool = False
    uneven: str = "pad"
    layouts: str = "global"
    memory: float | None = None
    recompute: bool = True
    effort: int | None = None
    halo_exchange: bool = True
    combine: Combining = Combining()

    @property
    def keeps_declared(self) -> bool:
        """Whether each value is brought to its propagated sharding right where it is made."""
        return self.layouts == "propagated"
