"""What users decide about partitioning, beside costs."""

from __future__ import annotations

from dataclasses import dataclass

UNEVEN = ("pad", "replicate", "error")


@dataclass(frozen=True, slots=True)
class Policy:
    """How a program is partitioned.

    Attributes:
        optimize_collectives: sdy collectives that the program holds may be replaced by cheaper ones; else they stay.
        uneven: what becomes of axes that do not divide a dimension. "pad": inside of the program the dimension lies in
            equal blocks, the last ones padded; arguments and results keep the axes that divide. "replicate": only axes
            that divide are used. "error": they are refused.
        halo_exchange: ops may take elements of other shards of a dimension that they cut or shift; else it is whole.
    """

    optimize_collectives: bool = False
    uneven: str = "pad"
    halo_exchange: bool = True
