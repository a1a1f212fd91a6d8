"""What of a partitioned program's collectives runs beside work: one trip ahead, in rings, and as compilers move them.

Nothing is marked here, so that programs which hide more can be told from those which hide less before one is chosen.
See docs/explanation/schedule.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sdy_jax.lowering.interface.report import PartitionReport
from sdy_jax.lowering.interface.setting import Setting
from sdy_jax.lowering.proposal.proposal import Proposal
from sdy_jax.lowering.schedule.hidden_time import Hidden, counted_share, hidden_by_work
from sdy_jax.lowering.schedule.marks import HiddenCollectives, Inserted
from sdy_jax.lowering.schedule.prefetching import Ahead, gathers_ahead, mark_ahead
from sdy_jax.lowering.schedule.ring_products import RingProduct, mark_rings, ring_products


class Overlap(NamedTuple):
    """What runs beside work.

    Attributes:
        ahead: the gathers that run one trip ahead of their loops.
        rings: the collectives that run as rings with products.
        moved: what the compiler hides of all others.
        saved: the time that all of it saves, which is less than what is hidden.
    """

    ahead: Sequence[Ahead] = ()
    rings: Sequence[RingProduct] = ()
    moved: Hidden = Hidden()
    saved: float = 0.0

    def mark(self, inserted: Inserted, report: PartitionReport) -> Inserted:
        """Marks what runs beside work in the module that was looked at, and says so in its records. Returns the
        collectives that the partitioner made, without those that are marked."""
        hiding = HiddenCollectives(inserted)
        mark_ahead(self.ahead, hiding)
        mark_rings(self.rings, hiding)
        report.hidden = self.moved.time
        return hiding.reported(report)


def overlap_of(proposal: Proposal, setting: Setting, room: Callable[[], float]) -> Overlap:
    """What of the collectives of a partitioned module runs beside work; nothing where the model does not know time.

    Args:
        proposal: the module, whose collectives are all there.
        setting: what collectives cost, and the devices.
        room: says the bytes that a device may hold beside those that it holds if none runs ahead.
    """
    if setting.costs.unit != "seconds":
        return Overlap()
    ahead = gathers_ahead(proposal, setting, room)
    hidden = {op.mlir: time for op, _, time in ahead}
    others = {op: record for op, record in proposal.inserted.items() if op not in hidden}
    rings = ring_products(proposal, others, setting.costs)
    hidden |= {ring.collective.mlir: ring.saved for ring in rings}
    waiting = {op: record for op, record in others.items() if op not in hidden}
    moved = hidden_by_work(proposal, waiting, setting)
    records = [(proposal.inserted[op], time) for op, time in hidden.items()]
    saved = math.fsum(
        record.estimated_times * time * (1 - counted_share(record, setting.costs, proposal.mesh))
        for record, time in records
    )
    return Overlap(ahead, rings, moved, saved + moved.saved)
